"""`TrainingLoader`: reads and replaces what a trainer's data loader takes its samples from."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe


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
