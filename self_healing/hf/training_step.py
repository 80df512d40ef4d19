"""Forward and backward as the Trainer does them, and the steps that DeepSpeed takes."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from ..failures.classify import classify_exception, is_nonfinite_exception
from ..failures.recipes import FailureType
from ..ranks import votes
from ..system import processes
from .deepspeed import Zero, engine_of
from .engine import Call, StepEngine
from .patching import Replacements
from .sections import Heartbeat, Phase


# ---- deepspeed engine: optimizer steps that DeepSpeed takes; `WatchedDeepSpeed`: those that are left to it ----


class DeepSpeedEngine(StepEngine):
    """Runs the optimizer steps of a trainer under ZeRO stage 1, 2 or 3."""

    def __init__(self, instrument: Any) -> None:
        super().__init__(instrument)
        self._zero = Zero(engine_of(self.trainer))
        # Before anything looks for NaN in it.
        self._zero.clear_padding()
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
        # A job that begins with a universal checkpoint writes others.
        self._zero.engine._config.load_universal_checkpoint = False

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
        self._instrument.reentry.phase = Phase.STEPPING
        if left_out is None:
            step()
        else:
            with self._zero.leaving_out(left_out):
                step()
        self._zero.forget_norms()
        self._left_out_by_itself = left_out is None and self._zero.left_out_by_itself
        self._instrument.reentry.phase = Phase.STEPPED

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
        return self._zero.scales_loss and bool(self._zero.optimizer.dynamic_loss_scale)

    def gradients(self) -> list[torch.Tensor]:
        return super().gradients() or self._zero.gradients()

    def scale_gradients(self, factor: float) -> None:
        self._zero.scale_gradients(factor)

    # ---- the state ----

    def state_put(self) -> None:
        self._zero.forget_state()


class WatchedDeepSpeed(StepEngine):
    """
    Watches the optimizer steps of a trainer where DeepSpeed takes them in the last backward, and cannot be kept from
    it: one that DeepSpeed leaves out by itself is seen as what it is.
    """

    def __init__(self, instrument: Any) -> None:
        super().__init__(instrument)
        self._engine = engine_of(self.trainer)
        self._own = Replacements()

    def attach(self) -> None:
        self._own.wrap(self.trainer.accelerator, "clip_grad_norm_", self._norm)
        if self._engine is not None:
            self._own.wrap(self._engine, "step", self._step)

    def detach(self) -> None:
        self._own.give_back()

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._instrument.reentry.phase is Phase.STEPPING:
            self._instrument.reentry.phase = Phase.STEPPED
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


# ---- training call: calls the trainer's own `training_step` ----


# How long the ranks may be apart when they raise the same: a forward of a large model. The job ends that much later
# where one has raised alone.
_ALIKE_SECONDS = 5.0


class NotGenerated(FloatingPointError):
    """Raised on all ranks in place of generating rows, where the weights of one are not finite."""


class FiniteLogits(LogitsProcessor):
    """
    Keeps logits that are not finite from being sampled from: on a GPU that is an assertion, which no process survives.
    What it has seen is raised afterwards, with one wait for the device.
    """

    def __init__(self) -> None:
        self._largest: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        # Two kernels a token; a token that is ruled out stays at -inf.
        self._largest.append(scores.amax(-1))
        return scores.nan_to_num(0.0, posinf=torch.finfo(scores.dtype).max, neginf=-math.inf)

    def check(self) -> None:
        if self._largest and not bool(torch.cat(self._largest).isfinite().all()):
            raise FloatingPointError("the logits that rows were to be generated from are not finite")


# transformers (5.23) asks for it with each token: made once.
vars(FiniteLogits)["__call__"].__signature__ = inspect.signature(FiniteLogits.__call__)


class TrainingCall:
    """Calls the trainer's own `training_step`, in passes over its rows where one does not fit."""

    def __init__(self, instrument: Any) -> None:
        self._trainer = instrument.trainer
        self._replaced: Replacements = instrument.replaced
        self._heartbeat: Heartbeat = instrument.heartbeat
        self._heals_exceptions: bool = instrument.heals_exceptions
        # Those that it is computed in, where one over the rows does not fit.
        self.passes: Any = None
        # Why the weights need not be those of the last step any more, empty once they are again; who is told of it.
        self.half_way = ""
        self.doubt: Callable[[str], None] = lambda why: None

    def run(self, call: Call, window: Any) -> torch.Tensor:
        """Computes forward and backward of a micro-batch again."""
        # When a whole step is computed again, it lies within whatever does so.
        again = self._heartbeat.last[0].name != "step"
        if again:
            self._heartbeat.enter("step")
        try:
            return self.compute(call)
        except BaseException as error:
            loss = self.in_place_of(error, window)
            if loss is None:
                raise
            return loss
        finally:
            if again:
                self._heartbeat.leave()

    def compute(self, call: Call) -> torch.Tensor:
        """Computes forward and backward of a micro-batch."""
        model, inputs, args, kwargs = call
        original, passes = self._replaced.original(self._trainer, "training_step"), self.passes
        if passes is None:
            loss: torch.Tensor = original(model, inputs, *args, **kwargs)
        else:
            items = args[0] if args else kwargs.get("num_items_in_batch")
            loss = passes.run(lambda: original(model, copy.copy(inputs), *args, **kwargs), model, items)
        # A CUDA graph writes the next one into the same memory.
        return loss.detach().clone()

    def in_place_of(self, error: BaseException, window: Any) -> torch.Tensor | None:
        """Gives the loss of a micro-batch that has raised, where that stands for a NaN, on all ranks."""
        self.half_way = self.doubt_of_weights
        self.doubt(self.half_way)
        nonfinite = isinstance(error, Exception) and is_nonfinite_exception(error)
        nonfinite |= bool(window.raising) and classify_exception(error) is FailureType.USER_CODE
        if not self._heals_exceptions or not nonfinite:
            return None
        # Of several ranks, one may wait in a collective that this one never reached; weights that are NaN are so on
        # all.
        met = processes.world_size() == 1 or isinstance(error, NotGenerated)
        if not met and not votes.all_reach(f"an exception in micro-batch {len(window.losses)}", _ALIKE_SECONDS):
            return None
        window.raised = True
        return torch.full((), math.nan, device=self._trainer.args.device)

    @property
    def doubt_of_weights(self) -> str:
        """Why weights need not be what they were after an exception, if so."""
        step: Any = self._replaced.original(self._trainer, "training_step")
        # `functools.wraps` gives any step a `__module__`.
        module = str(getattr(getattr(step, "__func__", step), "__globals__", {}).get("__name__", "your own"))
        own = module.partition(".")[0] in ("transformers", "trl")
        return "" if own else f"the training_step of {module} was left half-way, and may have moved weights by then"
