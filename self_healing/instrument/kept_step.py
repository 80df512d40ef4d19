"""Steps that are kept after they were applied: their batches, and what it takes to apply them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..hf.engine import Call
from ..system.random_state import RandomState


HOST = torch.device("cpu")


@dataclass(slots=True)
class Control:
    """A healthy step that is kept, to be computed again with other weights."""

    calls: list[Call]
    loss: float
    nbytes: int

    def leave_device(self) -> int:
        """Moves its inputs to host memory, from where the Trainer prepares them again; the bytes that were moved."""
        moved = sum(nbytes_of(inputs, elsewhere_than=HOST) for _, inputs, _, _ in self.calls)
        if moved:
            # Those of the step itself, which may be under way, stay where they are.
            self.calls = [(model, on_host(inputs), args, kwargs) for model, inputs, args, kwargs in self.calls]
        return moved


@dataclass(frozen=True, slots=True)
class Recording:
    """A step that was applied, with all that is needed to apply it again bit for bit."""

    step: int
    control: Control
    rng: RandomState
    rates: list[float]
    scaled_by: float
    options: list[dict[str, Any]]


def nbytes_of(value: Any, elsewhere_than: torch.device | None = None) -> int:
    if isinstance(value, torch.Tensor):
        return 0 if value.device == elsewhere_than else value.nbytes
    if isinstance(value, Mapping):
        return sum(nbytes_of(inner, elsewhere_than) for inner in value.values())
    return sum(nbytes_of(inner, elsewhere_than) for inner in value) if isinstance(value, (list, tuple)) else 0


def on_host(value: Any) -> Any:
    """Copies a micro-batch to host memory, nested in whatever the Trainer's own preparation knows."""
    if isinstance(value, torch.Tensor):
        return value.to(HOST)
    if isinstance(value, Mapping):
        return type(value)({key: on_host(inner) for key, inner in value.items()})  # type: ignore[call-arg]
    return type(value)(on_host(inner) for inner in value) if isinstance(value, (list, tuple)) else value
