"""Preemption: SIGTERM and SIGUSR1."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    TEXTS,
    EvalLoss,
    RaisingForward,
    assert_same_weights,
    best_model_trainer,
    job_result,
    journal,
    logged,
    losses,
    lost_connection,
    sft_trainer,
    slowly,
    weights,
)
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.run.record import ExitReason, RunRecord


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    found = signal.getsignal(signal.SIGINT)
    # What a shell starts in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    after = {signum: signal.getsignal(signum) for signum in before}
    for signum, handler in {**before, signal.SIGINT: found}.items():
        signal.signal(signum, handler)
    assert after == before


class SignalAt(TrainerCallback):
    """Sends a signal to the process in the middle of a step."""

    def __init__(self, step: int, signum: signal.Signals = signal.SIGTERM, seconds: float = 0.0) -> None:
        self.step, self.signum, self.seconds = step, signum, seconds

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.signum)
            time.sleep(self.seconds)


@pytest.mark.heals("preemption", "wrapper")
@pytest.mark.parametrize(("signum", "code"), [("sigterm", 143), pytest.param("sigusr1", 75, marks=pytest.mark.slow)])
def test_the_step_is_finished_and_saved_and_the_restart_goes_on_bitwise(
    tmp_path: Path,
    start: Callable[..., int],
    until_it_ends: Callable[..., list[int]],
    signum: str,
    code: int,
) -> None:
    plain, job = tmp_path / "plain", tmp_path / "job"
    assert start(plain) == 0
    began = time.monotonic()
    assert until_it_ends(job, 3, fault=signum, step=5) == [code, 0]
    assert time.monotonic() - began < 60
    assert (job / "checkpoint-6").is_dir()
    assert [event["path"] for event in journal(job, "checkpoint_chosen")] == [str(job / "checkpoint-6")]
    assert job_result(job)["weights"] == job_result(plain)["weights"]
    assert job_result(job)["losses"] == job_result(plain)["losses"]
    (incident,) = job_result(job)["incidents"]
    assert (incident["failure"], incident["actions"], incident["steps_lost"]) == (
        "preempted",
        ["save_and_leave"],
        0,
    )


@pytest.mark.slow
def test_a_step_that_takes_too_long_is_left_and_the_state_before_it_saved(
    tmp_path: Path, start: Callable[..., int], until_it_ends: Callable[..., list[int]]
) -> None:
    plain, job = tmp_path / "plain", tmp_path / "job"
    assert start(plain) == 0
    began = time.monotonic()
    codes = until_it_ends(job, 3, fault="slow_sigterm", step=5, config={"preemption_deadline": 6.0})
    assert codes == [143, 0]
    # The step sleeps for 60 s.
    assert time.monotonic() - began < 40
    assert (job / "checkpoint-5").is_dir()
    assert job_result(job)["weights"] == job_result(plain)["weights"]


@pytest.mark.slow
def test_at_the_deadline_the_process_ends_whatever_it_does(tmp_path: Path, start: Callable[..., int]) -> None:
    job = tmp_path / "job"
    began = time.monotonic()
    assert start(job, fault="deaf_sigterm", step=5, config={"preemption_deadline": 3.0}) == 143
    assert time.monotonic() - began < 30
    (event,) = journal(job, "preemption_deadline")
    assert "within 3 s of SIGTERM" in event["why"]
    assert start(job, restarts=1, config={"preemption_deadline": 3.0}) == 0
    assert [event["path"] for event in journal(job, "checkpoint_chosen")] == [str(job / "checkpoint-4")]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_first_ctrl_c_finishes_the_step_and_saves_it(
    tmp_path: Path, tokenizer: Any, capfd: pytest.CaptureFixture[str], wrapped: bool
) -> None:
    plain = sft_trainer(tmp_path / "plain", tokenizer)
    plain.train()
    callbacks = [SignalAt(2, signal.SIGINT), *([] if wrapped else [SelfHealingCallback()])]
    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=callbacks)
    with pytest.raises(KeyboardInterrupt):
        (SelfHealingTrainer(trainer) if wrapped else trainer).train()
    told = capfd.readouterr().err
    assert "Ctrl-C: the step is finished and saved first. Once more, and the run stops at once." in told
    assert trainer.state.global_step == 3
    (incident,) = journal(tmp_path / "run", "diagnosed")
    assert (incident["failure"], incident["cause"]) == ("preempted", "Ctrl-C")

    again = sft_trainer(tmp_path / "run", tokenizer)
    SelfHealingTrainer(again).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert_same_weights(weights(again), weights(plain))


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, tokenizer: Any) -> None:
    class Twice(SignalAt):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_substep_end(*args, **kwargs)
            super().on_substep_end(*args, **kwargs)

    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[Twice(2, signal.SIGINT)])
    with pytest.raises(KeyboardInterrupt):
        SelfHealingTrainer(trainer).train()
    assert trainer.state.global_step == 2
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_handler_of_ctrl_c_that_a_program_has_stays_its_own(tmp_path: Path, tokenizer: Any) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: came.append(signum))
    try:
        trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[SignalAt(2, signal.SIGINT)])
        SelfHealingTrainer(trainer).train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert came
    assert trainer.state.global_step == 6


def test_a_preempted_run_leaves_with_system_exit(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[SignalAt(2)])
    with pytest.raises(SystemExit) as left:
        SelfHealingTrainer(trainer).train()
    assert left.value.code == 143
    assert trainer.state.global_step == 3
    assert not list((tmp_path / "run").glob("postmortem*"))
    record = RunRecord.read(tmp_path / "run")
    assert record is not None
    assert (record.ending, record.newest.last_step) == (ExitReason.PREEMPTED, 3)


@pytest.mark.heals("preemption", "callback")
def test_the_callback_alone_leaves_as_well(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[SignalAt(2), SelfHealingCallback()])
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == 143
    assert (tmp_path / "run" / "checkpoint-3" / "healing.json").is_file()


class SignalAtTheEndOf(TrainerCallback):
    """Sends a signal to the process when a step is done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("asked", [SignalAt(5), *slowly(SignalAtTheEndOf(6))], ids=["in the step", "at its end"])
