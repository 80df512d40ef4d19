"""`RanksExchange`: what the devices of all ranks did, told in reductions of known numbers, which are checked, too."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from .device_check import DeviceCheck


# What each rank tells: whether its device was wrong, whether it gave no result, and seconds. Then known numbers.
_WRONG, _FAILED, _SECONDS, _KNOWN = 0, 1, 2, 3
_COLUMNS = 256
# A rank is called slow where its device takes so many times as long as the others at the median.
SLOW = 4.0


@dataclass(frozen=True, slots=True)
class RanksCheck:
    """
    What was found of all ranks, the same on each of them.

    Args:
        wrong (`dict[int, str]`):
            What is wrong, by rank.
        failed (`list[int]`):
            Ranks whose device gave no result.
        seconds (`list[float]`):
            What the product of two matrices took on each; 0 where there was no result.
        all_reduce (`float`):
            Seconds of the last reduction on this rank.
    """

    wrong: dict[int, str]
    failed: list[int]
    seconds: list[float]
    all_reduce: float

    @property
    def slow(self) -> dict[int, float]:
        """Ranks that are slower than the others, by how many times."""
        found: dict[int, float] = {}
        for rank, seconds in enumerate(self.seconds):
            others = [each for other, each in enumerate(self.seconds) if other != rank and each > 0]
            if others and seconds >= SLOW * median(others):
                found[rank] = seconds / median(others)
        return found


class RanksExchange:
    """
    Tells all ranks what the device of each did.

    Each rank gives one row, and zeros for all others, so that the sum of a row is exactly what that rank gave, and
    shows which one was changed on its way. Then all tell which rows have reached them changed.

    Args:
        own ([`DeviceCheck`]):
            Of this rank.
        device (`torch.device`):
            Where the run trains.
    """

    def __init__(self, own: DeviceCheck, device: torch.device) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self._rank, self._known = rank, _known(ranks)
        rows = torch.zeros(ranks, _COLUMNS, dtype=torch.float32)
        rows[rank, _KNOWN:] = self._known[rank]
        rows[rank, :_KNOWN] = torch.tensor([own.wrong, own.error is not None, own.seconds])
        # All that may not fit is there before the ranks meet.
        self._rows, self._changed = rows.to(device), torch.zeros(ranks, ranks, dtype=torch.float32, device=device)

    def run(self) -> RanksCheck:
        """Exchanges it. Collective: all ranks have to come."""
        told, _ = _summed(self._rows)
        self._changed[self._rank].copy_((told[:, _KNOWN:] != self._known).any(1))
        seen, seconds = _summed(self._changed)
        ranks = range(len(told))
        wrong = {rank: "its device computes wrong results" for rank in ranks if told[rank, _WRONG] != 0}
        failed = [rank for rank in ranks if told[rank, _FAILED] != 0]
        return RanksCheck(_changed_on_the_way(seen) | wrong, failed, told[:, _SECONDS].tolist(), seconds)


def _known(ranks: int) -> torch.Tensor:
    row, column = torch.arange(ranks, device="cpu")[:, None], torch.arange(_COLUMNS - _KNOWN, device="cpu")
    return ((row * 31 + column * 7 + row * column) % 251 + 1).to(torch.float32)


def _summed(rows: torch.Tensor) -> tuple[torch.Tensor, float]:
    began = time.perf_counter()
    dist.all_reduce(rows)
    # Waits for the device.
    back = rows.cpu()
    return back, time.perf_counter() - began


def _changed_on_the_way(seen: torch.Tensor) -> dict[int, str]:
    """Finds whose numbers were changed, by which rank has seen whose to be so."""
    changed = seen != 0
    ranks = range(len(changed))
    most = len(changed) / 2
    givers = {rank: "what it sends arrives changed" for rank in ranks if changed[:, rank].sum() > most}
    takers = {rank: "what it receives is changed" for rank in ranks if changed[rank].sum() > most}
    if givers or takers or not changed.any():
        return takers | givers
    involved = changed.any(0) | changed.any(1)
    return {rank: "what it sends or receives is changed" for rank in ranks if involved[rank]}
