"""`AccelerateEngine`: optimizer steps of accelerate's own loop."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ..clipping.gradients import by_mesh, scale_gradients, whole
from ..instrument.gradients import discard_gradients, gradients_of, is_fsdp2, without_reduction
from ..instrument.hooks import Hooks
from ..instrument.memory_retry import MemoryRetry
from ..instrument.phase import Phase
from ..instrument.rates import Rates
from ..instrument.training_call import TrainingCall
from .engine import Call, StepEngine
from .hooks import Failsafe
from .patching import Replacements
from .reentry import Reentry
from .view import TrainerView


_T = TypeVar("_T")


class AccelerateEngine(StepEngine):
    """Runs the optimizer steps of a trainer whose gradients lie in its parameters: one process, DDP, FSDP."""

    def __init__(
        self,
        trainer: Any,
        view: TrainerView,
        *,
        replaced: Replacements,
        hooks: Hooks,
        failsafe: Failsafe,
        retry: MemoryRetry,
        call: TrainingCall,
        rates: Rates,
        reentry: Reentry,
    ) -> None:
        super().__init__(trainer, view)
        self._replaced = replaced
        self._hooks = hooks
        self._failsafe = failsafe
        self._retry = retry
        self._training_call = call
        self._rates = rates
        self._reentry = reentry

    def attach(self) -> None:
        # What the Trainer calls between backward and update is wrapped by the instrument.
        pass

    def detach(self) -> None:
        pass

    def is_fatal(self, error: Exception) -> bool:
        return self._failsafe.tells_of_lost_device(error)

    def compute(
        self, call: Call, last: bool, on_nonfinite: Callable[[], None], synchronise: bool = True
    ) -> torch.Tensor:
        model, inputs, args, kwargs = call
        self.trainer.accelerator.gradient_state._set_sync_gradients(last and synchronise)
        if not synchronise and hasattr(model, "require_forward_param_sync"):
            # DistributedDataParallel sends the buffers of the first rank to the others in the first forward after one
            # whose gradients were synchronised (torch 2.13, `_pre_forward`). One that raises would do so once more.
            model.require_forward_param_sync = False
        with self.with_all_ranks("a micro-batch is computed again"), self._gradients_kept(model, last, synchronise):
            return self._training_call.run((model, copy.copy(inputs), args, kwargs), on_nonfinite)

    def _gradients_kept(self, model: Any, last: bool, synchronise: bool) -> contextlib.AbstractContextManager[None]:
        """Has ranks exchange gradients as between the Trainer's own micro-batches, or not at all."""
        trainer = self.trainer
        if last and synchronise:
            return contextlib.nullcontext()
        if not getattr(trainer, "is_distributed_loading_by_transformers", False) or not is_fsdp2(trainer.model):
            kept: contextlib.AbstractContextManager[None] = trainer.accelerator.no_sync(model=model)
            return kept
        # transformers 5.2x: accelerate did not wrap a model that was sharded while it was loaded.
        return trainer._defer_fsdp_gradient_reduction() if synchronise else without_reduction(trainer.model)

    def prepare_inputs(self, inputs: Any) -> Any:
        with self.with_all_ranks("a batch is prepared again"):
            self.trainer.model.train()
            return self.trainer._prepare_inputs(inputs)

    def until_it_fits(self, compute: Callable[[], _T], discard: Callable[[], None]) -> _T:
        return self._retry.until_it_fits(compute, discard)

    def experiment(self) -> contextlib.AbstractContextManager[None]:
        return self._retry.experiment()

    def discard(self) -> None:
        discard_gradients(self.trainer.model)
        self._forget_unscaled()

    def _forget_unscaled(self) -> None:
        scaler = self.trainer.accelerator.scaler
        if scaler is not None:
            # `unscale_` refuses to run twice for one optimizer; what it noted belongs to gradients that are gone.
            scaler._per_optimizer_states.clear()

    @property
    def scaler_active(self) -> bool:
        scaler = self.trainer.accelerator.scaler
        return scaler is not None and scaler.is_enabled()

    def gradients(self) -> list[torch.Tensor]:
        return gradients_of(self.trainer.model)

    def gradients_are_finite(self) -> bool:
        gradients = self.gradients()
        if self.scaler_active or not gradients:
            return True
        norms = [float(whole(torch.nn.utils.get_total_norm(group))) for group in by_mesh(gradients)]
        return all(map(math.isfinite, norms))

    def scale_gradients(self, factor: float) -> None:
        scale_gradients(self.trainer.model, factor)

    def rates_in_force(self, scale: float | None = None) -> list[Any]:
        return self._rates.in_force(scale)

    def group_options(self) -> list[dict[str, Any]]:
        return self._rates.options()

    def step_again(
        self, rates: Sequence[Any], scaled_by: float = 1.0, options: Sequence[Mapping[str, Any]] = ()
    ) -> float | None:
        with self.with_all_ranks("a step is applied again"):
            norm = self._clip()
            if scaled_by != 1.0:
                self.scale_gradients(scaled_by)
            self._hooks.before_optimizer_step()
            phase = self._reentry.phase
            try:
                with self._rates.set(rates, options):
                    self._replaced.original(self.trainer.optimizer, "step")()
            finally:
                self._reentry.phase = phase
            return None if norm is None else float(norm)

    def _clip(self) -> Any:
        trainer, limit = self.trainer, self.view.max_grad_norm
        if limit <= 0:
            return None
        return self._replaced.original(trainer.accelerator, "clip_grad_norm_")(trainer.model.parameters(), limit)

    def leave_out(self, overflowed: bool) -> None:
        # Without gradients `optimizer.step()` does nothing; but a GradScaler refuses to step without any, so neither
        # it nor the optimizer is called for this step.
        if not self.scaler_active:
            return
        accelerator = self.trainer.accelerator
        scaler = accelerator.scaler
        scaler._per_optimizer_states.clear()
        if overflowed:
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
        # The Trainer sets it again at the next micro-batch.
        accelerator.gradient_state._set_sync_gradients(False)
        self._reentry.phase = Phase.STEPPED

    def state_put(self) -> None:
        # Parameters are what the next forward computes with.
        pass

    @contextlib.contextmanager
    def full_precision(self) -> Iterator[bool]:
        model = self.trainer.model
        mixed, plain = vars(model).get("forward"), vars(model).get("_original_forward")
        if mixed is None or plain is None:
            yield False
            return
        model.forward = plain
        try:
            yield True
        finally:
            model.forward = mixed
