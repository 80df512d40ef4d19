"""A job whose process is killed, and that a launcher starts again."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    JOB,
    assert_same_weights,
    grpo_trainer,
    job_log,
    job_result,
    journal,
    losses,
    sft_trainer,
    slowly,
    start_job,
    weights,
)
from transformers import TrainerCallback

from self_healing import FAILURE_RECIPES, FailureType, HealingConfig, HealingReport, SelfHealingTrainer
from self_healing.run.record import _CALLS, RECORD_FILE, RunRecord


def under_torchrun(output_dir: Path, restarts: int, **options: Any) -> int:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
            *("--max-restarts", str(restarts)),
            *(str(Path(__file__).parents[1] / JOB), str(output_dir), json.dumps(options)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=300,
    ).returncode


def refusals(output_dir: Path) -> list[str]:
    return [line for line in job_log(output_dir).splitlines() if "Error: Training is not started again" in line]


def postmortems(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(output_dir.glob("postmortem*.json"))]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output_dir = tmp_path_factory.mktemp("plain") / "job"
    assert start_job(output_dir, {}, {}) == 0
    return job_result(output_dir)


def fault_at(seed: int) -> int:
    return (7, 2, 5, 10, 8)[seed]


def as_torchrun(output_dir: Path, restarts: int, **options: Any) -> int:
    """Without its own process, which takes as long to begin as all of the job."""
    environment = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": str(restarts)}
    codes = (
        start_job(output_dir, {**environment, "TORCHELASTIC_RESTART_COUNT": str(restart)}, options)
        for restart in range(restarts + 1)
    )
    return 0 if 0 in codes else 1


@pytest.mark.heals("killed", "wrapper")
@pytest.mark.parametrize("launch", [as_torchrun, *slowly(under_torchrun)])
@pytest.mark.parametrize("seed", [0, *slowly(1, 2, 3, 4)], ids=lambda seed: f"seed {seed}")
def test_a_process_killed_in_mid_step_is_started_again_by_torchrun_and_ends_bitwise_equal(
    tmp_path: Path, plain: dict[str, Any], seed: int, launch: Callable[..., int]
) -> None:
    job = tmp_path / "job"
    workers = {"dataloader_num_workers": 2 * (seed % 2)}
    assert launch(job, 3, fault="sigkill", step=fault_at(seed), arguments=workers) == 0
    assert job_result(job)["weights"] == plain["weights"]
    assert job_result(job)["losses"] == plain["losses"]
    (incident,) = job_result(job)["incidents"]
    assert (incident["failure"], incident["step"]) == ("process_died", fault_at(seed))
    assert (incident["steps_lost"], incident["steps_repeated"]) == (0, fault_at(seed) % 4)
    assert incident["outcome"] == "resolved"


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_costs_that_checkpoint(
    tmp_path: Path, plain: dict[str, Any], until_it_ends: Callable[..., list[int]]
) -> None:
    job = tmp_path / "job"
    assert until_it_ends(job, 3, fault="sigkill_while_saving", step=8) == [-9, 0]
    assert job_result(job)["weights"] == plain["weights"]
    assert [event["path"] for event in journal(job, "checkpoint_chosen")] == [str(job / "checkpoint-4")]
    assert "Attempt 2 of run" in job_log(job)
    assert "checkpoint-4 (step 4); the one before ended at step 8" in job_log(job)


@pytest.mark.heals("killed", "wrapper")
def test_a_kill_before_the_first_checkpoint_begins_anew(
    tmp_path: Path, plain: dict[str, Any], until_it_ends: Callable[..., list[int]]
) -> None:
    job = tmp_path / "job"
    assert until_it_ends(job, 3, fault="sigkill", step=2) == [-9, 0]
    assert job_result(job)["weights"] == plain["weights"]


@pytest.mark.heals("lost_device", "wrapper")
def test_a_broken_device_ends_the_process_for_a_restart(
    tmp_path: Path, plain: dict[str, Any], until_it_ends: Callable[..., list[int]]
) -> None:
    job = tmp_path / "job"
    assert until_it_ends(job, 3, fault="device", step=6) == [75, 0]
    assert job_result(job)["weights"] == plain["weights"]
    (incident,) = job_result(job)["incidents"]
    assert (incident["failure"], incident["actions"]) == ("device", ["exit_for_restart"])
    # The run was brought to its end: what one of its processes died of is set aside.
    assert not (job / "postmortem.json").exists()
    assert len(list(job.glob("postmortem.before-*.json"))) == 1


@pytest.mark.heals("native_hang", "wrapper")
def test_a_hang_in_native_code_is_healed_by_a_restart(
    tmp_path: Path, plain: dict[str, Any], until_it_ends: Callable[..., list[int]]
) -> None:
    job = tmp_path / "job"
    config = {"hang_floor_seconds": 2.0, "GRACE_SECONDS": 1.0, "LEARNING_STEPS": 1}
    began = time.monotonic()
    assert until_it_ends(job, 3, fault="native_hang", step=6, config=config) == [75, 0]
    assert time.monotonic() - began < 60
    assert job_result(job)["weights"] == plain["weights"]
    (incident,) = job_result(job)["incidents"]
    assert (incident["failure"], incident["outcome"]) == ("hang", "resolved")
    assert incident["actions"] == ["write_stacks", "interrupt", "exit_for_restart"]
    (stacks,) = (job / "hangs").glob("*stacks.txt")
    assert "minutes_in_native_code" in stacks.read_text()


def test_a_quarantined_sample_is_not_touched_by_the_process_that_is_started_next(
    tmp_path: Path, start: Callable[..., int], until_it_ends: Callable[..., list[int]]
) -> None:
    undisturbed, job = tmp_path / "undisturbed", tmp_path / "job"
    order = {"bad_sample": 30, "arguments": {"max_steps": 16}}
    assert start(undisturbed, **order) == 0
    # Found in the first epoch of 8 steps and after the last checkpoint, which knows nothing of it.
    assert until_it_ends(job, 3, fault="sigkill", step=7, **order) == [-9, 0]
    # Tried in the batch, alone, and once more; and never again.
    assert (tmp_path / "job.loaded").read_text() == (tmp_path / "undisturbed.loaded").read_text() == "xxx"
    assert job_result(job)["weights"] == job_result(undisturbed)["weights"]


@pytest.mark.slow
def test_a_row_that_was_dropped_before_a_kill_is_dropped_in_that_step_again(
    tmp_path: Path, start: Callable[..., int], until_it_ends: Callable[..., list[int]]
) -> None:
    undisturbed, job = tmp_path / "undisturbed", tmp_path / "job"
    order = {"poison": 3, "arguments": {"max_steps": 20}}
    assert start(undisturbed, **order) == 0
    (dropped,) = (json.loads(line) for line in (undisturbed / "quarantine.jsonl").read_text().splitlines())
    checkpoint = dropped["step"] // 4 * 4
    # After the drop, and before the next checkpoint.
    assert until_it_ends(job, 3, fault="sigkill", step=checkpoint + 3, **order) == [-9, 0]
    assert journal(job, "run_started")[-1]["resumed_from"] == str(job / f"checkpoint-{checkpoint}")
    assert job_result(job)["weights"] == job_result(undisturbed)["weights"]
    assert job_result(job)["losses"] == job_result(undisturbed)["losses"]
    # It is written down once.
    assert len((job / "quarantine.jsonl").read_text().splitlines()) == 1


@pytest.mark.heals(
    "lost_device", "callback", partly="written down with the checkpoint to resume from; the exception goes on"
)
def test_a_broken_device_is_written_down_by_the_callback_alone(tmp_path: Path, start: Callable[..., int]) -> None:
    job = tmp_path / "job"
    assert start(job, fault="device", step=6, callback_alone=True) == 1
    (postmortem,) = postmortems(job)
    assert (postmortem["failure"], postmortem["step"]) == ("device", 6)


def test_a_crash_loop_ends_within_the_budget_with_one_postmortem(
    tmp_path: Path, until_it_ends: Callable[..., list[int]]
) -> None:
    job = tmp_path / "job"
    options = {"fault": "sigkill", "step": 6, "times": 100, "config": {"max_recovery_attempts": 1}}
    # From step 0; from step 4, which was progress; once more without any; then it is refused.
    assert until_it_ends(job, 6, **options) == [-9, -9, -9, 1, 1, 1]
    (postmortem,) = postmortems(job)
    attempts = postmortem["attempts"]
    assert [attempt["last_step"] for attempt in attempts[:3]] == [6, 6, 6]
    assert [attempt["first_step"] for attempt in attempts[:3]] == [0, 4, 4]
    assert [incident["failure"] for incident in postmortem["chain"]] == ["process_died"] * 3
    assert "started 2 times from step 4 and never came beyond step 6" in postmortem["verdict"]
    # It did not say why it ended: it was killed.
    assert FAILURE_RECIPES[FailureType.PROCESS_DIED].advice in postmortem["what_to_do"]
    # Started again all the same, it says so at once and never at greater length, and the postmortem stays.
    _, second, last = refusals(job)
    assert len(second) == len(last)


def left_behind(text: str) -> list[str]:
    """What is said at the start of a run about one that did not come to its end."""
    return [line for line in text.splitlines() if "Training begins at step 0" in line]


def test_a_start_after_a_kill_says_what_was_left_and_what_to_write_and_starts_as_asked(
    tmp_path: Path, plain: dict[str, Any], start: Callable[..., int]
) -> None:
    job = tmp_path / "job"
    options = {"fault": "sigkill", "step": 6, "launcher": "none"}
    assert start(job, **options) == -9
    assert left_behind(job_log(job)) == []
    assert start(job, **options) == 0
    (line,) = left_behind(job_log(job))
    assert "The run died at step 6 of 12" in line
    assert f'To go on from {job}/checkpoint-4, write train(resume_from_checkpoint="auto").' in line
    assert "checkpoint-12" in {each.name for each in job.iterdir()}
    assert job_result(job)["weights"] == plain["weights"]


class Noting(TrainerCallback):
    """Notes the steps that are trained."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


