"""The data loader of a run: its rows, its position, its workers, and how it is resumed."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from traceback import walk_tb
from types import FrameType
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ..system import processes
from .batches import Layout
from .objective import Objective


logger = logging.getLogger(__name__)


# ---- row sources ----


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
        self._began_at = 0
        # What the batch sampler gives out, from this micro-batch of the epoch on: read only where somebody asks.
        self._given: Iterator[Any] = itertools.tee((), 1)[0]
        self._given_from = 0
        self._watched: tuple[Any, type] | None = None
        self._streams = isinstance(trainer.train_dataset, IterableDataset)

    # ---- where we are ----

    def epoch_begins(self) -> None:
        """Called in `on_epoch_begin`; the epoch a run is resumed in begins with the micro-batches it skips."""
        trainer = self._trainer
        self.micro_batches = 0
        resumed_here = int(trainer.state.global_step) == self._entry_step
        if resumed_here and self._entry_step > 0 and not trainer.args.ignore_data_skip:
            accumulation = trainer.args.gradient_accumulation_steps
            length = self._length()
            if length is not None:
                updates = max(math.ceil(length / accumulation), 1)
                self.micro_batches = self._entry_step % updates * accumulation
        self._began_at = self.micro_batches

    def advance(self, size: int) -> None:
        """Counts the micro-batches of a finished step."""
        self.micro_batches += size
        # What is behind is not asked for any more.
        for _ in itertools.islice(self._given, max(self.micro_batches - self._given_from, 0)):
            pass
        self._given_from = self.micro_batches

    def at_epoch_end(self) -> bool:
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

    # ---- the batch sampler ----

    def watch(self) -> None:
        """Keeps the index lists the batch sampler gives out, until [`release`]."""
        loader = self._trainer.callback_handler.train_dataloader
        sampler = getattr(loader, "batch_sampler", None)
        if sampler is None or self._streams or isinstance(loader, DataLoaderDispatcher):
            # Of a dispatcher the first rank alone knows what it has drawn.
            return
        cls, position = type(sampler), self

        def __iter__(self: Any) -> Iterator[Any]:
            given, position._given = itertools.tee(cls.__iter__(self))
            # Those that a resume skips are among them.
            position._given_from = 0
            return given

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

    # ---- where rows came from ----

    def sampled(self, size: int) -> set[int]:
        """Indices of the samples that the micro-batches of the current step were made of, as far as they are known."""
        return {int(index) for indices in self._drawn(0, size) for index in indices}

    def _drawn(self, first: int, count: int) -> list[Sequence[int]]:
        """What the batch sampler has given out for micro-batches of the current step."""
        start = self.micro_batches + first - self._given_from
        # A copy, which leaves what it reads to those that ask next.
        drawn = list(itertools.islice(copy.copy(self._given), start, start + count)) if start >= 0 else []
        return [indices for indices in drawn if isinstance(indices, (list, tuple))]

    def sources(self, layout: Layout, index: int) -> list[RowSource]:
        """Finds where each row of a micro-batch of the current step came from."""
        unknown = [RowSource() for _ in range(layout.rows)]
        if self._objective.online:
            return unknown
        if self._streams:
            return self._of_the_stream(layout, index) or unknown
        drawn = self._drawn(index, 1)
        if not drawn:
            return unknown
        indices = drawn[0]
        if layout.kind == "segments":
            sources = [source for item in indices for source in self._segments(self.actual(int(item)))]
        else:
            sources = [RowSource(dataset_index=self.actual(int(item))) for item in indices]
        return sources if len(sources) == layout.rows else unknown

    def _of_the_stream(self, layout: Layout, index: int) -> list[RowSource]:
        """The rows of a stream in its order, of which all micro-batches but the last of an epoch hold as many."""
        size = int(self._trainer._train_batch_size)
        # A resumed stream has skipped batches nobody counted; several processes share it out between them.
        shared = processes.world_size() > 1 or self._trainer.args.dataloader_num_workers > 1
        if shared or self._began_at > 0 or layout.kind == "segments" or layout.rows > size:
            return []
        first = (self.micro_batches + index) * size
        return [RowSource(stream_ordinal=first + row) for row in range(layout.rows)]

    def _segments(self, item: int) -> list[RowSource]:
        """The sequences TRL's packing put into one row of the dataset."""
        dataset = self._trainer.train_dataset
        if "seq_lengths" not in (getattr(dataset, "column_names", None) or []):
            return [RowSource(dataset_index=item)]
        return [RowSource(item, segment) for segment in range(len(dataset[item]["seq_lengths"]))]


