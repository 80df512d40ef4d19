"""What a watchdog does about a hang, and when: asked poll by poll, on a clock of its own, without a thread."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from constants import settings_among

from self_healing import Action, FailureType, HealingConfig, Incident
from self_healing.healers.hangs import watchdog
from self_healing.healers.hangs.watchdog import Watchdog
from self_healing.hf.sections import Heartbeat
from self_healing.journal.journal import Journal
from self_healing.ranks.messages import Failure, Position
from self_healing.ranks.session import OtherRanks


@pytest.fixture(autouse=True)
def constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back what a test sets."""
    settings_among({"FACTOR": 1.0, "GRACE_SECONDS": 4.0}, monkeypatch.setattr)


class Left(BaseException):
    """The process ended, with an exit code."""


class MadeUpSignal:
    """The signal to the training thread, without a handler and without data loader workers."""

    signal = signal.SIGUSR2

    def stacks_of_workers(self) -> dict[int, str]:
        return {}

    def give_back(self) -> None:
        pass


class Watched:
    """A run of two seconds a step, at step 7, that the watchdog looks at once a second; nothing is interrupted."""

    def __init__(self, directory: Path, counts_attempts: bool = False, **settings: Any) -> None:
        self.now = 0.0
        constants = {"hang_floor_seconds": 10.0, "FACTOR": 1.0, "GRACE_SECONDS": 4.0}
        config = HealingConfig(**settings_among(constants | settings))
        self.heartbeat = Heartbeat(1, clock=lambda: self.now)
        self.told: list[Incident] = []
        self.alerts: list[tuple[str, str, str, int]] = []
        self.before_exit: list[str] = []
        self.watchdog = Watchdog(
            config,
            self.heartbeat,
            Journal(directory, config, "run", notify=self.told.append),
            may_recover=lambda: False,
            before_exit=self.before_exit.append,
            step=lambda: 7,
            still_training=lambda frame: True,
            at_the_end=lambda: False,
            over=lambda: None,
            counts_attempts=lambda: counts_attempts,
        )
        self.watchdog._journal.alert = lambda *alert: self.alerts.append(alert)  # type: ignore[method-assign]
        self.watchdog._training_thread = threading.get_ident()
        self.watchdog._waker = MadeUpSignal()  # type: ignore[assignment]
        self.stopping = threading.Event()
        self.heartbeat.stood_still = self.watchdog._stood_still
        for section, seconds in self.watchdog._exits.read(config).items():
            self.heartbeat.has_taken(section, seconds)
        with self.heartbeat.section("step"):
            self.wait(2.0)

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += self.watchdog._interval
            self.watchdog._look(self.stopping)

    def hang(self, seconds: float) -> None:
        self.heartbeat.enter("step")
        self.wait(seconds)

    @property
    def incidents(self) -> list[Incident]:
        return self.watchdog._journal.incidents


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Builds runs, and ends them with the test."""
    begun: list[Watched] = []

    def build(**settings: Any) -> Watched:
        begun.append(Watched(tmp_path, **settings))
        return begun[-1]

    yield build
    for watched in begun:
        watched.watchdog.stop()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the process is an exception."""

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(logging, "shutdown", lambda: None)


def reminders(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "Still no sign" in record.getMessage()]


def test_a_step_that_compiles_for_a_new_shape_is_no_hang_and_is_told_of_like_the_first_ones(
    watch: Callable[..., Watched],
) -> None:
    watched, found = watch(), list[int]()

    def backend(graph: Any, inputs: Any) -> Any:
        for seconds in (290.0, 20.0):
            watched.wait(seconds)
            found.append(len(watched.incidents))
        return graph.forward

    watched.heartbeat.enter("step")
    assert torch.compile(lambda number: number + 1, backend=backend)(torch.ones(2)).sum() == 4
    assert found == [0, 1]
    assert watched.incidents[0].actions == [Action.WRITE_STACKS]


