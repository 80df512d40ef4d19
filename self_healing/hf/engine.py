"""`StepEngine`: how an optimizer step is computed, discarded, measured and applied."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from ..failures.recipes import TrainingFault
from ..instrument.origin import Origin, watching_gradients, watching_outputs
from ..instrument.preparing import preparing
from ..ranks import votes
from ..system.random_state import lowest_precision
from .patching import Replacements
from .view import TrainerView


_T = TypeVar("_T")

# Where a rank is that is through training code.
THROUGH = "through"

# One call of `training_step`: model, inputs, arguments.
Call = tuple[Any, Any, tuple[Any, ...], dict[str, Any]]


class StepPasses(Protocol):
    """Computes a training step in several passes over its rows."""

    def run(self, compute: Callable[[], torch.Tensor], model: Any, items: Any) -> torch.Tensor:
        """Computes the step."""


class StepEngine(ABC):
    """
    Runs the optimizer steps of one trainer for a [`Window`], which knows nothing of the library that owns the backward
    pass.
    """

    def __init__(self, trainer: Any, view: TrainerView) -> None:
        self.trainer = trainer
        self.view = view

    @abstractmethod
    def attach(self) -> None:
        """Wraps what the steps go through, before anything else of the trainer is wrapped."""

    @abstractmethod
    def detach(self) -> None:
        """Gives it back; a step that is held back is taken first."""

    # ---- compute ----

    @contextlib.contextmanager
    def with_all_ranks(self, question: str) -> Iterator[None]:
        """
        Marks a block of training code, which may be a collective wherever it is (a loss that gathers its metrics).
        """
        votes.wait_for_all_ranks(question, self.view.device)
        try:
            yield
        except Exception as error:
            if self.is_fatal(error) or isinstance(error, (votes.RankRaised, votes.RanksDisagree)):
                raise
            raise TrainingFault(error, others_wait=True) from error
        votes.reach(THROUGH)

    def among_ranks(self, question: str) -> contextlib.AbstractContextManager[None]:
        """As [`with_all_ranks`], where there are several; on one process an exception is what it is."""
        return contextlib.nullcontext() if self.view.world_size == 1 else self.with_all_ranks(question)

    @abstractmethod
    def is_fatal(self, error: Exception) -> bool:
        """Whether an exception concerns everything, and not only what was computed: the device is lost."""

    @abstractmethod
    def compute(
        self, call: Call, last: bool, on_nonfinite: Callable[[], None], synchronise: bool = True
    ) -> torch.Tensor:
        """Computes forward and backward of one micro-batch; its gradients are added to those there are."""

    @abstractmethod
    def prepare_inputs(self, inputs: Any) -> Any:
        """Prepares a micro-batch as the trainer does (online trainers: generates)."""

    def preparing(self, change: Callable[[Any], Any], prepared: Any = None) -> contextlib.AbstractContextManager[None]:
        """Passes what the trainer prepares, or has prepared before, through `change`, once."""
        return preparing(self.trainer, change, prepared)

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
        replaced = Replacements()

        def backward(original: Callable[..., None], loss: torch.Tensor, **kwargs: Any) -> None:
            original(0.0 * loss, **kwargs)

        replaced.wrap(self.trainer.accelerator, "backward", backward)
        try:
            yield
        finally:
            replaced.give_back()

    @abstractmethod
    def until_it_fits(self, compute: Callable[[], _T], discard: Callable[[], None]) -> _T:
        """
        Computes something that begins with rewinding the step: it can be begun again with more memory, or once more.
        """

    @abstractmethod
    def experiment(self) -> contextlib.AbstractContextManager[None]:
        """Marks what is computed inside as not needed by the run: where memory runs out in it, it is given up."""

    # ---- discard ----

    @abstractmethod
    def discard(self) -> None:
        """Drops all gradients there are, and what is known of them."""

    # ---- measure ----

    @property
    @abstractmethod
    def scaler_active(self) -> bool:
        """Whether a GradScaler looks after overflowing gradients (fp16)."""

    @abstractmethod
    def gradients(self) -> list[torch.Tensor]:
        """The gradients there are on this rank."""

    @abstractmethod
    def gradients_are_finite(self) -> bool:
        """Whether they are on all ranks; where a GradScaler looks after them, they count as finite."""

    @abstractmethod
    def scale_gradients(self, factor: float) -> None:
        """Multiplies them by a factor."""

    # ---- apply ----

    @abstractmethod
    def rates_in_force(self, scale: float | None = None) -> list[Any]:
        """The learning rate of each parameter group: the schedule's, times the factor in force or another one."""

    @abstractmethod
    def group_options(self) -> list[dict[str, Any]]:
        """Settings of each parameter group that schedules change beside the rate (one-cycle momentum)."""

    @abstractmethod
    def step_again(
        self, rates: Sequence[Any], scaled_by: float = 1.0, options: Sequence[Mapping[str, Any]] = ()
    ) -> float | None:
        """Clips and applies the gradients there are with given rates, as the Trainer would; their norm before."""

    @abstractmethod
    def leave_out(self, overflowed: bool) -> None:
        """Has the Trainer's next `optimizer.step()` apply nothing; the gradients are discarded by then."""

    @property
    def left_out_by_itself(self) -> bool:
        """Whether an engine of its own has taken the step already, and applied nothing."""
        return False

    @abstractmethod
    def state_put(self) -> None:
        """Called when another state was written over the tensors that training changes."""

    # ---- look ----

    def watching_outputs(self) -> contextlib.AbstractContextManager[list[Origin]]:
        """Notes the modules whose outputs are not finite, in the order in which they are computed."""
        return watching_outputs(self._models_by_name())

    def watching_gradients(self) -> contextlib.AbstractContextManager[list[Origin]]:
        """Notes the module in whose backward the gradient is first not finite."""
        return watching_gradients(self._models_by_name())

    def _models_by_name(self) -> dict[str, torch.nn.Module]:
        models = self.view.models()
        named = {name: value for name, value in vars(self.trainer).items() if isinstance(value, torch.nn.Module)}

        def prefix(model: torch.nn.Module) -> str:
            return next((name for name, value in named.items() if value is model), type(model).__name__)

        trained, *others = models
        return {"": trained} | {prefix(model): model for model in others}

    @property
    def precision(self) -> torch.dtype:
        """The lowest precision that a step is computed in."""
        return lowest_precision(self.trainer.model.parameters(), self.view.autocast_dtype)

    @abstractmethod
    def full_precision(self) -> contextlib.AbstractContextManager[bool]:
        """Takes off the model what is put around its forward for mixed precision; gives whether there was any."""
