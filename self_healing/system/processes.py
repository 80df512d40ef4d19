"""This process and others: rank, launcher, whether one still runs, how to end at once, messages that end no run."""

from __future__ import annotations

import logging
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, NoReturn

import psutil

from ..config.healing_config import HealingConfig


def world_size() -> int:
    """Number of processes that train together."""
    # Commands that only read files do not wait for torch: where nobody has imported it, nobody trains.
    dist, accelerate = sys.modules.get("torch.distributed"), sys.modules.get("accelerate.state")
    world = dist.group.WORLD if dist is not None and dist.is_available() else None
    if world is None:
        return 1
    # A program may have made a group for something else, of processes each of which trains by itself. A new
    # AcceleratorState, to ask that of, would read the environment, several times a step.
    by_itself = accelerate is not None and accelerate.AcceleratorState._shared_state.get("num_processes") == 1
    return 1 if by_itself else int(world.size())


def own_rank() -> int:
    """Number of this process among them."""
    return int(sys.modules["torch.distributed"].get_rank()) if world_size() > 1 else 0


def is_first_rank() -> bool:
    """Whether this process is the one that decides about files."""
    return own_rank() == 0


# ---- processes ----


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
    except psutil.NoSuchProcess:
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
    with suppress(OSError, ValueError, IndexError):
        stat = (_PROCESSES / str(process.pid) / "stat").read_bytes()
        # proc(5): after the name in brackets, which may hold any characters.
        return int(stat.rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(process.create_time())


def machine() -> str:
    """Names what the number of a process belongs to: a machine, and on it a container that counts its own."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            parts.append(os.readlink(path) if "ns" in Path(path).parts else Path(path).read_text().strip())
    return " ".join(parts)


def end_at_once(code: int) -> NoReturn:
    """
    Ends this process with what it has logged and printed, and without Python's own end: what that frees may abort the
    process, or keep it.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


# ---- launcher ----


# EX_TEMPFAIL of sysexits.h: "temporary failure, try again later".
EXIT_FOR_RESTART = 75


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of this process."""

    launcher: str
    restarts: int
    restarts_left: int | None
    by_agent: bool = False
    # Names the torchrun that has started this process.
    agent: str = ""
    requeued: bool = False
    job: str = ""
    in_a_pod: bool = False

    @property
    def started_again(self) -> bool:
        """Whether the launcher has started the job before this."""
        return self.restarts > 0


def launch_of(environment: Mapping[str, str] | None = None) -> Launch:
    """Reads the launch from the environment variables of torchrun and SLURM."""
    environment = os.environ if environment is None else environment
    requeued = _number(environment, "SLURM_RESTART_COUNT")
    job = environment.get("SLURM_JOB_ID", "")
    in_a_pod = "KUBERNETES_SERVICE_HOST" in environment
    if "TORCHELASTIC_RUN_ID" in environment:
        restarts = _number(environment, "TORCHELASTIC_RESTART_COUNT")
        left = max(_number(environment, "TORCHELASTIC_MAX_RESTARTS") - restarts, 0)
        agent = environment["TORCHELASTIC_RUN_ID"]
        if agent == "none":
            # As all have it that were given none: told apart by the process that has started this one.
            agent = f"process {os.getppid()} of {machine()}"
        # A requeued job starts another torchrun, whose own count begins at 0 again.
        count, again = restarts + requeued, restarts > 0
        return Launch("torchrun", count, left, again, agent, requeued > 0, job, in_a_pod)
    if job:
        return Launch("slurm", requeued, None, requeued=requeued > 0, job=job)
    return Launch("none", 0, None, in_a_pod=in_a_pod)


def of_all_ranks(launches: Sequence[Launch]) -> Launch:
    """Puts together what the ranks of a job know of its launch: of several nodes, one may have been replaced."""
    return replace(
        launches[0],
        restarts=max(launch.restarts for launch in launches),
        by_agent=any(launch.by_agent for launch in launches),
        requeued=any(launch.requeued for launch in launches),
    )


def restarts_on_exit(config: HealingConfig) -> bool:
    """Whether a process that ends with [`EXIT_FOR_RESTART`] is started again, as far as can be known."""
    if config.launcher_restarts != "auto":
        return config.launcher_restarts == "yes"
    return (launch_of().restarts_left or 0) > 0


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment.get(name, "0"))
    except ValueError:
        return 0


# ---- log safely: logs what must not end a run, whatever handlers the program has ----


def log_safely(logger: logging.Logger, level: int, message: str, *args: Any, **options: Any) -> None:
    """Logs a message; a handler or a filter of the program's that raises is reported on stderr, and ends nothing."""
    try:
        logger.log(level, message, *args, **options)
    except Exception:
        with suppress(Exception):
            print("[self_healing] A logging handler of this program raised:", file=sys.stderr)
            traceback.print_exc()


@contextmanager
def contained(logger: logging.Logger, message: str, level: int = logging.ERROR) -> Iterator[None]:
    """What a block raises is logged, and must not take the place of what a run ends with."""
    try:
        yield
    except Exception:
        log_safely(logger, level, message, exc_info=True)
