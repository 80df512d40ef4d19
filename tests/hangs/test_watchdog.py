"""Hangs: noticed by learned limits, written down, interrupted and recovered, or left by a restart; no false alarms."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import gc
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from conftest import (
    assert_same_weights,
    build_tokenizer,
    grpo_trainer,
    journal,
    logged,
    rloo_trainer,
    sft_trainer,
    weights,
)
from transformers import TrainerCallback

from self_healing import FailureType, HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.failures.classify import classify_exception
from self_healing.healers.data.guard import Guard
from self_healing.healers.data.sources import SourceReader
from self_healing.healers.hangs.watchdog import HangExits, TrainingHang, Watchdog
from self_healing.hf.sections import Heartbeat
from self_healing.journal.incident import Incident
from self_healing.journal.journal import Journal


# Short enough for a test, and longer than a step on a machine that does other things as well.
QUICK = {
    "hang_floor_seconds": 2.0,
    "hang_grace_seconds": 2.0,
    "hang_learning_steps": 2,
    # Data loader workers may take as long besides.
    "retry_total_seconds": 0.5,
}
FOREVER = 1000.0


def hangs(output_dir: Path) -> list[dict[str, Any]]:
    return [event for event in journal(output_dir, "detected") if event["symptom"] == "hang"]


def actions(output_dir: Path) -> list[str]:
    return [event["action"] for event in journal(output_dir, "action")]


def outcomes(output_dir: Path) -> list[str]:
    return [event["outcome"] for event in journal(output_dir, "outcome")]


def stacks(output_dir: Path) -> str:
    (path,) = (output_dir / "hangs").iterdir()
    return path.read_text()


def wait_until(happened: Callable[[], Any]) -> None:
    # However busy the machine is: a watchdog that gets no time of it counts none either.
    for _ in range(6000):
        if happened():
            return
        time.sleep(0.01)
    raise AssertionError("nothing has happened in a minute")


class Once:
    """Hangs at one call of something, counted from 1."""

    def __init__(self, call: int, hang: Callable[[], Any] = lambda: time.sleep(FOREVER)) -> None:
        self.call, self.hang = call, hang
        self.count = self.fired = 0

    def __call__(self, *_: Any, **__: Any) -> None:
        self.count += 1
        if self.count == self.call:
            self.fired += 1
            self.hang()


# ---- what is known of a part of a step ----


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def spend(heartbeat: Heartbeat, clock: Clock, name: str, *seconds: float) -> None:
    for each in seconds:
        heartbeat.enter(name)
        clock.now += each
        heartbeat.leave()


def limit(heartbeat: Heartbeat, name: str) -> float | None:
    return heartbeat.limit(heartbeat.sections[name], factor=10.0, floor=60.0)


def test_the_first_times_of_a_part_have_no_limit_but_half_an_hour_to_be_told_of(clock: Clock) -> None:
    heartbeat = Heartbeat(3, clock)
    spend(heartbeat, clock, "step", 1.0, 1.0)
    assert limit(heartbeat, "step") is None
    assert heartbeat.limit_at_first(heartbeat.sections["step"], 60.0) == 1800.0
    spend(heartbeat, clock, "step", 1.0)
    assert limit(heartbeat, "step") == 60.0


def test_a_stream_that_is_skipped_at_first_may_take_as_long_as_it_was_given(clock: Clock) -> None:
    heartbeat = Heartbeat(3, clock)
    heartbeat.be_patient("data", at_least=7200.0)
    assert heartbeat.limit_at_first(heartbeat.sections["data"], 60.0) == 7200.0


def test_one_checkpoint_and_one_evaluation_are_enough_to_know_them(clock: Clock) -> None:
    heartbeat = Heartbeat(3, clock)
    spend(heartbeat, clock, "save", 30.0)
    spend(heartbeat, clock, "evaluate", 20.0)
    assert limit(heartbeat, "save") == 300.0
    assert limit(heartbeat, "evaluate") == 200.0


def test_the_limit_is_a_multiple_of_the_longest_time_seen(clock: Clock) -> None:
    heartbeat = Heartbeat(3, clock)
    spend(heartbeat, clock, "step", 1.0, 1.0, 1.0, 9.0, 2.0)
    assert limit(heartbeat, "step") == 90.0


def test_what_only_the_first_times_took_is_not_multiplied(clock: Clock) -> None:
    heartbeat = Heartbeat(3, clock)
    spend(heartbeat, clock, "step", 300.0, 1.0, 1.0, 1.0)
    assert limit(heartbeat, "step") == 600.0


def test_each_part_counts_only_the_time_that_is_its_own(clock: Clock) -> None:
    heartbeat = Heartbeat(1, clock)
    for _ in range(2):
        heartbeat.enter("evaluate")
        clock.now += 10
        spend(heartbeat, clock, "prediction", 100.0)
        clock.now += 20
        heartbeat.leave()
    assert limit(heartbeat, "evaluate") == 200.0
    assert limit(heartbeat, "prediction") == 1000.0


def test_a_wait_on_purpose_is_neither_a_hang_nor_learned_from(clock: Clock) -> None:
    heartbeat = Heartbeat(1, clock)
    spend(heartbeat, clock, "step", 1.0)
    heartbeat.enter("step")
    with heartbeat.paused():
        assert heartbeat.waits_on_purpose
        clock.now += 1000
    heartbeat.leave()
    assert not heartbeat.waits_on_purpose
    assert limit(heartbeat, "step") == 60.0


def test_time_in_which_the_process_stood_still_is_not_learned_from(clock: Clock) -> None:
    heartbeat = Heartbeat(1, clock)
    heartbeat.stood_still = lambda beats, now: 1000.0
    spend(heartbeat, clock, "step", 1.0, 1008.0)
    assert limit(heartbeat, "step") == 80.0


def test_a_step_goes_on_where_it_is_not_known_whether_the_process_stood_still(clock: Clock) -> None:
    heartbeat = Heartbeat(1, clock)

    def fails(beats: int, now: float) -> float:
        raise ValueError("a bug")

    heartbeat.stood_still = fails
    spend(heartbeat, clock, "step", 1.0, 8.0)
    assert limit(heartbeat, "step") == 80.0


def test_after_a_reentry_everything_may_take_longer_once_more(clock: Clock) -> None:
    heartbeat = Heartbeat(1, clock)
    spend(heartbeat, clock, "data", 1.0, 1.0)
    heartbeat.begin()
    assert limit(heartbeat, "data") == 600.0
    spend(heartbeat, clock, "data", 1.0)
    assert limit(heartbeat, "data") == 60.0


def test_a_stream_may_take_as_long_to_skip_as_it_took_to_consume(clock: Clock) -> None:
    heartbeat = Heartbeat(1, clock)
    spend(heartbeat, clock, "data", 1.0, 1.0)
    heartbeat.begin()
    heartbeat.be_patient("data", at_least=36000.0)
    assert limit(heartbeat, "data") == 36000.0


def test_what_is_allowed_a_time_may_take_it_each_time(clock: Clock) -> None:
    heartbeat = Heartbeat(1, clock)
    heartbeat.allow("data", 960.0)
    spend(heartbeat, clock, "data", 1.0, 1.0)
    heartbeat.begin()
    spend(heartbeat, clock, "data", 1.0, 1.0)
    assert limit(heartbeat, "data") == 960.0


def test_what_an_earlier_process_waited_for_in_vain_is_given_twice_as_long(clock: Clock) -> None:
    heartbeat = Heartbeat(1, clock)
    heartbeat.has_taken("step", 90.0)
    spend(heartbeat, clock, "step", 1.0, 1.0)
    assert limit(heartbeat, "step") == 180.0


def test_loading_the_best_model_is_not_watched(clock: Clock) -> None:
    heartbeat = Heartbeat(1, clock)
    spend(heartbeat, clock, "load_best_model", 1.0, 1.0, 1.0)
    assert limit(heartbeat, "load_best_model") is None


@pytest.mark.parametrize("name", ["optimizer", "save", "judge"])
def test_what_must_not_be_left_half_done_is_never_interrupted(name: str) -> None:
    heartbeat = Heartbeat()
    assert heartbeat.may_be_interrupted
    heartbeat.enter(name)
    heartbeat.enter("step")
    assert not heartbeat.may_be_interrupted
    heartbeat.leave()
    heartbeat.leave()
    assert heartbeat.may_be_interrupted


def test_a_sign_of_life_costs_nothing_that_could_be_measured_beside_a_step() -> None:
    heartbeat = Heartbeat()
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1000):
            heartbeat.enter("step")
            heartbeat.leave()
        best = min(best, (time.perf_counter() - began) / 1000)
    # Four parts a step.
    assert best < 5e-6


# ---- waking the training thread ----


class Desk:
    """A watchdog with a section that is known, and what it did."""

    def __init__(
        self,
        directory: Path,
        recovers: bool = True,
        still_training: Callable[[Any], bool] = lambda frame: True,
        ending: bool = False,
        **settings: Any,
    ) -> None:
        config = HealingConfig(**{"hang_floor_seconds": 0.3, "hang_grace_seconds": 0.5, **settings})
        self.over = 0
        self.directory = directory
        self.heartbeat = Heartbeat(1)
        self.journal = Journal(directory, config, "run")
        self.watchdog = Watchdog(
            config,
            self.heartbeat,
            self.journal,
            may_recover=lambda: recovers,
            before_exit=lambda why: None,
            step=lambda: 7,
            still_training=still_training,
            at_the_end=lambda: ending,
            over=self._is_over,
            counts_attempts=lambda: False,
        )

    def claimed(self) -> list[Incident]:
        """The incident that an exception from `train()` would belong to."""
        claim = self.watchdog.claim(TrainingHang("")) if self.watchdog.has_claim else None
        return [] if claim is None else [claim.incident]

    def _is_over(self) -> None:
        self.over += 1

    def wait_between(self, until: Callable[[], Any]) -> None:
        """Between parts that are known, no sign of life until something has happened."""
        for _ in range(20):
            with self.heartbeat.section("step"):
                pass
        wait_until(until)

    def __enter__(self) -> Desk:
        self.watchdog.start()
        assert self.watchdog._thread is not None
        self._thread = self.watchdog._thread
        for _ in range(3):
            self.heartbeat.enter("step")
            self.heartbeat.leave()
        return self

    def __exit__(self, *_: Any) -> None:
        self.watchdog.stop()
        # What it was writing when training ended is written.
        self._thread.join(60.0)


def wait_for_a_queue() -> None:
    queue.Queue[int]().get()


def wait_for_a_queue_with_timeouts() -> None:
    while True:
        try:
            queue.Queue[int]().get(timeout=5.0)
        except queue.Empty:
            continue


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wait_for_an_event() -> None:
    threading.Event().wait()


def wait_for_a_process() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        process.wait()
    finally:
        process.kill()
        process.wait()


def wait_for_a_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


def wait_for_a_future() -> None:
    concurrent.futures.Future[int]().result()


def wait_in_a_loop_that_takes_every_error_for_its_own() -> None:
    while True:
        try:
            time.sleep(FOREVER)
        except Exception:
            logging.getLogger(__name__).info("trying again")


@pytest.mark.parametrize(
    "wait",
    [
        lambda: time.sleep(FOREVER),
        wait_for_a_queue,
        wait_for_a_queue_with_timeouts,
        wait_for_a_lock,
        wait_for_an_event,
        wait_for_a_process,
        wait_for_a_socket,
        wait_for_a_future,
        wait_in_a_loop_that_takes_every_error_for_its_own,
    ],
    ids=lambda wait: wait.__name__.removeprefix("wait_"),
)
def test_the_interrupt_wakes_what_waits(tmp_path: Path, wait: Callable[[], None]) -> None:
    began = time.monotonic()
    awaited = pytest.raises(TrainingHang, match="no sign of life from 'step'")
    with Desk(tmp_path) as desk, awaited, desk.heartbeat.section("step"):
        wait()
    assert time.monotonic() - began < 10
    assert desk.claimed() == desk.journal.incidents
    assert actions(tmp_path) == ["write_stacks", "interrupt"]


def test_what_wakes_it_is_classified_as_a_hang() -> None:
    assert classify_exception(TrainingHang("")) is FailureType.HANG


def test_an_interrupt_that_comes_late_does_not_strike_what_moves_again(tmp_path: Path) -> None:
    with Desk(tmp_path, hang_grace_seconds=30.0) as desk:
        number = desk.watchdog._signal
        assert number is not None
        signal.pthread_sigmask(signal.SIG_BLOCK, [number])
        with desk.heartbeat.section("step"):
            while number not in signal.sigpending():
                time.sleep(0.01)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        time.sleep(0.2)
    assert desk.claimed() == []
    assert outcomes(tmp_path) == ["self_recovered"]


def test_a_signal_from_somebody_else_strikes_nothing(tmp_path: Path) -> None:
    with Desk(tmp_path) as desk, desk.heartbeat.section("step"):
        number = desk.watchdog._signal
        assert number is not None
        signal.pthread_kill(threading.get_ident(), number)
        time.sleep(0.05)
    assert desk.claimed() == []


def test_cleaning_up_that_hangs_as_well_is_interrupted_again(tmp_path: Path) -> None:
    def wait_and_wait_again() -> None:
        try:
            time.sleep(FOREVER)
        finally:
            time.sleep(FOREVER)

    with Desk(tmp_path) as desk, pytest.raises(TrainingHang), desk.heartbeat.section("step"):
        wait_and_wait_again()
    assert len(hangs(tmp_path)) == 1
    assert actions(tmp_path).count("interrupt") == 2


def test_an_interrupt_that_was_swallowed_is_not_taken_for_the_next_exception(tmp_path: Path) -> None:
    with Desk(tmp_path) as desk:
        with desk.heartbeat.section("step"), contextlib.suppress(BaseException):
            time.sleep(FOREVER)
        for _ in range(100):
            with desk.heartbeat.section("step"):
                time.sleep(0.005)
    assert desk.claimed() == []
    assert outcomes(tmp_path) == ["self_recovered"]


def blocked_in_c(seconds: float) -> None:
    """Waits for a mutex in native code, which no signal wakes."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    until = (ctypes.c_long * 2)(int(time.time() + seconds), 0)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, until)  # blocked here


