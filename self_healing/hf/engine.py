"""Computes, measures, discards and applies a step; finds where a computation stops being finite."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..failures.recipes import TrainingFault
from ..ranks import votes
from ..system.random_state import lowest_precision
from .batches import preparing
from .patching import Replacements
from .sections import Phase
from .state import (
    by_mesh,
    discard_gradients,
    extent_of,
    fsdp2_modules,
    named_gradients_of,
    scale_gradients,
    whole,
    without_reduction,
)
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
        votes.wait_for_all_ranks(question, self.view.device)
        try:
            yield
        except Exception as error:
            lost = self._instrument.failsafe.tells_of_lost_device(error)
            if lost or isinstance(error, (votes.RankRaised, votes.RanksDisagree)):
                raise
            raise TrainingFault(error, others_wait=True) from error
        votes.reach(THROUGH)

    def among_ranks(self, question: str) -> contextlib.AbstractContextManager[None]:
        """As [`with_all_ranks`], where there are several; on one process an exception is what it is."""
        return contextlib.nullcontext() if self.view.world_size == 1 else self.with_all_ranks(question)

    def compute(
        self, call: Call, last: bool, on_nonfinite: Callable[[], None], synchronise: bool = True
    ) -> torch.Tensor:
        """Computes forward and backward of one micro-batch; its gradients are added to those there are."""
        model, inputs, args, kwargs = call
        self.trainer.accelerator.gradient_state._set_sync_gradients(last and synchronise)
        if not synchronise and hasattr(model, "require_forward_param_sync"):
            # DistributedDataParallel sends the buffers of the first rank to the others in the first forward after one
            # whose gradients were synchronised (torch 2.13, `_pre_forward`). One that raises would do so once more.
            model.require_forward_param_sync = False
        with self.with_all_ranks("a micro-batch is computed again"), self._gradients_kept(model, last, synchronise):
            loss: torch.Tensor = self._instrument.call.run((model, copy.copy(inputs), args, kwargs), on_nonfinite)
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

    def prepare_inputs(self, inputs: Any) -> Any:
        """Prepares a micro-batch as the trainer does (online trainers: generates)."""
        with self.with_all_ranks("a batch is prepared again"):
            self.trainer.model.train()
            return self.trainer._prepare_inputs(inputs)

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

    def gradients_are_finite(self) -> bool:
        """Whether they are on all ranks; where a GradScaler looks after them, they count as finite."""
        gradients = self.gradients()
        if self.scaler_active or not gradients:
            return True
        norms = [float(whole(torch.nn.utils.get_total_norm(group))) for group in by_mesh(gradients)]
        return all(map(math.isfinite, norms))

    def scale_gradients(self, factor: float) -> None:
        scale_gradients(self.trainer.model, factor)

    def step_again(
        self, rates: Sequence[Any], scaled_by: float = 1.0, options: Sequence[Mapping[str, Any]] = ()
    ) -> float | None:
        """Clips and applies the gradients there are with given rates, as the Trainer would; their norm before."""
        trainer, limit, norm = self.trainer, self.view.max_grad_norm, None
        original, reentry = self._instrument.replaced.original, self._instrument.reentry
        with self.with_all_ranks("a step is applied again"):
            if limit > 0:
                norm = original(trainer.accelerator, "clip_grad_norm_")(trainer.model.parameters(), limit)
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

    @contextlib.contextmanager
    def full_precision(self) -> Iterator[bool]:
        """Takes off the model what is put around its forward for mixed precision; gives whether there was any."""
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

    def state_put(self) -> None:
        """Called when another state was written over the tensors that training changes."""

    # ---- look ----

    @contextlib.contextmanager
    def watching_outputs(self) -> Iterator[list[Origin]]:
        """Notes the modules whose outputs are not finite, in the order in which they are computed."""
        found: list[Origin] = []

        def hook(name: str, module: torch.nn.Module) -> Any:
            return module.register_forward_hook(_note(name, found), with_kwargs=True)

        with _hooked(self._models_by_name(), hook):
            yield found

    @contextlib.contextmanager
    def watching_gradients(self) -> Iterator[list[Origin]]:
        """Notes the module in whose backward the gradient of a finite loss is first not finite."""
        found: list[Origin] = []

        def hook(name: str, module: torch.nn.Module) -> Any:
            innermost = next(module.children(), None) is None
            return module.register_full_backward_hook(_note_gradient(name, found)) if innermost else None

        with _hooked(self._models_by_name(), hook):
            yield found

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


# ---- origin: finds where a computation first gives a number that is not finite: batch, module, loss or backward ----


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where a computation first gave a number that is not finite."""

    place: Literal["inputs", "module", "loss", "gradient"]
    names: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"first_nonfinite": self.place, "first_nonfinite_names": list(self.names[:20]), **self.details}

    def __str__(self) -> str:
        name = self.names[0] if self.names else "?"
        if self.place == "inputs":
            return f"the batch itself holds NaN or Inf ({', '.join(self.names[:5])})"
        if self.place == "loss":
            return "the outputs of all modules are finite, and the loss made of them is not"
        if self.place == "gradient":
            begins = self.details.get("backward_module")
            where = "" if begins is None else f"; it begins {self.details['backward_place']} {begins}"
            named = f" ({', '.join(self.names[:5])})" if self.names else ""
            return f"the loss is finite, and the gradient is not{named}{where}"
        of = f"{self.details.get('module_class', '?')}, {self.details.get('output_dtype', '?')}"
        largest = self.details.get("largest_input")
        given = "" if largest is None else f"; its inputs are finite, up to {largest:.3g}"
        if self.details.get("inputs_finite") is False:
            # An operation that is no module: attention scores, a residual.
            within = name.rpartition(".")[0] or "the model"
            given = f"; what reaches it is not finite either, and was computed in {within} itself"
        return f"the first module whose output is not finite is {name} ({of}{given})"


