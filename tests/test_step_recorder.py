"""Every step of a real run is written down, as it was applied."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from conftest import OutputFault, journal, losses, sft_trainer
from transformers import TrainerCallback

from self_healing import FailureType, HealingConfig, SelfHealingCallback
from self_healing.healers.restarts.ending import Shutdown
from self_healing.journal.step_log import StepLog, StepRow, read_step_log
from self_healing.ranks.messages import Failure


def steps_of(output_dir: Path) -> list[StepRow]:
    (path,) = output_dir.glob("healing_steps-*.bin")
    about, rows = read_step_log(path)
    assert about["run"] == journal(output_dir, "run_started")[-1]["run"]
    return rows


def test_every_step_is_written_down_with_its_true_loss(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], logging_steps=1)
    trainer.train()
    rows = steps_of(tmp_path)
    assert [row.step for row in rows] == list(range(6))
    assert [row.loss for row in rows] == pytest.approx(losses(trainer), rel=1e-3)
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert [row.grad_norm for row in rows] == pytest.approx([entry["grad_norm"] for entry in logged], rel=1e-3)
    assert [row.learning_rate for row in rows] == pytest.approx([e["learning_rate"] for e in logged], rel=1e-3)
    assert all(row.host_memory > 1e6 and row.learning_rate_scale == 1.0 and row.attempt == 1 for row in rows)
    assert all(0 < row.busy <= row.seconds * 1.5 for row in rows[1:])


def test_a_step_that_is_left_out_is_written_down_as_such(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(HealingConfig(on_nonfinite="skip"))])
    OutputFault(trainer.model, strike=lambda number: number in (5, 6, 7, 8))
    trainer.train()
    left_out = {event["step"] for event in journal(tmp_path, "action") if event["action"] == "skip_step"}
    rows = steps_of(tmp_path)
    assert {row.step for row in rows if row.skipped} == left_out != set()
    assert all(math.isnan(row.loss) == bool(row.skipped) for row in rows)
    # What was healed in it is no step.
    assert all(math.isnan(row.busy) for row in rows if row.skipped)


def test_a_process_that_is_ended_from_the_inside_leaves_its_last_steps(tmp_path: Path, tokenizer: Any) -> None:
    healing, rows = SelfHealingCallback(), list[StepRow]()

    class Ended(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                failure = Failure(1, 4, FailureType.USER_CODE, "ValueError: only there")
                healing.run.part(Shutdown).end_process(str(failure), failure, 75)
                rows.extend(steps_of(tmp_path))

    sft_trainer(tmp_path, tokenizer, callbacks=[healing, Ended()]).train()
    # All of them within the second after which they are written otherwise.
    assert [row.step for row in rows] == list(range(4))


def test_a_log_that_cannot_be_written_costs_nothing_but_itself(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(self: StepLog) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(StepLog, "write", refused)
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()])
    OutputFault(trainer.model, strike=lambda number: number == 9)
    trainer.train()
    assert caplog.text.count("The step log in") == 1
    assert [event["outcome"] for event in journal(tmp_path, "outcome")] == ["resolved"]
