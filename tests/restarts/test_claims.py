"""Whose an exception is that left `train()`, asked of made-up healers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from self_healing import HealingConfig, Incident
from self_healing.failures.recipes import Action, FailureType
from self_healing.healers.assembly import assemble
from self_healing.healers.oom.healer import MemoryOutsideOfModel
from self_healing.healers.services import ServiceCalls
from self_healing.run.healer import Claim, Healer, Healers, claim_by_recipe, claim_for


def incident(name: str = "1") -> Incident:
    return Incident(name, 7, "made up")


@dataclass
class Claims(Healer):
    """Claims exceptions as it is told to."""

    claims: list[Claim] = field(default_factory=list)

    @property
    def has_claim(self) -> bool:
        return bool(self.claims)

    def claim(self, error: BaseException) -> Claim | None:
        return self.claims.pop() if self.claims else None


def test_the_first_that_claims_an_exception_heals_it_and_no_claim_is_left() -> None:
    idle, first, second = Claims(), Claims(), Claims()
    healers = Healers((idle, first, second))
    first.claims.append(Claim(incident("first"), Action.RESUME))
    second.claims.append(Claim(incident("second"), Action.RESUME))
    claims = healers.claims(ValueError())
    assert [claim.incident.id for claim in claims] == ["first", "second"]
    assert healers.claims(ValueError()) == []


@pytest.mark.parametrize(
    ("failure", "remedy", "wait"),
    [
        (FailureType.NETWORK, Action.WAIT_AND_RESUME, True),
        (FailureType.HANG, Action.RESUME, False),
        (FailureType.PROCESS_DIED, Action.RESUME, False),
        (FailureType.OUT_OF_MEMORY, Action.STOP, False),
        (FailureType.USER_CODE, Action.STOP, False),
    ],
)
def test_a_recipe_says_what_is_done_outside_of_train(failure: FailureType, remedy: Action, wait: bool) -> None:
    claim = claim_by_recipe(incident(), failure)
    assert (claim.remedy, claim.wait) == (remedy, wait)


def test_an_incident_that_waits_claims_whatever_exception_left_training() -> None:
    assert claim_for(None, ConnectionError()) is None
    claim, other = claim_for(incident(), ConnectionError()), claim_for(incident(), MemoryError())
    assert claim is not None
    assert claim.wait
    # Whoever knows what to do about memory goes on with the same incident.
    assert other is not None
    assert other.remedy is Action.STOP


def made_up_run(directory: Path, **settings: Any) -> Any:
    config = HealingConfig(api_retry_attempts=2, api_retry_base_delay=0.01, **settings)
    return assemble(config, directory, sleep=lambda seconds: None, wrapped=True)


def fail() -> None:
    raise ConnectionError("refused")


def test_a_call_that_is_given_up_claims_the_exception_once(tmp_path: Path) -> None:
    run = made_up_run(tmp_path)
    calls = ServiceCalls(run)
    with pytest.raises(ConnectionError) as caught:
        calls.call("a judge", lambda: None, fail)
    assert calls.has_claim
    claim = calls.claim(caught.value)
    assert claim is not None
    assert claim.incident is run.journal.incidents[0]
    assert calls.claim(caught.value) is None


class TestMemoryOutsideOfTheModel:
    def healer(self, directory: Path, **settings: Any) -> MemoryOutsideOfModel:
        run = made_up_run(directory, **settings)
        self.state = SimpleNamespace(global_step=0)
        return MemoryOutsideOfModel(run, SimpleNamespace(state=self.state))

    def remedies(self, directory: Path, steps: list[int], **settings: Any) -> list[Action | None]:
        healer = self.healer(directory, **settings)
        found: list[Action | None] = []
        for step in steps:
            self.state.global_step = step
            claim = healer.claim(MemoryError(), incident())
            found.append(None if claim is None else claim.remedy)
        return found

    def test_a_step_is_done_once_more_with_the_memory_freed(self, tmp_path: Path) -> None:
        assert self.remedies(tmp_path, [3, 90]) == [Action.FREE_MEMORY, Action.FREE_MEMORY]

    def test_the_same_step_again_ends_the_run_if_the_batch_stays(self, tmp_path: Path) -> None:
        found = self.remedies(tmp_path, [3, 4, 4], oom_reduce_batch=False)
        assert found == [Action.FREE_MEMORY, Action.FREE_MEMORY, Action.STOP]
