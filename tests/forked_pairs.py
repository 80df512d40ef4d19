"""Pairs of processes that train together, forked from one that has imported everything, within a limit of time."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from conftest import VOTES


# Far beyond what a pair needs; one that takes as long waits for ever.
SECONDS = 240
_GLANCE = 0.05
# Before one is killed, its stacks are written for so many seconds.
_WRITING = 5.0
store_class: Any = torch.distributed.TCPStore


def _run_rank(
    directory: Path,
    rank: int,
    environment: Mapping[str, str],
    run: Callable[[Path, int], dict[str, Any]],
    seconds: float,
) -> None:
    # With what it starts itself it is ended as a group.
    os.setpgid(0, 0)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", **environment)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # As torchrun has it. Without it accelerate gives each rank as many threads as there are cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    log = os.open(directory / f"log.{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    result: dict[str, Any] = {}
    code = 0
    VOTES.keep_last_in(directory / f"vote.{rank}.txt")
    # Of one that will be killed: where it waits.
    stacks = (directory / f"stacks.{rank}.txt").open("w")
    faulthandler.dump_traceback_later(max(seconds - _WRITING, 1.0), file=stacks)
    try:
        # The process it is forked from may have trained before, by itself.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.distributed.init_process_group("gloo")
        result |= run(directory, rank)
        VOTES.compare()
    except BaseException as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"[:300]
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    (directory / f"results.{rank}.json").write_text(json.dumps(result))
    if "error" not in result:
        torch.distributed.barrier()
    # As a process ends, and its peer sees that it is gone.
    os._exit(code)


def run_pair(
    directory: Path,
    run: Callable[[Path, int], dict[str, Any]],
    seconds: float = SECONDS,
    apart: float = SECONDS,
    launcher: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """
    Runs something on two ranks, whose `launcher` serves their store, if there is one, so that it outlives each. Gives
    their exit codes as `codes`, who had to be killed as `hung`, where as `last`, and when each ended as `ended`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"MASTER_PORT": str(port)}
    if launcher is not None:
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", **launcher}
    written = [directory / f"results.{rank}.json" for rank in (0, 1)]
    for path in written:
        path.unlink(missing_ok=True)
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_run_rank, args=(directory, rank, environment, run, seconds)) for rank in (0, 1)]
    began = time.monotonic()
    for process in ranks:
        process.start()
    # After they were forked: it has threads.
    store = None if launcher is None else store_class("127.0.0.1", port, is_master=True, wait_for_workers=False)
    ended, deadline = dict[int, float](), began + seconds
    while len(ended) < len(ranks) and time.monotonic() < deadline:
        # Not by their sentinels, which what they have started themselves keeps open.
        time.sleep(_GLANCE)
        for rank, process in enumerate(ranks):
            if rank not in ended and not process.is_alive():
                ended[rank] = time.time()
                deadline = min(deadline, time.monotonic() + apart)
    hung = [rank for rank in range(len(ranks)) if rank not in ended]
    for process in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
    del store
    results = [json.loads(path.read_text()) if path.exists() else {"error": "it left no result"} for path in written]
    return {
        "hung": hung,
        "last": [_last(directory, rank) for rank in (0, 1)] if hung else [],
        "codes": [process.exitcode for process in ranks],
        "ended": [ended.get(rank) for rank in range(len(ranks))],
        "ranks": results,
        "seconds": time.monotonic() - began,
    }


def _last(directory: Path, rank: int) -> str:
    """Tells where a rank was last: its vote, and what its training thread was in."""
    vote, stacks = directory / f"vote.{rank}.txt", directory / f"stacks.{rank}.txt"
    asked = vote.read_text().strip() if vote.exists() else ""
    found = stacks.read_text() if stacks.exists() else ""
    # The newest call first, and the training thread last.
    _, _, training = found.rpartition("Thread 0x")
    calls = [line.strip() for line in training.splitlines()[1:13]]
    return f"rank {rank}, {asked or 'before the first vote'}; {' < '.join(calls) or 'it has ended'}"
