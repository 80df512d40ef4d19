"""Says which rank the others wait for."""

from __future__ import annotations

from collections.abc import Mapping

from .messages import Position


def waited_for(here: Position, others: Mapping[int, Position]) -> int | None:
    """Finds a rank that this one may be waiting for, and that is within its own limits: a wait for it is no hang."""
    for rank, other in others.items():
        if not other.training or other.collective is not None or other.left <= 0:
            continue
        if other.on_purpose or here.collective is not None or other.progress < here.progress:
            return rank
    return None


def behind(positions: Mapping[int, Position]) -> list[int]:
    """
    Finds the ranks that the others wait for: those in no collective, and of these the ones that have come least far.
    """
    moving = {rank: each for rank, each in positions.items() if each.training and each.collective is None}
    least = min((each.progress for each in moving.values()), default=None)
    found = sorted(rank for rank, each in moving.items() if each.progress == least)
    return [] if len(found) == len(positions) else found


def where_all_wait(positions: Mapping[int, Position]) -> str:
    """Describes where ranks are of which none is waited for: without times, so that all of them say the same."""
    together: dict[str, list[int]] = {}
    for rank, each in sorted(positions.items()):
        line = each.called_from or each.line or "an unknown line"
        called = "" if each.called_from is None else f", called at {each.called_from}"
        where = f"at {line}" if each.collective is None else f"in {each.collective}{called}"
        together.setdefault(where, []).append(rank)
    named = "; ".join(f"{_named(ranks)} {where}" for where, ranks in together.items())
    if len(positions) == 1:
        return f"{named}, and nothing is known of the others"
    if any(each.collective is None for each in positions.values()):
        return f"no rank is behind the others: {named}"
    return f"the ranks wait in {'the same collective' if len(together) == 1 else 'different collectives'}: {named}"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


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
