"""Collectives by which all ranks see the same step and decide the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def world_size() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank. Collective: every rank must call it, in the same order."""
    if world_size() == 1:
        return flag
    vote = torch.tensor(float(flag), device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())


def wait_for_all_ranks(device: torch.device) -> None:
    """Returns once every rank has called it. Collective."""
    # A barrier returns before the others have called it where the device works asynchronously; a value that is read
    # on the host does not.
    any_rank(False, device)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum of a small tensor over all ranks; a NaN or Inf of any rank stays one. Collective."""
    if world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def largest_of_ranks(value: float, device: torch.device) -> float:
    """The largest value of any rank. Collective."""
    if world_size() == 1:
        return value
    largest = torch.tensor(value, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest.item())


def is_first_rank() -> bool:
    """Whether this process is the one that decides about files."""
    return world_size() == 1 or dist.get_rank() == 0


def from_first_rank(value: Any) -> Any:
    """Returns the value of the first rank on every rank. Collective."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
