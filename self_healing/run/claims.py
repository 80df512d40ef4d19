"""`Claim`: the incident that an exception which left `train()` belongs to, and its remedy."""

from __future__ import annotations

from dataclasses import dataclass

from ..failures.classify import classify_exception
from ..failures.recipes import FAILURE_RECIPES, Action, FailureType
from ..hf.memory import BatchPlan
from ..journal.incident import Incident


@dataclass(frozen=True, slots=True)
class Claim:
    """An exception that left `train()`, with the incident it belongs to and what cures it."""

    incident: Incident
    remedy: Action
    wait: bool = False
    batch: BatchPlan | None = None


def claim_by_recipe(incident: Incident, failure: FailureType) -> Claim:
    """Claims an exception for the remedy outside of `train()` that its recipe names; `STOP` if it names none."""
    remedy = FAILURE_RECIPES[failure].reentry or Action.STOP
    return Claim(incident, remedy, wait=remedy is Action.WAIT_AND_RESUME)


def claim_for(incident: Incident | None, error: BaseException) -> Claim | None:
    """Claims an exception for an incident that waits for one; `None` without one."""
    return None if incident is None else claim_by_recipe(incident, classify_exception(error))
