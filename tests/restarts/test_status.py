"""`self-healing report` says whether a run goes on, has ended or died, and at which step."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import RaisingForward, sft_trainer
from transformers import TrainerCallback
from typer.testing import CliRunner

from self_healing import HealingConfig, HealingReport, SelfHealingCallback, SelfHealingTrainer
from self_healing.journal.journal import Journal
from self_healing.run.record import ExitReason
from self_healing.run.status import RunState, RunStatus, StatusKeeper, read_status
from self_healing.tools.cli import app


def report(directory: Path) -> Any:
    return CliRunner().invoke(app, ["report", str(directory)])


def status_of(directory: Path) -> RunStatus:
    status = HealingReport.from_run_dir(directory).status
    assert status is not None
    return status


def begun(directory: Path, step: int = 0) -> StatusKeeper:
    """A run of this process that has come to a step, with a journal."""
    keeper = StatusKeeper(directory)
    Journal(directory, HealingConfig(), run_id="run").event("run_started", 0, output_dir=str(directory))
    keeper.begin("run", directory / "healing_events.jsonl", 0, 40, 0)
    keeper.note_step(step)
    return keeper


def change(keeper: StatusKeeper, **fields: Any) -> None:
    assert keeper.status is not None
    keeper.status = replace(keeper.status, **fields)
    keeper._write()


# ---- what a file in the output_dir tells ----


def test_a_run_whose_process_is_there_goes_on(tmp_path: Path) -> None:
    keeper = begun(tmp_path, step=13)
    result = report(tmp_path)
    assert f"The run is in progress (process {os.getpid()}" in result.stdout
    assert "step 13 of 40" in result.stdout
    assert result.exit_code == 3
    keeper.end(RunState.ENDED, 40)


@pytest.mark.parametrize("number", ["free", "given out again"])
def test_a_run_whose_process_is_gone_died(tmp_path: Path, number: str) -> None:
    keeper = begun(tmp_path, step=13)
    if number == "free":
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        change(keeper, pid=process.pid)
    else:
        # This process is another one.
        change(keeper, process_began=1.5)
    result = report(tmp_path)
    assert "The run died at step 13 of 40" in result.stdout
    assert "Nothing had to be healed." not in result.stdout
    assert result.exit_code == 1


def test_of_another_machine_nothing_is_known(tmp_path: Path) -> None:
    change(begun(tmp_path), host="elsewhere")
    result = report(tmp_path)
    assert "Whether the run is still going is not known" in result.stdout
    assert result.exit_code == 4


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"run": 1}', "\x00"])
def test_a_damaged_status_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "healing_status.json").write_text(content)
    assert read_status(tmp_path) is None


@pytest.mark.parametrize(
    ("ending", "state", "why"),
    [
        (ExitReason.FINISHED, RunState.ENDED, ""),
        (ExitReason.PREEMPTED, RunState.LEFT, "because"),
        (ExitReason.RESTART, RunState.LEFT, "because"),
        (ExitReason.FAILED, RunState.STOPPED, "because"),
        (ExitReason.GAVE_UP, RunState.STOPPED, "because"),
        (ExitReason.INTERRUPTED, RunState.STOPPED, "because"),
    ],
)
def test_the_end_of_an_attempt_is_that_of_the_run_as_far_as_it_is_known(
    tmp_path: Path, ending: ExitReason, state: RunState, why: str
) -> None:
    begun(tmp_path).end_attempt(ending, 7, f"\n because{' of it' * 90}\nsecond line" if why else "because")
    status = status_of(tmp_path)
    assert (status.state, status.step) == (state, 7)
    # Whole words, in 300 characters.
    assert status.why == (f"{why}{' of it' * 48} ..." if why else "")


def test_a_journal_without_a_status_tells_what_it_can(tmp_path: Path) -> None:
    journal = Journal(tmp_path, HealingConfig(), run_id="run")
    journal.event("run_started", 0)
    journal.event("snapshots", 7)
    assert (status_of(tmp_path).state, status_of(tmp_path).step) == (RunState.UNKNOWN, 7)
    journal.event("run_ended", 20)
    assert (status_of(tmp_path).state, status_of(tmp_path).step) == (RunState.ENDED, 20)


# ---- what real runs write ----


def test_a_run_tells_while_it_goes_on_and_when_it_has_ended(tmp_path: Path, tokenizer: Any) -> None:
    seen: list[RunStatus] = []

    class Look(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(status_of(tmp_path))

    SelfHealingTrainer(sft_trainer(tmp_path, tokenizer, max_steps=3, callbacks=[Look()])).train()
    assert [(status.state, status.step, status.max_steps) for status in seen[:1]] == [(RunState.RUNNING, 0, 3)]
    assert {status.state for status in seen} == {RunState.RUNNING}
    result = report(tmp_path)
    assert "The run ended at step 3 of 3" in result.stdout
    assert "Nothing had to be healed." in result.stdout
    assert result.exit_code == 0


def test_a_run_that_an_exception_ended_says_so(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=8, callbacks=[SelfHealingCallback()])
    RaisingForward(trainer.model, lambda forward: forward == 7, lambda: KeyError("labels"))
    with pytest.raises(KeyError):
        trainer.train()
    result = report(tmp_path)
    assert "train() was left at step 3 of 8" in result.stdout
    assert "KeyError: 'labels'" in result.stdout
    assert result.exit_code == 1


def test_the_journal_is_found_from_either_directory(tmp_path: Path, tokenizer: Any) -> None:
    config = HealingConfig(healing_dir=str(tmp_path / "healing"))
    trainer = sft_trainer(tmp_path / "out", tokenizer, max_steps=2, callbacks=[SelfHealingCallback(config)])
    trainer.train()
    for directory in (tmp_path / "out", tmp_path / "healing"):
        told = report(directory).stdout
        assert "The run ended at step 2 of 2" in told
        assert f"Journal: {tmp_path / 'healing' / 'healing_events.jsonl'}" in told
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    assert report(moved / "out").exit_code == 0
