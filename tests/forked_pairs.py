"""Pairs of processes that train together, forked from one that has imported everything, within a limit of time."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from recorded_votes import RecordedVotes


# Far beyond what a pair needs; one that takes as long waits for ever.
SECONDS = 240


def _run_rank(directory: Path, rank: int, port: int, run: Callable[[Path, int], dict[str, Any]]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    log = os.open(directory / f"log.{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    result: dict[str, Any] = {}
    votes = RecordedVotes()
    try:
        torch.distributed.init_process_group("gloo")
        result |= run(directory, rank)
        votes.compare()
    except BaseException as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"[:300]
    sys.stdout.flush()
    sys.stderr.flush()
    (directory / f"results.{rank}.json").write_text(json.dumps(result))
    if "error" not in result:
        torch.distributed.barrier()
    # As a process ends, and its peer sees that it is gone.
    os._exit(1 if "error" in result else 0)


def run_pair(directory: Path, run: Callable[[Path, int], dict[str, Any]], seconds: float = SECONDS) -> dict[str, Any]:
    """
    Runs something on two ranks.

    Args:
        directory (`Path`):
            Where they write; it is made.
        run (`Callable[[Path, int], dict]`):
            Given the directory and the rank; what it gives is the result.
        seconds (`float`, *optional*):
            How long they may take together.

    Returns:
        `dict`: the ranks that had to be killed as `hung`, and the results of both as `ranks`; with an `error` where
        one raised.
    """
    directory.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_run_rank, args=(directory, rank, port, run)) for rank in (0, 1)]
    began = time.monotonic()
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(max(seconds - (time.monotonic() - began), 0.1))
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill()
        process.join()
    written = [directory / f"results.{rank}.json" for rank in (0, 1)]
    results = [json.loads(path.read_text()) if path.exists() else {"error": "it left no result"} for path in written]
    return {"hung": hung, "ranks": results, "seconds": time.monotonic() - began}