@contextlib.contextmanager
def _hooked(models: Mapping[str, torch.nn.Module], register: Callable[[str, torch.nn.Module], Any]) -> Iterator[None]:
    """Registers hooks on all modules of models, by their names, for one computation."""
    hooks = []
    compiled = False
    try:
        for prefix, model in models.items():
            for name, module in model.named_modules():
                compiled |= type(module).__name__ == "OptimizedModule"
                compiled |= getattr(module, "_compiled_call_impl", None) is not None
                called = ".".join(part for part in (prefix, name) if part).replace("_orig_mod.", "")
                with contextlib.suppress(RuntimeError):
                    # A scripted module takes no such hook.
                    hooks.append(register(called, module))
        with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            yield
    finally:
        for hook in hooks:
            if hook is not None:
                hook.remove()


def _note_gradient(name: str, found: list[Origin]) -> Callable[..., None]:
    def note(module: torch.nn.Module, to_inputs: Any, of_outputs: Any) -> None:
        if found:
            return
        received = any(not _is_finite(each) for each in _floats(of_outputs))
        if not received and all(_is_finite(each) for each in _floats(to_inputs)):
            return
        place = "between the loss and the output of" if received else "in the backward of"
        details = {
            "backward_module": name or type(module).__name__,
            "backward_class": type(module).__name__,
            "backward_place": place,
        }
        found.append(Origin("gradient", (), details))

    return note


def _note(name: str, found: list[Origin]) -> Callable[..., None]:
    def note(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # Only the first matters, and each look waits for the device.
        bad = None if found else next((each for each in _floats(output) if _is_bad(each)), None)
        if bad is None:
            return
        inputs = list(_floats((args, kwargs)))
        finite = not any(_is_bad(each) for each in inputs)
        found.append(
            Origin(
                "module",
                (name or type(module).__name__,),
                {
                    "module_class": type(module).__name__,
                    "output_dtype": str(bad.dtype),
                    "inputs_finite": finite,
                    "largest_input": _largest(inputs) if finite else None,
                },
            )
        )

    return note


def nonfinite_in(batch: Any) -> list[str]:
    """Names the entries of a batch that hold NaN or Inf."""
    entries = batch.items() if isinstance(batch, Mapping) else [("batch", batch)]
    return [str(name) for name, value in entries if any(_is_bad(each) for each in _floats(value))]


def _floats(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _floats(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _floats(inner)


def _is_bad(value: torch.Tensor) -> bool:
    extent = extent_of(value)
    # Masks hold -inf on purpose.
    return extent is not None and (math.isnan(extent.low) or float(extent.high) == math.inf)


def _is_finite(value: torch.Tensor) -> bool:
    extent = extent_of(value)
    return extent is None or (math.isfinite(extent.low) and math.isfinite(extent.high))


def _largest(values: list[torch.Tensor]) -> float | None:
    """The largest absolute value in tensors; `None` if there is none."""
    extents = [extent for extent in map(extent_of, values) if extent is not None]
    return max((max(-float(extent.low), float(extent.high)) for extent in extents), default=None)
