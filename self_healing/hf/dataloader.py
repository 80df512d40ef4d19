"""Finds where the rows of a batch came from: index in the dataset, segment of a packed row, ordinal in a stream."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher

from ..ranks import votes
from ..system import processes
from .batches import Layout, layout_of
from .objective import Objective


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowSource:
    """The place in the data that a row of a batch came from; `None` where that is unknown."""

    dataset_index: int | None = None
    segment: int | None = None
    stream_ordinal: int | None = None


class DataPosition:
    """Follows the data of one `train()` call: which micro-batch of the epoch is next, and which rows it is made of."""

    def __init__(self, trainer: Any, objective: Objective) -> None:
        self._trainer = trainer
        self._objective = objective
        self._entry_step = int(trainer.state.global_step)
        # The sample that is used for an index, where another one stands in for it.
        self.actual: Callable[[int], int] = int
        self.micro_batches = 0
        self._rows = 0
        self._began_at = 0
        self._sampled: dict[int, list[int]] = {}
        # Ranks that the first one loads for, itself included; none where what each of them gets is not known.
        self._loads_for = 1
        self._watched: tuple[Any, type] | None = None

    # ---- where we are ----

    def epoch_begins(self) -> None:
        """Called in `on_epoch_begin`; the epoch a run is resumed in begins with the micro-batches it skips."""
        trainer = self._trainer
        self.micro_batches = self._rows = 0
        resumed_here = int(trainer.state.global_step) == self._entry_step
        if resumed_here and self._entry_step > 0 and not trainer.args.ignore_data_skip:
            accumulation = trainer.args.gradient_accumulation_steps
            length = self._length()
            if length is not None:
                updates = max(math.ceil(length / accumulation), 1)
                self.micro_batches = self._entry_step % updates * accumulation
        self._began_at = self.micro_batches

    def advance(self, batches: Sequence[Any]) -> None:
        """Counts the micro-batches of a finished step."""
        self.micro_batches += len(batches)
        first = self._drawn_for(self.micro_batches).start
        for position in [position for position in self._sampled if position < first]:
            del self._sampled[position]
        if self._streams():
            # Elsewhere rows are known by what the batch sampler has given out.
            self._rows += sum(self._count_rows(batch) for batch in batches)

    def at_epoch_end(self) -> bool:
        """Whether the epoch has no micro-batch left."""
        length = self._length()
        return length is not None and self.micro_batches >= length

    def epoch_after(self, batches: int) -> float | None:
        """The Trainer's `epoch` after that many more micro-batches; `None` where it cannot be known."""
        length = self._length()
        if length is None:
            return None
        return math.floor(self._trainer.state.epoch or 0) + (self.micro_batches + batches) / length

    def _length(self) -> int | None:
        with contextlib.suppress(TypeError):
            return len(self._trainer.callback_handler.train_dataloader)
        return None

    def _count_rows(self, batch: Any) -> int:
        if isinstance(batch, list):
            return len(batch)
        layout = layout_of(batch, self._objective)
        return 0 if layout is None else layout.rows

    # ---- the batch sampler ----

    def watch(self) -> None:
        """Keeps the index lists the batch sampler gives out, until [`release`]."""
        loader = self._trainer.callback_handler.train_dataloader
        sampler = getattr(loader, "batch_sampler", None)
        if sampler is None or self._streams():
            return
        if isinstance(loader, DataLoaderDispatcher):
            self._loads_for = _ranks_served(loader)
            if self._loads_for == 0 or not processes.is_first_rank():
                # What workers of another rank prefetch from its sampler is never trained on.
                return
        cls, position_now, sampled = type(sampler), self, self._sampled

        def __iter__(self: Any) -> Iterator[Any]:
            sampled.clear()
            for position, batch in enumerate(cls.__iter__(self)):
                # Batches that a resume skips are drawn as well, but never looked up.
                if position >= position_now.micro_batches and isinstance(batch, (list, tuple)):
                    sampled[position] = list(batch)
                yield batch

        try:
            sampler.__class__ = type(cls.__name__, (cls,), {"__iter__": __iter__, "__module__": cls.__module__})
        except TypeError:
            logger.info("The batch sampler %s cannot be watched: rows will have no dataset index.", cls.__name__)
            return
        self._watched = (sampler, cls)

    def release(self) -> None:
        """Gives the batch sampler its class back."""
        if self._watched is not None:
            sampler, cls = self._watched
            sampler.__class__ = cls
            self._watched = None

    def share(self, size: int) -> None:
        """Tells all ranks what the first one has drawn for the current step, where it loads for all."""
        if self._loads_for > 1:
            drawn = votes.from_first_rank(
                "samples of the step", lambda: self._drawn_in_step(size), self._trainer.accelerator.device
            )
            self._sampled.update(drawn)

    def _drawn_in_step(self, size: int) -> dict[int, list[int]]:
        positions = range(self.micro_batches, self.micro_batches + size)
        draws = (draw for position in positions for draw in self._drawn_for(position))
        return {draw: self._sampled[draw] for draw in draws if draw in self._sampled}

    def _drawn_for(self, micro_batch: int) -> range:
        """Which batches of the sampler are drawn for a micro-batch of the epoch, by their numbers."""
        ranks = max(self._loads_for, 1)
        # Where it is resumed within an epoch, accelerate skips as many of them as micro-batches, whoever they are for.
        first = self._began_at + (micro_batch - self._began_at) * ranks
        return range(first, first + ranks)

    def _indices(self, micro_batch: int) -> list[int] | None:
        """What this rank's part of a micro-batch is made of; `None` where that is unknown."""
        drawn = [self._sampled.get(draw) for draw in self._drawn_for(micro_batch)]
        if len({None if each is None else len(each) for each in drawn}) > 1:
            # They are put together and cut in equal parts, filled up with rows of the first ones.
            return None
        return drawn[processes.own_rank() if self._loads_for > 1 else 0]

    # ---- where rows came from ----

    def sampled(self, size: int) -> set[int]:
        """Indices of the samples that the micro-batches of the current step were made of, as far as they are known."""
        return {int(index) for batch in self._drawn_in_step(size).values() for index in batch}

    def sources(self, layout: Layout, index: int, earlier: Sequence[Any]) -> list[RowSource]:
        """Finds where each row of a micro-batch of the current step came from."""
        unknown = [RowSource() for _ in range(layout.rows)]
        if self._objective.online:
            return unknown
        if self._streams():
            # A resumed stream has skipped batches nobody counted; several processes share it out between them.
            if processes.world_size() > 1 or layout.kind == "segments" or self._began_at > 0:
                return unknown
            before = self._rows + sum(self._count_rows(batch) for batch in earlier)
            return [RowSource(stream_ordinal=before + row) for row in range(layout.rows)]
        indices = self._indices(self.micro_batches + index)
        if indices is None:
            return unknown
        if layout.kind == "segments":
            sources = [source for item in indices for source in self._segments(self.actual(int(item)))]
        else:
            sources = [RowSource(dataset_index=self.actual(int(item))) for item in indices]
        return sources if len(sources) == layout.rows else unknown

    def _segments(self, item: int) -> list[RowSource]:
        """The sequences TRL's packing put into one row of the dataset."""
        dataset = self._trainer.train_dataset
        if "seq_lengths" not in (getattr(dataset, "column_names", None) or []):
            return [RowSource(dataset_index=item)]
        return [RowSource(item, segment) for segment in range(len(dataset[item]["seq_lengths"]))]

    def _streams(self) -> bool:
        return isinstance(self._trainer.train_dataset, torch.utils.data.IterableDataset)


def _ranks_served(loader: DataLoaderDispatcher) -> int:
    """For how many ranks the first one draws a batch each; none where all of them get parts or copies of one."""
    if loader.split_batches or loader.submesh_tp is not None:
        return 0
    return int(loader.state.num_processes)
