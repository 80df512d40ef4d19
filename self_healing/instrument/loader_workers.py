"""Handles worker processes of a data loader that die, or that the training thread waits for in vain."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


logger = logging.getLogger(__name__)

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
