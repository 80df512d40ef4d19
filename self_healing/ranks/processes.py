"""Which processes of a job run on this machine, and whether they still do."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

import psutil


class State(Enum):
    """What is known of a process: it runs, it does not for the moment, it is gone."""

    RUNS = auto()
    STOPPED = auto()
    GONE = auto()


@dataclass(frozen=True, slots=True)
class Process:
    """
    A process, to be told from all others.

    Args:
        machine (`str`):
            Where its number means something.
        pid (`int`), began (`float`):
            Its number, and when it was started, because numbers are given out again; comparable on this machine only.
    """

    machine: str
    pid: int
    began: float

    @classmethod
    def this_one(cls) -> Process:
        """Gives this process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        """Gives a process of this machine, which has to be there."""
        return cls(machine(), pid, _began(psutil.Process(pid)))

    def state(self) -> State:
        """Looks what became of it; on its own machine only."""
        try:
            process = psutil.Process(self.pid)
            if abs(_began(process) - self.began) > 1.0:
                return State.GONE
            status = process.status()
        except psutil.NoSuchProcess:
            return State.GONE
        except psutil.Error:
            # Of another user: nothing is known, and nothing assumed.
            return State.RUNS
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return State.GONE
        # One that a debugger has stopped (tracing-stop) is looked at by somebody.
        return State.STOPPED if status == psutil.STATUS_STOPPED else State.RUNS


def _began(process: psutil.Process) -> float:
    """
    Gives when a process was started: in seconds since the machine was. psutil (7.2) adds the time of that by the
    clock, so that all processes were others once the clock is set (NTP, a virtual machine that was moved).
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{process.pid}/stat").read_bytes()
        # proc(5): after the name in brackets, which may hold any characters.
        return int(stat.rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(process.create_time())


def machine() -> str:
    """Names what the number of a process belongs to: a machine, and on it a container that counts its own."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(path) if "ns" in Path(path).parts else Path(path).read_text().strip())
    return " ".join(parts)
