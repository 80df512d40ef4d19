"""The open incident about a loss, with readings given by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_run import MadeUpRun

from self_healing import FailureType
from self_healing.failures.recipes import Symptom
from self_healing.healers.numerics.detectors.trend import Reading
from self_healing.healers.numerics.state import LossWatch
from self_healing.journal.incident import Incident


OUTCOME_STEPS, PATIENCE = 3, 4


class Losses:
    """Shows a watch one loss after the other; the baseline is at 2.0."""

    def __init__(self, directory: Path) -> None:
        self.run = MadeUpRun(directory, outcome_steps=OUTCOME_STEPS, divergence_patience=PATIENCE)
        self.watch: LossWatch = self.run.numerics.watch
        self.step = 0
        self.told: list[FailureType] = []
        self.panel: Any = SimpleNamespace(
            signed_loss=False,
            relearned=False,
            divergence=SimpleNamespace(alarmed=False),
            loss_trend=SimpleNamespace(scale=0.05),
            loss_reading=None,
        )

    def show(self, *losses: float, z: float | None = 0.0) -> None:
        for loss in losses:
            self.panel.loss_reading = Reading(self.step, loss, z, 2.0, 0.05, 20)
            self.watch.follow(self.panel)
            self.step += 1

    def alarm(self, name: str = "loss_spike") -> None:
        self.watch.begin(Symptom(name, self.step, {}), lambda incident, failure: self.told.append(failure))

    @property
    def incident(self) -> Incident:
        return self.run.journal.incidents[0]

    @property
    def outcome(self) -> dict[str, Any]:
        """The last line of the journal."""
        return json.loads((self.run.directory / "healing_events.jsonl").read_text().splitlines()[-1])


@pytest.fixture
def losses(tmp_path: Path) -> Losses:
    found = Losses(tmp_path)
    found.show(*[2.0] * 20)
    return found


def test_a_loss_that_is_back_for_long_enough_has_recovered(losses: Losses) -> None:
    losses.alarm()
    losses.show(9.0, z=8.0)
    losses.show(*[2.0] * (OUTCOME_STEPS - 1))
    assert losses.watch.open
    losses.show(2.0)
    assert not losses.watch.open
    assert losses.incident.outcome == "self_recovered"
    assert (losses.outcome["loss_before"], losses.outcome["loss_after"]) == (2.0, 2.0)


def test_it_has_to_be_back_in_steps_in_a_row(losses: Losses) -> None:
    losses.alarm()
    for _ in range(3):
        losses.show(2.0, 2.0)
        losses.show(9.0, z=8.0)
    assert losses.watch.open


def test_back_at_the_baseline_but_above_where_it_was_before_is_unresolved(losses: Losses) -> None:
    losses.show(*[1.0] * 20)
    losses.alarm()
    losses.show(9.0, z=8.0)
    losses.show(*[2.0] * 5)
    assert losses.incident.outcome == "unresolved"
    assert losses.outcome["settled"]
    assert losses.outcome["loss_before"] == 1.0


def test_a_rise_that_had_begun_before_it_was_seen_does_not_count_as_before(losses: Losses) -> None:
    losses.show(*[8.0] * 10, z=1.0)
    losses.alarm()
    losses.show(*[2.0] * 5)
    assert losses.outcome["loss_before"] == 2.0


def test_a_loss_that_neither_comes_back_nor_settles_holds_no_checkpoint_for_ever(losses: Losses) -> None:
    losses.alarm()
    losses.show(*[9.0] * (3 * PATIENCE), z=8.0)
    assert losses.watch.open
    losses.show(9.0, z=8.0)
    assert not losses.watch.open
    assert losses.incident.outcome == "unresolved"


def test_without_a_baseline_nothing_can_be_told_any_more(losses: Losses) -> None:
    losses.alarm()
    losses.panel.signed_loss = True
    losses.show(-1.0)
    assert losses.incident.outcome == "unresolved"
    assert not losses.outcome["settled"]


def test_a_loss_of_zero_is_below_any_baseline(losses: Losses) -> None:
    losses.alarm()
    losses.show(*[0.0] * OUTCOME_STEPS, z=None)
    assert losses.incident.outcome == "self_recovered"


def test_a_spike_that_widens_is_one_incident(losses: Losses) -> None:
    losses.alarm()
    losses.alarm("divergence")
    losses.alarm("divergence")
    losses.alarm()
    assert losses.told == [FailureType.LOSS_SPIKE, FailureType.DIVERGENCE]
    assert len(losses.run.journal.incidents) == 1
    assert losses.incident.failure is FailureType.DIVERGENCE
    assert losses.incident.cause == "spike that widened"
    assert losses.incident.evidence["widened_at"] == 20


def test_a_divergence_ends_with_its_alarm(losses: Losses) -> None:
    losses.panel.divergence.alarmed = True
    losses.alarm("divergence")
    losses.show(2.0, 2.0, 2.0, 2.0)
    assert losses.watch.open
    losses.panel.divergence.alarmed = False
    losses.show(2.0)
    assert losses.incident.outcome == "self_recovered"


def test_a_level_that_was_learned_instead_is_no_recovery(losses: Losses) -> None:
    losses.alarm("divergence")
    losses.panel.relearned = True
    losses.show(2.0)
    assert losses.incident.outcome == "unresolved"


def test_a_second_rise_belongs_to_the_first(losses: Losses) -> None:
    losses.alarm()
    losses.watch.rises_further(Symptom("second_rise", 33, {}))
    assert losses.incident.evidence["rose_again_at"] == 33
    assert len(losses.run.journal.incidents) == 1


def test_a_hold_on_request_ends_when_the_loss_is_back(losses: Losses) -> None:
    incident = losses.run.journal.open(20, "by_request", {})
    losses.watch.hold(incident)
    losses.watch.hold(losses.run.journal.open(20, "by_request", {}))
    assert losses.watch.incident is incident
    losses.show(*[2.0] * OUTCOME_STEPS)
    assert incident.outcome == "self_recovered"
    assert losses.outcome["loss_before"] == 2.0


def test_a_hold_lasts_as_long_whatever_was_open_before(losses: Losses) -> None:
    losses.alarm()
    losses.show(*[9.0] * (3 * PATIENCE), z=8.0)
    losses.watch.forget()
    losses.watch.hold(losses.run.journal.open(40, "by_request", {}))
    losses.show(9.0, z=8.0)
    assert losses.watch.open


def test_at_the_end_of_the_run_the_loss_is_not_back(losses: Losses) -> None:
    losses.alarm()
    losses.watch.end()
    assert losses.incident.outcome == "unresolved"
    assert not losses.watch.open
