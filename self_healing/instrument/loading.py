"""How guards get into the trainer's data loader, and out of it again."""

from __future__ import annotations

import contextlib
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from ..sample_guard import Guard, GuardedCollator, GuardedDataset
from ..stream_guard import GuardedStream


class LoaderGuard:
    """
    Puts guards into the training data loader of one trainer. Those of evaluations are left alone.

    torch refuses to set `dataset` on a loader that exists, though its iterators, made at the beginning of each epoch,
    read it then; so do the loaders that accelerate makes of this one to skip what was trained on.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer, in `on_train_begin` or later.
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
        self._guarded: GuardedDataset | GuardedStream | None = None
        self._guard: Guard | None = None
        self._collate: Any = None

    def attach(self, guard: Guard) -> None:
        """
        From here on samples that cannot be used are replaced.

        Args:
            guard ([`Guard`]):
                What the guards share.
        """
        self._guard = guard
        streams = isinstance(self.dataset, IterableDataset)
        self._guarded = GuardedStream(self.dataset, guard) if streams else GuardedDataset(self.dataset, guard)
        self._collate = vars(self._loader)["collate_fn"]
        vars(self._dataset_of)["dataset"] = self._guarded
        vars(self._loader)["collate_fn"] = GuardedCollator(self._collate, guard, self._guarded)

    def detach(self) -> None:
        """Gives the loader back as it was. What has been made of it already passes everything on."""
        if self._guard is None:
            return
        self._guard.off = True
        vars(self._dataset_of)["dataset"] = self.dataset
        vars(self._loader)["collate_fn"] = self._collate
        self._guard = None

    def actual(self, index: int) -> int:
        """The sample that is used for an index."""
        return self._guarded.actual(index) if isinstance(self._guarded, GuardedDataset) else index

    @property
    def has_workers(self) -> bool:
        return int(getattr(self._loader, "num_workers", 0)) > 0

    @property
    def samples_per_batch(self) -> int:
        return int(self._trainer._train_batch_size)

    @property
    def samples(self) -> int | None:
        """How many there are; `None` for a stream."""
        with contextlib.suppress(Exception):
            return len(self.dataset)
        return None
