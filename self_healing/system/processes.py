"""Whether a process of this machine is the one that it was, and runs, is stopped, or is gone; ends this one."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import NoReturn

import psutil


# Where Linux tells of its processes; elsewhere their times are by the clock.
_PROCESSES = Path("/proc")


class State(Enum):
    """What is known of a process: it runs, it does not for the moment, it is gone; or nothing (of another user's)."""

    RUNS = auto()
    STOPPED = auto()
    GONE = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Process:
    """A process, to be told from all others."""

    machine: str
    pid: int
    began: float

    @classmethod
    def this_one(cls) -> Process:
        """Gives this process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        """Gives a process of this machine."""
        return cls(machine(), pid, _began(psutil.Process(pid)))

    @property
    def age(self) -> float:
        """Seconds since it was started, whatever the clock was set to meanwhile."""
        return _now() - self.began

    def state(self) -> State:
        """Looks what became of it; on its own machine only."""
        return state_of(self.pid, self.began)


def state_of(pid: int, began: float) -> State:
    """Looks what became of a process of this machine."""
    try:
        process = psutil.Process(pid)
        if began and abs(_began(process) - began) > 1.0:
            return State.GONE
        status = process.status()
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        # A number that no process can have, as it is negative, is no `psutil.Error`.
        return State.GONE
    except psutil.Error:
        return State.UNKNOWN
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return State.GONE
    if not began:
        return State.UNKNOWN
    # One that a debugger has stopped (tracing-stop) is looked at by somebody.
    return State.STOPPED if status == psutil.STATUS_STOPPED else State.RUNS


def _began(process: psutil.Process) -> float:
    """Gives when a process was started: in seconds since the machine was."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = (_PROCESSES / str(process.pid) / "stat").read_bytes()
        # proc(5): after the name in brackets, which may hold any characters.
        return int(stat.rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(process.create_time())


def _now() -> float:
    """Gives the time as [`_began`] counts it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if (_PROCESSES / "self" / "stat").exists() else time.time()


def machine() -> str:
    """Names what the number of a process belongs to: a machine, and on it a container that counts its own."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(path) if "ns" in Path(path).parts else Path(path).read_text().strip())
    return " ".join(parts)


def end_at_once(code: int) -> NoReturn:
    """
    Ends this process with what it has logged and printed, and without Python's own end: what that frees may abort the
    process, or keep it.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
