"""`DeepSpeedEngine`: optimizer steps that DeepSpeed takes; `WatchedDeepSpeed`: those that are left to it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..hf.deepspeed import Zero, engine_of, load_as_written
from ..hf.patching import Replacements
from ..hf.training_step import AccelerateEngine
from .native_adam import NativeAdam
from .phase import Phase


class DeepSpeedEngine(AccelerateEngine):
    """Runs the optimizer steps of a trainer under ZeRO stage 1, 2 or 3."""

    def __init__(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(trainer, *args, **kwargs)
        self._zero = Zero(engine_of(trainer))
        # Before anything looks for NaN in it.
        self._zero.clear_padding()
        inner = self._zero.optimizer.optimizer
        self._adam = NativeAdam(inner) if NativeAdam.is_in(inner) else None
        self._own = Replacements()
        self._held = self._detaching = self._left_out_by_itself = False
        # Whether the step that is held is left out, and if so, whether for an overflow.
        self._left_out: bool | None = None

    def attach(self) -> None:
        self._own.wrap(self._zero.engine, "step", self._hold)
        self._own.wrap(self._zero.engine, "forward", self._after_the_step)
        self._own.wrap(self._zero.engine, "backward", self._after_the_step)
        self._own.wrap(self._zero.optimizer, self._zero.measure, self._zero.norm_of_group)
        self._own.wrap(self.trainer.optimizer, "step", self._step)
        # accelerate gives the norm of the step before, as this one has not been taken.
        self._own.wrap(self.trainer.accelerator, "clip_grad_norm_", self._norm)
        load_as_written(self._zero.engine, self._own)

    def detach(self) -> None:
        if self._held:
            # Given up between backward and step: the gradient is applied first, or it would be part of the next one.
            self._detaching = True
        else:
            self._own.give_back()

    # ---- the step, held and taken ----

    def _hold(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._held, self._left_out = True, None
        self._zero.forget_norms()

    def _after_the_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._held and torch.is_grad_enabled():
            # A `training_step` of the user's own, in which there are several steps: only the last can be judged.
            self._held = False
            self._take()
        return original(*args, **kwargs)

    def _norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._held:
            return self._zero.norm()
        # No rank has computed a gradient: rows are not generated with weights that are not finite.
        return torch.zeros((), device=self.trainer.accelerator.device)

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        held, self._held = self._held, False
        if held:
            self._take()
        if self._detaching:
            self._own.give_back()
        return original(*args, **kwargs)

    def _take(self) -> None:
        step = self._own.original(self._zero.engine, "step")
        left_out, self._left_out = self._left_out, None
        self._reentry.phase = Phase.STEPPING
        if left_out is None:
            step()
        else:
            with self._zero.leaving_out(left_out):
                step()
        self._zero.forget_norms()
        self._left_out_by_itself = left_out is None and self._zero.left_out_by_itself
        self._reentry.phase = Phase.STEPPED

    @property
    def left_out_by_itself(self) -> bool:
        # Not while it is held: then it is that of the step before.
        return not self._held and self._left_out_by_itself

    def leave_out(self, overflowed: bool) -> None:
        self._held, self._left_out = True, overflowed

    def step_again(
        self, rates: Sequence[Any], scaled_by: float = 1.0, options: Sequence[Mapping[str, Any]] = ()
    ) -> float | None:
        with self._zero.uncounted():
            return super().step_again(rates, scaled_by, options)

    # ---- its gradient ----

    def _gradients_kept(self, model: Any, last: bool, synchronise: bool) -> contextlib.AbstractContextManager[None]:
        # Between micro-batches of a step DeepSpeed accumulates by itself.
        return contextlib.nullcontext() if synchronise else self._zero.kept_on_rank()

    def discard(self) -> None:
        super().discard()
        self._zero.discard()
        self._held, self._left_out = False, None

    @property
    def scaler_active(self) -> bool:
        return self._zero.searches_scale

    def gradients(self) -> list[torch.Tensor]:
        return super().gradients() or self._zero.gradients()

    def scale_gradients(self, factor: float) -> None:
        self._zero.scale_gradients(factor)

    # ---- the state ----

    def state_put(self) -> None:
        self._zero.forget_state()
        if self._adam is not None:
            self._adam.count_again()


class WatchedDeepSpeed(AccelerateEngine):
    """
    Watches the optimizer steps of a trainer where DeepSpeed takes them in the last backward, and cannot be kept from
    it: one that DeepSpeed leaves out by itself is seen as what it is.
    """

    def __init__(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(trainer, *args, **kwargs)
        self._engine = engine_of(trainer)
        self._own = Replacements()

    def attach(self) -> None:
        self._own.wrap(self.trainer.accelerator, "clip_grad_norm_", self._norm)
        if self._engine is not None:
            self._own.wrap(self._engine, "step", self._step)

    def detach(self) -> None:
        self._own.give_back()

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._reentry.phase is Phase.STEPPING:
            self._reentry.phase = Phase.STEPPED
        return result

    def _norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        # Of a step that was left out it is the norm of the one before, up to DeepSpeed 0.19.6.
        return math.inf if self._was_left_out else norm

    @property
    def _was_left_out(self) -> bool:
        return self._engine is not None and not self._engine.was_step_applied()

    @property
    def scaler_active(self) -> bool:
        return self._engine is not None and bool(self._engine.fp16_enabled() and self._engine.dynamic_loss_scale())

    @property
    def left_out_by_itself(self) -> bool:
        # While a loss scaler looks for its scale, that is as it should be.
        return self._was_left_out and not self.scaler_active
