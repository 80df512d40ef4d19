"""What the journal of the first rank makes of the incidents of others."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from self_healing import HealingConfig
from self_healing.failures.recipes import FailureType
from self_healing.journal import journal as module
from self_healing.journal.incident import Incident
from self_healing.journal.journal import Journal


@pytest.fixture
def told() -> list[Incident]:
    return []


@pytest.fixture
def first(tmp_path: Path, told: list[Incident]) -> Journal:
    return Journal(tmp_path, HealingConfig(), "run", notify=told.append)


@pytest.fixture
def second(tmp_path: Path, first: Journal) -> Journal:
    journal = Journal(tmp_path, HealingConfig(), "run", rank=1)
    journal.tell = lambda record: first.take_in(1, record())
    return journal


def happens(journal: Journal, step: int, symptom: str, cause: str, **evidence: Any) -> Incident:
    incident = journal.open(step, symptom, evidence)
    journal.diagnosed(incident, FailureType.BAD_DATA, cause, {})
    journal.dealt_with(incident)
    journal.closed(incident, "resolved")
    return incident


def test_an_incident_that_only_another_rank_has_had_is_reported_by_the_first(
    first: Journal, second: Journal, told: list[Incident]
) -> None:
    happens(second, 3, "bad_sample", "sample 7")
    assert [(each.id, each.cause) for each in told] == [("run-001.rank1", "sample 7")]
    assert first.totals()["incidents"] == 1


def test_an_event_that_both_have_seen_is_reported_once(first: Journal, second: Journal, told: list[Incident]) -> None:
    happens(second, 2, "bad_sample", "sample 7")
    for journal in (first, second):
        happens(journal, 3, "nonfinite_loss", "data")
    # Under one number here, and under another one there.
    assert [each.id for each in told] == ["run-001.rank1", "run-001"]
    assert first.totals()["incidents"] == 2


def test_rows_that_each_rank_has_dropped_are_counted_together(first: Journal, second: Journal) -> None:
    happens(first, 3, "nonfinite_loss", "data", rows=[{"dataset_index": 1}])
    happens(second, 3, "nonfinite_loss", "data", rows=[{"dataset_index": 2}, {"dataset_index": 5}])
    assert first.totals()["quarantined_rows"] == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_no_id_of_another_rank_is_used_again_after_a_restart(
    tmp_path: Path, first: Journal, second: Journal, rank: int
) -> None:
    for step in range(3):
        happens(second, step, "bad_sample", f"sample {step}")
    recorded = first.of_all_ranks
    # On another machine, where the journal of the rank does not lie.
    journal = Journal(tmp_path / "elsewhere", HealingConfig(), "run", rank=rank)
    journal.take_up(recorded, [incident.id for incident in recorded])
    assert journal.open(9, "bad_sample", {}).id == f"run-004{'.rank1' * rank}"
    assert (len(journal.heard), len(journal.incidents)) == ((3, 1) if rank == 0 else (0, 4))


def test_after_a_restart_a_rank_goes_on_with_its_own_and_with_those_of_the_first(tmp_path: Path) -> None:
    first, second = Incident("run-001", 3, "hang"), Incident("run-001.rank1", 3, "bad_sample")
    third = Incident("run-001.rank2", 3, "bad_sample")
    journal = Journal(tmp_path, HealingConfig(), "run", rank=1)
    journal.take_up([first, second, third])
    assert (journal.incidents, journal.heard) == ([second, first], [])


def test_what_becomes_of_an_incident_is_written_by_the_rank_that_has_had_it(tmp_path: Path) -> None:
    told: list[Any] = []
    journal = Journal(tmp_path, HealingConfig(), "run", rank=1)
    journal.tell = told.append
    first, own = Incident("run-001", 3, "hang"), Incident("run-001.rank1", 3, "bad_sample")
    journal.take_up([first, own])
    for incident in (first, own):
        journal.acted(incident, "resume")
        journal.taken_up(incident, 4, "checkpoint-4")
        journal.dealt_with(incident)
        journal.closed(incident, "resolved")
    written = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert [(event["incident"], event["kind"], event["step"]) for event in written] == [
        (own.id, "action", 3),
        (own.id, "taken_up", 4),
        (own.id, "outcome", 3),
    ]
    assert (first.outcome, own.outcome) == ("resolved", "resolved")
    assert {each()["incident"] for each in told} == {own.id}


def test_incidents_opened_in_two_threads_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, HealingConfig(), "run")
    other = threading.Thread(target=journal.open, args=(3, "hang", {}))

    def largest(*numbers: int) -> int:
        """Called while a thread looks for a number that nobody has."""
        found = max(*numbers)
        if other.ident is None:
            other.start()
            other.join(0.3)
        return found

    monkeypatch.setattr(module, "max", largest, raising=False)
    journal.open(3, "loss_spike", {})
    other.join()
    assert sorted(incident.id for incident in journal.incidents) == ["run-001", "run-002"]
