"""An incident is timed and told of once, and no way out of its block leaves it without an outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import journal
from made_up_run import MadeUpRun

from self_healing import Action, FailureType, Incident, UnrecoverableTrainingError
from self_healing.failures.recipes import DamagedCheckpointError
from self_healing.run import incidents


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeUpRun:
    """A run that writes down whom it has told, with a clock that goes on by a second each time it is looked at."""
    seconds = iter(range(100))
    monkeypatch.setattr(incidents.time, "perf_counter", lambda: float(next(seconds)))
    run = MadeUpRun(tmp_path)
    run.told = []
    run.journal.notify = run.told.append
    return run


def kinds(run: MadeUpRun) -> list[str]:
    return [event["kind"] for event in journal(run.directory)]


def awaited(run: MadeUpRun) -> list[Incident]:
    return [each.incident for each in run.outcomes._awaited]


def test_one_that_is_closed_is_told_of_once_and_then_closed(run: MadeUpRun) -> None:
    with run.incident(3, "loss_spike", {"value": 9.0}) as opened:
        opened.diagnosed(FailureType.LOSS_SPIKE, "one step")
        opened.acted(Action.HOLD_CHECKPOINTS)
        opened.close("reported", missing=[])
    assert kinds(run) == ["detected", "diagnosed", "action", "outcome"]
    assert run.told == [opened.incident]
    assert (opened.incident.outcome, opened.incident.seconds_lost) == ("reported", 1.0)
    assert awaited(run) == []


def test_one_that_is_not_closed_waits_for_the_steps_that_follow(run: MadeUpRun) -> None:
    with run.incident(3, "gradient_spike", {}) as opened:
        opened.diagnosed(FailureType.GRADIENT_SPIKE, "the same again")
    assert awaited(run) == run.told == [opened.incident]
    assert opened.incident.outcome == "open"


def test_what_follows_is_not_counted_as_lost(run: MadeUpRun) -> None:
    with run.incident(3, "nonfinite_loss", {}) as opened:
        opened.stop_clock()
        opened.wait()
    assert opened.incident.seconds_lost == 1.0
    assert len(awaited(run)) == 1


def test_going_on_with_one_adds_to_the_time_it_has_cost(run: MadeUpRun) -> None:
    earlier = run.journal.open(3, "red_flag", {})
    earlier.seconds_lost = 5.0
    run.dealing_with(earlier).close("reported")
    assert earlier.seconds_lost == 6.0


def test_one_that_another_part_closes_is_told_of_and_left_open(run: MadeUpRun) -> None:
    with run.incident(3, "loss_spike", {}) as opened:
        opened.leave_open()
    assert (run.told, awaited(run), opened.incident.outcome) == ([opened.incident], [], "open")


@pytest.mark.parametrize("error", [ValueError("ours"), UnrecoverableTrainingError("of another incident")])
def test_an_exception_closes_it_as_unresolved(run: MadeUpRun, error: Exception) -> None:
    with pytest.raises(type(error)), run.incident(3, "nonfinite_loss", {}) as opened:
        raise error
    assert (opened.incident.outcome, opened.incident.seconds_lost) == ("unresolved", 1.0)
    assert run.told == []


def test_an_exception_leaves_the_outcome_it_has(run: MadeUpRun) -> None:
    opened = run.incident(3, "nonfinite_loss", {})
    run.journal.closed(opened.incident, "fatal")
    with pytest.raises(UnrecoverableTrainingError), opened:
        raise UnrecoverableTrainingError("the remedies are spent")
    assert kinds(run) == ["detected", "outcome"]
    assert opened.incident.outcome == "fatal"


@pytest.mark.parametrize("wait", ["wait", "leave_open"])
def test_an_exception_leaves_it_where_it_waits(run: MadeUpRun, wait: str) -> None:
    opened = run.incident(3, "loss_spike", {})
    getattr(opened, wait)()
    with pytest.raises(ValueError, match="ours"), opened:
        raise ValueError("ours")
    assert opened.incident.outcome == "open"


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(143), RuntimeError("CUDA error: unspecified launch failure"), None]
)
def test_what_goes_on_elsewhere_stays_open(run: MadeUpRun, error: Any) -> None:
    opened = run.incident(3, "nonfinite_loss", {})
    error = error or DamagedCheckpointError(opened.incident, "checkpoint-2")
    with pytest.raises(type(error)), opened:
        raise error
    assert opened.incident.outcome == "open"
