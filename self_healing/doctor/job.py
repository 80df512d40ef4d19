"""All ranks of a job that was started to be looked at: what was found of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median


# A rank is called slow where it reaches less than that part of what the others do at the median.
_SLOW = 0.25


@dataclass(frozen=True, slots=True)
class RankRow:
    """
    What was found of one rank.

    Args:
        rank (`int`), host (`str`), device (`str`):
            Which one, and where.
        teraflops (`float`, *optional*):
            Of a product of matrices in single precision.
        memory (`float`, *optional*), from_host (`float`, *optional*), neighbours (`float`, *optional*):
            GB/s that its device copies in its own memory, takes from the host, and exchanges with the ranks next to
            it while all ranks do; `None` if that is not there.
        error (`str`, *optional*):
            What its device raised.
    """

    rank: int
    host: str
    device: str
    teraflops: float | None
    memory: float | None
    from_host: float | None
    neighbours: float | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """
    What was found of all ranks.

    Args:
        rank (`int`), ranks (`int`):
            This one, of how many.
        rows (`list[RankRow]`):
            Of each rank.
        wrong (`dict[int, str]`):
            What is wrong, by rank.
        missing (`list[int]`):
            Ranks that have not come.
        all_reduce (`float`, *optional*):
            GB/s that each rank sends and receives in a large all-reduce.
        error (`str`, *optional*):
            Why nothing could be found out together.
    """

    rank: int
    ranks: int
    rows: list[RankRow] = field(default_factory=list)
    wrong: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    all_reduce: float | None = None
    error: str | None = None

    @property
    def works(self) -> bool:
        """Whether all ranks have come, and none is wrong."""
        return not self.wrong and not self.missing and self.error is None

    def slow(self) -> list[tuple[int, str, float, float]]:
        """Lists ranks that are far slower than the others: in what, with what they reach and what the others do."""
        found = []
        for name in ("teraflops", "memory", "from_host", "neighbours"):
            reached = {row.rank: float(value) for row in self.rows if (value := getattr(row, name)) is not None}
            for rank, value in reached.items():
                others = [each for other, each in reached.items() if other != rank]
                if others and value < _SLOW * median(others):
                    found.append((rank, name, value, median(others)))
        return found


def is_in_job(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher has started this process as one of several ranks, and has told them where to meet."""
    environment = os.environ if environment is None else environment
    # Without a local rank it is a shell in the pod of a job, where the others do not come.
    wanted = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in environment for name in wanted) and environment["WORLD_SIZE"] not in ("0", "1")
