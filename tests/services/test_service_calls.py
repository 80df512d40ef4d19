"""Calls of services that fail, and the incident of each, without a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_up_run import MadeUpRun

from self_healing import FailureType
from self_healing.failures.recipes import NonFiniteReward
from self_healing.healers.services import ServiceCalls


class Calls:
    """A run that waits by writing down for how long."""

    def __init__(self, directory: Path) -> None:
        self.run = MadeUpRun(directory, retry_attempts=4)
        self.waited: list[float] = []
        run: Any = self.run
        run.sleep = self.waited.append
        self.calls = ServiceCalls(run)
        self.rewound = 0

    def rewind(self) -> None:
        self.rewound += 1

    def make(self, *results: Any) -> Any:
        """A call that raises, or gives, one after the other."""
        given = iter(results)

        def function() -> Any:
            result = next(given)
            if isinstance(result, BaseException):
                raise result
            return result

        return self.calls.call("the judge", self.rewind, function)


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    return Calls(tmp_path)


def test_a_call_that_is_made_again_is_one_incident(calls: Calls) -> None:
    assert calls.make(ConnectionError("x" * 2000), ConnectionError("no"), 7) == 7
    (incident,) = calls.run.journal.incidents
    assert calls.run.incidents == [(str(FailureType.NETWORK.value), "resolved")]
    assert incident.figures[0] == f"the judge: 3 attempts, {sum(calls.waited):.1f} s waited"
    assert incident.seconds_lost >= sum(calls.waited)
    assert len(incident.evidence["message"]) == 500
    assert (calls.rewound, len(calls.waited)) == (2, 2)


def test_one_that_works_is_none(calls: Calls) -> None:
    assert calls.make(7) == 7
    assert calls.run.journal.incidents == []


def test_one_that_is_given_up_is_closed_where_training_cannot_be_entered_again(calls: Calls) -> None:
    with pytest.raises(ConnectionError):
        calls.make(*[ConnectionError("no")] * 4)
    assert calls.run.incidents == [("network", "unresolved")]
    assert "4 attempts" in calls.run.journal.incidents[0].figures[0]
    assert not calls.calls.has_claim


def test_it_is_claimed_where_training_can(calls: Calls) -> None:
    calls.run.may_enter_again = True
    with pytest.raises(ConnectionError):
        calls.make(*[ConnectionError("no")] * 4)
    assert calls.calls.has_claim
    # The user's code has let it pass, and goes on.
    calls.make(7)
    assert calls.run.incidents == [("network", "self_recovered")]


def test_rewards_that_stay_not_finite_are_gone_on_without(calls: Calls) -> None:
    error = NonFiniteReward([None], range(30), 64)
    assert calls.make(*[error] * 4) == [None]
    (incident,) = calls.run.journal.incidents
    assert (incident.failure, incident.outcome) == (FailureType.NONFINITE_REWARD, "unresolved")
    assert incident.evidence["completions"] == list(range(20))
    # It is known by now: asked twice at most, and no incident of its own.
    assert calls.make(*[error] * 2) == [None]
    assert incident.evidence["answers"] == 2
    assert len(calls.run.journal.incidents) == 1
