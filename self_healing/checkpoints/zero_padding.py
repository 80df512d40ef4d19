"""Knows where the weights in a partition of ZeRO-3 end: what lies behind is whatever the memory held."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def only_in_padding(
    partition: torch.Tensor, shapes: Sequence[Sequence[int]], begin: int, rank: int, processes: int
) -> bool:
    """
    Whether all that is not finite in a rank's partition is padding. Each parameter is cut into as many parts as there
    are ranks, all of one length (`deepspeed.runtime.zero.partition_parameters`, 0.19.8): those of the last ranks may
    be longer than what is left of it.

    Args:
        partition (`torch.Tensor`):
            Of the weights, or of what the optimizer keeps for them.
        shapes (`Sequence[Sequence[int]]`):
            Of the parameters, in their order.
        begin (`int`):
            How many numbers of the rank lie before this partition, in others.
        rank (`int`), processes (`int`):
            The rank, and of how many.
    """
    bad = ~torch.isfinite(partition.reshape(-1))
    at = -begin
    for shape in shapes:
        length = math.ceil(math.prod(shape) / processes)
        weights = min(max(math.prod(shape) - rank * length, 0), length)
        if bool(bad[max(at, 0) : max(at + weights, 0)].any()):
            return False
        at += length
    return at >= bad.numel()
