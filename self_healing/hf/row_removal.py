"""Leaves rows out of a step, with its loss normalised as if they had never been in its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from accelerate.utils import send_to_device

from ..ranks import votes
from .batches import Layout, own_token_count, select_rows


_LABELS = ("labels", "shift_labels")


@dataclass(frozen=True, slots=True)
class RowRemoval:
    """The rows that stay in a step, and what its loss is divided by without the others."""

    rows: Mapping[int, Sequence[int]]
    layouts: Mapping[int, Layout | None]
    items: Any = None
    dropped: torch.Tensor | None = None
    micro_batches: float | None = None
    stand_in: Any = None

    @classmethod
    def of(cls, step: Any, rows: Mapping[int, Sequence[int]], engine: Any) -> Self:
        """Counts what the loss is divided by, with all ranks together: one that keeps all its rows takes part."""
        layouts = {index: step.layout(index) for index in rows}
        items, dropped = _count_items(step, rows, layouts, engine)
        device, counts = engine.view.device, [sum(not kept for kept in rows.values()), step.size]
        emptied, micro_batches, *_ = votes.sum_over_ranks("micro-batches without a row", counts, device)
        if not emptied:
            return cls(rows, layouts, items, dropped)
        left = max(micro_batches - emptied, 1) / engine.view.world_size
        stand_in = None if engine.view.world_size == 1 else _stand_in(step, rows, device)
        return cls(rows, layouts, items, dropped, left, stand_in)

    def emptied(self, index: int) -> bool:
        return index in self.rows and not self.rows[index]

    def computed(self, size: int) -> list[int]:
        """Which of so many micro-batches are computed at all, with rows of theirs or with the one that stands in."""
        return [index for index in range(size) if self.stand_in is not None or not self.emptied(index)]

    def select(self, index: int, batch: Any) -> Any:
        """Takes a prepared micro-batch without the rows that go; if none is left, what stands in for it."""
        if self.emptied(index):
            return dict(self.stand_in)
        if self.dropped is not None and isinstance(batch, Mapping):
            batch = {**batch, "num_items_in_batch": batch["num_items_in_batch"] - self.dropped}
        rows, layout = self.rows.get(index), self.layouts.get(index)
        return batch if rows is None or layout is None else select_rows(batch, layout, rows)


def _stand_in(step: Any, rows: Mapping[int, Sequence[int]], device: torch.device) -> Any:
    """Gives a row that stays, the same on all ranks: where a rank keeps none, what it has of its own gives NaN."""

    def own() -> Any:
        for index in range(step.size):
            layout, kept = step.layout(index), rows.get(index, range(1))
            if layout is not None and kept:
                # By way of the host: each rank has a device of its own.
                return send_to_device(select_rows(step.prepared[index], layout, layout.alone(kept[0])), "cpu")
        return None

    return send_to_device(votes.from_first_rank_with("a row that stays", own(), device), device)


def _count_items(
    step: Any, keep: Mapping[int, Sequence[int]], layouts: Mapping[int, Layout | None], engine: Any
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
        on_all_ranks = votes.sum_over_ranks("tokens left out", dropped.reshape(1), dropped.device)
        return None, dropped.new_tensor(on_all_ranks[0])
    if not batches:
        # The Trainer sums the counts over ranks, but not where it is given nothing to count.
        hidden = {name: torch.full_like(value, -100) for name, value in step.prepared[0].items() if name in _LABELS}
        batches = [{**step.prepared[0], **hidden}]
    with engine.with_all_ranks("items without the rows that go"):
        return trainer._get_num_items_in_batch(batches, trainer.args.device), None
