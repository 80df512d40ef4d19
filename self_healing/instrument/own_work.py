"""`OwnWork`: the time a rank spends on what it does by itself, before it meets the others in a collective."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from accelerate.data_loader import DataLoaderDispatcher

from ..log_safely import log_safely
from .wrapping import Instrument


logger = logging.getLogger("self_healing")

_T = TypeVar("_T")


class OwnWork:
    """
    Adds up how long a rank waits for its batches, and how long its model takes for forward passes.

    All ranks of a job take equally long for a step, because they wait for each other in its collectives. What tells a
    slow one from the others is the time before the first collective. It is read off clocks: nothing is asked of other
    ranks, and nothing waits for the device.

    Args:
        instrument ([`Instrument`]):
            Attached to the trainer.
    """

    def __init__(self, instrument: Instrument) -> None:
        self._instrument = instrument
        trainer, device = instrument.trainer, instrument.view.device
        # One rank reads for all, and the others wait for it where they read.
        loaders = getattr(trainer.accelerator, "_dataloaders", [])
        self._knows_data = not any(isinstance(each, DataLoaderDispatcher) for each in loaders)
        # In a forward pass of a sharded model ranks wait for each other, and so they do where they share rows.
        replicated = trainer.accelerator.distributed_type.value.startswith("MULTI_")
        self._knows_forward = replicated and not instrument.view.sharded and not instrument.view.shares_rows
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._iterator: Callable[[], Any] = lambda: None
        self._steps, self._data, self._forward = 0, 0.0, 0.0
        self._began: float | None = None
        # Begin and end of forward passes that the device may not be through with.
        self._pending: deque[tuple[Any, Any]] = deque()
        self._failed = False
        # Replaced as a whole, for the thread that tells it.
        self._told: tuple[int, float, float | None, float | None] = (0, 0.0, None, None)

    def attach(self) -> None:
        """Begins to measure, until the instrument is detached."""
        instrument = self._instrument
        instrument.replace(instrument.trainer, "get_batch_samples", self._fetch)
        if self._knows_forward:
            instrument.intercept_calls(instrument.trainer.model, self._call)

    def told(self) -> tuple[int, float, float | None, float | None]:
        """Gives the steps so far, and the seconds that they, their batches and their forward passes took."""
        return self._told

    def _measured(self, measure: Callable[[], _T], otherwise: _T) -> _T:
        """Measures something; where that fails, nothing is measured any more, and training goes on."""
        if self._failed:
            return otherwise
        try:
            return measure()
        except Exception:
            self._failed, self._told = True, (self._steps, self._told[1], None, None)
            log_safely(logger, logging.WARNING, "How fast this rank is is not measured any more.", exc_info=True)
            return otherwise

    def _fetch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*self._measured(lambda: self._take_time(args), args), **kwargs)

    def _take_time(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Takes the time of the step before; gives an iterator that tells how long the batches of this one take."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now
        else:
            self._steps += 1
        self._drain()
        data = self._data if self._knows_data else None
        forward = self._forward if self._knows_forward else None
        self._told = (self._steps, now - self._began, data, forward)
        if not args or not self._knows_data:
            return args
        iterator, first = args[0], self._iterator() is not args[0]
        if first:
            # At the beginning of an epoch workers are started, and ranks agree on its seed.
            self._iterator = lambda: None
            with contextlib.suppress(TypeError):
                self._iterator = weakref.ref(iterator)
            return args
        return _Timed(iterator, self._add_data), *args[1:]

    def _add_data(self, seconds: float) -> None:
        self._data += seconds

    def _call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Not of evaluations, and not where a trainer asks for log probabilities of what it has generated.
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        began = self._measured(self._moment, None)
        result = original(*args, **kwargs)
        if began is not None:
            self._measured(lambda: self._add_forward(began), None)
        return result

    def _moment(self) -> Any:
        """Gives the time of the host; of a device that works asynchronously, an event in the order of its work."""
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def _add_forward(self, began: Any) -> None:
        ended = self._moment()
        if self._module is None:
            self._forward += ended - began
        else:
            self._pending.append((began, ended))

    def _drain(self) -> None:
        while self._pending and self._pending[0][1].query():
            began, ended = self._pending.popleft()
            self._forward += began.elapsed_time(ended) / 1000.0


class _Timed:
    """An iterator that tells how long each of its batches took."""

    def __init__(self, iterator: Any, add: Callable[[float], None]) -> None:
        self._iterator, self._add = iterator, add

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            return next(self._iterator)
        finally:
            self._add(time.perf_counter() - began)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)