def test_a_signal_in_the_last_step_costs_neither_its_evaluation_nor_the_best_model(
    tmp_path: Path, tokenizer: Any, asked: TrainerCallback
) -> None:
    def build(name: str, *callbacks: TrainerCallback) -> Any:
        return best_model_trainer(tmp_path / name, tokenizer, EvalLoss(rises=True), *callbacks)

    plain = build("plain")
    plain.train()
    trainer = build("run", asked)
    SelfHealingTrainer(trainer).train()
    assert plain.state.best_global_step == 2
    assert_same_weights(weights(trainer), weights(plain))
    assert logged(trainer) == logged(plain)


@pytest.mark.slow
def test_a_last_evaluation_that_takes_too_long_is_left_and_may_still_be_the_best(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == state.max_steps:
                time.sleep(30)

    def build(name: str, *callbacks: TrainerCallback) -> Any:
        return best_model_trainer(tmp_path / name, tokenizer, EvalLoss(rises=False), *callbacks)

    plain = build("plain")
    plain.train()
    left = build("run", SignalAtTheEndOf(6), Slow())
    with pytest.raises(SystemExit) as leaving:
        SelfHealingTrainer(left, HealingConfig(preemption_deadline=4.0)).train()
    assert leaving.value.code == 143
    resumed = build("run")
    SelfHealingTrainer(resumed).train(resume_from_checkpoint=True)
    assert resumed.state.best_global_step == 6
    assert_same_weights(weights(resumed), weights(plain))
    assert logged(resumed) == logged(plain)
    assert "nothing is trained" not in caplog.text


def test_handlers_that_were_there_are_called_and_what_they_raise_is_put_off(tmp_path: Path, tokenizer: Any) -> None:
    called = []

    def earlier(signum: int, frame: Any) -> None:
        called.append(signum)
        raise SystemExit(7)

    signal.signal(signal.SIGTERM, earlier)
    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[SignalAt(2)])
    with pytest.raises(SystemExit) as left:
        SelfHealingTrainer(trainer).train()
    assert (called, left.value.code) == ([signal.SIGTERM], 7)
    assert (tmp_path / "run" / "checkpoint-3").is_dir()
    assert signal.getsignal(signal.SIGTERM) is earlier
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_just_in_time_checkpoints_of_transformers_are_not_written_twice(tmp_path: Path, tokenizer: Any) -> None:
    asked = SignalAt(2, seconds=0.5)
    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[asked], enable_jit_checkpoint=True)
    (theirs,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, JITCheckpointCallback)]
    # After its three seconds the run would be over here.
    theirs.jit_manager.kill_wait = 0
    saves = []
    save = trainer._save_checkpoint
    trainer._save_checkpoint = lambda *args, **kwargs: (saves.append(trainer.state.global_step), save(*args, **kwargs))
    with pytest.raises(SystemExit):
        SelfHealingTrainer(trainer).train()
    assert saves == [3]