@pytest.mark.slow
def test_without_a_launcher_a_thread_blocked_in_c_is_left_alone_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Desk(tmp_path) as desk, desk.heartbeat.section("step"):
        blocked_in_c(4.0)
    assert actions(tmp_path) == ["write_stacks", "interrupt"]
    assert outcomes(tmp_path) == ["self_recovered"]
    assert desk.claimed() == []
    assert "does not respond to an interrupt" in caplog.text
    assert "Still no sign of life from 'step'" in caplog.text


@pytest.mark.slow
def test_alerts_come_at_ever_longer_intervals(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Desk(tmp_path, hang_action="notify") as desk, desk.heartbeat.section("step"):
        time.sleep(3.5)
    # After 0.3 s, 0.6, 1.2, 2.4.
    assert 2 <= caplog.text.count("Still no sign of life") <= 3


def test_a_failure_of_the_watchdog_is_logged_and_harms_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Desk(tmp_path, hang_action="notify") as desk:
        desk.heartbeat.limit = lambda *_: 1 / 0  # type: ignore[method-assign]
        with desk.heartbeat.section("step"):
            time.sleep(0.3)
        assert desk.watchdog.running
    assert caplog.text.count("The watchdog for hangs failed") == 1


def test_stacks_that_cannot_be_written_do_not_stop_the_recovery(tmp_path: Path) -> None:
    (tmp_path / "hangs").write_text("in the way")
    with Desk(tmp_path) as desk, pytest.raises(TrainingHang), desk.heartbeat.section("step"):
        time.sleep(FOREVER)
    assert "write_stacks" not in desk.journal.incidents[0].actions


def test_a_disk_that_hangs_as_well_does_not_stop_the_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("self_healing.healers.hangs.watchdog._BOUND", 0.5)
    began = time.monotonic()
    with Desk(tmp_path) as desk:
        desk.journal.open = lambda *_, **__: time.sleep(30)  # type: ignore[assignment,method-assign,func-returns-value]
        with pytest.raises(TrainingHang), desk.heartbeat.section("step"):
            time.sleep(FOREVER)
    assert desk.claimed() == []
    assert time.monotonic() - began < 15


def test_handlers_and_thread_are_gone_afterwards(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with Desk(tmp_path) as desk:
        assert any(thread.name == "self_healing watchdog" for thread in threading.enumerate())
        assert desk.watchdog._signal is not None
    time.sleep(0.2)
    assert not any(thread.name == "self_healing watchdog" for thread in threading.enumerate())
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


def test_a_handler_that_somebody_else_has_installed_meanwhile_is_left_in_place(tmp_path: Path) -> None:
    with Desk(tmp_path) as desk:
        number = desk.watchdog._signal
        assert number is not None
        signal.signal(number, signal.SIG_IGN)
    assert signal.getsignal(number) == signal.SIG_IGN
    signal.signal(number, signal.SIG_DFL)


# ---- runs that end without a word, and those that come to their end ----


def test_what_comes_after_a_train_that_raised_is_no_hang(tmp_path: Path) -> None:
    with Desk(tmp_path, recovers=False, still_training=lambda frame: False, launcher_restarts="yes") as desk:
        desk.wait_between(lambda: not desk.watchdog.running)
        assert desk.over == 1
    assert not hangs(tmp_path)


def test_a_run_that_ended_without_a_word_keeps_neither_watchdog_nor_signal(tmp_path: Path) -> None:
    left_behind = Desk(tmp_path, still_training=lambda frame: False).__enter__()
    number, forgotten = left_behind.watchdog._signal, weakref.ref(left_behind.watchdog)
    left_behind.wait_between(lambda: not (there := forgotten()) or not there.running)
    del left_behind
    gc.collect()
    assert forgotten() is None
    with Desk(tmp_path) as next_run:
        assert next_run.watchdog._signal == number
    assert signal.getsignal(number) == signal.SIG_DFL


def test_after_the_last_step_nothing_is_interrupted_or_ended(tmp_path: Path) -> None:
    with Desk(tmp_path, ending=True, launcher_restarts="yes") as desk:
        desk.wait_between(lambda: actions(tmp_path))
    assert actions(tmp_path) == ["write_stacks"]
    assert outcomes(tmp_path) == ["self_recovered"]


def test_a_hang_that_is_over_while_it_is_reported_has_one_outcome(tmp_path: Path) -> None:
    with Desk(tmp_path, ending=True) as desk:
        stopping, closed = threading.Thread(target=desk.watchdog.stop), desk.journal.closed

        def stop_meanwhile(_: Incident) -> None:
            stopping.start()
            wait_until(desk.watchdog._stopping.is_set)

        def written_slowly(*args: Any) -> None:
            time.sleep(0.5)
            closed(*args)

        desk.journal.notify, desk.journal.closed = stop_meanwhile, written_slowly  # type: ignore[method-assign]
        desk.wait_between(lambda: outcomes(tmp_path))
        stopping.join()
    assert outcomes(tmp_path) == ["self_recovered"]


def test_the_first_time_of_a_part_that_hangs_is_told_of_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    settings = {"hang_floor_seconds": 0.05, "hang_grace_seconds": 0.1}
    with Desk(tmp_path, **settings) as desk, desk.heartbeat.section("evaluate"):
        wait_until(lambda: actions(tmp_path))
    assert actions(tmp_path) == ["write_stacks"]
    assert outcomes(tmp_path) == ["self_recovered"]
    assert "no sign of life from 'evaluate'" in caplog.text
    assert "test_watchdog.py" in stacks(tmp_path)


def test_ranks_that_hang_together_write_their_stacks_side_by_side(tmp_path: Path) -> None:
    for rank in (0, 1):
        with Desk(tmp_path, ending=True) as desk:
            desk.journal.rank = rank
            desk.wait_between(lambda journal=desk.journal: journal.incidents and journal.incidents[0].actions)
    names = sorted(path.name for path in (tmp_path / "hangs").iterdir())
    assert names == ["run-001-stacks.txt", "run-001.rank1-stacks.txt"]


def test_where_an_exit_has_not_helped_the_next_process_is_not_ended_again(tmp_path: Path) -> None:
    HangExits(tmp_path).note_exit(7, "between", 0.1)
    with Desk(tmp_path, recovers=False, launcher_restarts="yes") as desk:
        desk.wait_between(lambda: actions(tmp_path))
    assert actions(tmp_path) == ["write_stacks"]


def test_what_an_earlier_process_of_the_job_waited_for_is_known(tmp_path: Path) -> None:
    memory = HangExits(tmp_path)
    memory.note_exit(7, "between", 90.0)
    restarted = HealingConfig(launcher_restarts="yes")
    assert HangExits(tmp_path).read(restarted) == {"between": 90.0}
    assert HangExits(tmp_path).read(HealingConfig()) == {}, "of another run in the same directory"
    memory.path.write_text("{")
    assert HangExits(tmp_path).read(restarted) == {}


def test_with_workers_the_data_may_take_as_long_as_attempts_are_made_there(tmp_path: Path, tokenizer: Any) -> None:
    callback = SelfHealingCallback(HealingConfig(retry_total_seconds=500.0, hang_floor_seconds=50.0))
    sft_trainer(tmp_path, tokenizer, max_steps=1, dataloader_num_workers=1, callbacks=[callback]).train()
    assert callback.run is not None
    assert callback.run.context.heartbeat.sections["data"].allowed == 550.0


def test_reading_a_stream_up_to_where_it_was_gives_signs_of_life() -> None:
    signs: list[int] = []

    class Stream:
        def __init__(self) -> None:
            self.failed = False

        def __iter__(self) -> Any:
            for number in range(10):
                if number == 6 and not self.failed:
                    self.failed = True
                    raise ConnectionError("reset")
                yield number

    guard = Guard(SimpleNamespace(), 0, retry=retried)  # type: ignore[arg-type]
    guard.alive = lambda: signs.append(1)
    stream = Stream()
    assert list(SourceReader(lambda: iter(stream), guard, lambda ordinal: {})) == list(range(10))
    assert len(signs) == 6


def retried(attempt: Callable[[], Any]) -> Any:
    try:
        return attempt()
    except ConnectionError:
        return attempt()


# ---- real runs: recovered in process ----


@pytest.mark.parametrize("workers", [0, 2])
def test_a_hang_in_the_data_loader_costs_no_step(tmp_path: Path, tokenizer: Any, workers: int) -> None:
    arguments = {"max_steps": 8, "dataloader_num_workers": workers}
    clean = sft_trainer(tmp_path / "clean", tokenizer, **arguments)
    expected = clean.train()
    trainer = sft_trainer(tmp_path / "healed", tokenizer, **arguments)
    collate, hung = trainer.data_collator, tmp_path / "hung"
    row = trainer.train_dataset[30]["input_ids"]

    def collate_or_hang(examples: list[dict[str, Any]]) -> Any:
        if not hung.exists() and any(example["input_ids"] == row for example in examples):
            hung.touch()
            time.sleep(FOREVER)  # hangs here
        return collate(examples)

    trainer.data_collator = collate_or_hang
    began = time.monotonic()
    output = SelfHealingTrainer(trainer, HealingConfig(**QUICK)).train()
    assert time.monotonic() - began < 30
    assert hung.exists()
    assert_same_weights(weights(trainer), weights(clean))
    assert logged(trainer) == logged(clean)
    assert output.global_step == expected.global_step
    (hang,) = hangs(tmp_path / "healed")
    assert hang["evidence"]["section"] == "data"
    assert actions(tmp_path / "healed") == ["write_stacks", "interrupt", "emergency_checkpoint", "resume"]
    assert outcomes(tmp_path / "healed") == ["resolved"]
    assert "in collate_or_hang" in stacks(tmp_path / "healed")
    (diagnosis,) = journal(tmp_path / "healed", "diagnosed")
    assert "in collate_or_hang" in diagnosis["evidence"]["diagnosis"]
    assert not psutil.Process().children(recursive=True), "workers that hang are ended"
    (interrupt,) = [event for event in journal(tmp_path / "healed", "action") if event["action"] == "interrupt"]
    again = journal(tmp_path / "healed", "run_started")[1]
    assert again["time"] - interrupt["time"] < 5, "torch alone would wait 5 s for each worker that hangs"


@pytest.mark.slow
def test_persistent_workers_that_hang_in_an_evaluation_are_replaced(tmp_path: Path, tokenizer: Any) -> None:
    others = sft_trainer(tmp_path / "data", tokenizer, texts=["nothing like the others"] * 4)
    trainer = sft_trainer(
        tmp_path / "healed",
        tokenizer,
        trainer_kwargs={"eval_dataset": others.train_dataset},
        max_steps=6,
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
        eval_strategy="steps",
        eval_steps=2,
    )
    collate, evaluations = trainer.data_collator, tmp_path / "evaluations"
    row = others.train_dataset[0]["input_ids"]

    def collate_or_hang(examples: list[dict[str, Any]]) -> Any:
        if examples[0]["input_ids"] == row:
            with evaluations.open("a") as file:
                file.write("x")
            if evaluations.stat().st_size == 2:
                time.sleep(FOREVER)
        return collate(examples)

    trainer.data_collator = collate_or_hang
    output = SelfHealingTrainer(trainer, HealingConfig(**QUICK)).train()
    assert evaluations.stat().st_size == 4
    assert output.global_step == 6
    assert [event["evidence"]["section"] for event in hangs(tmp_path / "healed")] == ["evaluate"]
    assert outcomes(tmp_path / "healed") == ["resolved"]


@pytest.mark.heals("hang", "wrapper")
def test_a_hang_in_the_forward_costs_no_step(tmp_path: Path, tokenizer: Any) -> None:
    clean = sft_trainer(tmp_path / "clean", tokenizer)
    clean.train()
    trainer = sft_trainer(tmp_path / "healed", tokenizer)
    fault = Once(8, wait_for_a_lock)
    trainer.model.model.norm.register_forward_pre_hook(fault)
    SelfHealingTrainer(trainer, HealingConfig(**QUICK)).train()
    assert fault.fired == 1
    assert_same_weights(weights(trainer), weights(clean))
    assert [event["evidence"]["section"] for event in hangs(tmp_path / "healed")] == ["step"]
    assert outcomes(tmp_path / "healed") == ["resolved"]


class Event(TrainerCallback):
    """Does something in one event."""

    def __init__(self, name: str, action: Callable[..., None]) -> None:
        setattr(self, name, lambda args, state, control, **kwargs: action())


@pytest.mark.parametrize(
    "event",
    [
        pytest.param("on_step_begin", marks=pytest.mark.slow),
        pytest.param("on_step_end", marks=pytest.mark.slow),
        pytest.param("on_log", marks=pytest.mark.slow),
    ],
)
def test_a_callback_that_hangs_costs_no_step(tmp_path: Path, tokenizer: Any, event: str) -> None:
    clean = sft_trainer(tmp_path / "clean", tokenizer, max_steps=8)
    clean.train()
    fault = Once(6)
    trainer = sft_trainer(tmp_path / "healed", tokenizer, max_steps=8, callbacks=[Event(event, fault)])
    SelfHealingTrainer(trainer, HealingConfig(**QUICK)).train()
    assert fault.fired == 1
    assert_same_weights(weights(trainer), weights(clean))
    assert logged(trainer) == logged(clean)
    assert outcomes(tmp_path / "healed") == ["resolved"]


@pytest.mark.parametrize("build", [grpo_trainer, pytest.param(rloo_trainer, marks=pytest.mark.slow)])
def test_a_reward_that_hangs_is_interrupted(tmp_path: Path, tokenizer: Any, build: Any) -> None:
    fault = Once(4)
    trainer = build(tmp_path / "healed", tokenizer, max_steps=6)

    def reward(completions: list[str], **_: Any) -> list[float]:
        fault()
        return [float(len(text)) for text in completions]

    trainer.reward_funcs = [reward]
    output = SelfHealingTrainer(trainer, HealingConfig(**QUICK)).train()
    assert fault.fired == 1
    assert output.global_step == 6
    (hang,) = hangs(tmp_path / "healed")
    assert hang["evidence"]["section"] == "rewards"
    assert "in reward" in stacks(tmp_path / "healed")


@pytest.mark.slow
def test_something_slow_that_was_mistaken_for_a_hang_gets_more_time_the_second_time(
    tmp_path: Path, tokenizer: Any
) -> None:
    calls = 0

    def slow_from_the_sixth_step_on() -> None:
        nonlocal calls
        calls += 1
        if calls in (6, 7):
            time.sleep(4)

    callback = Event("on_step_end", slow_from_the_sixth_step_on)
    trainer = sft_trainer(tmp_path / "run", tokenizer, max_steps=8, callbacks=[callback])
    output = SelfHealingTrainer(trainer, HealingConfig(**QUICK)).train()
    assert output.global_step == 8
    assert len(hangs(tmp_path / "run")) == 1


# ---- real runs: not interrupted ----


def test_a_hang_in_the_optimizer_is_not_interrupted(tmp_path: Path, tokenizer: Any) -> None:
    clean = sft_trainer(tmp_path / "clean", tokenizer)
    clean.train()
    trainer = sft_trainer(tmp_path / "run", tokenizer)
    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(Once(5, lambda: time.sleep(4)))
    SelfHealingTrainer(trainer, HealingConfig(**QUICK)).train()
    assert_same_weights(weights(trainer), weights(clean))
    assert [event["evidence"]["section"] for event in hangs(tmp_path / "run")] == ["optimizer"]
    assert actions(tmp_path / "run") == ["write_stacks"]
    assert outcomes(tmp_path / "run") == ["self_recovered"]


@pytest.mark.slow
def test_a_hang_in_saving_is_not_interrupted(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path / "run", tokenizer, save_strategy="steps", save_steps=2)
    original, fault = trainer._save_rng_state, Once(2, lambda: time.sleep(5))
    trainer._save_rng_state = lambda directory: (fault(), original(directory))
    SelfHealingTrainer(trainer, HealingConfig(**QUICK, hang_factor=1.0)).train()
    assert [event["evidence"]["section"] for event in hangs(tmp_path / "run")] == ["save"]
    assert actions(tmp_path / "run") == ["write_stacks"]
    assert (tmp_path / "run" / "checkpoint-4" / "trainer_state.json").exists()


@pytest.mark.heals("hang", "callback", partly="reported, with the stacks of all threads")
@pytest.mark.parametrize(
    "wrapped",
    [pytest.param(True, id="notify"), pytest.param(False, id="callback alone")],
)
@pytest.mark.slow
def test_where_nothing_is_interrupted_the_hang_is_told_of(tmp_path: Path, tokenizer: Any, wrapped: bool) -> None:
    told: list[Incident] = []

    class Listener(TrainerCallback):
        def on_instability(self, args: Any, state: Any, control: Any, incident: Incident, **kwargs: Any) -> None:
            told.append(incident)

    clean = sft_trainer(tmp_path / "clean", tokenizer)
    clean.train()
    config = HealingConfig(**QUICK, hang_action="notify" if wrapped else "recover")
    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[SelfHealingCallback(config), Listener()])
    trainer.model.model.norm.register_forward_pre_hook(Once(8, lambda: time.sleep(4)))
    if wrapped:
        SelfHealingTrainer(trainer).train()
    else:
        trainer.train()
    assert_same_weights(weights(trainer), weights(clean))
    assert actions(tmp_path / "run") == ["write_stacks"]
    assert outcomes(tmp_path / "run") == ["self_recovered"]
    assert [incident.failure for incident in told] == [FailureType.HANG]


def test_switched_off_nothing_watches(tmp_path: Path, tokenizer: Any) -> None:
    seen: list[str] = []
    look = Event("on_step_end", lambda: seen.extend(thread.name for thread in threading.enumerate()))
    trainer = sft_trainer(tmp_path / "run", tokenizer, max_steps=2, callbacks=[look])
    SelfHealingTrainer(trainer, HealingConfig(hang_action="off")).train()
    assert seen
    assert "self_healing watchdog" not in seen


def test_the_watchdog_ends_with_a_run_that_fails(tmp_path: Path, tokenizer: Any) -> None:
    def fail() -> None:
        raise ValueError("a mistake")

    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[Event("on_step_end", fail)])
    with pytest.raises(ValueError, match="a mistake"):
        SelfHealingTrainer(trainer, HealingConfig(**QUICK)).train()
    time.sleep(0.5)
    assert not any(thread.name == "self_healing watchdog" for thread in threading.enumerate())


