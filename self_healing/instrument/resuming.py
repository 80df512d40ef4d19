"""Helps a call of `train()` that resumes: skips into any data loader, and loads a checkpoint twice if need be."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader, IterableDataset

from ..failures.classify import classify_exception
from ..failures.recipes import FailureType
from ..hf.memory import let_go
from ..hf.patching import Replacements
from .device_memory import free_memory


logger = logging.getLogger("self_healing")


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
