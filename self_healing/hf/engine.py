"""Computes, measures, discards and applies a step; finds where a computation stops being finite."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..failures.recipes import TrainingFault
from ..ranks import votes
from ..system.random_state import lowest_precision
from .batches import only_moves
from .patching import Replacements
from .sections import Phase
from .state import discard_gradients, fsdp2_modules, named_gradients_of, scale_gradients, without_reduction
from .view import TrainerView


# ---- step engine: how an optimizer step is computed, discarded, measured and applied ----


# Where a rank is that is through training code.
THROUGH = "through"

# One call of `training_step`: model, inputs, arguments.
Call = tuple[Any, Any, tuple[Any, ...], dict[str, Any]]


class StepEngine:
    """
    Runs the optimizer steps of one trainer, whose gradients lie in its parameters: one process, DDP, FSDP. What
    DeepSpeed does otherwise is in its subclasses.
    """

    left_out_by_itself: Any = False
    """Whether the engine has skipped the step by itself, and applied nothing."""

    def __init__(self, instrument: Any) -> None:
        self.trainer = instrument.trainer
        self.view: TrainerView = instrument.view
        self.retry = instrument.retry
        self.rates = instrument.rates
        self._instrument = instrument

    def attach(self) -> None:
        """Wraps what the steps go through, before anything else of the trainer is wrapped."""

    def detach(self) -> None:
        """Gives it back; a step that is held back is taken first."""

    # ---- compute ----

    @contextlib.contextmanager
    def with_all_ranks(self, question: str) -> Iterator[None]:
        """
        Marks a block of training code, which may be a collective wherever it is (a loss that gathers its metrics).
        """
        if self.view.world_size > 1:
            votes.wait_for_all_ranks(question, self.view.device)
        try:
            yield
        except Exception as error:
            lost = self._instrument.failsafe.tells_of_lost_device(error)
            if lost or isinstance(error, (votes.RankRaised, votes.RanksDisagree)):
                raise
            raise TrainingFault(error, others_wait=True) from error
        if self.view.world_size > 1:
            votes.reach(THROUGH)

    def compute(self, call: Call, last: bool, window: Any, synchronise: bool = True) -> torch.Tensor:
        """Computes forward and backward of one micro-batch; its gradients are added to those there are."""
        model, inputs, args, kwargs = call
        self.trainer.accelerator.gradient_state._set_sync_gradients(last and synchronise)
        if not synchronise and hasattr(model, "require_forward_param_sync"):
            # DistributedDataParallel sends the buffers of the first rank to the others in the first forward after one
            # whose gradients were synchronised (torch 2.13, `_pre_forward`). One that raises would do so once more.
            model.require_forward_param_sync = False
        with self.with_all_ranks("a micro-batch is computed again"), self._gradients_kept(model, last, synchronise):
            loss: torch.Tensor = self._instrument.call.run((model, copy.copy(inputs), args, kwargs), window)
            return loss

    def _gradients_kept(self, model: Any, last: bool, synchronise: bool) -> contextlib.AbstractContextManager[None]:
        """Has ranks exchange gradients as between the Trainer's own micro-batches, or not at all."""
        trainer = self.trainer
        if last and synchronise:
            return contextlib.nullcontext()
        if not getattr(trainer, "is_distributed_loading_by_transformers", False) or not fsdp2_modules(trainer.model):
            kept: contextlib.AbstractContextManager[None] = trainer.accelerator.no_sync(model=model)
            return kept
        # transformers 5.2x: accelerate did not wrap a model that was sharded while it was loaded.
        return trainer._defer_fsdp_gradient_reduction() if synchronise else without_reduction(trainer.model)

    @contextlib.contextmanager
    def accumulating(self, micro_batches: float | None) -> Iterator[None]:
        """Divides losses by another number of micro-batches; `None`: by that of the step."""
        trainer = self.trainer
        theirs = trainer.current_gradient_accumulation_steps
        if micro_batches is not None:
            trainer.current_gradient_accumulation_steps = micro_batches
        try:
            yield
        finally:
            trainer.current_gradient_accumulation_steps = theirs

    @contextlib.contextmanager
    def counting_nothing(self) -> Iterator[None]:
        """Has what is computed give gradients of zero, which take part in whatever ranks do with them."""

        def backward(original: Callable[..., None], loss: torch.Tensor, **kwargs: Any) -> None:
            original(0.0 * loss, **kwargs)

        with Replacements() as replaced:
            replaced.wrap(self.trainer.accelerator, "backward", backward)
            yield

    def prepare_inputs(self, inputs: Any) -> Any:
        """Prepares a micro-batch as the trainer does (online trainers: generates)."""
        with self.with_all_ranks("a batch is prepared again"):
            self.trainer.model.train()
            return self.trainer._prepare_inputs(inputs)

    @property
    def only_moves_inputs(self) -> bool:
        return only_moves(self._instrument.replaced.original(self.trainer, "_prepare_inputs"))

    def discard(self) -> None:
        """Drops all gradients there are, and what is known of them."""
        discard_gradients(self.trainer.model)
        scaler = self.trainer.accelerator.scaler
        if scaler is not None:
            # `unscale_` refuses to run twice for one optimizer; what it noted belongs to gradients that are gone.
            scaler._per_optimizer_states.clear()

    @property
    def scaler_active(self) -> bool:
        """Whether a GradScaler looks after overflowing gradients (fp16)."""
        scaler = self.trainer.accelerator.scaler
        return scaler is not None and scaler.is_enabled()

    def gradients(self) -> list[torch.Tensor]:
        """The gradients there are on this rank."""
        return [gradient for _, gradient in named_gradients_of(self.trainer.model)]

    def scale_gradients(self, factor: float) -> None:
        scale_gradients(self.trainer.model, factor)

    def step_again(
        self, rates: Sequence[Any], scaled_by: float = 1.0, options: Sequence[Mapping[str, Any]] = ()
    ) -> float | None:
        """Clips and applies the gradients there are with given rates, as the Trainer would; their norm before."""
        trainer, norm = self.trainer, None
        original, reentry = self._instrument.replaced.original, self._instrument.reentry
        with self.with_all_ranks("a step is applied again"):
            if self.view.max_grad_norm > 0:
                norm = trainer._clip_grad_norm(trainer.model)
            if scaled_by != 1.0:
                self.scale_gradients(scaled_by)
            self._instrument.hooks.before_optimizer_step()
            phase = reentry.phase
            try:
                with self.rates.set(rates, options):
                    original(trainer.optimizer, "step")()
            finally:
                reentry.phase = phase
            return None if norm is None else float(norm)

    def leave_out(self, overflowed: bool) -> None:
        """Has the Trainer's next `optimizer.step()` apply nothing; the gradients are discarded by then."""
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
        self._instrument.reentry.phase = Phase.STEPPED

    def state_put(self) -> None:
        """Called when another state was written over the tensors that training changes."""

    @property
    def precision(self) -> torch.dtype:
        """The lowest precision that a step is computed in."""
        return lowest_precision(self.trainer.model.parameters(), self.view.autocast_dtype)
