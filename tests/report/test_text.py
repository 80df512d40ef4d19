"""The report in all its forms: of runs on record, of lines that cannot be read, and of names that would do harm."""

from __future__ import annotations

import io
import json
import shutil
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


# ---- in a terminal ----


def shown(directory: Path, columns: int) -> list[str]:
    """The lines of the report in a terminal of some width."""
    console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None, highlight=False)
    show(read_run(directory), HealingReport.from_run_dir(directory), console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def place_of(lines: list[str], begin: str) -> int:
    return next(number for number, line in enumerate(lines) if line.startswith(begin))


def test_the_verdict_comes_first_then_what_to_do_then_what_happened(ended: MadeUpDirectory) -> None:
    ended.incident(1, 7, ["quarantine_rows", "drop_rows"], "resolved")
    ended.checkpoint(90)
    lines = shown(ended.path, 80)
    begins = (
        "Verdict: Good: what was found was healed.",
        "The run ended at step 100",
        "What to do next:",
        "1 incident,",
    )
    places = [place_of(lines, begin) for begin in (*begins, "  healed: step 7", "Checkpoints")]
    assert places[0] == 0
    assert places == sorted(places)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_lines_are_wrapped_between_words_and_what_is_copied_is_left_whole(
    ended: MadeUpDirectory, columns: int
) -> None:
    ended.incident(1, 7, ["use_reexecuted_step", "quarantine_rows", "drop_rows"], "unresolved")
    ended.checkpoint(90)
    lines = shown(ended.path, columns)
    commands = [line for line in lines if "self-healing replay" in line or str(ended.path) in line]
    assert [line for line in lines if len(line) > columns and line not in commands] == []
    _, printed, _ = in_all_forms(ended.path)
    told = " ".join(printed.partition("Checkpoints")[0].split())
    assert " ".join(" ".join(lines).partition("Checkpoints")[0].split()) == told


def test_a_program_gets_each_incident_in_one_line(ended: MadeUpDirectory) -> None:
    ended.incident(1, 7, ["use_reexecuted_step", "quarantine_rows", "drop_rows"], "resolved")
    _, printed, _ = in_all_forms(ended.path)
    line = "  healed: step 7: NaN/Inf in loss, poison rows on rank 1 -> computed again, quarantined, dropped; "
    assert f"\n{line}0 steps lost, 1.5 s\n" in printed


def test_a_checkpoint_is_listed_once_and_the_newest_of_a_healthy_run_is_not_yet_confirmed(
    ended: MadeUpDirectory,
) -> None:
    for step, standing in ((80, "verified"), (90, "unverified"), (100, "unverified")):
        path = ended.checkpoint(step, standing=standing)
        shutil.copytree(path, ended.path / "last-known-good" / path.name)
    report, printed, page = in_all_forms(ended.path)
    assert len(report.checkpoints) == 6
    assert [(each.path, words) for each, words in report.listed()] == [
        ("checkpoint-100", "newest, not yet confirmed"),
        ("checkpoint-90", "not yet confirmed"),
        ("checkpoint-80", "verified"),
    ]
    for text in (printed, page, briefing_of(report)):
        assert "newest, not yet confirmed" in text
        assert "unverified" not in text
        assert "last-known-good/" not in text


def test_after_a_run_that_was_not_healed_a_checkpoint_is_unverified(ended: MadeUpDirectory) -> None:
    ended.checkpoint(100, standing="unverified")
    ended.incident(1, 7, ["skip_step"], "unresolved")
    assert [words for _, words in read_run(ended.path).listed()] == ["unverified"]


def test_of_many_incidents_the_newest_are_told(ended: MadeUpDirectory) -> None:
    for number in range(1, 31):
        ended.incident(number, number, ["use_reexecuted_step"], "resolved")
    lines = shown(ended.path, 120)
    assert "The newest of them; --json has 10 more." in lines
    assert [line.split(":")[1] for line in lines if line.startswith("  healed:")] == [
        f" step {number}" for number in range(11, 31)
    ]
