"""Ranks tell each other that they live and what has failed, over a real store; here with threads of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed
from test_watchdog import wait_until

from self_healing import FailureType
from self_healing.ranks.messages import Failure, Place, Position, failure_of
from self_healing.ranks.session import OtherRanks
from self_healing.system.processes import Process


store_class: Any = torch.distributed.TCPStore
# Ten times as often as in a run of a minute's floor.
INTERVAL = 0.1
ELSEWHERE = Process("another machine", 1, 0.0)


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


def test_a_rank_that_is_gone_with_the_store_may_have_said_why(
    child: Process, caplog: pytest.LogCaptureFixture
) -> None:
    gone = store_class("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = Rank(gone.port, 0, 2), Rank(gone.port, 1, 2, child)
    wait_until(lambda: len(first.ranks.positions()) == 2)
    del gone
    wait_until(lambda: sum("cannot be listened to" in each.message for each in caplog.records) == 2)
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: first.told)
    assert first.told[0].error == "its process is gone, and what it may have said before cannot be read"
    first.ranks.leave()
    second.ranks.leave()


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
    monkeypatch.setattr(second.ranks, "_tell_where", lambda channel: None)
    first.position = Position(5, "step", 10, 0.1, 60.0, collective="all_reduce")
    time.sleep(40 * INTERVAL)
    assert first.told == []


def test_a_store_that_cannot_be_reached_is_told_of_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    gone = store_class("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = Rank(gone.port, 0, 2), Rank(gone.port, 1, 2)
    wait_until(lambda: len(first.ranks.positions()) == 2)
    del gone
    wait_until(lambda: sum("cannot be listened to" in each.message for each in caplog.records) == 2)
    began = time.monotonic()
    first.ranks.tell(Failure(0, 5, FailureType.USER_CODE, "ValueError"))
    first.ranks.leave()
    second.ranks.leave()
    assert time.monotonic() - began < 5.0
    assert sum("cannot be listened to" in each.message for each in caplog.records) == 2
    assert second.told == []


@pytest.mark.parametrize(("code", "others"), [(3, 3), (0, 1)])
def test_a_rank_that_exits_by_itself_ends_the_others_with_its_code_or_as_failed(code: Any, others: int) -> None:
    found = failure_of(SystemExit(code), 1, 5, "step")
    assert found is not None
    assert (found.failure, found.exit_code, found.for_good) == (FailureType.INTERRUPTED, others, False)
