"""The data loader of a run: its rows, its position, its workers, and how it is resumed."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderStateMixin, IterableDatasetShard
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ..failures.classify import classify_exception
from ..failures.recipes import FailureType
from ..ranks import votes
from ..system import processes
from .batches import Layout, layout_of
from .memory import free_memory, let_go
from .objective import Objective
from .patching import Replacements


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


# ---- loading: reads and replaces what a trainer's data loader takes its samples from ----


class TrainingLoader:
    """
    Reads and replaces dataset and collate function of one trainer's training data loader; those of evaluations stay.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
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

    def read_from(self, dataset: Any, collate: Any) -> None:
        """Has the loader take its samples from another dataset, and make batches of them in another way."""
        vars(self._dataset_of)["dataset"] = dataset
        vars(self._loader)["collate_fn"] = collate

    def restore(self) -> None:
        """Gives the loader back as it was. Its iterators that exist already are not reached."""
        if self.dataset is not None:
            self.read_from(self.dataset, self.collate)

    @property
    def streams(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def has_workers(self) -> bool:
        return int(getattr(self._loader, "num_workers", 0)) > 0

    @property
    def samples_per_batch(self) -> int:
        return int(self._trainer._train_batch_size)

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


# ---- resuming ----


@contextlib.contextmanager
def skipping_any_loader(trainer: Any) -> Iterator[None]:
    """Lets a call of `train()` that resumes skip into whatever `get_train_dataloader` returns."""
    replacements = Replacements()

    def skippable(original: Any, *args: Any, **kwargs: Any) -> Any:
        loader = original(*args, **kwargs)
        return loader if _accelerate_skips(trainer, loader) else IteratedLoader(loader, trainer)

    replacements.wrap(trainer, "get_train_dataloader", skippable)
    try:
        yield
    finally:
        replacements.give_back()


@contextlib.contextmanager
def loading_twice_at_most(trainer: Any) -> Iterator[None]:
    """Loads what a call of `train()` that resumes cannot load of its checkpoint once more, from its beginning."""
    replacements = Replacements()

    def load(original: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            if classify_exception(error) in (FailureType.DEVICE, FailureType.PROCESS_DIED):
                raise
            logger.warning("A part of the checkpoint could not be loaded; trying once more.", exc_info=True)
            let_go(error)
        # Outside the handler: what the exception held is gone.
        free_memory(trainer.accelerator.device)
        return original(*args, **kwargs)

    for name in ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state"):
        replacements.wrap(trainer, name, load)
    try:
        yield
    finally:
        replacements.give_back()


def _accelerate_skips(trainer: Any, loader: Any) -> bool:
    if trainer.accelerator.distributed_type == DistributedType.XLA or isinstance(loader, DataLoaderStateMixin):
        return True
    if isinstance(loader, DataLoader):
        return type(loader).__iter__ is DataLoader.__iter__
    return hasattr(loader, "dataset") and hasattr(loader, "batch_sampler")


class IteratedLoader:
    """A loader of any kind that accelerate skips into by iterating: to it, a stream of batches that are ready."""

    # What accelerate hands to the loader that it makes; the wrapped loader has applied its own by then.
    batch_size = None
    drop_last = pin_memory = persistent_workers = False
    num_workers = timeout = 0
    worker_init_fn = multiprocessing_context = prefetch_factor = None
    pin_memory_device = ""

    def __init__(self, loader: Any, trainer: Any) -> None:
        self._wrapped = loader
        self._trainer = trainer
        # torch draws a seed for every iterator: not from the global generator, which the order may be drawn from.
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._wrapped)

    def __len__(self) -> int:
        return len(self._wrapped)

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapped":
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    @property
    def dataset(self) -> IterableDataset[Any]:
        return _ReadyBatches(self._wrapped, self._trainer)

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        return batch


class _ReadyBatches(IterableDataset[Any]):
    def __init__(self, loader: Any, trainer: Any) -> None:
        self._loader = loader
        self._trainer = trainer

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self._loader, "set_epoch"):
            # The Trainer tells its own loader, and from here on that is the one that accelerate has made.
            self._loader.set_epoch(math.floor(self._trainer.state.epoch or 0))
        return iter(self._loader)


# ---- loader workers ----


# Per worker, in seconds: SIGTERM ends one that runs Python at once, SIGKILL all others but those the kernel holds.
_PATIENCE = 2.0


class WorkerDeaths:
    """Lets the death of a data loader worker surface where batches are fetched, and nowhere else."""

    def __init__(self) -> None:
        self._torchs: Callable[[int, FrameType | None], Any] | None = None
        self._fetching = False
        self._held: RuntimeError | None = None

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Marks that batches are fetched inside: a dead worker is raised here."""
        held, self._held = self._held, None
        if held is not None:
            raise held
        self._fetching = True
        try:
            yield
        finally:
            self._fetching = False
            # torch has its handler from the first worker on.
            self._stand_before_torch()

    def forget(self) -> None:
        """Called when an epoch begins: the workers of the last one are not needed any more."""
        self._held = None

    def release(self) -> None:
        """Gives torch its handler back, unless another handler calls this one, which passes everything on then."""
        self._fetching, self._held = True, None
        if self._torchs is not None and signal.getsignal(signal.SIGCHLD) == self._handle:
            signal.signal(signal.SIGCHLD, self._torchs)
            self._torchs = None

    def _stand_before_torch(self) -> None:
        # Where no loader has workers there is none; asking for a signal's handler takes longer than fetching a batch.
        if not getattr(_utils.signal_handling, "_SIGCHLD_handler_set", True):
            return
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
            return
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and getattr(handler, "__module__", None) == _utils.signal_handling.__name__:
            self._torchs = handler
            signal.signal(signal.SIGCHLD, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._torchs is None:
            return
        try:
            self._torchs(number, frame)
        except RuntimeError as error:
            if self._fetching:
                raise
            self._held = error


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
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    frame = None if trace is None else trace.tb_frame
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
    still = [worker.pid for worker in iterator._workers if worker.is_alive()]
    if still:
        logger.warning("Data loader workers %s do not end: the kernel holds them (a file system that hangs).", still)
    with contextlib.suppress(Exception):
        iterator._shutdown_workers()
    return [worker.pid for worker in iterator._workers]
