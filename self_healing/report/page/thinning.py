"""Leaves out points of a long line that nobody could see, and none that somebody would look for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def thin(
    steps: Sequence[int], values: Sequence[float | None], buckets: int, whole: Iterable[tuple[int, int]] = ()
) -> tuple[list[int], list[float | None]]:
    """
    Thins a line so that its peaks stay: of each bucket of neighbouring points the lowest and the highest are kept, and
    the first that has no value, which is a gap.

    Args:
        steps (`Sequence[int]`):
            The step of each point, in ascending order.
        values (`Sequence[float | None]`):
            Its value; `None` is a gap.
        buckets (`int`):
            How many buckets there are at most. Not more than three points of each are kept.
        whole (`Iterable[tuple[int, int]]`, *optional*):
            Stretches (first and last step) of which every point is kept.

    Returns:
        `tuple[list[int], list[float | None]]`: Steps and values of the points that are kept.
    """
    count = len(steps)
    if count <= 2 * buckets:
        return list(steps), list(values)
    chosen = {0, count - 1}
    for bucket in range(buckets):
        found = _telling(values, bucket * count // buckets, (bucket + 1) * count // buckets)
        chosen.update(found)
    stretches = sorted(whole)
    if stretches:
        wanted = {step for first, last in stretches for step in range(first, last + 1)}
        chosen.update(index for index, step in enumerate(steps) if step in wanted)
    kept = sorted(chosen)
    return [steps[index] for index in kept], [values[index] for index in kept]


def _telling(values: Sequence[float | None], begin: int, end: int) -> set[int]:
    there = [index for index in range(begin, end) if values[index] is not None]
    telling = (
        {next(index for index in range(begin, end) if values[index] is None)} if len(there) < end - begin else set()
    )
    if there:
        # Of equals the first.
        telling.add(min(there, key=values.__getitem__))  # type: ignore[arg-type]
        telling.add(max(there, key=values.__getitem__))  # type: ignore[arg-type]
    return telling
