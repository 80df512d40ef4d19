"""The report of a run, read from directories that were written by hand: running, dead, torn, of several ranks."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from self_healing.checkpoints.marker import write_marker
from self_healing.failures.recipes import FAILURE_RECIPES, FailureType
from self_healing.journal.step_log import StepLog, StepRow, step_log_of
from self_healing.report.healing_report import HealingReport
from self_healing.report.output import LINES, briefing_of
from self_healing.report.reading import read_run
from self_healing.report.records import SCHEMA
from self_healing.run.status import STATUS_FILE, RunState, RunStatus


BEGAN = 1_000_000.0
LIMITS = {
    "max_recovery_attempts": 6,
    "budget_refund_steps": 50,
    "max_skipped_fraction": 0.1,
    "max_spike_skips": 3,
    "skip_window": 100,
    "max_lr_reductions": 4,
}


class MadeUpDirectory:
    """A run directory, written line by line."""

    def __init__(self, path: Path, run: str = "run") -> None:
        self.path = path
        self.run = run
        self.time = BEGAN
        path.mkdir(parents=True, exist_ok=True)

    def event(self, kind: str, step: int = 0, rank: int = 0, **fields: Any) -> None:
        self.time += 1
        name = "healing_events.jsonl" if rank == 0 else f"healing_events.rank{rank}.jsonl"
        common = {"schema": 1, "time": self.time, "run": self.run, "rank": rank, "attempt": 1, "step": step}
        with (self.path / name).open("a") as file:
            file.write(json.dumps({**common, "kind": kind, **fields}) + "\n")

    def started(self, step: int = 0, rank: int = 0, **fields: Any) -> None:
        about = {"output_dir": str(self.path), "max_steps": 100, "pid": 1, "host": "h", "limits": LIMITS}
        self.event("run_started", step, rank, **{**about, "objective": "sft", **fields})

    def incident(self, number: int, step: int, actions: list[str], outcome: str | None, rank: int = 0) -> str:
        name = f"{self.run}-{number:03d}" + (f".rank{rank}" if rank else "")
        self.event("detected", step, rank, incident=name, symptom="nonfinite_loss", evidence={"loss": "nan"})
        evidence = {"poison_rows": 1, "rows_in_step": 8, "ranks": [1]}
        found = {"failure": "nonfinite_poison_rows", "cause": "poison rows", "evidence": evidence}
        self.event("diagnosed", step, rank, incident=name, **found)
        for action in actions:
            self.event("action", step, rank, incident=name, action=action, happened=True)
        lost = sum(action == "skip_step" for action in actions)
        if outcome is not None:
            cost = {"steps_lost": lost, "steps_repeated": 0, "seconds_lost": 1.5}
            self.event("outcome", step, rank, incident=name, outcome=outcome, **cost)
        return name

    def status(self, state: RunState, step: int, **fields: Any) -> None:
        status = RunStatus(self.run, "healing_events.jsonl", 100, 1, "h", BEGAN, state, step, BEGAN + 500, **fields)
        (self.path / STATUS_FILE).write_text(json.dumps(asdict(status)))

    def steps(self, *rows: StepRow) -> None:
        log = StepLog(step_log_of(self.path, self.run), {"run": self.run})
        log.kept.extend(rows)
        log.write()

    def checkpoint(self, step: int, standing: Any = "verified", run: str | None = None) -> Path:
        path = self.path / f"checkpoint-{step}"
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"0" * 100)
        write_marker(path, run or self.run, step, {}, False, standing, True)
        return path


def row(step: int, seconds: float = 2.0, **fields: Any) -> StepRow:
    return StepRow(step, time=BEGAN + step, seconds=seconds, busy=seconds, loss=3.0, loss_max=3.0)._replace(**fields)


@pytest.fixture
def made_up(tmp_path: Path) -> MadeUpDirectory:
    return MadeUpDirectory(tmp_path / "run")


# ---- what has become of it ----


def test_a_run_that_died_names_the_checkpoint_to_go_on_from(made_up: MadeUpDirectory) -> None:
    made_up.started()
    # Another process has its number by now.
    status = RunStatus(
        "run", "healing_events.jsonl", 100, os.getpid(), os.uname().nodename, BEGAN, step=37, process_began=1.5
    )
    (made_up.path / STATUS_FILE).write_text(json.dumps(asdict(status)))
    made_up.checkpoint(10)
    made_up.checkpoint(20)
    made_up.checkpoint(30, standing="suspect")
    report = read_run(made_up.path)
    assert report.state.name == "died"
    assert [each.step for each in report.checkpoints] == [30, 20, 10]
    resume = report.next_steps[-1]
    assert "checkpoint-20 (step 20, verified)" in resume.text
    assert resume.why == "17 steps are done again."
    assert resume.command == f"trainer.train(resume_from_checkpoint={str(made_up.path / 'checkpoint-20')!r})"


def test_where_a_new_run_is_asked_for_nothing_says_to_resume(made_up: MadeUpDirectory) -> None:
    made_up.started()
    name = made_up.incident(1, 9, ["skip_step", "reduce_learning_rate", "stop"], "fatal")
    made_up.event("diagnosed", 9, incident=name, failure="learning_rate", cause="the rate")
    made_up.event("action", 9, incident=name, action="reduce_learning_rate", reductions=4, learning_rate=1e-8)
    made_up.status(RunState.STOPPED, 10)
    made_up.checkpoint(10)
    content = {"run": "run", "failure": "learning_rate", "what_to_do": "Begin a new run.", "resume_with": "train(1)"}
    (made_up.path / "postmortem.json").write_text(json.dumps(content))
    report = read_run(made_up.path)
    told = [step.text for step in report.next_steps]
    assert told[0] == "Begin a new run."
    # Without a record of the run, the journal says how often: one action may reduce the rate several times.
    assert {each.setting: each.used for each in report.budgets}["max_lr_reductions"] == 4
    assert not [text for text in told if text.startswith("Resume") or "learning_rate=" in text]


def test_a_run_that_was_interrupted_is_told_once_what_to_resume_from_and_what_it_costs(
    made_up: MadeUpDirectory,
) -> None:
    made_up.started()
    made_up.status(RunState.STOPPED, 52, why="KeyboardInterrupt")
    made_up.checkpoint(40)
    line = "trainer.train(resume_from_checkpoint='outputs/run/checkpoint-40')"
    content = {
        "run": "run",
        "failure": "interrupted",
        "verdict": "the run was interrupted",
        "what_to_do": FAILURE_RECIPES[FailureType.INTERRUPTED].advice,
        "resume_with": line,
    }
    (made_up.path / "postmortem.json").write_text(json.dumps(content))
    (step,) = read_run(made_up.path).next_steps
    assert step.text == "Resume: checkpoint-40 (step 40, verified) is what the postmortem names."
    assert (step.why, step.command) == ("12 steps are done again.", line)


# ---- incidents ----


def test_an_incident_is_told_from_evidence_to_outcome(made_up: MadeUpDirectory) -> None:
    made_up.started()
    name = made_up.incident(1, 7, ["quarantine_rows", "drop_rows"], "resolved")
    quarantined = {"incident": name, "step": 7, "epoch": 0.5, "dataset_index": 17, "segment": None, "run": "run"}
    (made_up.path / "quarantine.jsonl").write_text(json.dumps(quarantined) + "\n{torn")
    (made_up.path / "incidents").mkdir()
    (made_up.path / "incidents" / f"{name}.pt").write_bytes(b"batch")
    report = read_run(made_up.path)
    (incident,) = report.incidents
    parts = ["evidence", "experiment", "experiment", "cause", "remedy", "remedy", "outcome"]
    assert [line["part"] for line in incident.story] == parts
    assert incident.story[2]["text"] == "Found on rank 1."
    assert (incident.title, incident.severity, incident.seconds_lost) == (
        "nonfinite loss: poison rows",
        "warning",
        1.5,
    )
    assert incident.rows == report.quarantine
    assert [row["name"] for row in incident.rows] == ["row 17 of train_dataset"]
    assert incident.files == [{"what": "offending batch", "path": f"incidents/{name}.pt", "bytes": 5}]
    assert report.remarks == ["1 line of quarantine.jsonl cannot be read."]
    assert "row 17 of train_dataset" in report.next_steps[-1].text


def test_an_incident_that_all_ranks_see_is_one(made_up: MadeUpDirectory) -> None:
    for rank in (0, 1):
        made_up.started(rank=rank)
        made_up.incident(1, 7, ["skip_step"], "resolved", rank)
    # Only there; the first rank has counted on with another one.
    made_up.incident(2, 9, ["skip_step"], "resolved", rank=1)
    made_up.incident(2, 20, ["skip_step"], "resolved")
    report = read_run(made_up.path)
    assert [(each.id, each.rank) for each in report.incidents] == [
        ("run-001", 0),
        ("run-002.rank1", 1),
        ("run-002", 0),
    ]
    assert [(each["rank"], each["incidents"]) for each in report.ranks] == [(0, 2), (1, 2)]
    summary = HealingReport.from_run_dir(made_up.path)
    assert [each["incident"] for each in summary.incidents] == ["run-001", "run-002.rank1", "run-002"]
    assert [each["step"] for each in summary.incidents] == [7, 9, 20]


def test_a_report_does_as_much_for_each_rank_of_many_as_of_few(tmp_path: Path) -> None:
    def calls_for(ranks: int) -> int:
        made_up, calls = MadeUpDirectory(tmp_path / f"{ranks}"), Counter[str]()
        for rank in range(ranks):
            made_up.started(rank=rank)
            made_up.incident(1, 7, ["skip_step"], "resolved", rank)
        sys.setprofile(lambda frame, event, argument: calls.update([event]))
        try:
            read_run(made_up.path, charts=False)
        finally:
            sys.setprofile(None)
        return calls["call"] + calls["c_call"]

    few, more, many = (calls_for(ranks) for ranks in (16, 32, 256))
    assert (many - more) / 224 < 1.1 * (more - few) / 16


# ---- several runs ----


def test_of_several_runs_the_newest_is_told_unless_one_is_named(made_up: MadeUpDirectory) -> None:
    made_up.started()
    made_up.incident(1, 7, ["skip_step"], "resolved")
    made_up.event("run_ended", 50, incidents=1)
    made_up.run = "second"
    made_up.started()
    made_up.status(RunState.ENDED, 100)
    report = read_run(made_up.path)
    assert (report.run, report.incidents) == ("second", [])
    assert [{**each, "began": None} for each in report.other_runs] == [
        {"run": "run", "began": None, "state": "ended", "incidents": 1, "step": 50}
    ]
    assert len(read_run(made_up.path, run="run").incidents) == 1
    with pytest.raises(ValueError, match=r"There is no run 'third' in .*There are: run, second"):
        read_run(made_up.path, run="third")
    made_up.run = "run-again"
    made_up.started()
    assert read_run(made_up.path, run="sec").run == "second"
    assert read_run(made_up.path, run="run").run == "run"
    with pytest.raises(ValueError, match=r"2 runs begin with 'ru' in .*There are: run, run-again"):
        read_run(made_up.path, run="ru")


# ---- what can be drawn, and where the time went ----


def test_steps_that_were_done_again_are_told_apart(made_up: MadeUpDirectory) -> None:
    made_up.started()
    made_up.status(RunState.ENDED, 6)
    first = [row(step, attempt=1) for step in range(5)]
    made_up.steps(*first, *(row(step, attempt=2, loss=2.0) for step in range(2, 6)))
    report = read_run(made_up.path)
    assert report.series["source"] == "steps"
    assert report.series["kept"]["step"] == [0, 1, 2, 3, 4, 5]
    assert report.series["kept"]["loss"] == [3.0, 3.0, 2.0, 2.0, 2.0, 2.0]
    assert [each["step"] for each in report.series["discarded"]] == [[2, 3, 4]]
    assert report.goodput is not None
    assert (report.goodput.steps_useful, report.goodput.steps_done) == (6, 9)
    assert (report.goodput.useful, report.goodput.lost_steps) == (12.0, 6.0)


# ---- processes and budgets ----


# ---- what is made of it ----


def test_the_json_is_strict_and_names_its_schema(made_up: MadeUpDirectory) -> None:
    made_up.started()
    made_up.incident(1, 7, ["skip_step"], "resolved")
    content = read_run(made_up.path).to_dict()
    read = json.loads(json.dumps(content, allow_nan=False))
    assert read["schema"] == SCHEMA
    assert (read["steps_lost"], read["incidents"][0]["evidence"]["loss"]) == (1, "nan")
    assert "series" not in read_run(made_up.path).to_dict(series=False)


def test_a_briefing_of_many_incidents_has_60_lines_at_most(made_up: MadeUpDirectory) -> None:
    made_up.started()
    for number in range(1, 40):
        made_up.incident(number, number, ["skip_step"], "unresolved" if number == 3 else "resolved")
    made_up.status(RunState.STOPPED, 90, why="no")
    for step in range(10, 90, 10):
        made_up.checkpoint(step)
    text = briefing_of(read_run(made_up.path))
    assert len(text.splitlines()) <= LINES
    assert all(len(line) <= 400 for line in text.splitlines())
    # What was not healed is there, however long ago it was.
    assert "step 3: nonfinite loss: poison rows -> unresolved" in text
    assert "and 27 more" in text
    assert "## Where to read on" in text
