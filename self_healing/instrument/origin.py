"""Finds where a computation first gives a number that is not finite: batch, module, loss or backward."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..extents import extent_of


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
    """Notes the modules whose outputs are not finite, in the order in which they are computed, for one computation."""
    found: list[Origin] = []
    with _hooked(models, lambda name, module: module.register_forward_hook(_note(name, found), with_kwargs=True)):
        yield found


@contextlib.contextmanager
def watching_gradients(models: Mapping[str, torch.nn.Module]) -> Iterator[list[Origin]]:
    """Notes the module in whose backward the gradient is first not finite, for one computation with a finite loss."""
    found: list[Origin] = []

    def hook(name: str, module: torch.nn.Module) -> Any:
        innermost = next(module.children(), None) is None
        return module.register_full_backward_hook(_note_gradient(name, found)) if innermost else None

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
