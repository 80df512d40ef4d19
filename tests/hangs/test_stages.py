"""What a watchdog does about a hang, and when: asked poll by poll, on a clock of its own, without a thread."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import journal

from self_healing import Action, FailureType, HealingConfig, Incident
from self_healing.healers.hangs import watchdog
from self_healing.healers.hangs.threads import current_frames, line_of, processor_seconds
from self_healing.healers.hangs.watchdog import HangExits, TrainingHang, Watchdog
from self_healing.hf.sections import Heartbeat
from self_healing.journal.journal import Journal
from self_healing.ranks.messages import Failure, Position
from self_healing.ranks.session import OtherRanks
from self_healing.system.processes import EXIT_FOR_RESTART


class Left(BaseException):
    """The process ended, with an exit code."""


class MadeUpSignal:
    """The signal to the training thread, without a handler, and the answers of data loader workers."""

    signal = signal.SIGUSR2

    def __init__(self) -> None:
        self.workers: dict[int, str] = {}
        self.given_back = 0

    def stacks_of_workers(self) -> dict[int, str]:
        return self.workers

    def give_back(self) -> None:
        self.given_back += 1


class Watched:
    """
    A run of two seconds a step, at step 7, that the watchdog looks at once a second.

    Args:
        directory (`Path`):
            Where it is written down.
        recovers (`bool`, *optional*, defaults to `False`):
            Whether the training thread can be interrupted.
        settings:
            Of the configuration.
    """

    def __init__(
        self,
        directory: Path,
        recovers: bool = False,
        counts_attempts: bool = False,
        still_training: bool = True,
        at_the_end: bool = False,
        **settings: Any,
    ) -> None:
        self.now = 0.0
        self.over = 0
        config = HealingConfig(
            **{"hang_floor_seconds": 10.0, "hang_factor": 1.0, "hang_grace_seconds": 4.0, **settings}
        )
        self.heartbeat = Heartbeat(1, clock=lambda: self.now)
        self.told: list[Incident] = []
        self.alerts: list[tuple[str, str, str, int]] = []
        self.before_exit: list[str] = []
        self.watchdog = Watchdog(
            config,
            self.heartbeat,
            Journal(directory, config, "run", notify=self.told.append),
            may_recover=lambda: recovers,
            before_exit=self.before_exit.append,
            step=lambda: 7,
            still_training=lambda frame: still_training,
            at_the_end=lambda: at_the_end,
            over=self._is_over,
            counts_attempts=lambda: counts_attempts,
        )
        self.watchdog._journal.alert = lambda *alert: self.alerts.append(alert)  # type: ignore[method-assign]
        self.watchdog._training_thread = threading.get_ident()
        self.signal = MadeUpSignal()
        self.watchdog._waker = self.signal  # type: ignore[assignment]
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

    def interrupted(self) -> str:
        """Runs the handler of the signal, and leaves the step that hangs; gives the message."""
        with pytest.raises(TrainingHang) as raised:
            self.watchdog.interrupt(None)
        return str(raised.value)

    def _is_over(self) -> None:
        self.over += 1

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


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The threads that are sent a signal, and which; none arrives."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: sent.append((thread, number)))
    return sent


def reminders(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "Still no sign" in record.getMessage()]


def test_nothing_is_said_before_the_limit(watch: Callable[..., Watched]) -> None:
    watched = watch(hang_action="notify")
    watched.hang(9.5)
    assert watched.incidents == []


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
    watched = watch(hang_action="notify")
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


def test_a_thread_that_computes_is_told_from_one_that_waits() -> None:
    def spent(work: Callable[[], Any]) -> float:
        before = processor_seconds(threading.get_native_id())
        work()
        after = processor_seconds(threading.get_native_id())
        assert before is not None
        assert after is not None
        return after - before

    def compute() -> None:
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass

    assert spent(compute) > 0.1
    assert spent(lambda: time.sleep(0.2)) < 0.1
    assert processor_seconds(-1) is None


def test_a_hang_is_told_of_at_the_limit_with_the_line_it_waits_at(watch: Callable[..., Watched]) -> None:
    watched = watch(hang_action="notify")
    watched.hang(12.0)
    assert watched.told == watched.incidents
    (incident,) = watched.incidents
    assert incident.actions == [Action.WRITE_STACKS]
    assert incident.evidence["diagnosis"].startswith("The training thread waits at /")
    assert incident.evidence["limit"] == 10.0


def test_times_are_written_down_in_milliseconds(watch: Callable[..., Watched]) -> None:
    watched = watch(hang_action="notify", hang_floor_seconds=10.00551)
    watched.now += 0.12345
    watched.hang(12.0)
    evidence = watched.incidents[0].evidence
    assert evidence["limit"] == 10.006
    assert evidence["seconds"] == round(evidence["seconds"], 3) != round(evidence["seconds"], 2)


def test_it_is_recalled_after_as_long_again_and_then_ever_more_rarely(
    watch: Callable[..., Watched], caplog: pytest.LogCaptureFixture
) -> None:
    watched = watch(hang_action="notify")
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


def test_what_moves_again_has_recovered_by_itself(watch: Callable[..., Watched]) -> None:
    watched = watch(hang_action="notify")
    watched.hang(15.0)
    watched.heartbeat.leave()
    watched.wait(1.0)
    (incident,) = watched.incidents
    assert incident.outcome == "self_recovered"
    assert incident.seconds_lost == pytest.approx(15.0, abs=2.0)


def test_a_process_that_is_started_again_ends_after_the_grace(
    watch: Callable[..., Watched], exits: None, tmp_path: Path
) -> None:
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
    assert incident.seconds_lost == 15.0
    assert incident.outcome == "open"
    assert HangExits(tmp_path).read(HealingConfig(launcher_restarts="yes")) == {"step": 15.0}
    (event,) = journal(tmp_path, "action")[1:]
    assert (event["action"], event["exit_code"]) == ("exit_for_restart", 75)


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


@pytest.mark.parametrize("section", ["judge", "evaluate"])
def test_after_the_last_step_every_part_is_only_told_of(
    watch: Callable[..., Watched], exits: None, sent: list[tuple[int, int]], section: str
) -> None:
    # Ranks wait for each other in votes there, for as long as a callback of one of them takes.
    watched = watch(recovers=True, at_the_end=True, launcher_restarts="yes")
    for _ in range(3):
        with watched.heartbeat.section(section):
            watched.wait(1.0)
    watched.heartbeat.enter(section)
    watched.wait(1000.0)
    assert sent == []
    assert [incident.actions for incident in watched.told] == [[Action.WRITE_STACKS]]


def test_a_line_is_named_by_file_number_function_and_code() -> None:
    frame = sys._getframe()
    named, number = line_of(frame), frame.f_lineno
    assert named.startswith(f"{__file__}:{number}, in test_a_line_is_named_by_file_number_function_and_code: ")
    assert named.endswith("named, number = line_of(frame), frame.f_lineno")


# ---- interrupts ----


def test_the_training_thread_is_sent_one_signal_at_the_limit(
    watch: Callable[..., Watched], sent: list[tuple[int, int]]
) -> None:
    watched = watch(recovers=True)
    watched.hang(12.0)
    assert sent == [(threading.get_ident(), signal.SIGUSR2)]
    (incident,) = watched.incidents
    assert incident.actions == [Action.WRITE_STACKS, Action.INTERRUPT]
    # Whoever listens is told once it has helped, or has not.
    assert watched.told == []


def test_the_signal_raises_what_says_where_and_how_long_it_hung(
    watch: Callable[..., Watched], sent: list[tuple[int, int]]
) -> None:
    watched = watch(recovers=True)
    watched.hang(12.0)
    assert not watched.watchdog.has_claim
    assert watched.interrupted() == "no sign of life from 'step' for 12 s (limit 10 s)"
    assert watched.watchdog.has_claim
    claim = watched.watchdog.claim(TrainingHang(""))
    assert claim is not None
    assert claim.incident is watched.incidents[0]
    assert claim.incident.seconds_lost == 12.0
    assert not watched.watchdog.has_claim


@pytest.mark.parametrize("ended", [[], [41, 42]])
def test_the_workers_that_the_training_thread_waited_for_are_ended_and_named(
    watch: Callable[..., Watched],
    sent: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    ended: list[int],
) -> None:
    monkeypatch.setattr("self_healing.healers.hangs.watchdog.end_awaited_workers", lambda frame: ended)
    watched = watch(recovers=True)
    watched.hang(12.0)
    watched.interrupted()
    assert watched.incidents[0].evidence.get("workers_ended", []) == ended


def test_what_has_moved_or_waits_on_purpose_when_the_signal_arrives_is_not_interrupted(
    watch: Callable[..., Watched], sent: list[tuple[int, int]]
) -> None:
    watched = watch(recovers=True)
    watched.watchdog.interrupt(None)
    watched.hang(12.0)
    with watched.heartbeat.paused():
        watched.watchdog.interrupt(None)
    watched.heartbeat.leave()
    watched.watchdog.interrupt(None)
    assert not watched.watchdog.has_claim


def test_a_thread_that_does_not_answer_is_told_of_after_the_grace(
    watch: Callable[..., Watched], sent: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    watched = watch(recovers=True)
    watched.hang(14.0)
    assert watched.told == []
    watched.wait(2.0)
    assert watched.told == watched.incidents
    assert "does not respond to an interrupt" in caplog.text
    watched.wait(30.0)
    # 10 s after it was told of, and 20 s after that.
    assert [int(text.split()[-2]) for text in reminders(caplog)] == [25, 45]
    assert len(sent) == len(watched.told) == 1


def test_what_hangs_again_on_its_way_out_is_interrupted_again_as_the_same_incident(
    watch: Callable[..., Watched], sent: list[tuple[int, int]]
) -> None:
    watched = watch(recovers=True)
    watched.hang(12.0)
    watched.interrupted()
    watched.wait(12.0)
    assert len(sent) == 2
    (incident,) = watched.incidents
    assert incident.actions == [Action.WRITE_STACKS, Action.INTERRUPT, Action.INTERRUPT]
    watched.interrupted()
    assert watched.watchdog.has_claim


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
def test_what_was_interrupted_has_not_recovered_by_itself_when_its_cleaning_up_moves_again(
    watch: Callable[..., Watched], sent: list[tuple[int, int]], ends: bool
) -> None:
    watched = watch(recovers=True)
    with watched.heartbeat.section("save"):
        watched.wait(1.0)
    watched.hang(12.0)
    watched.interrupted()
    watched.heartbeat.enter("save")
    watched.wait(15.0)
    if not ends:
        watched.heartbeat.leave()
        watched.wait(1.0)
    watched.watchdog.stop()
    claim = watched.watchdog.claim(TrainingHang(""))
    assert claim is not None
    assert claim.incident.outcome == "open"


def test_what_answers_and_ends_before_the_watchdog_goes_on_has_not_recovered_by_itself(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watch(recovers=True)

    def answer(thread: int, number: int) -> None:
        watched.interrupted()
        watched.stopping.set()

    monkeypatch.setattr(signal, "pthread_kill", answer)
    watched.hang(10.5)
    assert watched.watchdog.has_claim
    assert [incident.outcome for incident in watched.incidents] == ["open"]


def test_a_run_that_ends_while_its_hang_is_written_down_is_neither_waited_for_nor_interrupted(
    watch: Callable[..., Watched], sent: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watch(recovers=True)
    monkeypatch.setattr("self_healing.healers.hangs.watchdog.write_stacks", lambda *_: watched.stopping.set())
    watched.hang(10.5)
    assert sent == []
    assert watched.watchdog._alarm is None
    assert [incident.outcome for incident in watched.incidents] == ["self_recovered"]


def test_an_interrupt_that_was_swallowed_is_over_once_training_goes_on(
    watch: Callable[..., Watched], sent: list[tuple[int, int]]
) -> None:
    watched = watch(recovers=True)
    watched.hang(12.0)
    watched.interrupted()
    watched.heartbeat.leave()
    for _ in range(24):
        with watched.heartbeat.section("step"):
            pass
    watched.heartbeat.start_over()
    watched.wait(1.0)
    # 50 signs of life since: it may still be on its way out.
    assert watched.watchdog.has_claim
    watched.heartbeat.start_over()
    watched.wait(1.0)
    assert not watched.watchdog.has_claim
    assert [incident.outcome for incident in watched.incidents] == ["self_recovered"]


# ---- time that does not count, and runs that are over ----


def test_time_in_which_the_whole_process_stood_still_is_no_hang(watch: Callable[..., Watched]) -> None:
    watched = watch(hang_action="notify")
    watched.heartbeat.enter("step")
    watched.wait(1.0)
    watched.now += 1000.0
    watched.wait(8.0)
    assert watched.incidents == []
    watched.wait(4.0)
    assert len(watched.incidents) == 1


@pytest.mark.parametrize("seen", [0.0, 1.0], ids=["before the watchdog looks", "after it has looked"])
def test_time_in_which_the_whole_process_stood_still_is_not_learned_from(
    watch: Callable[..., Watched], seen: float
) -> None:
    watched = watch(hang_action="notify")
    step = watched.heartbeat.sections["step"]
    with watched.heartbeat.section("step"):
        watched.wait(3.0)
        watched.now += 1000.0
        watched.wait(seen)
    # As long as it was seen to take, and until the next look.
    assert step.longest == 4.0
    # Of the stretch before, not of this one.
    with watched.heartbeat.section("step"):
        watched.wait(8.0)
    assert step.longest == pytest.approx(8.0, abs=1.0)


def test_a_part_in_which_there_was_no_look_counts_until_the_next_one_was_due(watch: Callable[..., Watched]) -> None:
    watched = watch(hang_action="notify")
    with watched.heartbeat.section("data"):
        watched.now += 1000.0
    assert watched.heartbeat.sections["data"].longest == 1.0


def test_a_hang_that_follows_on_standing_still_is_noticed_in_time(watch: Callable[..., Watched]) -> None:
    watched = watch(hang_action="notify")
    with watched.heartbeat.section("step"):
        watched.now += 1000.0
    watched.hang(13.0)
    assert len(watched.incidents) == 1


def test_a_wait_on_purpose_is_looked_at_again_from_its_end(watch: Callable[..., Watched]) -> None:
    watched = watch(hang_action="notify")
    watched.heartbeat.enter("step")
    with watched.heartbeat.paused():
        watched.wait(100.0)
    watched.wait(9.0)
    assert watched.incidents == []


def test_a_run_that_has_ended_without_a_word_is_let_go_once_it_is_between_parts(watch: Callable[..., Watched]) -> None:
    watched = watch(still_training=False)
    watched.watchdog._thread = threading.current_thread()
    watched.heartbeat.leave()
    watched.wait(2.0)
    assert not watched.stopping.is_set()
    watched.wait(1.0)
    assert watched.stopping.is_set()
    assert not watched.watchdog.running
    assert watched.over == 1


def test_what_is_done_about_a_hang_keeps_no_process_from_its_end(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        "self_healing.healers.hangs.watchdog.write_stacks", lambda *_: seen.append(threading.current_thread().daemon)
    )
    watch(hang_action="notify").hang(12.0)
    assert seen == [True]


def test_a_look_that_fails_is_logged_once_and_looking_goes_on(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[int] = []

    def fail(stopping: threading.Event) -> None:
        looks.append(1)
        if len(looks) == 3:
            stopping.set()
        raise RuntimeError("no such file")

    watched = watch(hang_floor_seconds=0.001)
    monkeypatch.setattr(watched.watchdog, "_look", fail)
    watched.watchdog._watch(watched.stopping)
    assert len(looks) == 3
    assert caplog.text.count("The watchdog for hangs failed once, and goes on") == 1


def test_nothing_that_is_done_about_a_hang_is_waited_for_without_end(
    watch: Callable[..., Watched], exits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[float | None] = []
    join = threading.Thread.join

    def note(thread: threading.Thread, timeout: float | None = None) -> None:
        bounds.append(timeout)
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", note)
    with pytest.raises(Left):
        watch(launcher_restarts="yes").hang(30.0)
    # The hang, and the end: what is written of it, the logs; then the two streams.
    assert bounds == [10.0, 10.0, 10.0, 2.0, 2.0]


def test_stacks_that_cannot_be_written_are_not_said_to_be(
    watch: Callable[..., Watched], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hangs").write_text("in the way")
    watched = watch(hang_action="notify")
    watched.hang(12.0)
    (incident,) = watched.told
    assert incident.actions == []
    assert "stacks" not in incident.evidence
    assert "The stacks could not be written to" in caplog.text


# ---- data loader workers ----

STACKS = """Thread 0x1 (most recent call first):
  File "/here/other.py", line 3 in elsewhere

