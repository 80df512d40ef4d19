"""Leaves rows out of a step, with its loss normalised as if they had never been in its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from .. import consensus
from ..batch_layout import Layout, own_token_count, select_rows
from .step_engine import StepEngine
from .step_record import StepRecord


@dataclass(frozen=True, slots=True)
class FewerRows:
    """
    The rows that stay in a step, and what its loss is divided by without the others.

    Args:
        rows (`Mapping[int, Sequence[int]]`):
            By micro-batch; one that is not named keeps all.
        layouts (`Mapping[int, Layout | None]`):
            How the rows of these micro-batches are told apart.
        items (`Any`):
            The Trainer's number of items without the rows that go; `None` where a batch carries its own.
        dropped (`torch.Tensor`, *optional*):
            By how much the number that each batch carries is lower, over all ranks.
    """

    rows: Mapping[int, Sequence[int]]
    layouts: Mapping[int, Layout | None]
    items: Any = None
    dropped: torch.Tensor | None = None

    @classmethod
    def of(cls, step: StepRecord, rows: Mapping[int, Sequence[int]], engine: StepEngine) -> Self:
        """
        Counts what the loss is divided by, with all ranks together: one that keeps all its rows takes part.

        Args:
            step ([`StepRecord`]):
                The step, with its micro-batches prepared.
            rows (`Mapping[int, Sequence[int]]`):
                Those that stay.
            engine ([`StepEngine`]):
                Of its trainer.
        """
        layouts = {index: step.layout(index) for index in rows}
        items, dropped = _count_items(step, rows, layouts, engine)
        return cls(rows, layouts, items, dropped)

    def emptied(self, index: int) -> bool:
        """Whether a micro-batch keeps no row."""
        return index in self.rows and not self.rows[index]

    def select(self, index: int, batch: Any) -> Any:
        """Takes a prepared micro-batch without the rows that go."""
        if self.dropped is not None and isinstance(batch, Mapping):
            batch = {**batch, "num_items_in_batch": batch["num_items_in_batch"] - self.dropped}
        rows, layout = self.rows.get(index), self.layouts.get(index)
        return batch if rows is None or layout is None else select_rows(batch, layout, rows)


def _count_items(
    step: StepRecord,
    keep: Mapping[int, Sequence[int]],
    layouts: Mapping[int, Layout | None],
    engine: StepEngine,
) -> tuple[Any, torch.Tensor | None]:
    trainer, dropped = engine.trainer, torch.zeros((), device=engine.view.device)
    batches = []
    for index in range(step.size):
        batch, rows, layout = step.prepared[index], keep.get(index), layouts.get(index)
        if rows is None or layout is None:
            batches.append(batch)
            continue
        gone = [row for row in range(layout.rows) if row not in set(rows)]
        tokens = own_token_count(batch, layout, gone) if gone and step.objective.online else None
        if tokens is not None:
            dropped = dropped + tokens
        if rows:
            batches.append(select_rows(batch, layout, rows))
    if step.objective.online:
        carried = any(isinstance(batch, Mapping) and "num_items_in_batch" in batch for batch in step.prepared.values())
        if not carried:
            return None, None
        on_all_ranks = consensus.sum_over_ranks("tokens left out", dropped.reshape(1), dropped.device)
        return None, dropped.new_tensor(on_all_ranks[0])
    with engine.among_ranks("items without the rows that go"):
        return trainer._get_num_items_in_batch(batches, trainer.args.device), None