@pytest.mark.parametrize(("of_a_processor", "told"), [(0.5, False), (0.05, True)])
def test_on_several_ranks_a_callback_that_computes_is_no_hang_and_one_that_waits_is(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch, of_a_processor: float, told: bool
) -> None:
    watched = watch(on_hang="notify")
    monkeypatch.setattr(OtherRanks, "known", True)
    monkeypatch.setattr(watchdog, "processor_seconds", lambda thread: 7.0 + of_a_processor * watched.now)
    with watched.heartbeat.section("log"):
        watched.wait(2.0)
    watched.heartbeat.enter("log")
    watched.wait(100.0)
    assert bool(watched.incidents) is told


def test_of_ranks_in_different_collectives_none_is_blamed_and_all_say_the_same(
    watch: Callable[..., Watched], exits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Failure] = []
    where = {
        rank: Position(7, "between", 40 + rank, 12.0, -2.0, collective=collective)
        for rank, collective in enumerate(("all_gather", "barrier"))
    }
    monkeypatch.setattr(OtherRanks, "known", True)
    monkeypatch.setattr(OtherRanks, "waited_for", lambda ranks, here: None)
    monkeypatch.setattr(OtherRanks, "positions", lambda ranks, within=0.0: dict(where))
    monkeypatch.setattr(OtherRanks, "first_failure", lambda ranks: told[0] if told else None)
    monkeypatch.setattr(OtherRanks, "tell", lambda ranks, failure: told.append(failure))
    said = []
    for _ in (0, 1):
        with pytest.raises(Left):
            (watched := watch(counts_attempts=True, launcher_restarts="yes")).hang(100.0)
        said += watched.before_exit
        # The first one is gone by the time that the second one looks where the others are.
        where.pop(0, None)
    assert [(each.rank, each.failure) for each in told] == [(None, FailureType.HANG)]
    expected = "the ranks wait in different collectives: rank 0 in all_gather; rank 1 in barrier"
    assert said == [f"nothing moves after step 7: {expected}"] * 2


def test_it_is_recalled_after_as_long_again_and_then_ever_more_rarely(
    watch: Callable[..., Watched], caplog: pytest.LogCaptureFixture
) -> None:
    watched = watch(on_hang="notify")
    watched.hang(100.0)
    # At 10 s it is told of; then 10, 20 and 40 s later.
    assert [int(text.split()[-2]) // 10 for text in reminders(caplog)] == [2, 4, 8]
    assert len(watched.told) == 1
    where = watched.incidents[0].evidence["stacks"]
    # The second one is that of each incident.
    assert [watched.alerts[0], watched.alerts[2]] == [
        ("self_healing: training hangs", f"'step' has not moved for 11 s; stacks in {where}", "error", 7),
        ("self_healing: still hanging", "Still no sign of life from 'step' after 21 s.", "error", 7),
    ]


@pytest.mark.parametrize(("counts_attempts", "ends"), [(False, False), (True, True)])
def test_the_same_hang_after_a_restart_ends_the_process_only_where_attempts_are_counted(
    watch: Callable[..., Watched], exits: None, counts_attempts: bool, ends: bool
) -> None:
    with pytest.raises(Left):
        watch(launcher_restarts="yes").hang(30.0)
    again = watch(counts_attempts=counts_attempts, launcher_restarts="yes")
    if ends:
        with pytest.raises(Left):
            again.hang(200.0)
    else:
        again.hang(200.0)
        assert len(again.told) == 1


# ---- time that does not count, and runs that are over ----


def test_time_in_which_the_whole_process_stood_still_is_no_hang(watch: Callable[..., Watched]) -> None:
    watched = watch(on_hang="notify")
    watched.heartbeat.enter("step")
    watched.wait(1.0)
    watched.now += 1000.0
    watched.wait(8.0)
    assert watched.incidents == []
    watched.wait(4.0)
    assert len(watched.incidents) == 1
