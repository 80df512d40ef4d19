"""`HangWatch` in a made-up run: what it allows, whose exceptions it claims, and that it ends with `train()`."""

from __future__ import annotations

import contextvars
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from self_healing import Action, HealingConfig
from self_healing.healers.hangs import healer as hangs_healer
from self_healing.healers.hangs.healer import HangWatch
from self_healing.healers.hangs.watchdog import HangExits, TrainingHang, Watchdog
from self_healing.hf.sections import Heartbeat
from self_healing.journal.journal import Journal
from self_healing.ranks.session import OtherRanks


class Watching:
    """
    A run at step 7 that began an hour ago, on a clock of its own.

    Args:
        directory (`Path`):
            Where it is written down.
        streams (`bool`), loader_workers (`int`), at_the_end (`bool`), *optional*:
            What is seen of it.
        settings:
            Of the configuration.
    """

    def __init__(
        self,
        directory: Path,
        streams: bool = False,
        loader_workers: int = 0,
        at_the_end: bool = False,
        **settings: Any,
    ) -> None:
        self.now = 1000.0
        self.heartbeat = Heartbeat(1, clock=lambda: self.now)
        config = HealingConfig(**{"hang_floor_seconds": 10.0, "retry_total_seconds": 500.0, **settings})
        self.journal = Journal(directory, config, "run")
        view = SimpleNamespace(streams=streams, loader_workers=loader_workers, at_the_end=at_the_end)
        self.instrument = SimpleNamespace(on_detach=[], view=view, failsafe=SimpleNamespace(switched_off=False))
        self.run = SimpleNamespace(
            config=config,
            heartbeat=self.heartbeat,
            journal=self.journal,
            may_enter_again=True,
            step=7,
            started_at=time.time() - 3600.0,
            instrument=self.instrument,
            attachment=SimpleNamespace(instrument=self.instrument),
            ranks=OtherRanks("run"),
        )
        self.healer = HangWatch(
            self.run,  # type: ignore[arg-type]
            before_exit=lambda why, failure, code: None,
            still_training=lambda frame: True,
            over=lambda: None,
            counts_attempts=lambda: False,
            leave_state=lambda instrument, undisturbed: self.left.append(undisturbed()),
        )
        # Of each state that was left, whether training stood still until the end.
        self.left: list[bool] = []

    @property
    def watchdog(self) -> Watchdog:
        assert self.healer._watchdog is not None
        return self.healer._watchdog

    def detach(self) -> None:
        while self.instrument.on_detach:
            self.instrument.on_detach.pop()()

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.watchdog._look(threading.Event())

    def hang(self, section: str) -> None:
        """Gives no sign of life in a part that is known, a little longer than it may take."""
        for _ in range(5):
            with self.heartbeat.section(section):
                self.wait(1)
        self.heartbeat.enter(section)
        self.wait(15)


