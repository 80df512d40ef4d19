"""Which rank the others wait for, and which may be waited for without a hang."""

from __future__ import annotations

import random

from self_healing.ranks.messages import Position, behind, waited_for, where_all_are, where_all_wait


WAITS = Position(7, "step", 50, 30.0, 30.0, collective="all_gather")
SLEEPS = Position(7, "step", 50, 30.0, 30.0, line="model.py:3, in forward: time.sleep(100)")
LOADS = Position(7, "data", 48, 30.0, 30.0)


def test_a_rank_in_a_collective_may_wait_for_one_that_is_in_none() -> None:
    assert waited_for(WAITS, {1: SLEEPS}) == 1


def test_a_rank_that_is_further_may_wait_for_one_that_is_behind() -> None:
    assert waited_for(SLEEPS, {1: LOADS}) == 1
    assert waited_for(LOADS, {1: SLEEPS}) is None


def test_a_rank_that_waits_on_purpose_may_be_waited_for_wherever_it_is() -> None:
    paused = Position(7, "rewards", 50, 30.0, 30.0, on_purpose=True)
    assert waited_for(Position(7, "rewards", 50, 30.0, 30.0), {1: paused}) == 1


def test_nobody_waits_for_a_rank_that_is_over_its_own_limit() -> None:
    assert waited_for(WAITS, {1: Position(7, "step", 50, 70.0, -10.0)}) is None


def test_nobody_waits_for_a_rank_that_has_left_train() -> None:
    assert waited_for(WAITS, {1: Position(7, "between", 50, 1.0, 30.0, training=False)}) is None


def test_the_time_of_one_rank_always_counts() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        places = {
            rank: Position(
                draw.randrange(3), "step", draw.randrange(3), 9.0, 9.0, collective=draw.choice([None, "barrier"])
            )
            for rank in range(4)
        }
        waiting = [
            waited_for(here, {other: each for other, each in places.items() if other != rank})
            for rank, here in places.items()
        ]
        assert None in waiting


def test_the_one_in_no_collective_is_the_one_the_others_wait_for() -> None:
    positions = {0: WAITS, 1: SLEEPS, 2: WAITS}
    assert behind(positions) == [1]
    told = where_all_are(positions)
    assert told.startswith("The others wait for rank 1. Rank 1: is at model.py:3, in forward: time.sleep(100)")
    assert "Ranks 0, 2: each waits in all_gather" in told


def test_of_ranks_that_wait_for_their_devices_the_one_that_has_come_least_far_is_named() -> None:
    further = Position(7, "judge", 52, 30.0, 30.0)
    assert behind({0: further, 1: LOADS, 2: further}) == [1]


def test_ranks_that_are_all_alike_are_not_told_apart() -> None:
    assert behind({0: SLEEPS, 1: SLEEPS}) == []
    assert behind({0: WAITS, 1: WAITS}) == []


def test_of_ranks_that_all_wait_it_is_said_where_and_no_time_that_each_would_say_otherwise() -> None:
    called = "user.py:9, in on_step_end: dist.barrier()"
    alone = Position(7, "between", 49, 31.0, 29.0, collective="barrier", line="torch.py:1", called_from=called)
    others = Position(7, "step", 50, 33.0, 27.0, collective="all_gather", line="torch.py:2")
    assert where_all_wait({0: others, 1: alone, 2: others}) == (
        f"the ranks wait in different collectives: ranks 0, 2 in all_gather; rank 1 in barrier, called at {called}"
    )
    assert where_all_wait({1: others, 0: others}) == "the ranks wait in the same collective: ranks 0, 1 in all_gather"
    assert where_all_wait({0: others}) == "rank 0 in all_gather, and nothing is known of the others"
    assert where_all_wait({0: SLEEPS, 1: SLEEPS}).startswith("no rank is behind the others: ranks 0, 1 at model.py:3")
