"""The report in all its forms: of runs on record, of lines that cannot be read, and of names that would do harm."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_reading import MadeUpDirectory

from self_healing.report.healing_report import HealingReport
from self_healing.report.output import briefing_of, show
from self_healing.report.page.rendering import page_of
from self_healing.report.reading import read_run
from self_healing.report.records import RunReport
from self_healing.run.status import RunState


JOURNALS = sorted((Path(__file__).parents[1] / "data" / "chaos_journals").glob("*.jsonl"))


@pytest.fixture
def ended(tmp_path: Path) -> MadeUpDirectory:
    made_up = MadeUpDirectory(tmp_path / "run")
    made_up.started()
    made_up.status(RunState.ENDED, 100)
    return made_up


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


def in_all_forms(directory: Path) -> tuple[RunReport, str, str]:
    """The report, its text in the terminal, and its page; all as the command line makes them."""
    report, summary = read_run(directory), HealingReport.from_run_dir(directory)
    with io.TextIOWrapper(io.BytesIO(), encoding="utf-8") as stream:
        show(report, summary, Console(file=stream, width=80, highlight=False))
        stream.flush()
        stream.seek(0)
        printed = stream.read()
    json.dumps(report.to_dict(), allow_nan=False)
    json.dumps(summary.to_dict())
    briefing_of(report).encode()
    return report, printed, page_of(report)


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.stem)
def test_a_run_on_record_is_told_in_all_forms(tmp_path: Path, path: Path) -> None:
    text = "".join(json.dumps(event) + "\n" for event in lines_of(path, tmp_path))
    (tmp_path / "healing_events.jsonl").write_text(text)
    report, printed, _ = in_all_forms(tmp_path)
    assert len(report.incidents) > 10
    assert report.remarks == []
    assert "What to do next:" in printed


def test_lines_that_are_no_events_are_counted_and_left_out(ended: MadeUpDirectory) -> None:
    ended.incident(1, 7, ["skip_step"], "resolved")
    with (ended.path / "healing_events.jsonl").open("a") as file:
        file.write('{"step": 1}\n[]\n{"schema": 1, "ru')
    report, printed, _ = in_all_forms(ended.path)
    assert len(report.incidents) == 1
    assert "3 lines of the journal cannot be read" in report.remarks[0]
    assert report.remarks[0] in printed.replace("\n", " ")


def test_texts_of_a_run_are_no_markup_steer_no_terminal_and_can_be_encoded(ended: MadeUpDirectory) -> None:
    ended.event("detected", 3, incident="run-001", symptom="[/a] [b]c[/b]\x1b[2J")
    sample = {"run": "run", "kind": "bad_sample", "dataset_index": 5, "error": "r\udce9sum\u00e9"}
    (ended.path / "quarantine.jsonl").write_text(json.dumps(sample) + "\n")
    _, printed, page = in_all_forms(ended.path)
    assert "[/a]" in printed
    assert "[b]c[/b]" in printed
    assert "\x1b" not in printed
    assert "r?sum\u00e9" in page
