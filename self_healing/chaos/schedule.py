"""
Schedules faults: at their step, or spread over the run at random with room to recover between them; and on the rank
they are meant for, or on one at random.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .faults import ANY, RANDOM, Fault, FaultError


def strike_steps(faults: Sequence[Fault], max_steps: int, seed: int, min_gap: int | None = None) -> tuple[int, ...]:
    """
    Gives the step of each fault: its own, or one drawn at random. The same for the same arguments.

    Those at random are put into a random order and each gets an equal share of the run; it strikes somewhere in its
    share, `min_gap` steps before the next one may. The first `min_gap` steps of the run are left alone.

    Args:
        faults (`Sequence[Fault]`):
            All of them.
        max_steps (`int`):
            Of the run.
        seed (`int`):
            Of the order and the steps.
        min_gap (`int`, *optional*):
            Fewest steps between two of those at random. Defaults to half of what each has.

    Raises:
        `FaultError`: if the run is too short for them.
    """
    drawn = [number for number, fault in enumerate(faults) if fault.drawn]
    steps = [0 if fault.at == RANDOM else int(fault.at) for fault in faults]
    if not drawn:
        return tuple(steps)
    share = max_steps / (len(drawn) + 0.5)
    gap = max(int(share / 2), 1) if min_gap is None else min_gap
    room = (max_steps - gap) / len(drawn)
    if room < gap or gap < 1:
        raise FaultError(
            f"{len(drawn)} faults at random do not fit into {max_steps} steps with min_gap={gap} between them. "
            f"Please train longer, ask for fewer, give them steps, or set min_gap to at most "
            f"{max_steps // (len(drawn) + 1)}."
        )
    # Of its own: the run's random states are none of our business.
    rng = random.Random(seed)
    rng.shuffle(drawn)
    for place, number in enumerate(drawn):
        begin, slack = gap + place * room, room - gap
        steps[number] = min(int(begin + rng.random() * slack), max_steps - 1)
    return tuple(steps)


def strike_ranks(faults: Sequence[Fault], world_size: int, seed: int, among: str | int | Sequence[int]) -> list[int]:
    """
    Gives the rank of each fault: its own, or one drawn at random. The same for the same arguments, so that all ranks
    know it without asking each other.

    Args:
        faults (`Sequence[Fault]`):
            All of them.
        world_size (`int`):
            Number of ranks.
        seed (`int`):
            Of the draw.
        among (`"any"`, `int` or `Sequence[int]`):
            Those to draw from.

    Raises:
        `FaultError`: if there is no such rank.
    """
    chosen = [among] if isinstance(among, int) else [each for each in among if isinstance(each, int)]
    if among == ANY:
        chosen = list(range(world_size))
    for rank in (*chosen, *(fault.rank for fault in faults if fault.rank is not None)):
        if rank >= world_size:
            there_are = "only rank 0" if world_size == 1 else f"ranks 0 to {world_size - 1}"
            raise FaultError(f"Faults cannot strike rank {rank}: this job has {there_are}. Please name one of these.")
    # Apart from the draw of the steps, which is the same for any number of ranks.
    rng = random.Random(f"ranks {seed}")
    drawn = [rng.choice(chosen) for _ in faults]
    return [rank if fault.rank is None else fault.rank for fault, rank in zip(faults, drawn, strict=True)]
