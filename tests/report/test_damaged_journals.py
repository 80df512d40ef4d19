"""Reports of journals that are whole JSON, and say what no journal says: after a disk failed, or a change by hand."""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from self_healing.report import HealingReport
from self_healing.report.briefing import briefing_of
from self_healing.report.output import show
from self_healing.report.page.rendering import write_page
from self_healing.report.reading import read_run
from self_healing.report.records import RunReport
from self_healing.restarts.record import Attempt, Ending
from self_healing.restarts.status import RunState, RunStatus


JOURNALS = sorted((Path(__file__).parents[1] / "data" / "chaos_journals").glob("*.jsonl"))
DAMAGE: list[Any] = [
    *(None, True, -1, 0, 7, 2**63, 10**30, 10**400, -(10**18), 1e30, 1e308, float("inf"), float("nan")),
    *("", "nan", "2026", "\ud800", "[/nope]\x1b[31m\n[bold]", "</script><script>alert(1)</script>", "x" * 5000, "\0"),
    *([], {}, [None], ["x"], [[1]], {"x": "y"}, {"a": None}, {"loss": {"loss": {}}, "grad_norm": {}}),
]
QUARANTINED = {
    **{"run": "run", "incident": "run-001", "kind": "bad_sample", "problem": "raises", "error_type": "ValueError"},
    **{"step": 3, "epoch": 0.1, "time": 1e6, "dataset_index": 5, "content_hash": "0" * 64, "preview": "text"},
}


def lines_of(path: Path, directory: Path) -> list[dict[str, Any]]:
    """The events of a journal on record, with values where it says only their kind."""
    found = []
    for number, line in enumerate(path.read_text().splitlines()):
        values = {"<str>": "run", "<float>": 1e6 + number, "<int>": 17, "<directory>": str(directory)}
        event = json.loads(line, object_hook=lambda entry, values=values: _filled(entry, values))
        if "kind" in event:
            found.append(event)
    return found


def _filled(entry: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    filled = {}
    for name, value in entry.items():
        if name == "incident":
            value = f"run-{value:03d}"
        elif isinstance(value, str):
            value = values.get(value, value.replace("<directory>", values["<directory>"]))
        # The learning rate and seconds are small.
        filled[name] = 0.5 if isinstance(value, float) and name != "time" else value
    return filled


def places_in(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*way, key)
        if isinstance(inner, dict | list):
            yield from places_in(inner, (*way, key))


def damage(content: Any, rng: random.Random) -> None:
    """Damages one value anywhere in it."""
    *way, last = rng.choice(list(places_in(content)))
    for key in way:
        content = content[key]
    if rng.random() < 0.1:
        del content[last]
    else:
        content[last] = copy.deepcopy(rng.choice(DAMAGE))


@pytest.fixture
def files() -> dict[str, dict[str, Any]]:
    """What lies beside the journal."""
    attempt = Attempt(1, 17, "host", 1e6, None, 0, 100, Ending.RESTART, "a hang")
    marker = {"schema": 1, "step": 10, "time": 1e6, "files": {"model": 5}, "bookkeeping": {}, "standing": "verified"}
    status = RunStatus("run", "healing_events.jsonl", 240, 17, "host", 1e6, RunState.DIED, 200, 1e6 + 900.0)
    logged = [{"step": step, "loss": 2.0, "eval_loss": 2.0, "grad_norm": 1.0} for step in range(1, 9)]
    return {
        "quarantine.jsonl": dict(QUARANTINED),
        "healing_status.json": asdict(status),
        "healing_run.json": {
            **{"schema": 1, "time": 1e6, "run": "run", "incidents": [], "postmortem": None, "saving": None},
            "attempts": [asdict(attempt), asdict(replace(attempt, number=2, began=1e6 + 100.0))],
            "memory": {"budget": {"used": 1, "failed_at": 3}, "learning_rate": {"reductions": 1}},
        },
        "postmortem.json": {
            **{"run": "run", "step": 3, "verdict": "It hangs.", "what_to_do": "Look.", "resume_with": "train()"},
            "error": {"type": "builtins.TimeoutError", "message": "too long"},
        },
        "checkpoint-10/healing.json": marker,
        "checkpoint-10/trainer_state.json": {"global_step": 10, "log_history": logged},
    }


def write_run(directory: Path, journal: list[dict[str, Any]], files: dict[str, Any]) -> None:
    (directory / "checkpoint-10").mkdir(parents=True)
    text = "".join(json.dumps(event) + "\n" for event in journal)
    (directory / "healing_events.jsonl").write_text(text)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content) + "\n")