@pytest.fixture
def watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Builds runs that are looked at by hand, and detaches them with the test."""
    begun: list[Watching] = []
    monkeypatch.setattr(Watchdog, "_watch", lambda self, stopping: None)

    def build(**settings: Any) -> Watching:
        begun.append(Watching(tmp_path, **settings))
        return begun[-1]

    yield build
    for each in begun:
        each.detach()


def test_before_the_first_step_there_is_nothing_to_claim(watching: Any) -> None:
    healer = watching().healer
    assert healer.has_claim is False
    assert healer.claim(TrainingHang("")) is None


def test_the_exception_of_an_interrupted_hang_is_claimed_once(watching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = watching()
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: None)
    run.healer.attach(first=True)
    assert run.healer.has_claim is False
    run.hang("step")
    with pytest.raises(TrainingHang):
        run.watchdog.interrupt(None)
    assert run.healer.has_claim is True
    claim = run.healer.claim(TrainingHang(""))
    assert [claim.incident] == run.journal.incidents
    assert claim.incident.step == 7
    assert run.healer.has_claim is False


def test_a_run_that_cannot_be_entered_again_is_not_interrupted(watching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: sent.append(number))
    run = watching()
    run.run.may_enter_again = False
    run.healer.attach(first=True)
    run.hang("step")
    assert len(run.journal.incidents) == 1
    assert sent == []


def test_a_hang_after_another_entry_is_an_incident_of_its_own(watching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: None)
    run = watching()
    for _ in range(2):
        run.healer.attach(first=True)
        run.hang("step")
        with pytest.raises(TrainingHang):
            run.watchdog.interrupt(None)
        run.healer.claim(TrainingHang(""))
        run.detach()
    assert [incident.actions for incident in run.journal.incidents] == [[Action.WRITE_STACKS, Action.INTERRUPT]] * 2


def test_a_hang_while_no_instrument_is_attached_is_not_at_the_end(
    watching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: sent.append(number))
    run = watching()
    run.run.attachment.instrument = None
    run.healer.attach(first=True)
    for _ in range(20):
        with run.heartbeat.section("step"):
            run.wait(1)
    run.wait(15)
    assert [incident.evidence["section"] for incident in run.journal.incidents] == ["between"]
    assert len(sent) == 1


def test_it_is_watched_from_each_entry_to_its_end(watching: Any) -> None:
    run = watching()
    run.healer.attach(first=True)
    watchdog = run.watchdog
    assert watchdog.running
    stopping = watchdog._stopping
    run.detach()
    assert not watchdog.running
    assert stopping.is_set()
    assert watchdog._signal is None
    run.healer.attach(first=False)
    assert run.watchdog is watchdog
    assert watchdog.running


def test_what_an_earlier_process_was_ended_in_may_take_twice_as_long(watching: Any, tmp_path: Path) -> None:
    HangExits(tmp_path).note_exit(7, "step", 90.0)
    run = watching(launcher_restarts="yes")
    run.healer.attach(first=True)
    assert run.heartbeat.sections["step"].longest_at_first == 90.0


def test_a_watchdog_that_does_not_start_costs_no_training(
    watching: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    run = watching()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        run.healer.attach(first=True)
    assert "Hangs are not watched for in this run" in caplog.text
    run.detach()


@pytest.mark.parametrize(("first", "streams", "at_least"), [(True, True, 0), (False, False, 0), (False, True, 3600)])
def test_a_stream_may_take_as_long_to_skip_as_the_run_has_taken_so_far(
    watching: Any, first: bool, streams: bool, at_least: int
) -> None:
    run = watching(streams=streams)
    run.healer.attach(first=first)
    data = run.heartbeat.sections.get("data")
    assert (0 if data is None else data.at_least) == pytest.approx(at_least, abs=60)


@pytest.mark.parametrize(("workers", "allowed"), [(0, None), (1, 510.0)])
def test_with_workers_the_data_may_take_as_long_as_their_attempts(
    watching: Any, workers: int, allowed: float | None
) -> None:
    run = watching(loader_workers=workers)
    run.healer.attach(first=True)
    data = run.heartbeat.sections.get("data")
    assert (None if data is None else data.allowed) == allowed


def test_after_the_last_step_a_hang_is_only_told_of(watching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: sent.append(number))
    run = watching(at_the_end=True)
    run.healer.attach(first=True)
    for _ in range(20):
        with run.heartbeat.section("step"):
            run.wait(1)
    run.wait(700)
    assert [incident.evidence["section"] for incident in run.journal.incidents] == ["between"]
    assert sent == []


# ---- the state that is left where this rank ends with another one ----


def test_it_is_left_too_where_the_collective_has_failed_while_the_rank_is_ended(watching: Any) -> None:
    run = watching()
    joint_exit = run.healer._joint_exit
    with joint_exit._lock:
        training = threading.Thread(target=joint_exit.call_off)
        training.start()
        run.healer._leave_last_step()
        assert run.left == [True]
    training.join()


def test_it_is_not_left_of_a_rank_that_goes_on(watching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs_healer, "_LETTING_OUT", 0.0)
    run = watching()
    run.healer._leave_last_step()
    run.healer._joint_exit.call_off()
    run.healer._leave_last_step()
    assert run.left == []


# ---- the watchdog's thread and signal ----


def test_a_run_within_a_run_leaves_the_outer_one_its_signal(watching: Any) -> None:
    outer, inner = watching(), watching()
    outer.healer.attach(first=True)
    inner.healer.attach(first=True)
    assert None not in (outer.watchdog._signal, inner.watchdog._signal)
    assert outer.watchdog._signal != inner.watchdog._signal
    inner.detach()
    assert signal.getsignal(outer.watchdog._signal) is outer.watchdog._waker


def test_the_watching_thread_keeps_no_process_from_its_end_and_knows_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool, str]] = []
    current_run = contextvars.ContextVar("current_run", default="none")

    def watch(watchdog: Watchdog, stopping: threading.Event) -> None:
        thread = threading.current_thread()
        seen.append((thread.name, thread.daemon, current_run.get()))

    monkeypatch.setattr(Watchdog, "_watch", watch)
    run = Watching(tmp_path)
    # Trackers keep their current run like this.
    token = current_run.set("the run")
    run.healer.attach(first=True)
    current_run.reset(token)
    assert run.watchdog._thread is not None
    run.watchdog._thread.join()
    run.detach()
    assert seen == [("self_healing watchdog", True, "the run")]


def test_the_signal_is_given_back_in_the_main_thread_alone(watching: Any) -> None:
    run = watching()
    run.healer.attach(first=True)
    number = run.watchdog._signal
    thread = threading.Thread(target=run.watchdog.stop)
    thread.start()
    thread.join()
    assert signal.getsignal(number) is run.watchdog._waker
    run.detach()
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_run_that_is_watched_is_not_watched_twice(watching: Any) -> None:
    run = watching()
    run.healer.attach(first=True)
    thread, number = run.watchdog._thread, run.watchdog._signal
    run.watchdog.start()
    assert (run.watchdog._thread, run.watchdog._signal) == (thread, number)


def test_outside_of_the_main_thread_a_hang_is_noticed_and_not_interrupted(watching: Any) -> None:
    run = watching()
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    thread = threading.Thread(target=run.healer.attach, args=(True,))
    thread.start()
    thread.join()
    assert run.watchdog.running
    assert run.watchdog._signal is None
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    run.hang("step")
    assert [incident.actions for incident in run.journal.incidents] == [[Action.WRITE_STACKS]]


@pytest.mark.parametrize(("floor", "interval"), [(300.0, 1.0), (0.5, 0.05)])
def test_it_is_looked_ten_times_within_the_shortest_limit_and_once_a_second_at_least(
    watching: Any, floor: float, interval: float
) -> None:
    run = watching(hang_floor_seconds=floor)
    run.healer.attach(first=True)
    assert run.watchdog._interval == interval
