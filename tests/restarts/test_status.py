"""`self-healing report` says whether a run goes on, has ended or died, and at which step."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import RaisingAt, RaisingForward, sft_trainer
from transformers import TrainerCallback
from typer.testing import CliRunner

from self_healing import HealingConfig, HealingReport, SelfHealingCallback, SelfHealingTrainer
from self_healing.cli import app
from self_healing.journal.journal import Journal
from self_healing.restarts.status import RunState, RunStatus, StatusKeeper, read_status


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
    keeper.begin("run", directory / "healing_events.jsonl", 0, 40, marks=True)
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
    assert f"The run is going on (process {os.getpid()}" in result.stdout
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
        # This process is younger than that run.
        change(keeper, began=1.0)
    result = report(tmp_path)
    assert "The run died at step 13 of 40" in result.stdout
    assert "Nothing had to be healed." not in result.stdout
    assert result.exit_code == 1


def test_of_another_machine_nothing_is_known(tmp_path: Path) -> None:
    change(begun(tmp_path), host="elsewhere")
    result = report(tmp_path)
    assert "Whether the run still goes on is not known" in result.stdout
    assert result.exit_code == 4


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"run": 1}', "\x00"])
def test_a_damaged_status_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "healing_status.json").write_text(content)
    assert read_status(tmp_path) is None


def test_what_is_written_down_first_counts(tmp_path: Path) -> None:
    keeper = begun(tmp_path)
    keeper.end(RunState.STOPPED, 3, "KeyError: 'a'")
    keeper.end(RunState.ENDED, 40)
    assert "left at step 3 of 40" in str(status_of(tmp_path))


def test_a_journal_without_a_status_tells_what_it_can(tmp_path: Path) -> None:
    journal = Journal(tmp_path, HealingConfig(), run_id="run")
    journal.event("run_started", 0)
    journal.event("snapshots", 7)
    assert (status_of(tmp_path).state, status_of(tmp_path).step) == (RunState.UNKNOWN, 7)
    journal.event("run_ended", 20)
    assert (status_of(tmp_path).state, status_of(tmp_path).step) == (RunState.ENDED, 20)


# ---- what real runs write ----


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapper", "callback"])
def test_a_run_tells_while_it_goes_on_and_when_it_has_ended(tmp_path: Path, tokenizer: Any, wrapped: bool) -> None:
    seen: list[RunStatus] = []

    class Look(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(status_of(tmp_path))

    callbacks = [Look()] if wrapped else [SelfHealingCallback(), Look()]
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=3, callbacks=callbacks)
    (SelfHealingTrainer(trainer) if wrapped else trainer).train()
    assert [(status.state, status.step, status.max_steps) for status in seen[:1]] == [(RunState.RUNNING, 0, 3)]
    assert {status.state for status in seen} == {RunState.RUNNING}
    result = report(tmp_path)
    assert "The run ended at step 3 of 3" in result.stdout
    assert "Nothing had to be healed." in result.stdout
    assert result.exit_code == 0


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapper", "callback"])
def test_a_run_that_an_exception_ended_says_so(tmp_path: Path, tokenizer: Any, wrapped: bool) -> None:
    callbacks = [] if wrapped else [SelfHealingCallback()]
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=8, callbacks=callbacks)
    RaisingForward(trainer.model, lambda forward: forward == 7, lambda: KeyError("labels"))
    with pytest.raises(KeyError):
        (SelfHealingTrainer(trainer) if wrapped else trainer).train()
    result = report(tmp_path)
    assert "train() was left at step 3 of 8" in result.stdout
    assert "KeyError: 'labels'" in result.stdout
    assert result.exit_code == 1


def test_an_exception_the_callback_is_not_told_of_is_found_out(tmp_path: Path, tokenizer: Any) -> None:
    callback = SelfHealingCallback(HealingConfig(hang_floor_seconds=0.1))
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=8, callbacks=[callback, RaisingAt("on_step_end", 3)])
    with pytest.raises(ConnectionError):
        trainer.train()
    for _ in range(600):
        if status_of(tmp_path).over:
            break
        time.sleep(0.1)
    assert (status_of(tmp_path).state, status_of(tmp_path).step) == (RunState.STOPPED, 3)


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
