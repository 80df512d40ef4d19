"""What a watchdog does about a hang, and when: asked poll by poll, on a clock of its own, without a thread."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from self_healing import Action, HealingConfig, Incident
from self_healing.hangs.stacks import line_of
from self_healing.hangs.watchdog import Watchdog
from self_healing.instrument.sections import Heartbeat
from self_healing.journal.journal import Journal
from self_healing.launcher import EXIT_FOR_RESTART


class Left(BaseException):
    """The process ended, with an exit code."""


class Watched:
    """
    A run of two seconds a step, at step 7, that the watchdog looks at twice a second.

    Args:
        directory (`Path`):
            Where it is written down.
        settings:
            Of the configuration.
    """

    def __init__(self, directory: Path, counts_attempts: bool = False, **settings: Any) -> None:
        self.now = 0.0
        config = HealingConfig(
            **{"hang_floor_seconds": 10.0, "hang_factor": 1.0, "hang_grace_seconds": 4.0, **settings}
        )
        self.heartbeat = Heartbeat(1, clock=lambda: self.now)
        self.told: list[Incident] = []
        self.before_exit: list[str] = []
        self.watchdog = Watchdog(
            config,
            self.heartbeat,
            Journal(directory, config, "run", notify=self.told.append),
            may_recover=lambda: False,
            before_exit=self.before_exit.append,
            step=lambda: 7,
            counts_attempts=lambda: counts_attempts,
        )
        self.watchdog._training_thread = threading.get_ident()
        self.stopping = threading.Event()
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


def test_nothing_is_said_before_the_limit(watch: Callable[..., Watched]) -> None:
    watched = watch(hang_action="notify")
    watched.hang(9.5)
    assert watched.incidents == []


def test_a_hang_is_told_of_at_the_limit_with_the_line_it_waits_at(watch: Callable[..., Watched]) -> None:
    watched = watch(hang_action="notify")
    watched.hang(12.0)
    assert watched.told == watched.incidents
    (incident,) = watched.incidents
    assert incident.actions == [Action.WRITE_STACKS]
    assert incident.evidence["diagnosis"].startswith("The training thread waits at /")
    assert incident.evidence["limit"] == 10.0


def test_it_is_recalled_after_as_long_again_and_then_ever_more_rarely(
    watch: Callable[..., Watched], caplog: pytest.LogCaptureFixture
) -> None:
    watched = watch(hang_action="notify")
    watched.hang(100.0)
    # At 10 s it is told of; then 10, 20 and 40 s later.
    assert [int(text.split()[-2]) // 10 for text in reminders(caplog)] == [2, 4, 8]
    assert len(watched.told) == 1


def test_what_moves_again_has_recovered_by_itself(watch: Callable[..., Watched]) -> None:
    watched = watch(hang_action="notify")
    watched.hang(15.0)
    watched.heartbeat.leave()
    watched.wait(1.0)
    (incident,) = watched.incidents
    assert incident.outcome == "self_recovered"
    assert incident.seconds_lost == pytest.approx(15.0, abs=2.0)


def test_a_process_that_is_started_again_ends_after_the_grace(watch: Callable[..., Watched], exits: None) -> None:
    watched = watch(launcher_restarts="yes")
    watched.hang(12.0)
    assert watched.incidents
    assert watched.told == []
    with pytest.raises(Left) as left:
        watched.wait(4.0)
    assert left.value.args == (EXIT_FOR_RESTART,)
    (incident,) = watched.told
    assert incident.actions == [Action.WRITE_STACKS, Action.EXIT_FOR_RESTART]
    assert watched.before_exit == ["hang in 'step' for 15 s, which an interrupt does not end"]


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


def test_a_part_that_is_seen_for_the_first_time_is_only_told_of(watch: Callable[..., Watched], exits: None) -> None:
    watched = watch(launcher_restarts="yes")
    watched.heartbeat.enter("evaluate")
    watched.wait(1000.0)
    assert [incident.actions for incident in watched.told] == [[Action.WRITE_STACKS]]


def test_a_line_is_named_by_file_number_function_and_code() -> None:
    frame = sys._getframe()
    named, number = line_of(frame), frame.f_lineno
    assert named.startswith(f"{__file__}:{number}, in test_a_line_is_named_by_file_number_function_and_code: ")
    assert named.endswith("named, number = line_of(frame), frame.f_lineno")
