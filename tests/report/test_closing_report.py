"""Where `train()` is left, the report is written beside the journal; trackers have the metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import OutputFault, encoded_rows, plain_trainer, sft_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from self_healing import SelfHealingCallback
from self_healing.system.files import own_patterns


def report_in(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return content


def test_a_run_that_ends_leaves_its_report(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()])
    OutputFault(trainer.model, strike=lambda number: number == 5)
    trainer.train()
    report = report_in(tmp_path)
    assert (report["state"]["name"], report["state"]["step"]) == ("ended", 6)
    assert [(each["step"], each["outcome"]) for each in report["incidents"]] == [(2, "resolved")]
    assert report["goodput"]["steps_useful"] == 6
    assert "ended, step 6 of 6; 1 incident" in (tmp_path / "agent.md").read_text()


@pytest.mark.parametrize(("evaluation", "step"), [(1, 0), (2, 4)])
def test_an_exception_in_an_evaluation_is_in_the_report(
    evaluation: int, step: int, tmp_path: Path, tokenizer: Any
) -> None:
    evaluations: list[int] = []

    def compute_metrics(_: Any) -> dict[str, float]:
        evaluations.append(1)
        return {} if len(evaluations) < evaluation else {"missing": evaluations[evaluation]}

    trainer = plain_trainer(
        tmp_path,
        tokenizer,
        callbacks=[SelfHealingCallback()],
        eval_strategy="steps",
        eval_steps=4,
        eval_on_start=True,
        trainer_kwargs={"eval_dataset": encoded_rows(tokenizer).select(range(8)), "compute_metrics": compute_metrics},
    )
    with pytest.raises(IndexError):
        trainer.train()
    state = report_in(tmp_path)["state"]
    assert (state["name"], state["step"], state["why"]) == ("stopped", step, "IndexError: list index out of range")
    assert f"stopped, step {step} of 6" in (tmp_path / "agent.md").read_text()


def test_files_that_are_not_ours_stay(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "report.json").write_text('{"mine": 1}')
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], max_steps=1)
    trainer.train()
    assert (tmp_path / "report.json").read_text() == '{"mine": 1}'
    assert (tmp_path / "agent.md").exists()
    # And what is the user's is uploaded.
    assert "report.json" not in own_patterns(tmp_path)
    assert "agent.md" in own_patterns(tmp_path)


# ---- trackers ----


def test_tensorboard_has_the_metrics(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[SelfHealingCallback()], report_to=["tensorboard"])
    OutputFault(trainer.model, strike=lambda number: number == 5)
    trainer.train()
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    assert next((each.step, each.value) for each in events.Scalars("train/healing/incidents")) == (3, 1.0)
