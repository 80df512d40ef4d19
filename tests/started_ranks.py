"""Ranks of one job, each a process of its own, with the environment that torchrun gives them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import torch.distributed
from forked import Forked


STORE: Any = torch.distributed.TCPStore


class StartedRanks:
    """
    Ranks whose store is served here, as by the agent of torchrun: nothing but themselves ends them. Of a variable that
    is a tuple each rank has one.
    """

    def __init__(self, logs: Path, count: int, script: str, *arguments: str | Path, **environment: Any) -> None:
        self._logs = logs
        logs.mkdir(exist_ok=True)
        # As long as this object is there, so is the store.
        self._store = STORE("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        of_all = {
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "OMP_NUM_THREADS": 1,
            "GLOO_SOCKET_IFNAME": "lo",
            **environment,
        }
        self.processes: list[Forked] = []
        for rank in range(count):
            told = of_all | {"RANK": rank, "LOCAL_RANK": rank}
            of_rank = {name: value[rank] if isinstance(value, tuple) else value for name, value in told.items()}
            out, err = logs / f"out.{rank}", logs / f"err.{rank}"
            for log in (out, err):
                log.write_text("")
            self.processes.append(Forked(script, *arguments, environment=of_rank, out=out, err=err))

    def join(self, seconds: float = 240.0) -> list[int]:
        """Waits for the end of all, and gives their exit codes."""
        until = time.monotonic() + seconds
        return [process.wait(timeout=max(until - time.monotonic(), 1.0)) for process in self.processes]

    def run(self, seconds: float) -> int:
        """Waits for the end of all, and kills the others once one has failed; gives the first code that is not 0."""
        until = time.monotonic() + seconds
        while None in (codes := [process.poll() for process in self.processes]) and not any(codes):
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("ranks", seconds)
            time.sleep(0.02)
        return next(filter(None, codes), 0)

    def printed(self, rank: int) -> str:
        """What a rank has printed, without warnings."""
        return (self._logs / f"out.{rank}").read_text()

    def log(self, rank: int) -> str:
        """All that a rank has printed."""
        return self.printed(rank) + (self._logs / f"err.{rank}").read_text()

    def end(self) -> None:
        """Kills those that are left, and what they have started."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.wait()


class StruckRanks(StartedRanks):
    """Ranks of a run, to one of which something happens; it notes when."""

    def __init__(self, directory: Path, count: int, script: str, **options: Any) -> None:
        self.directory = directory
        directory.mkdir()
        super().__init__(directory.parent / "logs", count, script, directory, json.dumps(options))

    def struck(self) -> float:
        """Waits for the fault, and gives its time."""
        path = self.directory / "struck"
        for _ in range(2400):
            with contextlib.suppress(FileNotFoundError, ValueError):
                return float(json.loads(path.read_text())["time"])
            time.sleep(0.1)
        raise AssertionError(f"no fault in four minutes: {self.log(0)}")
