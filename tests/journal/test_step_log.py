"""The step log: what is written is read, however the writer ended, and it stays small."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import OutputFault, journal, losses, sft_trainer
from transformers import TrainerCallback

from self_healing import FailureType, HealingConfig, SelfHealingCallback
from self_healing.healers.restarts.ending import Shutdown
from self_healing.journal.step_log import StepLog, StepRow, read_step_log, step_log_of
from self_healing.ranks.messages import Failure


def row(step: int, loss: float = 2.0, attempt: int = 1, **more: float) -> StepRow:
    return StepRow(step, attempt=attempt, loss=loss, loss_max=loss)._replace(**more)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return step_log_of(tmp_path, "made-up")


def write(path: Path, *rows: StepRow, most: int = 1000) -> None:
    log = StepLog(path, {"run": "made-up"}, rows=most)
    for each in rows:
        log.kept.append(each)
        log.write()


def test_what_is_written_is_read(path: Path) -> None:
    whole = StepRow(7, 1, 1, 2, 1.5e9, *(0.5 * number for number in range(13)))
    write(path, whole, row(8, math.inf))
    about, rows = read_step_log(path)
    assert rows[0] == whole
    assert (rows[1].step, rows[1].loss) == (8, math.inf)
    assert (about["schema"], about["run"]) == (1, "made-up")


@pytest.mark.parametrize("content", [b"", b'{"schema": 2, "row_bytes": 80}\n'])
def test_what_is_no_step_log_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"JSON|Expecting|known version|decode"):
        read_step_log(path)
    # And it does not keep a run from writing its own.
    write(path, row(0))
    assert len(read_step_log(path)[1]) == 1


def test_a_long_run_stays_small_and_keeps_its_highest_loss(path: Path) -> None:
    write(path, *(row(step, 9.0 if step == 777 else 2.0) for step in range(5000)), most=64)
    rows = read_step_log(path)[1]
    assert 16 <= len(rows) <= 64
    assert sum(each.steps for each in rows) == 5000
    assert [each.step for each in rows if each.loss_max == 9.0] == [max(e.step for e in rows if e.step <= 777)]
    assert sum(each.loss * each.steps for each in rows) == pytest.approx(2.0 * 4999 + 9.0, rel=1e-6)


# ---- what goes wrong ----


def test_after_a_full_disk_the_rows_that_follow_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = StepLog(path, {"run": "made-up"})
    log.kept.append(row(0))
    log.write()
    log.kept.append(row(1))

    def write_a_part(self: Path, *_: Any) -> Any:
        os.truncate(self, self.stat().st_size + 5)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(Path, "open", write_a_part)
        with pytest.raises(OSError, match="No space left"):
            log.write()
    log.kept.append(row(9))
    log.write()
    assert [each.step for each in read_step_log(path)[1]] == [0, 9]


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