def in_all_forms(directory: Path) -> tuple[RunReport, str]:
    """The report as text, JSON, briefing and page, as the command line makes them."""
    report, summary = read_run(directory), HealingReport.from_run_dir(directory)
    with io.TextIOWrapper(io.BytesIO(), encoding="utf-8") as stream:
        show(report, summary, Console(file=stream, width=80, highlight=False))
        stream.flush()
        stream.seek(0)
        printed = stream.read()
    json.dumps(report.to_dict(), allow_nan=False)
    json.dumps(summary.to_dict())
    briefing_of(report).encode()
    write_page(report, directory / "report.html")
    return report, printed


@pytest.mark.parametrize("seed", range(24))
def test_a_damaged_run_is_reported_in_all_forms(tmp_path: Path, files: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    journal = lines_of(JOURNALS[seed % len(JOURNALS)], tmp_path)
    for _ in range(rng.choice((1, 10, 100, 1000))):
        damage(journal, rng)
    for name in rng.sample(sorted(files), 3):
        damage(files[name], rng)
    write_run(tmp_path / "run", journal, files)
    report, printed = in_all_forms(tmp_path / "run")
    assert report.next_steps
    assert "Journal: " in printed


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.stem)
def test_of_a_journal_that_is_whole_nothing_is_left_out(tmp_path: Path, files: dict[str, Any], path: Path) -> None:
    write_run(tmp_path / "run", lines_of(path, tmp_path), files)
    report, _ = in_all_forms(tmp_path / "run")
    assert len(report.incidents) > 10
    assert report.remarks == []


def test_what_cannot_be_read_is_counted_and_left_out(tmp_path: Path, files: dict[str, Any]) -> None:
    journal = lines_of(JOURNALS[0], tmp_path)
    outcome = next(event for event in journal if event["kind"] == "outcome")
    outcome |= {"steps_lost": "three", "time": None, "seconds_lost": 1e300}
    next(event for event in journal if event["kind"] == "detected")["evidence"] = "none"
    next(event for event in journal if event["kind"] == "snapshots")["step"] = "ten"
    files["quarantine.jsonl"]["content_hash"] = 7
    write_run(tmp_path / "run", journal, files)
    report, printed = in_all_forms(tmp_path / "run")
    assert report.incidents[0].outcome == outcome["outcome"]
    assert (report.incidents[0].steps_lost, report.incidents[0].seconds_lost, report.incidents[0].closed) == (
        0,
        0,
        None,
    )
    of_journal, of_quarantine = report.remarks
    assert "1 line of the journal cannot be read" in of_journal
    assert "4 values in the journal cannot be read" in of_journal
    assert of_quarantine == "1 value of quarantine.jsonl cannot be read."
    assert of_journal in printed.replace("\n", " ")


def test_a_status_of_no_time_is_as_if_it_were_not_there(tmp_path: Path, files: dict[str, Any]) -> None:
    journal = lines_of(JOURNALS[0], tmp_path)
    files["healing_status.json"]["since"] = 1e30
    write_run(tmp_path / "run", journal, files)
    report, _ = in_all_forms(tmp_path / "run")
    # What the journal says.
    assert (report.state.name, report.state.step) == ("ended", 240)


def test_names_in_tables_are_no_markup_and_steer_no_terminal(tmp_path: Path, files: dict[str, Any]) -> None:
    journal = lines_of(JOURNALS[0], tmp_path)
    next(event for event in journal if event["kind"] == "detected")["symptom"] = "[/a] [b]c[/b]\x1b[2J"
    write_run(tmp_path / "run", journal, files)
    _, printed = in_all_forms(tmp_path / "run")
    assert "[/a]" in printed
    assert "[b]c[/b]" in printed
    assert "\x1b" not in printed


def test_parts_of_file_names_that_no_encoding_has_are_on_the_page_as_a_question_mark(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    files["quarantine.jsonl"]["error"] = "r\udce9sum"
    write_run(tmp_path / "run", lines_of(JOURNALS[0], tmp_path), files)
    in_all_forms(tmp_path / "run")
    assert "r?sum" in (tmp_path / "run" / "report.html").read_text()