# ---- loading: reads and replaces what a trainer's data loader takes its samples from ----


class TrainingLoader:
    """
    Reads and replaces dataset and collate function of one trainer's training data loader; those of evaluations stay.
    """

    def __init__(self, trainer: Any) -> None:
        loader = trainer.callback_handler.train_dataloader
        # One of a kind of its own, a list say, holds no dataset to be guarded.
        self._loader = getattr(loader, "__dict__", {}).get("base_dataloader", loader)
        self._dataset_of = self._loader
        self.dataset: Any = getattr(self._loader, "__dict__", {}).get("dataset")
        if isinstance(self.dataset, IterableDatasetShard):
            # Its loop over the stream would end with the first exception.
            self._dataset_of, self.dataset = self.dataset, self.dataset.dataset
        if isinstance(self.dataset, IterDataPipe | MapDataPipe):
            self.dataset = None
        self.collate: Any = getattr(self._loader, "__dict__", {}).get("collate_fn")
        self.streams = isinstance(self.dataset, IterableDataset)
        self.has_workers = int(getattr(self._loader, "num_workers", 0)) > 0
        self.samples_per_batch = int(trainer._train_batch_size)

    def read_from(self, dataset: Any, collate: Any) -> None:
        """Has the loader take its samples from another dataset, and make batches of them in another way."""
        vars(self._dataset_of)["dataset"] = dataset
        vars(self._loader)["collate_fn"] = collate

    def restore(self) -> None:
        """Gives the loader back as it was. Its iterators that exist already are not reached."""
        if self.dataset is not None:
            self.read_from(self.dataset, self.collate)

    @property
    def samples(self) -> int | None:
        """Number of samples in the dataset; `None` for a stream."""
        with contextlib.suppress(Exception):
            return len(self.dataset)
        return None

    def rows_elsewhere(self, count: int, without: Collection[int]) -> list[Any]:
        """Loads batches of one sample, twice, from all over the data."""
        samples = None if self.streams else self.samples
        if not samples or self.collate is None:
            return []
        stride = max(samples // (count + len(without)), 1)
        chosen = [index for index in range(0, samples, stride) if index not in without][:count]
        return [self.collate([self.dataset[index], self.dataset[index]]) for index in chosen]


# ---- loader workers ----


# Per worker, in seconds: SIGTERM ends one that runs Python at once, SIGKILL all others but those the kernel holds.
_PATIENCE = 2.0


def end_awaited_workers(frame: FrameType | None) -> list[int]:
    """
    Ends the workers of the data loader that the code of a frame waits for; left alone, they would outlive it, or be
    waited for when it goes.
    """
    ended: list[int] = []
    waiting: _MultiProcessingDataLoaderIter | None = None
    while frame is not None:
        holder: Any = frame.f_locals.get("self")
        if isinstance(holder, _MultiProcessingDataLoaderIter) and waiting is None:
            waiting = holder
            ended = _end_workers(holder)
        loader = getattr(holder, "base_dataloader", holder)
        if waiting is not None and getattr(loader, "_iterator", None) is waiting:
            # Persistent workers would be asked for the next epoch's batches.
            loader._iterator = None
        frame = frame.f_back
    return ended


def end_workers_that_failed(error: BaseException) -> None:
    """
    Ends the workers of the data loader that an exception came out of because one of them is dying: torch raises again,
    wherever the training thread is by then, when it learns of it.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    frame = frames[-1] if frames else None
    try:
        end_awaited_workers(frame)
    except RuntimeError:
        # torch learns just now that it died, and raises once.
        end_awaited_workers(frame)


def _end_workers(iterator: Any) -> list[int]:
    if iterator._worker_pids_set:
        # torch raises in the training thread when a worker it knows dies.
        signals: Any = _utils.signal_handling
        signals._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    for worker in iterator._workers:
        worker.terminate()
    for worker in iterator._workers:
        worker.join(timeout=_PATIENCE)
        if worker.is_alive():
            worker.kill()
            worker.join(timeout=_PATIENCE)
    with contextlib.suppress(Exception):
        iterator._shutdown_workers()
    return [worker.pid for worker in iterator._workers]
