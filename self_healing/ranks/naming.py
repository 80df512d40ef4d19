"""Says which rank the others wait for."""

from __future__ import annotations

from collections.abc import Mapping

from .posts import Position


def waited_for(here: Position, others: Mapping[int, Position]) -> int | None:
    """
    Finds a rank that this one may be waiting for, and that is within its own limits: a wait for it is no hang.

    No two ranks wait for each other by this rule, so that the time of one of them always counts: a rank in a
    collective is never waited for, and of the rest only one that is behind, or waits on purpose.

    Args:
        here ([`Position`]):
            This rank.
        others (`Mapping[int, Position]`):
            The other ranks that are known to live.
    """
    for rank, other in others.items():
        if not other.training or other.collective is not None or other.left <= 0:
            continue
        if other.on_purpose or here.collective is not None or other.progress < here.progress:
            return rank
    return None


def behind(positions: Mapping[int, Position]) -> list[int]:
    """
    Finds the ranks that the others wait for: those in no collective, and of these the ones that have come least far.

    Args:
        positions (`Mapping[int, Position]`):
            All ranks that are known to live.

    Returns:
        `list[int]`: Empty where all of them are alike.
    """
    moving = {rank: each for rank, each in positions.items() if each.training and each.collective is None}
    least = min((each.progress for each in moving.values()), default=None)
    found = sorted(rank for rank, each in moving.items() if each.progress == least)
    return [] if len(found) == len(positions) else found


def where_all_are(positions: Mapping[int, Position]) -> str:
    """Describes where the ranks are, those that are at the same place together; the ones waited for come first."""
    together: dict[str, list[int]] = {}
    first = behind(positions)
    for rank in [*first, *(each for each in sorted(positions) if each not in first)]:
        together.setdefault(str(positions[rank]), []).append(rank)
    named = " ".join(
        f"Rank {ranks[0]}: {where}." if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))}: each {where}."
        for where, ranks in together.items()
    )
    if not first:
        return named
    return f"The others wait for rank {', '.join(map(str, first))}. {named}"
