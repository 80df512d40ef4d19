"""What the journal of the first rank makes of the incidents of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from self_healing import HealingConfig
from self_healing.failures import FailureType
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
    assert journal.open(9, "bad_sample", {}).id == "run-004"
    assert len(journal.heard) == (3 if rank == 0 else 0)
