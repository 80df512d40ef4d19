"""Reports of journals that are whole JSON, and say what no journal says: after a disk failed, or a change by hand."""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from self_healing.report import HealingReport
from self_healing.report.briefing import briefing_of
from self_healing.report.data import RunReport
from self_healing.report.page.rendering import write_page
from self_healing.report.reading import read_run
from self_healing.report.text import show
from self_healing.restarts.status import STATUS_FILE, RunState, RunStatus


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


def write_run(directory: Path, journal: list[dict[str, Any]], quarantine: Any, status: Any) -> None:
    directory.mkdir(exist_ok=True)
    text = "".join(json.dumps(event) + "\n" for event in journal)
    (directory / "healing_events.jsonl").write_text(text)
    (directory / "quarantine.jsonl").write_text(json.dumps(quarantine) + "\n")
    (directory / STATUS_FILE).write_text(json.dumps(status))


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


@pytest.fixture
def status(tmp_path: Path) -> dict[str, Any]:
    return asdict(RunStatus("run", "healing_events.jsonl", 240, 17, "host", 1e6, RunState.DIED, 200, 1e6 + 900.0))


@pytest.mark.parametrize("seed", range(24))
def test_a_damaged_journal_is_reported_in_all_forms(tmp_path: Path, status: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    journal = lines_of(JOURNALS[seed % len(JOURNALS)], tmp_path)
    quarantine = dict(QUARANTINED)
    for _ in range(rng.choice((1, 10, 100, 1000))):
        damage(journal, rng)
    for _ in range(rng.randrange(3)):
        damage(quarantine, rng)
        damage(status, rng)
    write_run(tmp_path / "run", [event for event in journal if isinstance(event, dict)] or [{}], quarantine, status)
    report, printed = in_all_forms(tmp_path / "run")
    assert report.next_steps
    assert "Journal: " in printed


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.stem)
def test_of_a_journal_that_is_whole_nothing_is_left_out(tmp_path: Path, status: dict[str, Any], path: Path) -> None:
    write_run(tmp_path / "run", lines_of(path, tmp_path), QUARANTINED, status)
    report, _ = in_all_forms(tmp_path / "run")
    assert len(report.incidents) > 10
    assert report.remarks == []
