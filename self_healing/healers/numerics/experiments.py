"""Experiments on a step: on some of its rows, in other precision, once more."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ...failures.recipes import TrainingFault
from ...hf.batches import Layout, select_rows
from ...hf.dataloader import TrainingLoader
from ...hf.memory import free_memory
from ...hf.state import Search, by_mesh, extent_of, named_gradients_of, whole
from ...hf.step import Window
from ...hf.view import is_compiled
from ...system import processes
from ...system.random_state import Repeatability, StepPrint


logger = logging.getLogger(__name__)


class StepExperiments:
    """Computes a step in other ways than it was, to find out what is wrong with it."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self._engine = window.engine
        self._trainer = window.engine.trainer

    # ---- some of its rows, and others ----

    def is_nonfinite(self, index: int) -> bool:
        """Whether a micro-batch is known not to be finite, from the step as it was computed last."""
        return self.window.size == 1 or not math.isfinite(float(self.window.losses[index]))

    def probe(self, index: int, rows: Sequence[int]) -> bool:
        """Whether some rows of a micro-batch alone give a finite loss and finite gradients."""
        layout = self.layout(index)
        return self._probe(index, lambda: select_rows(self.window.prepared[index], layout, rows))

    def probe_row(self, index: int, row: int) -> bool:
        """The same of one row alone."""
        return self.probe(index, self.layout(index).alone(row))

    def rows_without(self, poison: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """The rows that stay of each micro-batch that has poison rows."""
        return {at: [row for row in range(self.layout(at).rows) if row not in bad] for at, bad in poison.items()}

    def layout(self, index: int) -> Layout:
        layout = self.window.layout(index)
        if layout is None:
            raise ValueError(f"the rows of micro-batch {index} cannot be told apart")
        return layout

    def probe_batch(self, inputs: Any) -> bool:
        """Whether another micro-batch, as the data loader gave it, is finite with the weights as they are."""
        return self._probe(len(self.window.calls) - 1, lambda: self._engine.prepare_inputs(copy.copy(inputs)))

    def _probe(self, index: int, rows: Callable[[], Any]) -> bool:
        def compute() -> bool:
            batch = rows()
            self.window.rewind()
            try:
                loss = self.window.compute_micro_batch(index, lambda _: batch, last=True, synchronise=False)
                # In this order: where a layer's tensors are spread over ranks, all of them ask about gradients.
                return self._gradients_are_finite() and math.isfinite(float(loss))
            finally:
                self.window.rewind()

        return self.window.until_it_fits(compute)

    def _gradients_are_finite(self) -> bool:
        """Whether they are on all ranks; where a GradScaler looks after them, they count as finite."""
        gradients = self._engine.gradients()
        if self._engine.scaler_active or not gradients:
            return True
        norms = [float(whole(torch.nn.utils.get_total_norm(group))) for group in by_mesh(gradients)]
        return all(map(math.isfinite, norms))

    def rows_elsewhere(self, count: int) -> list[Any]:
        """
        Loads batches of one row each from all over the training data, none of them in this step, for each twice the
        same: what is computed from a batch may need more than one.
        """
        if self.window.objective.online:
            return []
        try:
            return TrainingLoader(self._trainer).rows_elsewhere(count, self.window.samples())
        except Exception:
            logger.info("Other rows of the data could not be loaded to compare with.", exc_info=True)
            return []

    # ---- where it begins ----

    def origin(self) -> Origin | None:
        """Finds where the step first gives a number that is not finite; `None` where that cannot be seen."""
        found: Origin | None = None
        for index in range(self.window.size):
            if found is None or processes.world_size() > 1:
                # Several processes compute equally many, because a loss may contain collectives.
                here = self.window.until_it_fits(functools.partial(self.origin_in, index))
                found = found or here
        return found

    def origin_in(self, index: int, pick: Callable[[Any], Any] = lambda batch: batch) -> Origin | None:
        """The same of what is picked of one micro-batch, once."""
        window = self.window
        window.rewind()
        spoiled: list[str] = []

        def look(batch: Any) -> Any:
            picked = pick(batch)
            spoiled.extend(nonfinite_in(picked))
            return picked

        try:
            with watching_outputs(self.models()) as seen:
                loss = window.compute_micro_batch(index, look, last=True, synchronise=False)
            if spoiled:
                return Origin("inputs", tuple(spoiled))
            if seen:
                return seen[0]
            if not math.isfinite(float(loss)):
                return Origin("loss")
            search = Search()
            for name, gradient in named_gradients_of(self._trainer.model):
                search.add(name, gradient, inf=True)
            bad = search.nonfinite()
            return Origin("gradient", tuple(bad)) if bad else None
        finally:
            window.rewind()

    def finite_in_full_precision(self) -> bool | None:
        """Whether the step is finite without mixed precision; `None` where there is none."""
        model = self._trainer.model
        # What accelerate puts around a forward, and what it keeps of the model's own.
        mixed, plain = vars(model).get("forward"), vars(model).get("_original_forward")
        if mixed is None or plain is None:
            return None
        model.forward = plain
        try:
            self.window.recompute()
            finite = self.window.signals().finite
        finally:
            model.forward = mixed
        self.window.rewind()
        return finite

    def models(self) -> dict[str, torch.nn.Module]:
        """The models that the trainer calls, each but the one it trains by the name it has there."""
        trained, *others = self._engine.view.models()
        names = {id(value): name for name, value in reversed(vars(self._trainer).items())}
        return {"": trained} | {names.get(id(model), type(model).__name__): model for model in others}

    # ---- does it repeat? ----

    def repeatability(self) -> Repeatability | None:
        """Computes the step once more, and tells how far the two lie apart; `None` if that cannot be known."""
        first = self._print()
        if first is None or not self._computed_once_more():
            return None
        found = self._apart_from(first)
        if found is None or found.bitwise or not self._computed_once_more():
            return found
        # Its gradients are those that are applied, and a fault may have struck it: then the third is the first again.
        again = self._apart_from(first)
        return again if again is not None and again.bitwise else found

    def _print(self) -> StepPrint | None:
        try:
            loss = torch.stack([loss.detach().double() for loss in self.window.losses]).sum()
            return StepPrint.of(float(loss), self._engine.gradients())
        except Exception:
            logger.info("Step %d: whether it repeats could not be measured.", self.window.step, exc_info=True)
            return None

    def _apart_from(self, first: StepPrint) -> Repeatability | None:
        again = self._print()
        return None if again is None else first.apart_from(again, self._engine.precision)

    def _computed_once_more(self) -> bool:
        """Computes it in any case; whether that succeeded at the first attempt."""
        window = self.window
        try:
            with window.engine.retry.experiment():
                self._compute_once_more()
        except TrainingFault as fault:
            logger.info("Step %d: computed once more to compare, it failed.", window.step, exc_info=fault.error)
        else:
            return True
        # Outside of the handler: what the failed attempt held is gone.
        window.discard()
        free_memory(self._engine.view.device)
        window.until_it_fits(self._compute_once_more)
        return False

    def _compute_once_more(self) -> None:
        window = self.window
        tokens = self._trainer.state.num_input_tokens_seen - window.tokens_inside
        loss, added = window.recompute_to_last_call(tokens)
        window.losses.append(loss)
        window.tokens_inside += added
        window.measure_again()
        window.accept()


# ---- origin: where a computation first gives a number that is not finite: batch, module, loss or backward ----


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
def watching_outputs(models: Mapping[str, torch.nn.Module]) -> Iterator[list[Origin]]:
    """Notes the modules whose outputs are not finite, in the order in which they are computed."""
    found: list[Origin] = []

    def hook(name: str, module: torch.nn.Module) -> Any:
        return module.register_forward_hook(functools.partial(_note, name, found), with_kwargs=True)

    with _hooked(models, hook):
        yield found


@contextlib.contextmanager
def watching_gradients(models: Mapping[str, torch.nn.Module]) -> Iterator[list[Origin]]:
    """Notes the module in whose backward the gradient of a finite loss is first not finite."""
    found: list[Origin] = []

    def hook(name: str, module: torch.nn.Module) -> Any:
        innermost = next(module.children(), None) is None
        note = functools.partial(_note_gradient, name, found)
        return module.register_full_backward_hook(note) if innermost else None

    with _hooked(models, hook):
        yield found


@contextlib.contextmanager
def _hooked(models: Mapping[str, torch.nn.Module], register: Callable[[str, torch.nn.Module], Any]) -> Iterator[None]:
    """Registers hooks on all modules of models, by their names, for one computation."""
    hooks = []
    compiled = False
    try:
        for prefix, model in models.items():
            for name, module in model.named_modules():
                compiled |= is_compiled(module)
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


def _note_gradient(name: str, found: list[Origin], module: torch.nn.Module, to_inputs: Any, of_outputs: Any) -> None:
    if found:
        return
    received = any(not _is_finite(each) for each in _floats(of_outputs))
    if not received and all(_is_finite(each) for each in _floats(to_inputs)):
        return
    place = "between the loss and the output of" if received else "in the backward of"
    kind = type(module).__name__
    details = {"backward_module": name or kind, "backward_class": kind, "backward_place": place}
    found.append(Origin("gradient", (), details))


def _note(name: str, found: list[Origin], module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    # Only the first matters, and each look waits for the device.
    bad = None if found else next((each for each in _floats(output) if _is_bad(each)), None)
    if bad is None:
        return
    inputs, kind = list(_floats((args, kwargs))), type(module).__name__
    finite = not any(_is_bad(each) for each in inputs)
    details = {
        "module_class": kind,
        "output_dtype": str(bad.dtype),
        "inputs_finite": finite,
        "largest_input": _largest(inputs) if finite else None,
    }
    found.append(Origin("module", (name or kind,), details))


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