class Bug(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise ValueError("a bug of the user's")


@pytest.mark.parametrize(("job", "steps"), [("17", [4]), pytest.param("18", [1, 2, 3, 4], marks=pytest.mark.slow)])
def test_a_requeued_job_takes_up_its_own_run_only(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, job: str, steps: list[int]
) -> None:
    def build() -> Any:
        return sft_trainer(tmp_path / "run", tokenizer, max_steps=4, save_strategy="steps", save_steps=2)

    monkeypatch.setenv("SLURM_JOB_ID", "17")
    first = build()
    first.add_callback(Bug())
    with contextlib.suppress(ValueError):
        SelfHealingTrainer(first).train()
    _CALLS.clear()
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    trained: list[int] = []
    again = build()
    again.add_callback(Noting(trained))
    SelfHealingTrainer(again).train()
    assert trained == steps


def test_a_generation_cycle_is_taken_up_in_its_middle(tmp_path: Path, tokenizer: Any) -> None:
    make = grpo_trainer
    # Rows for two optimizer steps at a time; the checkpoint falls between them.
    arguments = {"max_steps": 6, "steps_per_generation": 4, "save_strategy": "steps", "save_steps": 3}
    plain = make(tmp_path / "plain", tokenizer, **arguments)
    SelfHealingTrainer(plain).train()
    assert (tmp_path / "plain" / "checkpoint-3" / "generated.pt").is_file()
    assert not (tmp_path / "plain" / "checkpoint-6" / "generated.pt").exists()
    resumed = make(tmp_path / "run", tokenizer, **arguments)
    SelfHealingTrainer(resumed).train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-3"))
    assert_same_weights(weights(resumed), weights(plain))
    assert losses(resumed) == losses(plain)


def test_a_second_run_of_one_process_is_never_taken_for_the_first(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    steps = []
    for number in range(2):
        trainer = sft_trainer(tmp_path / "run", tokenizer, max_steps=3, save_strategy="steps", save_steps=2)
        if number == 0:
            trainer.add_callback(Bug())
        with contextlib.suppress(ValueError):
            SelfHealingTrainer(trainer).train()
        steps.append([entry["step"] for entry in trainer.state.log_history if "loss" in entry])
    assert steps[1] == [1, 2, 3]


@pytest.mark.slow
def test_a_script_that_trains_twice_into_a_directory_begins_anew_and_says_why(
    tmp_path: Path, plain: dict[str, Any], until_it_ends: Callable[..., list[int]]
) -> None:
    job = tmp_path / "job"
    assert until_it_ends(job, 3, warm_up=True, fault="sigkill", step=6) == [-9, 0]
    assert journal(job, "checkpoint_chosen") == []
    assert "which had trained there 2 times" in job_log(job)
    assert job_result(job)["weights"] == plain["weights"]


@pytest.mark.slow
def test_where_the_record_cannot_be_read_a_restart_takes_the_newest_checkpoint(
    tmp_path: Path, plain: dict[str, Any], start: Callable[..., int]
) -> None:
    job = tmp_path / "job"
    assert start(job, fault="sigkill", step=6) == -9
    (job / RECORD_FILE).write_text("{")
    assert start(job, restarts=1) == 0
    assert "It is written anew" in job_log(job)
    assert [event["path"] for event in journal(job, "checkpoint_chosen")] == [str(job / "checkpoint-4")]
    assert job_result(job)["weights"] == plain["weights"]


# ---- what is known of a run ----


def test_a_new_run_in_the_same_directory_is_a_new_one(tmp_path: Path, tokenizer: Any) -> None:
    runs = []
    for _ in range(2):
        SelfHealingTrainer(sft_trainer(tmp_path / "run", tokenizer, max_steps=2)).train()
        record = RunRecord.read(tmp_path / "run")
        assert record is not None
        runs.append((record.run, len(record.attempts)))
    assert runs[0][0] != runs[1][0]
    assert runs[1][1] == 1


def test_a_record_that_cannot_be_read_is_passed_over(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECORD_FILE).write_text('{"run": "x", "attempts": [{"ending": "?"}]}')
    trainer = sft_trainer(tmp_path / "run", tokenizer, max_steps=2)
    SelfHealingTrainer(trainer).train(resume_from_checkpoint="auto")
    assert trainer.state.global_step == 2


def test_a_record_that_cannot_be_written_stops_nothing(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "run" / RECORD_FILE).mkdir(parents=True)
    trainer = sft_trainer(tmp_path / "run", tokenizer, max_steps=2)
    SelfHealingTrainer(trainer).train()
    assert trainer.state.global_step == 2


def test_exit_codes_are_for_launchers_that_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from self_healing.system.processes import restarts_on_exit

    assert not restarts_on_exit(HealingConfig())
    assert restarts_on_exit(HealingConfig(launcher_restarts="yes"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert restarts_on_exit(HealingConfig())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not restarts_on_exit(HealingConfig())
    assert not restarts_on_exit(HealingConfig(launcher_restarts="no"))


@pytest.mark.slow
def test_the_report_of_a_run_that_was_killed_says_that_it_died(tmp_path: Path, start: Callable[..., int]) -> None:
    assert start(tmp_path / "job", launcher="none", fault="sigkill", step=5, callback_alone=True) == -9
    status = HealingReport.from_run_dir(tmp_path / "job").status
    assert status is not None
    assert (status.state, status.max_steps) == ("died", 12)
    # A slow disk is not written to after each step.
    assert status.step <= 5