@pytest.mark.parametrize(
    ("arguments", "step", "evaluations"),
    [
        pytest.param({"eval_strategy": "steps", "eval_steps": 3, "max_steps": 6}, 2, [3, 6], id="due at the step"),
        pytest.param(
            {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": 12},
            7,
            [8, 12],
            marks=pytest.mark.slow,
            id="at the end of an epoch",
        ),
    ],
)
def test_an_evaluation_that_was_left_out_is_done_first_and_nothing_differs(
    tmp_path: Path, tokenizer: Any, arguments: dict[str, Any], step: int, evaluations: list[int]
) -> None:
    def build(name: str, *callbacks: TrainerCallback) -> Any:
        held_out = {"trainer_kwargs": {"eval_dataset": Dataset.from_dict({"text": TEXTS[:4]})}}
        given = {"save_strategy": "no", **arguments}
        return sft_trainer(tmp_path / name, tokenizer, callbacks=list(callbacks), **held_out, **given)

    plain = build("plain")
    SelfHealingTrainer(plain).train()
    left = build("run", SignalAt(step))
    with pytest.raises(SystemExit):
        SelfHealingTrainer(left).train()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == [f"checkpoint-{step + 1}"]
    assert [entry["step"] for entry in left.state.log_history if "eval_loss" in entry] == []
    resumed = build("run")
    SelfHealingTrainer(resumed).train(resume_from_checkpoint="auto")
    assert [entry["step"] for entry in resumed.state.log_history if "eval_loss" in entry] == evaluations
    assert_same_weights(weights(resumed), weights(plain))
    assert losses(resumed) == losses(plain)


def test_the_checkpoint_just_written_does_not_give_way_to_the_best_one(tmp_path: Path, tokenizer: Any) -> None:
    trainer = best_model_trainer(tmp_path / "run", tokenizer, EvalLoss(rises=True), SignalAt(4), save_total_limit=1)
    with pytest.raises(SystemExit):
        SelfHealingTrainer(trainer).train()
    assert (tmp_path / "run" / "checkpoint-5" / "healing.json").is_file()
    assert trainer.args.load_best_model_at_end
    assert trainer.args.save_total_limit == 1


def test_a_child_process_does_not_answer_for_the_run(tmp_path: Path, tokenizer: Any) -> None:
    class Forks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
                child.start()
                # Python drops signals that arrive while it is still setting the child up.
                time.sleep(0.5)
                child.terminate()
                child.join(10)
                self.ended = child.exitcode

    forks = Forks()
    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[forks])
    SelfHealingTrainer(trainer).train()
    assert forks.ended == -signal.SIGTERM
    assert trainer.state.global_step == 6


def test_a_signal_cuts_the_wait_between_two_attempts_short(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path / "run", tokenizer)
    RaisingForward(trainer.model, lambda forward: forward >= 5, lost_connection)

    def send_while_it_waits() -> None:
        while not journal(tmp_path / "run", "action"):
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send_while_it_waits, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(SystemExit) as left:
        SelfHealingTrainer(trainer, HealingConfig(api_retry_base_delay=3000, api_retry_max_delay=3000)).train()
    assert left.value.code == 143
    assert time.monotonic() - began < 25
    record = RunRecord.read(tmp_path / "run")
    assert record is not None
    assert record.ending is ExitReason.PREEMPTED


def test_signals_can_be_left_alone(tmp_path: Path, tokenizer: Any) -> None:
    called = []
    signal.signal(signal.SIGTERM, lambda signum, frame: called.append(signum))
    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[SignalAt(2)])
    SelfHealingTrainer(trainer, HealingConfig(on_preemption="ignore")).train()
    assert trainer.state.global_step == 6
    assert called == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_training_in_another_thread_leaves_signals_alone(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path / "run", tokenizer, max_steps=2)
    thread = threading.Thread(target=SelfHealingTrainer(trainer).train)
    thread.start()
    thread.join(60)
    assert trainer.state.global_step == 2


class Raises(TrainerCallback):
    """A bug in somebody's callback, which leaves `train()` behind our back."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise ValueError("a bug")


def test_once_train_was_left_behind_our_back_signals_are_what_they_were(tmp_path: Path, tokenizer: Any) -> None:
    called = []
    signal.signal(signal.SIGTERM, lambda signum, frame: called.append(signum))
    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[SelfHealingCallback(), Raises()])
    with pytest.raises(ValueError, match="a bug"):
        trainer.train()
    os.kill(os.getpid(), signal.SIGTERM)
    assert called == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
