"""Hangs: noticed by learned limits, written down, interrupted and recovered, or left by a restart; no false alarms."""

from __future__ import annotations

import ctypes
import functools
import logging
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from conftest import (
    assert_same_weights,
    journal,
    logged,
    sft_trainer,
    slowly,
    weights,
)
from constants import settings_among
from transformers import TrainerCallback

from self_healing import FailureType, HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.healers.assembly import assemble
from self_healing.healers.hangs import watchdog
from self_healing.healers.hangs.healer import HangWatch
from self_healing.healers.hangs.watchdog import TrainingHang
from self_healing.hf.sections import Heartbeat
from self_healing.journal.incident import Incident


# Short enough for a test, and longer than a step on a machine that does other things as well.
QUICK = {"hang_floor_seconds": 2.0, "api_retry_max_delay": 0.0, "api_retry_base_delay": 0.0}
FOREVER = 1000.0


@pytest.fixture(autouse=True)
def constants(monkeypatch: pytest.MonkeyPatch) -> None:
    # Data loader workers may take as long as a call besides.
    settings_among({"GRACE_SECONDS": 2.0, "LEARNING_STEPS": 2, "LONGEST_CALL": 0.5}, monkeypatch.setattr)


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


def test_a_part_may_take_a_multiple_of_the_longest_time_seen_and_what_waits_on_purpose_does_not_count() -> None:
    seconds = [100.0]
    heartbeat = Heartbeat(3, lambda: seconds[0])

    def spend(*each: float) -> float | None:
        for more in each:
            with heartbeat.section("step"):
                seconds[0] += more
        return heartbeat.limit(heartbeat.sections["step"], factor=10.0, floor=60.0)

    # At first there is none, but half an hour to be told of.
    assert spend(1.0, 1.0) is None
    assert heartbeat.limit_at_first(heartbeat.sections["step"], 60.0) == 1800.0
    assert spend(1.0) == 60.0
    with heartbeat.section("step"), heartbeat.paused():
        assert heartbeat.waits_on_purpose
        seconds[0] += 1000
    assert not heartbeat.waits_on_purpose
    assert spend(9.0, 2.0) == 90.0


# ---- waking the training thread ----


class Desk:
    """A watchdog with a section that is known, and what it did."""

    def __init__(self, directory: Path, ending: bool = False, **settings: Any) -> None:
        config = HealingConfig(**settings_among({"hang_floor_seconds": 0.3, "GRACE_SECONDS": 0.5, **settings}))
        self.run: Any = assemble(config, directory, run_id="run", wrapped=True)
        self.run.heartbeat = self.heartbeat = Heartbeat(1)
        trainer = SimpleNamespace(control=SimpleNamespace(should_training_stop=ending))
        self.run.attached = SimpleNamespace(view=SimpleNamespace(step=7, last_step_done=False), trainer=trainer)
        self.journal = self.run.journal
        self.watch = HangWatch(self.run, None)
        self.watchdog = self.watch._watchdog

    def claimed(self) -> list[Incident]:
        """The incident that an exception from `train()` would belong to."""
        claim = self.watch.claim(TrainingHang(""))
        return [] if claim is None else [claim.incident]

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


def wait_in_a_loop_that_takes_every_error_for_its_own() -> None:
    while True:
        try:
            time.sleep(FOREVER)
        except Exception:
            logging.getLogger(__name__).info("trying again")


@pytest.mark.parametrize(
    "wait",
    [
        wait_for_a_queue_with_timeouts,
        *slowly(wait_for_a_process, wait_for_a_socket),
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


def test_an_interrupt_that_comes_late_does_not_strike_what_moves_again(tmp_path: Path) -> None:
    with Desk(tmp_path, GRACE_SECONDS=30.0) as desk:
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


def test_stacks_that_cannot_be_written_do_not_stop_the_recovery(tmp_path: Path) -> None:
    (tmp_path / "hangs").write_text("in the way")
    with Desk(tmp_path) as desk, pytest.raises(TrainingHang), desk.heartbeat.section("step"):
        time.sleep(FOREVER)
    assert "write_stacks" not in desk.journal.incidents[0].actions


def test_a_disk_that_hangs_as_well_does_not_stop_the_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_bounded", functools.partial(watchdog.within, 0.5))
    began = time.monotonic()
    with Desk(tmp_path) as desk:
        desk.journal.open = lambda *_, **__: time.sleep(FOREVER)
        with pytest.raises(TrainingHang), desk.heartbeat.section("step"):
            time.sleep(FOREVER)
    assert desk.claimed() == []
    assert time.monotonic() - began < 15


# ---- runs that end without a word, and those that come to their end ----


def test_after_the_last_step_nothing_is_interrupted_or_ended(tmp_path: Path) -> None:
    with Desk(tmp_path, ending=True, launcher_restarts="yes") as desk:
        desk.wait_between(lambda: actions(tmp_path))
    assert actions(tmp_path) == ["write_stacks"]
    assert outcomes(tmp_path) == ["self_recovered"]


def test_the_first_time_of_a_part_that_hangs_is_told_of_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    settings = {"hang_floor_seconds": 0.05, "GRACE_SECONDS": 0.1}
    with Desk(tmp_path, **settings) as desk, desk.heartbeat.section("evaluate"):
        wait_until(lambda: actions(tmp_path))
    assert actions(tmp_path) == ["write_stacks"]
    assert outcomes(tmp_path) == ["self_recovered"]
    assert "no sign of life from 'evaluate'" in caplog.text
    assert "test_watchdog.py" in stacks(tmp_path)


# ---- real runs: recovered in process ----


@pytest.mark.parametrize("workers", [0, *slowly(2)])
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
    # The one that ranks of other tests are forked from.
    there = psutil.Process().children(recursive=True)
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
    if workers == 0:
        assert "in collate_or_hang" in stacks(tmp_path / "healed")
        (diagnosis,) = journal(tmp_path / "healed", "diagnosed")
        assert "in collate_or_hang" in diagnosis["evidence"]["diagnosis"]
    assert psutil.Process().children(recursive=True) == there, "workers that hang are ended"
    (interrupt,) = [event for event in journal(tmp_path / "healed", "action") if event["action"] == "interrupt"]
    again = journal(tmp_path / "healed", "run_started")[1]
    assert again["time"] - interrupt["time"] < 5, "torch alone would wait 5 s for each worker that hangs"


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


# ---- real runs: not interrupted ----


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
    config = HealingConfig(**QUICK, on_hang="notify" if wrapped else "recover")
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


# ---- no false alarms ----


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


# ---- in a process of its own ----


@pytest.mark.slow
def test_a_hang_in_the_optimizer_is_left_by_a_restart(tmp_path: Path, until_it_ends: Callable[..., list[int]]) -> None:
    job, config = tmp_path / "job", {**QUICK, "GRACE_SECONDS": 1.0, "LEARNING_STEPS": 2}
    assert until_it_ends(job, 2, fault="hang_in_optimizer", step=5, config=config) == [75, 0]
    assert len(hangs(job)) == 1
    assert actions(job)[-1] == "exit_for_restart"
    assert "in hang" in stacks(job)
