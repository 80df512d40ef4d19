"""`DataFaults`: samples that cannot be loaded, and lost connections and waits while any is loaded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from .calls import lose_connection, wait
from .faults import Fault
from .strikes import Strikes


logger = logging.getLogger("self_healing.chaos")


class SampleError(ValueError):
    """Raised by a bad sample."""


class DataFaults:
    """
    Injects faults into the loading of samples.

    Args:
        strikes ([`Strikes`]):
            Which strike now.
    """

    def __init__(self, strikes: Strikes) -> None:
        self._strikes = strikes
        self._stream: Any = None
        self._original_stream: Any = None

    @property
    def in_stream(self) -> bool:
        """Whether they are in the trainer's stream already."""
        return self._stream is not None

    def guard(self, dataset: Any, undo: contextlib.ExitStack) -> None:
        """Gives the dataset object a class of its own for the time of the run, below whatever guards it."""
        cls = type(dataset)
        faults = self

        def __getitem__(self: Any, index: Any) -> Any:
            faults._on_loading(index)
            return cls.__getitem__(self, index)

        def __getitems__(self: Any, indices: Any) -> Any:
            faults._on_loading(indices)
            return cls.__getitems__(self, indices)

        def __iter__(self: Any) -> Iterator[Any]:
            for place, sample in enumerate(cls.__iter__(self)):
                faults._on_loading(place)
                yield sample

        streams = isinstance(dataset, torch.utils.data.IterableDataset)
        methods: dict[str, Any] = {"__iter__": __iter__} if streams else {"__getitem__": __getitem__}
        if not streams and hasattr(cls, "__getitems__"):
            methods["__getitems__"] = __getitems__
        try:
            dataset.__class__ = type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__})
        except TypeError:
            logger.warning("Chaos cannot break the data: a %s takes no faults. Please use a Dataset.", cls.__name__)
            return
        undo.callback(setattr, dataset, "__class__", cls)

    def join_stream(self, trainer: Any) -> None:
        """
        Puts a Hugging Face stream behind a function that raises, before the loader is made from it: what guards such a
        stream takes it to pieces, and would leave out what only the outermost object does.
        """
        stream = trainer.train_dataset
        if not isinstance(stream, torch.utils.data.IterableDataset) or not hasattr(stream, "map"):
            return

        def load(sample: Any, index: int) -> Any:
            self._on_loading(index)
            return sample

        trainer.train_dataset = self._stream = stream.map(load, with_indices=True)
        self._original_stream = stream

    def leave_stream(self, trainer: Any) -> None:
        """Gives the trainer its own stream back."""
        if self._stream is not None and trainer.train_dataset is self._stream:
            trainer.train_dataset = self._original_stream
        self._stream = None

    def _on_loading(self, indices: Any) -> None:
        if isinstance(indices, (str, slice)):
            return
        wait(self._strikes, "data")
        lose_connection(self._strikes, "data")
        wanted = [int(index) for index in indices] if hasattr(indices, "__iter__") else [int(indices)]
        for number, fault in enumerate(self._strikes.faults):
            if fault.kind == "bad_sample" and wanted:
                self._spoil_sample(number, fault, wanted)

    def _spoil_sample(self, number: int, fault: Fault, wanted: list[int]) -> None:
        with self._strikes.lock:
            bad = self._strikes.bad_index(number) if fault.index is None else fault.index
            finds = self._strikes.ranks[number] == self._strikes.rank
            if bad < 0 and finds and self._strikes.step >= self._strikes.steps[number]:
                bad = wanted[0]
                self._strikes.note_bad_index(number, bad)
            if bad not in wanted or self._strikes.step < self._strikes.steps[number]:
                return
            if fault.limit is not None and self._strikes.count(number) >= fault.limit:
                return
            with self._strikes.strike(number, index=bad):
                raise SampleError(f"sample {bad} cannot be decoded (rehearsed by self_healing.chaos)")