# ---- no false alarms ----


def test_a_healthy_run_is_left_as_it_is(tmp_path: Path, tokenizer: Any) -> None:
    clean = sft_trainer(tmp_path / "clean", tokenizer)
    clean.train()
    trainer = sft_trainer(tmp_path / "run", tokenizer)
    SelfHealingTrainer(trainer, HealingConfig(**QUICK)).train()
    assert_same_weights(weights(trainer), weights(clean))
    assert not (tmp_path / "run" / "hangs").exists()


@pytest.mark.slow
def test_first_steps_that_compile_are_no_hang(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path / "run", tokenizer)
    trainer.model.model.norm.register_forward_pre_hook(Once(1, lambda: time.sleep(4)))
    SelfHealingTrainer(trainer, HealingConfig(**QUICK)).train()
    assert not hangs(tmp_path / "run")


@pytest.mark.slow
def test_a_slow_run_that_moves_is_no_hang(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path / "run", tokenizer, max_steps=3)
    trainer.model.model.norm.register_forward_pre_hook(lambda *_: time.sleep(1.5))
    SelfHealingTrainer(trainer, HealingConfig(**QUICK, hang_factor=3.0)).train()
    assert not hangs(tmp_path / "run")


@pytest.mark.slow
def test_evaluations_and_checkpoints_that_take_long_each_time_are_no_hang(tmp_path: Path, tokenizer: Any) -> None:
    def measure(_: Any) -> dict[str, float]:
        time.sleep(3)
        return {}

    arguments = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    clean = sft_trainer(tmp_path / "data", tokenizer)
    trainer = sft_trainer(
        tmp_path / "run",
        tokenizer,
        trainer_kwargs={"eval_dataset": clean.train_dataset.select(range(4)), "compute_metrics": measure},
        **arguments,
    )
    original = trainer._save_rng_state
    trainer._save_rng_state = lambda directory: (time.sleep(3), original(directory))
    SelfHealingTrainer(trainer, HealingConfig(**QUICK)).train()
    assert not hangs(tmp_path / "run")


