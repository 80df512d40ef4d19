"""Looks into a step for the first number that is not finite: in which module, and for which rows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..failures.recipes import TrainingFault
from ..healers.numerics.diagnosis import find_poison_rows
from ..hf.engine import Origin
from ..hf.experiments import StepExperiments
from ..hf.step import Window


# Rows that are looked into one by one; a model that fails on all of them fails on each alike.
_ROWS_LOOKED_INTO = 8


@dataclass(frozen=True, slots=True)
class RowFound:
    """A row that is not finite by itself."""

    micro_batch: int
    row: int
    source: dict[str, Any]
    origin: Origin | None

    def __str__(self) -> str:
        known = [f"{name.replace('_', ' ')} {value}" for name, value in self.source.items() if value is not None]
        at = f"micro-batch {self.micro_batch}, row {self.row}" + (f" ({', '.join(known)})" if known else "")
        return f"{at}: {'where it begins could not be found' if self.origin is None else self.origin}"

    def to_dict(self) -> dict[str, Any]:
        origin = None if self.origin is None else {**self.origin.to_dict(), "told": str(self.origin)}
        return {**asdict(self), "origin": origin}


@dataclass(slots=True)
class Look:
    """What was seen of a step."""

    loss: float
    grad_norm: float | None
    finite: bool
    rows_in_step: int | None = None
    poison: int = 0
    rows: list[RowFound] = field(default_factory=list)
    origin: Origin | None = None
    full_precision: bool | None = None


def look_into(window: Window, sources: Mapping[int, Sequence[Mapping[str, Any]]]) -> Look:
    """Looks into a step that was computed; its gradients are gone on return."""
    signals = window.signals()
    look = Look(signals.loss, signals.grad_norm, signals.finite)
    if look.finite:
        return look
    # Prepared micro-batches are noted when a step is computed again.
    window.reexecute()
    with window.experiment():
        experiments = StepExperiments(window)
        look.full_precision = experiments.finite_in_full_precision()
        look.origin = experiments.origin(backward=True)
        layouts = [window.layout(index) for index in range(window.size)]
        if any(layout is None for layout in layouts):
            return look
        sizes = [layout.rows for layout in layouts if layout is not None]
        look.rows_in_step = sum(sizes)
        # A batch of a shape that is never trained on may raise.
        with contextlib.suppress(TrainingFault):
            poison = find_poison_rows(experiments, sizes, window.engine.view.device)
            look.poison = sum(len(rows) for rows in poison.values())
            places = [(index, row) for index, rows in poison.items() for row in rows]
            for index, row in places[:_ROWS_LOOKED_INTO]:
                known = list(sources.get(index, ()))
                source = dict(known[row]) if row < len(known) else {}
                look.rows.append(RowFound(index, row, source, experiments.origin_in_row(index, row)))
    return look