Current thread 0x2 (most recent call first):
  File "/here/rows.py", line 12 in read
  File "/here/collate.py", line 5 in __call__
  File "/usr/site-packages/torch/utils/data/_utils/worker.py", line 349 in _worker_loop
  File "/usr/lib/python3/multiprocessing/process.py", line 108 in run
"""


def test_the_line_a_worker_waits_at_is_part_of_the_diagnosis(watch: Callable[..., Watched]) -> None:
    watched = watch(hang_action="notify")
    watched.signal.workers = {41: STACKS, 42: ""}
    watched.hang(12.0)
    (incident,) = watched.incidents
    assert incident.evidence["workers_wait_at"] == {
        "41": "/here/rows.py, line 12 in read",
        "42": "an unknown line (it does not answer)",
    }
    assert "Data loader worker 41 waits at /here/rows.py, line 12 in read." in incident.evidence["diagnosis"]
    written = Path(incident.evidence["stacks"]).read_text()
    assert "process 41, a data loader worker\nThread 0x1" in written
    assert "process 42, a data loader worker\ndoes not answer" in written


def test_a_worker_that_waits_for_work_is_no_reason(watch: Callable[..., Watched]) -> None:
    idle = """Current thread 0x2 (most recent call first):
  File "/usr/lib/python3/selectors.py", line 415 in select
  File "/usr/lib/python3/multiprocessing/connection.py", line 948 in wait
  File "/usr/lib/python3/multiprocessing/queues.py", line 113 in get
  File "/usr/site-packages/torch/utils/data/_utils/worker.py", line 300 in _worker_loop
