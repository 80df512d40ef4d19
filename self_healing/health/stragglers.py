"""`StragglerWatch`: notices that one rank takes longer than the others for what it does by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median


PARTS = ("data", "forward")


@dataclass(frozen=True, slots=True)
class Work:
    """
    What one rank has spent on its own work since it began, in seconds.

    Args:
        steps (`int`), seconds (`float`):
            Optimizer steps, and the time they took.
        data (`float`, *optional*), forward (`float`, *optional*):
            Time in which it waited for batches, and in which its model computed; `None` if it is not known.
    """

    steps: int
    seconds: float
    data: float | None
    forward: float | None


@dataclass(frozen=True, slots=True)
class Straggler:
    """
    A rank that is slower than the others.

    Args:
        rank (`int`), part (`"data"` or `"forward"`):
            Which one, and in what it loses most.
        factor (`float`), share (`float`):
            Its own work, as times of the median of the others; and what it takes longer, as a part of a step.
        since_step (`int`):
            The step from which on.
    """

    rank: int
    part: str
    factor: float
    share: float
    since_step: int


@dataclass(slots=True)
class _Slow:
    since: float
    step: int
    times: int = 0
    quick: int = 0
    told: bool = False
    factors: list[float] = field(default_factory=list)
    shares: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})


class StragglerWatch:
    """
    Compares what all ranks have spent on their own work, each time since the time before.

    Healthy ranks take turns in being the slowest. So a rank is a straggler only if it was the slower one many times
    without a break, by a factor, and by a part of a step that is worth something.

    Args:
        factor (`float`, *optional*, defaults to 1.3), share (`float`, *optional*, defaults to 0.1):
            How much longer its work takes than that of the others at the median, and which part of a step that costs.
        times (`int`, *optional*, defaults to 20), seconds (`float`, *optional*, defaults to 60):
            For how many comparisons in a row, and how long.
        steps (`int`, *optional*, defaults to 8):
            Fewest steps between two comparisons.
    """

    def __init__(
        self, factor: float = 1.3, share: float = 0.1, times: int = 20, seconds: float = 60.0, steps: int = 8
    ) -> None:
        self._factor, self._share, self._times, self._seconds, self._steps = factor, share, times, seconds, steps
        self._before: Mapping[int, Work] = {}
        self._step = 0
        self._slow: dict[int, _Slow] = {}

    def take_in(self, now: float, step: int, works: Mapping[int, Work]) -> tuple[list[Straggler], list[int]]:
        """
        Compares the ranks.

        Args:
            now (`float`), step (`int`):
                When, in seconds, and the optimizer steps finished.
            works (`Mapping[int, Work]`):
                Of each rank, so far.

        Returns:
            `tuple[list[Straggler], list[int]]`: ranks that have turned out to be stragglers, and those that are none
            any more.
        """
        before, since = self._before, self._step
        if set(works) != set(before) or any(works[rank].steps < before[rank].steps for rank in works):
            # Ranks come and go; one that has entered train() again begins to count anew.
            self._before, self._step = dict(works), step
            self._slow = {rank: slow for rank, slow in self._slow.items() if slow.told}
            return [], []
        if len(works) < 2 or min(works[rank].steps - before[rank].steps for rank in works) < self._steps:
            return [], []
        self._before, self._step = dict(works), step
        spent = {part: _per_step(part, before, works) for part in PARTS}
        known = [part for part in PARTS if spent[part] is not None]
        typical = median(_each(before, works, "seconds").values())
        found: list[Straggler] = []
        over: list[int] = []
        for rank in works if known and typical > 0 else ():
            shares = {part: _excess(spent[part] or {}, rank) / typical for part in known}
            factor = _factor({each: sum((spent[part] or {})[each] for part in known) for each in works}, rank)
            slow = self._slow.get(rank)
            if factor >= self._factor and sum(shares.values()) >= self._share:
                slow = self._slow.setdefault(rank, _Slow(now, since))
                straggler = self._was_slow(rank, slow, factor, shares, now)
                found += [] if straggler is None else [straggler]
            elif slow is not None and self._was_quick(rank, slow, factor, sum(shares.values())):
                over.append(rank)
        return found, over

    def _was_slow(
        self, rank: int, slow: _Slow, factor: float, shares: Mapping[str, float], now: float
    ) -> Straggler | None:
        slow.times, slow.quick = slow.times + 1, 0
        if slow.told:
            return None
        slow.factors.append(factor)
        for part, share in shares.items():
            slow.shares[part].append(share)
        if slow.times < self._times or now - slow.since < self._seconds:
            return None
        slow.told = True
        typical = {part: median(each) for part, each in slow.shares.items() if each}
        part = max(typical, key=typical.__getitem__)
        return Straggler(rank, part, median(slow.factors), sum(typical.values()), slow.step)

    def _was_quick(self, rank: int, slow: _Slow, factor: float, share: float) -> bool:
        """Whether a straggler is none any more, as often in a row as it took to be one."""
        if not slow.told:
            del self._slow[rank]
            return False
        # Half-way is neither: a rank at the limit does not come and go.
        clearly = factor < (1 + self._factor) / 2 or share < self._share / 2
        slow.quick = slow.quick + 1 if clearly else 0
        if slow.quick < self._times:
            return False
        del self._slow[rank]
        return True


def _each(before: Mapping[int, Work], works: Mapping[int, Work], name: str) -> dict[int, float]:
    return {
        rank: (getattr(work, name) - getattr(before[rank], name)) / (work.steps - before[rank].steps)
        for rank, work in works.items()
    }


def _per_step(part: str, before: Mapping[int, Work], works: Mapping[int, Work]) -> dict[int, float] | None:
    """What each rank has spent on a part in a step; `None` where that of one is not known, or it has spent nothing."""
    if any(getattr(work, part) is None for work in (*before.values(), *works.values())):
        return None
    found = _each(before, works, part)
    # A model that is called on some ranks only, or whose calls are not seen on one.
    return found if part == "data" or all(seconds > 0 for seconds in found.values()) else None


def _excess(seconds: Mapping[int, float], rank: int) -> float:
    return seconds[rank] - median(each for other, each in seconds.items() if other != rank)


def _factor(seconds: Mapping[int, float], rank: int) -> float:
    others = median(each for other, each in seconds.items() if other != rank)
    return seconds[rank] / others if others > 0 else math.inf
