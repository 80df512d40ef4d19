"""JSON that a resume reads, damaged or of another version: what can be read is used, and the rest is said."""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from self_healing import HealingConfig, Incident
from self_healing.failures.recipes import FailureType, Given
from self_healing.healers.assembly import assemble, load_state, state_of
from self_healing.healers.numerics.state import NumericsState
from self_healing.healers.restarts.attempts import Attempts
from self_healing.healers.restarts.start import start_of
from self_healing.run.record import RECORD_FILE, ExitReason, RunRecord
from self_healing.run.run import Run
from self_healing.system.processes import launch_of


Path_ = tuple[str | int, ...]
Change = Callable[[Any, str | int], None]
KINDS: list[Any] = [None, True, -1, 2.5, "x", [], {}, [None], {"x": []}]


def paths(value: Any, above: Path_ = ()) -> Iterator[Path_]:
    """Every key in nested JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*above, key)
        yield from paths(each, (*above, key))


def damaged(content: Any, path: Path_, change: Change) -> Any:
    content = copy.deepcopy(content)
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return content


def deleted(holder: Any, key: str | int) -> None:
    del holder[key]


def renamed(holder: Any, key: str | int) -> None:
    if isinstance(holder, dict):
        holder[f"{key}~"] = holder.pop(key)


def of_another_kind(draw: random.Random) -> Change:
    def change(holder: Any, key: str | int) -> None:
        holder[key] = draw.choice([kind for kind in KINDS if type(kind) is not type(holder[key])])

    return change


def damages(content: Any, seed: int) -> Iterator[tuple[str, Any]]:
    """The content with each of its keys, one after the other, deleted, renamed, or of another kind."""
    draw = random.Random(seed)
    for path in paths(content):
        change = draw.choice([deleted, renamed, of_another_kind(draw), of_another_kind(draw)])
        yield f"{'.'.join(map(str, path))} {change.__name__}", damaged(content, path, change)


# ---- healing_run.json ----


@pytest.fixture
def record(tmp_path: Path) -> dict[str, Any]:
    """Of a run that failed in its second attempt, with everything in it that there can be."""
    run = assemble(HealingConfig(), tmp_path, run_id="20260101-000000-abcdef")
    written = RunRecord(tmp_path, run.run_id)
    run.part(Attempts).keep(written, taken_up=False)
    for _ in range(2):
        run.part(Attempts).begin(None, 4)
    run.journal.incidents.append(Incident("run-001", 6, "loss_spike", FailureType.DIVERGENCE, steps_lost=3))
    run.budget.used, run.budget.failed_at = 2, 6
    run.part(NumericsState).ladder.load_state_dict({"climbed": {"divergence": 2}})
    run.part(NumericsState).learning_rate.reduce(6)
    run.part(Attempts).end(ExitReason.FAILED, "RuntimeError")
    return dict(json.loads((tmp_path / RECORD_FILE).read_text()))


def taken_up(directory: Path, content: Any) -> Run:
    """A process that goes on with what the record says, as far as it does before the Trainer is asked."""
    (directory / RECORD_FILE).write_text(json.dumps(content))
    record = RunRecord.read(directory)
    assert record is not None
    start = start_of(None, 0, record, launch_of(), taken_up=False, requested="auto")
    assert start.record is record
    assert start.spends in (True, False)
    assert start.steps_to_repeat >= 0
    run = assemble(HealingConfig(), directory, run_id=record.run)
    run.part(Attempts).keep(record, taken_up=True)
    run.budget.spend(6)
    run.part(NumericsState).ladder.climb(FailureType.DIVERGENCE, 7, {Given.LATE, Given.RATE_LEFT})
    run.part(NumericsState).learning_rate.scale(9)
    run.part(NumericsState).learning_rate.reduce(9)
    run.part(NumericsState).missing.trained(9)
    run.part(Attempts).begin(None, 4)
    run.part(NumericsState).close_outcomes()
    run.part(Attempts).end(ExitReason.FINISHED)
    return run


def test_a_whole_record_is_used_without_a_word(
    tmp_path: Path, record: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run = taken_up(tmp_path, record)
    assert run.budget.failed_at >= 6
    assert caplog.text == ""


def test_what_memory_cannot_be_read_of_is_named(
    tmp_path: Path, record: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    record["memory"]["budget"] = {"used": "often"}
    run = taken_up(tmp_path, record)
    assert run.budget.failed_at >= 6
    assert "What the run record says of budget cannot be read" in caplog.text


# ---- what checkpoints hold ----


def test_no_damage_to_what_detectors_have_learned_stops_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = json.loads(json.dumps(state_of(assemble(HealingConfig(), tmp_path))))
    for name, content in damages(state, seed=0):
        try:
            load_state(assemble(HealingConfig(), tmp_path), content)
        except Exception as error:
            raise AssertionError(name) from error
    assert "What 'ladder' has learned cannot be taken from the checkpoint" in caplog.text
