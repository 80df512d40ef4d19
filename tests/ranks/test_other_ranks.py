"""Ranks tell each other that they live and what has failed, over a real store; here with threads of one process."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed

from self_healing import FailureType
from self_healing.ranks import session
from self_healing.ranks.messages import Failure, Place, Position, failure_of
from self_healing.ranks.session import OtherRanks
from self_healing.system.processes import Process, State


store_class: Any = torch.distributed.TCPStore
# Ten times as often as in a run of a minute's floor.
INTERVAL = 0.1
ELSEWHERE = Process("another machine", 1, 0.0)


def wait_until(happened: Callable[[], Any]) -> None:
    for _ in range(3000):
        if happened():
            return
        time.sleep(0.01)
    raise AssertionError("nothing has happened in half a minute")


class Rank:
    """One rank of a job: where it is, what it knows of the others, and the failures it was told of."""

    def __init__(self, port: int, rank: int, of: int, process: Process | None = None) -> None:
        self.told: list[Failure] = []
        self.position = Position(5, "step", 10 + rank, 0.1, 60.0)
        self.ranks = OtherRanks("the_run", INTERVAL)
        self.ranks.watch(lambda: self.position, self.told.append, Place(rank, of, "127.0.0.1", port), process)


@pytest.fixture
def store() -> Any:
    return store_class("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def child() -> Iterator[Process]:
    """A process of this machine, in place of that of a rank."""
    with subprocess.Popen(["sleep", "100"]) as started:
        yield Process.of(started.pid)
        started.kill()


@pytest.fixture
def job(store: Any) -> Iterator[Callable[..., list[Rank]]]:
    begun: list[Rank] = []

    def begin(of: int, process: Process | None = None) -> list[Rank]:
        """All ranks know of each other; the process given is that of the last one."""
        begun.extend(Rank(store.port, rank, of, process if rank == of - 1 else None) for rank in range(of))
        wait_until(lambda: all(len(each.ranks.positions()) == of for each in begun))
        return begun

    yield begin
    for each in begun:
        each.ranks.leave()


FAILED = Failure(1, 5, FailureType.USER_CODE, "ValueError: only here", "step")


def test_every_rank_is_told_once_what_one_has_failed_with(job: Callable[..., list[Rank]]) -> None:
    first, second, third = job(3)
    second.ranks.tell(FAILED)
    wait_until(lambda: first.told and third.told)
    time.sleep(3 * INTERVAL)
    assert first.told == third.told == [FAILED]
    assert second.told == []
    assert {each.ranks.first_failure() for each in (first, second, third)} == {FAILED}


def test_what_a_collective_has_raised_comes_after_what_it_follows_from(job: Callable[..., list[Rank]]) -> None:
    first, second = job(2)
    follows = Failure(0, 5, FailureType.PROCESS_DIED, "Connection closed by peer", follows=True)
    first.ranks.tell(follows)
    assert "another rank may be behind it: Connection closed" in str(first.ranks.first_failure())
    second.ranks.tell(FAILED)
    assert first.ranks.first_failure(within=30.0) == FAILED
    assert second.ranks.first_failure() == FAILED


def test_a_rank_that_is_killed_is_given_up_by_the_others(job: Callable[..., list[Rank]], child: Process) -> None:
    first, second, _ = job(3, child)
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: first.told and second.told)
    assert (first.told[0].rank, first.told[0].failure) == (2, FailureType.PROCESS_DIED)
    assert "gone without a word" in first.told[0].error
    # Of what it was doing nothing is known any more.
    assert set(first.ranks.positions()) == {0, 1}


def test_a_rank_that_is_killed_has_come_as_far_as_the_others(job: Callable[..., list[Rank]], child: Process) -> None:
    first, _ = job(2, child)
    # Steps are finished together; what the other one has said of itself last is older.
    first.position = Position(7, "step", 50, 0.1, 60.0)
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: first.told)
    assert first.told[0].step == 7


WAITS = Position(5, "between", 10, 30.0, 60.0, training=False, collective="broadcast")


def test_a_rank_that_leaves_training_alone_is_told_of_once_another_one_waits_for_it(
    job: Callable[..., list[Rank]],
) -> None:
    first, second, third = job(3)
    second.ranks.leave()
    time.sleep(15 * INTERVAL)
    # It may be at its own end: nothing is waited for yet.
    assert first.told == third.told == []
    first.position = third.position = WAITS
    began = time.monotonic()
    wait_until(lambda: first.told and third.told)
    # Counted from its last sign of life.
    assert time.monotonic() - began >= 8 * INTERVAL
    assert {str(each.ranks.first_failure()) for each in (first, third)} == {
        "rank 1 failed first; it failed after step 5: it left train() while the others train on: the ranks do "
        "different things; look for code that decides on one rank alone (should_training_stop in a callback)"
    }


def test_a_rank_that_leaves_training_at_the_end_of_it_is_not_missed(job: Callable[..., list[Rank]]) -> None:
    first, second = job(2)
    first.position = dataclasses.replace(WAITS, ending=True)
    second.ranks.leave()
    time.sleep(15 * INTERVAL)
    assert first.told == []
    assert first.ranks.first_failure() is None


def test_a_collective_that_fails_comes_of_a_rank_that_has_left_training_alone(job: Callable[..., list[Rank]]) -> None:
    first, second = job(2)
    second.ranks.leave()
    wait_until(lambda: 1 not in first.ranks.positions())
    # It may be about to leave as well, as all have agreed.
    assert first.ranks.first_failure() is None
    first.ranks.tell(Failure(0, 5, FailureType.PROCESS_DIED, "Connection closed by peer", follows=True))
    assert "rank 1 failed first" in str(first.ranks.first_failure())


def test_a_rank_that_is_stopped_is_given_up_and_one_that_goes_on_soon_is_not(
    job: Callable[..., list[Rank]], child: Process
) -> None:
    first, _ = job(2, child)
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(INTERVAL)
    os.kill(child.pid, signal.SIGCONT)
    time.sleep(10 * INTERVAL)
    assert first.told == []
    os.kill(child.pid, signal.SIGSTOP)
    began = time.monotonic()
    wait_until(lambda: first.told)
    assert time.monotonic() - began >= 3 * INTERVAL
    assert "is stopped" in first.told[0].error


def test_a_rank_that_never_comes_hides_no_other_one(store: Any, child: Process) -> None:
    here, last = Rank(store.port, 0, 4), Rank(store.port, 3, 4, child)
    wait_until(lambda: set(here.ranks.positions()) == {0, 3})
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: here.told)
    assert here.told[0].rank == 3
    for each in (here, last):
        each.ranks.leave()


def test_a_failure_that_was_counted_and_never_written_hides_no_other_one(job: Callable[..., list[Rank]]) -> None:
    first, second = job(2)
    session = second.ranks._session
    assert session is not None
    # As of a rank that is killed in between.
    session._order(lambda channel: channel.add("failures", 1), 10.0)
    second.ranks.tell(FAILED)
    wait_until(lambda: first.told)
    assert first.told == [FAILED]


def test_a_rank_that_says_goodbye_may_end(job: Callable[..., list[Rank]], child: Process) -> None:
    first, second = job(2, child)
    second.ranks.leave()
    os.kill(child.pid, signal.SIGKILL)
    time.sleep(10 * INTERVAL)
    assert first.told == []
    assert set(first.ranks.positions()) == {0}


def test_a_rank_of_another_machine_is_not_given_up_for_its_silence(
    job: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Native code holds the GIL there for minutes; and there is no such process here, which says nothing.
    first, second = job(2, ELSEWHERE)
    monkeypatch.setattr(second.ranks._session, "_tell_where", lambda channel: None)
    first.position = Position(5, "step", 10, 0.1, 60.0, collective="all_reduce")
    time.sleep(40 * INTERVAL)
    assert first.told == []


def test_a_rank_that_loses_the_store_comes_back_to_it_and_is_not_given_up(
    job: Callable[..., list[Rank]], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = job(2, ELSEWHERE)
    session = second.ranks._session
    assert session is not None
    for _ in range(2):
        assert session._channel is not None
        session._channel._store = Broken()
        wait_until(lambda: lost(second))
        second.position = Position(first.position.step, "data", second.position.beats + 1, 0.1, 60.0)
        wait_until(lambda: first.ranks.positions()[1] == second.position)
    assert sum("cannot be listened to" in each.message for each in caplog.records) == 1
    assert first.told == []
    second.ranks.tell(FAILED)
    wait_until(lambda: first.told)
    assert first.told == [FAILED]


class Clock:
    """As `time` tells it to this process, which does not run for a while."""

    def __init__(self) -> None:
        self.stood_still = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.stood_still


@pytest.mark.parametrize("where", ["between two looks", "in one"])
def test_what_was_seen_before_this_process_stood_still_says_nothing(
    job: Callable[..., list[Rank]], child: Process, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    # Of what follows no part takes so long otherwise, however busy the machine is.
    monkeypatch.setattr(session, "_STOPPED", 3000.0)
    first, _ = job(2, child)
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(lambda: child.state() is State.STOPPED)
    clock, looks = Clock(), list[float]()
    monkeypatch.setattr(session, "time", clock)
    here = first.ranks._session
    assert here is not None
    take_in, listen = here._take_in_failures, here._listen

    def take_in_failures(channel: Any) -> None:
        if where == "in one" and not clock.stood_still:
            clock.stood_still = 1e6
        take_in(channel)

    def look() -> None:
        if where == "between two looks" and len(looks) == 1:
            clock.stood_still = 1e6
        listen()
        looks.append(clock.stood_still)

    monkeypatch.setattr(here, "_take_in_failures", take_in_failures)
    monkeypatch.setattr(here, "_listen", look)
    # As after a machine was asleep: all of a sudden everything is long ago, and the other rank wakes a little later.
    wait_until(lambda: sum(each > 0 for each in looks) >= 3)
    assert first.told == []


def test_a_rank_knows_where_the_others_are(job: Callable[..., list[Rank]]) -> None:
    first, second = job(2)
    second.position = Position(6, "data", 40, 3.0, 57.0, line="data.py:3, in read: wait()")
    assert first.ranks.positions(within=30.0) == {0: first.position, 1: second.position}
    first.position = Position(7, "step", 50, 3.0, 57.0)
    assert first.ranks.waited_for(first.position) == (1, second.position)


def test_another_run_in_the_same_store_is_none_of_this_one(store: Any, job: Callable[..., list[Rank]]) -> None:
    first, second = job(2)
    second.ranks.tell(FAILED)
    wait_until(lambda: first.told)
    for each in (first, second):
        each.ranks.leave()
        each.told.clear()
        each.ranks.watch(
            lambda: Position(0, "", 0, 0.0, 60.0),
            each.told.append,
            Place(int(each is second), 2, "127.0.0.1", store.port),
        )
    wait_until(lambda: len(first.ranks.positions()) == 2)
    assert first.told == []
    assert first.ranks.failures == []


class Broken:
    """A connection that is lost: all calls raise what torch raises."""

    def __getattr__(self, name: str) -> Any:
        raise torch.distributed.DistNetworkError("Connection reset by peer")


def lost(rank: Rank) -> bool:
    return rank.ranks._session is not None and rank.ranks._session._lost_it


def test_a_store_that_cannot_be_reached_is_told_of_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    gone = store_class("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = Rank(gone.port, 0, 2), Rank(gone.port, 1, 2)
    wait_until(lambda: len(first.ranks.positions()) == 2)
    del gone
    wait_until(lambda: lost(first) and lost(second))
    began = time.monotonic()
    first.ranks.tell(Failure(0, 5, FailureType.USER_CODE, "ValueError"))
    first.ranks.leave()
    second.ranks.leave()
    assert time.monotonic() - began < 5.0
    assert sum("cannot be listened to" in each.message for each in caplog.records) == 2
    assert second.told == []


@pytest.mark.parametrize(("code", "others"), [(3, 3), (0, 1), (None, 1), ("no data", 1), (256, 1)])
def test_a_rank_that_exits_by_itself_ends_the_others_with_its_code_or_as_failed(code: Any, others: int) -> None:
    found = failure_of(SystemExit(code), 1, 5, "step")
    assert found is not None
    assert (found.failure, found.exit_code, found.for_good) == (FailureType.INTERRUPTED, others, False)


def test_where_ranks_are_can_be_asked_while_others_come(job: Callable[..., list[Rank]]) -> None:
    first, _ = job(2)
    here, over = first.ranks._session, threading.Event()
    assert here is not None
    known = here._others
    # Of a job of many ranks; a look of the thread itself would find out that they are none.
    known |= {rank: dataclasses.replace(known[1], left=True) for rank in range(2, 200)}

    def come() -> None:
        rank = 200
        while not over.is_set():
            known[rank] = known[2]
            known.pop(rank - 50, None)
            rank += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    coming = threading.Thread(target=come)
    coming.start()
    try:
        for _ in range(300):
            assert set(here.positions(0.0)) == {0, 1}
    finally:
        over.set()
        coming.join()
        sys.setswitchinterval(interval)


def test_a_single_process_builds_nothing() -> None:
    ranks = OtherRanks("the_run")
    ranks.watch(lambda: Position(0, "", 0, 0.0, 0.0), lambda failure: None)
    ranks.tell(FAILED)
    assert not ranks.known
    assert ranks.positions() == {}
    assert ranks.first_failure(within=60.0) is None
