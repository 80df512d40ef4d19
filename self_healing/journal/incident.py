"""`Incident`: one failure from its detection to its outcome, and the sentence that describes it to a person."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..detectors.symptom import Severity
from ..failures.recipes import FAILURE_RECIPES, Action, Cause, FailureType


# In the id of an incident of a rank other than the first, before the number of that rank.
OF_RANK = ".rank"
# Symptoms.
_OF_PROCESSES = frozenset({"process_died", "preempted", "failure_on_another_rank"})
# Outcomes; and the evidence of why it is not known how many steps are lost.
HEALED = frozenset({"resolved", "self_recovered"})
IN_DOUBT = "steps_lost_unknown"
# Still going on when they are reported: the reader may want to act on the advice.
_ADVISED = frozenset(
    {
        FailureType.CORRUPTED_COPY,
        FailureType.GRADIENT_SPIKE,
        FailureType.DIVERGENCE,
        FailureType.VANISHING_GRADIENT,
        FailureType.DEAD_LOSS,
        FailureType.NEVER_LEARNED,
        FailureType.SLOW_RISE,
    }
)


@dataclass(slots=True)
class Incident:
    """
    One failure from its detection to its outcome.

    Args:
        id (`str`):
            Unique within the run directory: those of ranks other than the first end with `.rank1`, `.rank2`, ...
        step (`int`):
            Optimizer steps finished when it was seen.
        symptom (`str`):
            A detector's name, or the type of an exception.
        failure (`FailureType`, *optional*):
            The kind of failure the diagnosis found.
        cause (`str`):
            The diagnosis in a few words; a [`Cause`] where an experiment has shown it.
        evidence (`dict`):
            The values and experiments behind the diagnosis.
        actions (`list[str]`):
            Names of the actions that were carried out.
        steps_lost (`int`):
            Optimizer steps that are missing from the weights.
        steps_repeated (`int`):
            Optimizer steps that were finished, are in no checkpoint, and have to be done again.
        seconds_lost (`float`):
            Time diagnosis and remedy took.
        severity (`str`, *optional*):
            That of the symptom. Defaults to that of the failure.
        figures (`list[str]`):
            Effects of the actions, in words with numbers.
        outcome (`str`):
            `"open"`, `"resolved"` (loss back within 2 scales of its trend), `"self_recovered"` (the same, without an
            action), `"unresolved"`, `"reported"` (no action was taken) or `"fatal"`.
    """

    id: str
    step: int
    symptom: str
    failure: FailureType | None = None
    cause: str = Cause.UNKNOWN
    evidence: dict[str, Any] = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)
    steps_lost: int = 0
    steps_repeated: int = 0
    seconds_lost: float = 0.0
    severity: Severity | None = None
    figures: list[str] = field(default_factory=list)
    outcome: str = "open"

    @property
    def of_a_process(self) -> bool:
        """Whether it is about a process, killed or asked to leave, and not about training."""
        return self.symptom in _OF_PROCESSES

    @property
    def quarantined(self) -> int:
        """Rows of batches, and samples of the data, that it put into quarantine."""
        return sum(len(self.evidence[kind]) for kind in ("rows", "samples") if kind in self.evidence)

    def is_like(self, other: Incident) -> bool:
        """Whether another one is the same event, seen by another rank."""
        mine, theirs = ((each.step, each.symptom, each.failure, each.cause) for each in (self, other))
        return mine == theirs

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Incident:
        """Makes an incident of what [`to_dict`] wrote in an earlier process."""
        known = {each.name: entry[each.name] for each in fields(cls) if each.name in entry}
        failure = known.pop("failure", None)
        return cls(
            id=entry["incident"],
            failure=None if failure is None else FailureType(failure),
            # Its own from here on.
            **{name: copy.copy(value) for name, value in known.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        entry = {each.name: copy.copy(getattr(self, each.name)) for each in fields(self) if each.name != "id"}
        entry["failure"] = None if self.failure is None else self.failure.value
        entry["seconds_lost"] = round(self.seconds_lost, 3)
        return {"incident": self.id, **entry}


def counted(number: int, what: str) -> str:
    """Counts something: `"1 step"`, `"2 steps"`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def lost_steps(steps: int, *evidence: Mapping[str, Any]) -> str:
    """Puts the steps that incidents have cost into words: `"1 step lost"`, or that nobody knows how many."""
    return "steps lost not known" if any(IN_DOUBT in each for each in evidence) else f"{counted(steps, 'step')} lost"


def figures(evidence: Mapping[str, Any]) -> str:
    """Puts the numbers of a detector's evidence into a few words."""
    if isinstance(evidence.get("loss"), Mapping) and isinstance(evidence.get("grad_norm"), Mapping):
        return f"loss: {figures(evidence['loss'])}; gradient norm: {figures(evidence['grad_norm'])}"
    shown = [
        f"{name.replace('_', ' ')} {evidence[name]:.4g}"
        for name in ("value", "baseline", "z", "bound", "threshold", "limit", "steps", "window")
        if isinstance(evidence.get(name), int | float)
    ]
    return ", ".join(([str(evidence["metric"])] if "metric" in evidence else []) + shown)


def describe(incident: Incident) -> str:
    """Puts an incident into a sentence, for a person at 3 a.m."""
    lost = "no step lost" if incident.steps_lost == 0 else f"{counted(incident.steps_lost, 'step')} lost"
    if IN_DOUBT in incident.evidence:
        lost = f"steps lost not known ({incident.evidence[IN_DOUBT]})"
    if incident.steps_repeated:
        lost += f", {counted(incident.steps_repeated, 'step')} done again"
    done = ", ".join(action.replace("_", " ") for action in incident.actions) or "nothing"
    if incident.figures:
        done += f" ({'; '.join(incident.figures)})"
    failure = "" if incident.failure is None else f" {FAILURE_RECIPES[incident.failure].diagnosis}"
    if incident.symptom == "vanishing_gradient" and incident.failure is FailureType.DIVERGENCE:
        # Healed as a divergence, though no loss need have risen.
        failure = " There is no gradient with these weights, and there is one with trusted ones: nothing is learned."
    numbers = figures(incident.evidence)
    if numbers:
        failure += f" ({numbers}.)"
    if incident.evidence.get("diagnosis"):
        failure += f" {str(incident.evidence['diagnosis']).removesuffix('.')}."
    tensors = incident.evidence.get("tensors")
    if tensors:
        failure += f" In: {', '.join(map(str, tensors[:5]))}."
    healed = Action.ROLL_BACK in incident.actions and Action.STOP not in incident.actions
    advice = incident.evidence.get("remedy") or (
        FAILURE_RECIPES[incident.failure].advice if incident.failure in _ADVISED and not healed else ""
    )
    if advice:
        failure += f" What to do: {advice}"
    if "why" in incident.evidence:
        failure += f" ({incident.evidence['why']}.)"
    now = incident.evidence.get("widened_at")
    steps = f"Step {incident.step}" if now is None else f"Step {incident.step} to {now}"
    return (
        f"{steps}: {incident.symptom.replace('_', ' ')}; cause: {incident.cause}.{failure} "
        f"Done: {done}; {lost}, {incident.seconds_lost:.1f} s. Incident {incident.id}."
    )
