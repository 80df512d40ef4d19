"""Looks at all ranks of a job that was started for it: whether they compute right, and how fast they are."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from .. import consensus
from .device_check import check_device
from .job import Job, RankRow


# Any: torch does not say of all of it that it exports it.
dist: Any = torch.distributed

# Seconds for all ranks to come, and for one collective.
_MEETING, _COLLECTIVE = 60.0, 60.0
# Seconds in which matrices are multiplied; bytes that are moved, on a CPU and on an accelerator; and how often.
_MULTIPLYING = 0.5
_ON_CPU, _ON_ACCELERATOR = 16 << 20, 256 << 20
_TIMES = 5


def look_at_job() -> Job:
    """Meets the other ranks, and looks at all of them. Collective; never raises, and takes half a minute at most."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = next(dist.rendezvous("env://", timeout=timedelta(seconds=_MEETING)))[0]
        missing = _missing(store, rank, ranks)
        if missing:
            return Job(rank, ranks, missing=missing)
        return _look(store, rank, ranks)
    except Exception as error:
        return Job(rank, ranks, error=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}")
    finally:
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


def _missing(store: Any, rank: int, ranks: int) -> list[int]:
    store.set(f"self_healing/doctor/{rank}", b"")
    missing, until = set(range(ranks)), time.monotonic() + _MEETING
    while missing and time.monotonic() < until:
        missing = {each for each in missing if not store.check([f"self_healing/doctor/{each}"])}
        time.sleep(0.1 if missing else 0.0)
    return sorted(missing)


def _look(store: Any, rank: int, ranks: int) -> Job:
    device = _own_device()
    backend = dist.get_default_backend_for_device(device)
    limit = timedelta(seconds=_COLLECTIVE)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    own = check_device(device, _MULTIPLYING)
    changed = consensus.changed_in_sum(_COLLECTIVE, device)
    count = _ON_CPU if device.type == "cpu" else _ON_ACCELERATOR
    row = RankRow(
        rank,
        socket.gethostname(),
        _name_of(device),
        own.flops / own.seconds / 1e12 if own.seconds > 0 else None,
        _bandwidth(device, 2 * count, _copy(device, count)),
        None if device.type == "cpu" else _bandwidth(device, count, _from_host(device, count)),
        _bandwidth(device, count, _exchange(device, count, rank, ranks)),
        own.error,
    )
    reduced = torch.ones(count // 4, device=device)
    # What each rank sends in a ring, whatever the number of ranks.
    moved = round(2 * (ranks - 1) / ranks * count)
    together = _bandwidth(device, moved, lambda: dist.all_reduce(reduced))
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, (row, own.wrong, changed))
    rows, wrong, seen = zip(*told, strict=True)
    computed = {each: "its device computes wrong results" for each in range(ranks) if wrong[each]}
    return Job(rank, ranks, list(rows), changed_on_the_way(seen) | computed, all_reduce=together)


def changed_on_the_way(seen: Sequence[Sequence[int]]) -> dict[int, str]:
    """
    Finds whose numbers were changed in a sum.

    Args:
        seen (`Sequence[Sequence[int]]`):
            For each rank, whose numbers have arrived changed there.
    """
    ranks, most = range(len(seen)), len(seen) / 2
    givers = {rank: "what it sends arrives changed" for rank in ranks if sum(rank in each for each in seen) > most}
    takers = {rank: "what it receives is changed" for rank in ranks if len(seen[rank]) > most}
    if givers or takers:
        return takers | givers
    involved = {by for by in ranks if seen[by]}.union(*seen)
    return {rank: "what it sends or receives is changed" for rank in involved}


def _own_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    here = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(here)
    return torch.device(accelerator.type, here)


def _name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device}" if name is None else f"{device} {name(device)}"


def _copy(device: torch.device, count: int) -> Callable[[], Any]:
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _from_host(device: torch.device, count: int) -> Callable[[], Any]:
    source = torch.zeros(count, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(count, dtype=torch.uint8, device=device)
    return lambda: target.copy_(source, non_blocking=True)


def _exchange(device: torch.device, count: int, rank: int, ranks: int) -> Callable[[], Any]:
    """All ranks send to the next one at a time, as in an all-reduce."""
    given = torch.full((count,), rank % 251, dtype=torch.uint8, device=device)
    taken = torch.empty_like(given)
    following, before = (rank + 1) % ranks, (rank - 1) % ranks

    def exchange() -> None:
        both = [dist.P2POp(dist.isend, given, following), dist.P2POp(dist.irecv, taken, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return exchange


def _bandwidth(device: torch.device, count: int, move: Callable[[], Any]) -> float:
    """GB/s at which bytes are moved, the best of several times; the first one is not counted."""
    shortest = float("inf")
    for number in range(_TIMES + 1):
        _synchronize(device)
        began = time.perf_counter()
        move()
        _synchronize(device)
        if number:
            shortest = min(shortest, time.perf_counter() - began)
    return count / shortest / 1e9


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
