"""When a rank that does not answer is named: by made-up times, without a thread or a network."""

from __future__ import annotations

from collections.abc import Iterable

from self_healing.health.silence import Silence, SilenceWatch
from self_healing.processes import State
from self_healing.ranks import Neighbour, Position


LIMIT = 20.0


class Watched:
    """A neighbour on a clock of its own, looked at once a second."""

    def __init__(self) -> None:
        self.now, self.heard, self.listened, self.rank = 1000.0, 1000.0, 1000.0, 1
        self.watch = SilenceWatch(LIMIT)

    def go_on(
        self, seconds: int, speaks: bool = True, answers: bool = True, store: bool = True, state: State | None = None
    ) -> list[Silence]:
        """Gives what was found on the way, each once."""
        found: list[Silence] = []
        for _ in range(seconds):
            self.now += 1.0
            self.heard = self.now if speaks and store else self.heard
            self.listened = self.now if store else self.listened
            position = Position(12, "step", 40, 0.0, 60.0, called_from="train.py:33 in forward")
            neighbour = Neighbour(self.rank, "node-3 boot ns", self.heard, self.listened, position, None, state)
            now = self.watch.look(self.now, neighbour, answers)
            found += [now] if now is not None and now not in found else []
        return found


def found_at(watched: Watched, **ways: bool) -> float:
    """The seconds after which something is found."""
    began = watched.now
    while not watched.go_on(1, **ways):
        assert watched.now - began < 10 * LIMIT
    return watched.now - began


def alternating(watched: Watched, ways: Iterable[dict[str, bool]]) -> list[Silence]:
    return [found for each in ways for found in watched.go_on(1, **each)]


def test_a_rank_that_neither_speaks_nor_answers_is_named_within_the_limit() -> None:
    watched = Watched()
    watched.go_on(30)
    assert 0.7 * LIMIT <= found_at(watched, speaks=False, answers=False) < 0.9 * LIMIT
    assert watched.watch.found is not None
    assert (watched.watch.found.rank, watched.watch.found.cut_off) == (1, False)
    assert "It is on another machine" in watched.watch.found.text
    assert "train.py:33 in forward ('step' after step 12" in watched.watch.found.text


def test_a_rank_that_cannot_be_asked_is_named_by_the_store_alone() -> None:
    watched = Watched()
    watched.go_on(30, answers=False)
    assert found_at(watched, speaks=False, answers=False) < 0.9 * LIMIT


def test_a_way_that_was_never_open_is_not_missed() -> None:
    assert Watched().go_on(200, answers=False) == []


def test_a_rank_that_lives_and_is_not_reached_any_more_is_cut_off() -> None:
    watched = Watched()
    watched.go_on(30)
    assert found_at(watched, answers=False) < 0.9 * LIMIT
    assert watched.watch.found is not None
    assert watched.watch.found.cut_off
    assert "the network between this machine and node-3 is cut" in watched.watch.found.text


def test_a_rank_that_answers_is_not_named_though_the_store_says_nothing() -> None:
    watched = Watched()
    watched.go_on(30)
    assert watched.go_on(200, speaks=False) == []
    assert watched.go_on(200, store=False) == []


def test_a_rank_that_does_not_answer_is_named_while_the_store_is_blocked() -> None:
    watched = Watched()
    watched.go_on(30)
    watched.go_on(30, store=False)
    assert found_at(watched, store=False, answers=False) < 0.9 * LIMIT


def test_no_rank_is_named_where_only_the_store_is_blocked() -> None:
    watched = Watched()
    watched.go_on(30, answers=False)
    assert watched.go_on(200, store=False, answers=False) == []


def test_it_is_over_when_the_rank_answers_again_and_found_once_more_afterwards() -> None:
    watched = Watched()
    watched.go_on(30)
    assert len(watched.go_on(60, speaks=False, answers=False)) == 1
    assert watched.go_on(1)[:1] == []
    assert len(watched.go_on(60, speaks=False, answers=False)) == 1


def test_one_that_speaks_again_and_is_not_reached_is_told_anew() -> None:
    watched = Watched()
    watched.go_on(30)
    watched.go_on(40, speaks=False, answers=False)
    found = watched.go_on(10, answers=False)
    assert [each.cut_off for each in found] == [True]


def test_what_was_not_heard_while_this_process_was_stopped_says_nothing() -> None:
    watched = Watched()
    watched.go_on(30)
    watched.now += 600.0
    assert watched.go_on(10, speaks=False, answers=False) == []
    assert len(watched.go_on(10, speaks=False, answers=False)) == 1


def test_an_answer_that_is_missing_now_and_then_is_no_silence() -> None:
    watched = Watched()
    watched.go_on(30)
    silent, back = {"speaks": False, "answers": False}, {"speaks": True, "answers": True}
    assert alternating(watched, [back, *[silent] * 13] * 20) == []


def test_another_rank_is_a_beginning() -> None:
    watched = Watched()
    watched.go_on(30)
    watched.go_on(14, speaks=False, answers=False)
    watched.rank, watched.heard = 2, watched.now
    assert watched.go_on(10, speaks=False, answers=False) == []


def test_what_became_of_its_process_is_told() -> None:
    for state, text in ((State.STOPPED, "is stopped (SIGSTOP)"), (State.RUNS, "none of its threads gets to run")):
        watched = Watched()
        watched.go_on(30, state=state)
        (found,) = watched.go_on(30, speaks=False, answers=False, state=state)
        assert text in found.text
