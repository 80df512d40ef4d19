"""Reports and postmortems, read from journals that were written by hand."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from self_healing import Action, FailureType, HealingConfig, HealingReport
from self_healing.journal.incident import Incident
from self_healing.journal.journal import Journal
from self_healing.journal.postmortem import Postmortem, read_errors_of_other_ranks
from self_healing.run.status import STATUS_FILE, RunState, RunStatus


def write(directory: Path, *events: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    lines = [json.dumps({"run": "made-up", "step": 0, **event}) for event in events]
    (directory / "healing_events.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def test_an_action_that_did_not_happen_is_not_told(tmp_path: Path) -> None:
    journal = Journal(tmp_path, HealingConfig(), "made-up")
    incident = journal.open(3, "divergence", {})
    journal.diagnosed(incident, FailureType.DIVERGENCE, "weights", {})
    journal.acted(incident, Action.ROLL_BACK.value, happened=False, why="there is no trusted state")
    journal.acted(incident, Action.STOP.value)
    journal.closed(incident, "fatal")
    (told,) = HealingReport.from_run_dir(tmp_path).incidents
    assert told["actions"] == ["stop"]
    assert (told["failure"], told["cause"], told["outcome"]) == ("divergence", "weights", "fatal")


def test_a_line_with_no_more_than_an_event_needs_is_one(tmp_path: Path) -> None:
    write(tmp_path, {"kind": "run_started"}, {"kind": "run_ended", "step": 7})
    report = HealingReport.from_run_dir(tmp_path)
    assert report.status is not None
    assert (report.status.state, report.status.step) == (RunState.ENDED, 7)


@pytest.mark.parametrize("run", ["made-up", "another"])
def test_the_status_of_another_run_says_nothing_about_this_one(tmp_path: Path, run: str) -> None:
    output = tmp_path / "output"
    output.mkdir()
    status = RunStatus(run, "", 50, 1, "host", 0.0, RunState.ENDED, 50, why="of the status")
    (output / STATUS_FILE).write_text(json.dumps(asdict(status)))
    journal = write(tmp_path / "journal", {"kind": "run_started", "output_dir": str(output)})
    found = HealingReport.from_run_dir(journal).status
    assert found is not None
    assert found.run == "made-up"
    assert found.why == ("of the status" if run == "made-up" else "")


def test_errors_of_other_ranks_are_those_since_the_run_went_on(tmp_path: Path) -> None:
    for rank, (run, step, error) in enumerate(
        [("made-up", 6, "old"), ("made-up", 7, "new"), ("another", 9, "no"), ("made-up", 9, None)], start=1
    ):
        content = {"run": run, "step": step, "failure": "crash", "error": error}
        (tmp_path / f"postmortem.rank{rank}.json").write_text(json.dumps(content))
    (tmp_path / "postmortem.rank9.json").write_text("{")
    found = read_errors_of_other_ranks(tmp_path, "made-up", since=7)
    assert found == [{"rank": 2, "step": 7, "failure": "crash", "error": "new"}]


@pytest.mark.parametrize(
    ("checkpoint", "older", "line"),
    [("here", "older", "'here'"), (None, "older", "'older'"), (None, None, None)],
)
def test_a_postmortem_names_the_line_that_resumes(checkpoint: Any, older: Any, line: str | None) -> None:
    end = Postmortem(
        verdict="no",
        failure=FailureType.DIVERGENCE,
        step=3,
        error=None,
        log_history=[],
        checkpoint=checkpoint,
        older_checkpoint=older,
    )
    assert end.resume_with == (None if line is None else f"trainer.train(resume_from_checkpoint={line})")


def test_an_incident_of_a_process_is_none_of_training() -> None:
    assert Incident("1", 3, "process_died").of_a_process
    assert Incident("1", 3, "preempted").of_a_process
    assert not Incident("1", 3, "divergence").of_a_process


@pytest.mark.parametrize(("wanted", "running"), [(True, True), (False, True), (True, False)])
def test_trackio_is_alerted_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool, running: bool
) -> None:
    alerts: list[Any] = []
    run = SimpleNamespace(alert=lambda *text, **how: alerts.append((*text, how["level"], how["step"])))
    trackio = SimpleNamespace(
        context_vars=SimpleNamespace(current_run=SimpleNamespace(get=lambda: run if running else None)),
        AlertLevel={"INFO": 1, "WARN": 2, "ERROR": 3},
    )
    monkeypatch.setitem(sys.modules, "trackio", trackio)  # type: ignore[arg-type]
    Journal(tmp_path, HealingConfig(trackio_alerts=wanted), "made-up").alert("title", "text", "warning", 7)
    assert alerts == ([("title", "text", 2, 7)] if wanted and running else [])


def test_without_trackio_there_is_nothing_to_alert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    Journal(tmp_path, HealingConfig(), "made-up").alert("title", "text", "warning", 7)
    assert "trackio" not in sys.modules