def test_waiting_before_another_attempt_is_no_hang(tmp_path: Path) -> None:
    with Desk(tmp_path) as desk, desk.heartbeat.section("step"):
        desk.heartbeat.pausing(time.sleep)(1.5)
    assert not hangs(tmp_path)


# ---- in a process of its own ----


def child(function: Callable[[str], None], directory: Path, **environment: str) -> subprocess.Popen[str]:
    code = f"import sys, test_watchdog; test_watchdog.{function.__name__}(sys.argv[1])"
    paths = os.pathsep.join(str(each) for each in list(Path(__file__).parents)[:3])
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(directory)],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train_and_block_in_c(directory: str) -> None:
    trainer = sft_trainer(Path(directory), build_tokenizer())
    trainer.model.model.norm.register_forward_pre_hook(Once(8, lambda: blocked_in_c(FOREVER)))
    SelfHealingTrainer(trainer, HealingConfig(**QUICK, launcher_restarts="yes")).train()


def train_and_hang_in_the_optimizer(directory: str) -> None:
    trainer = sft_trainer(Path(directory), build_tokenizer())
    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(Once(5))
    SelfHealingTrainer(trainer, HealingConfig(**QUICK)).train()


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "here",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
}


@pytest.mark.parametrize(
    ("run", "environment", "line"),
    [
        pytest.param(train_and_block_in_c, {}, "in blocked_in_c", marks=pytest.mark.slow),
        pytest.param(train_and_hang_in_the_optimizer, TORCHRUN, "time.sleep(FOREVER)", marks=pytest.mark.slow),
    ],
    ids=["blocked in native code", "in the optimizer, under torchrun"],
)
def test_what_no_interrupt_ends_is_left_by_a_restart(
    tmp_path: Path, run: Any, environment: dict[str, str], line: str
) -> None:
    process = child(run, tmp_path, **environment)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    (hang,) = hangs(tmp_path)
    written = journal(tmp_path)
    assert written[-1]["time"] - hang["time"] < 20
    assert actions(tmp_path)[-1] == "exit_for_restart"
    assert line in stacks(tmp_path)
    assert line in hang["evidence"]["waits_at"]


def train_slowly(directory: str) -> None:
    def note() -> None:
        Path(directory, "moving").touch()
        time.sleep(0.2)

    trainer = sft_trainer(Path(directory), build_tokenizer(), max_steps=40, callbacks=[Event("on_step_end", note)])
    SelfHealingTrainer(trainer, HealingConfig(**QUICK, launcher_restarts="yes")).train()


@pytest.mark.slow
def test_a_process_that_was_stopped_goes_on_without_an_alarm(tmp_path: Path) -> None:
    process = child(train_slowly, tmp_path)
    for _ in range(600):
        if (tmp_path / "moving").exists():
            break
        time.sleep(0.1)
    time.sleep(1.5)
    process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert not hangs(tmp_path)