"""
    watched = watch(hang_action="notify")
    watched.signal.workers = {41: idle}
    watched.hang(12.0)
    assert "workers_wait_at" not in watched.incidents[0].evidence


@pytest.mark.parametrize("collects", [True, False])
def test_stacks_are_read_without_the_garbage_collector_which_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    read, seen = sys._current_frames, list[bool]()
    monkeypatch.setattr(sys, "_current_frames", lambda: (seen.append(gc.isenabled()), read())[1])
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        assert threading.get_ident() in current_frames()
        assert (seen, gc.isenabled()) == ([False], collects)
    finally:
        (gc.enable if before else gc.disable)()


def test_two_threads_that_read_stacks_at_once_leave_the_garbage_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one would find it off, and the first one would put it on again while the second one reads."""
    read, seen = sys._current_frames, list[bool]()
    first_reads, second_has_come = threading.Event(), threading.Event()

    def frames() -> Any:
        if not first_reads.is_set():
            first_reads.set()
            # Unless it is kept waiting.
            second_has_come.wait(0.5)
        else:
            second_has_come.set()
            first.join(2.0)
        seen.append(gc.isenabled())
        return read()

    monkeypatch.setattr(sys, "_current_frames", frames)
    assert gc.isenabled()
    first, second = (threading.Thread(target=current_frames) for _ in range(2))
    first.start()
    assert first_reads.wait(5.0)
    second.start()
    for each in (first, second):
        each.join(5.0)
    assert (seen, gc.isenabled()) == ([False, False], True)
