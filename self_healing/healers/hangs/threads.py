"""The signals that wake a training thread from what it waits for, and that ask data loader workers where they are."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import weakref
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import psutil


class Interruptible(Protocol):
    """Is interrupted by a signal."""

    @property
    def needed(self) -> bool:
        """Whether the run that is watched still goes on."""

    def interrupt(self, frame: FrameType | None) -> None:
        """Called in the training thread; may raise."""


class WakeSignal:
    """Handles the signal that interrupts the training thread, and the one that data loader workers answer to."""

    def __init__(self, watchdog: Interruptible, free: list[int]) -> None:
        self._watchdog = weakref.ref(watchdog)
        self.signal = free[0]
        self.worker_signal: int | None = None
        self.worker_stacks: Any | None = None
        self._earlier = signal.signal(self.signal, self)
        if len(free) > 1 and hasattr(os, "memfd_create"):
            # Inherited by data loader workers that are forked: they write down where they are when they are asked.
            self.worker_stacks = os.fdopen(os.memfd_create("self_healing_stacks"), "w+b", buffering=0)
            self.worker_signal = free[1]
            faulthandler.register(self.worker_signal, file=self.worker_stacks, all_threads=True)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        watchdog = self._watchdog()
        if watchdog is None:
            self.give_back()
        else:
            watchdog.interrupt(frame)

    @property
    def needed(self) -> bool:
        """Whether the run it was installed for still goes on."""
        watchdog = self._watchdog()
        return watchdog is not None and watchdog.needed

    def give_back(self) -> None:
        """Called in the main thread."""
        installed: Any = signal.getsignal(self.signal)
        if installed is self:
            signal.signal(self.signal, self._earlier)
        if self.worker_signal is not None and self.worker_stacks is not None:
            faulthandler.unregister(self.worker_signal)
            self.worker_stacks.close()
            self.worker_signal = self.worker_stacks = None

    def stacks_of_workers(self) -> dict[int, str]:
        """Asks the processes forked from this one where they are; empty for those that do not answer."""
        number, file = self.worker_signal, self.worker_stacks
        found: dict[int, str] = {}
        if number is None or file is None:
            return found
        for child in psutil.Process().children(recursive=True):
            if not (_shares(child.pid, file.fileno()) and _catches(child.pid, number)):
                continue
            begin = os.fstat(file.fileno()).st_size
            try:
                os.kill(child.pid, number)
            except ProcessLookupError:
                # It has ended since it was listed.
                continue
            for _ in range(20):
                time.sleep(0.05)
                if os.fstat(file.fileno()).st_size > begin:
                    break
            time.sleep(0.05)
            found[child.pid] = os.pread(file.fileno(), 1 << 20, begin).decode("utf-8", "replace")
        return found


def own_signals() -> list[int]:
    """Gives the signals that a watchdog may take, in the order in which they are tried."""
    if hasattr(signal, "SIGRTMIN"):
        # The first ones are taken by debuggers and profilers now and then.
        return list(range(signal.SIGRTMIN + 5, signal.SIGRTMAX))
    return [signal.SIGUSR2]


def _shares(pid: int, number: int) -> bool:
    """Whether a process was forked from this one with a file open; other programs may have other uses for a signal."""
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), os.fstat(number))
    except OSError:
        return False


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError):
        pass
    return False
