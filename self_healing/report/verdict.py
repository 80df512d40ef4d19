"""The verdict on the weights of a run that is over: *good*, *look first* or *do not use*, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..failures import Action, FailureType
from ..journal.incident import IN_DOUBT
from .journals import number
from .records import CheckpointRow, IncidentStory, State, Verdict
from .words import counted


# A movement below this many times the spread of the logs around their trend is none.
_MOVED = 2.0
_NAMED = 3


def needs_a_look(incident: IncidentStory) -> bool:
    """Whether an incident leaves a doubt about the weights: it was not healed, or a red flag was only reported."""
    if incident.outcome == "reported":
        return incident.severity != "info" and incident.failure != FailureType.REPORTING
    return incident.outcome in ("unresolved", "fatal")


def judge_weights(
    state: State,
    incidents: Sequence[IncidentStory],
    checkpoints: Sequence[CheckpointRow],
    missing: int,
    ended: Mapping[str, Any],
) -> Verdict | None:
    """
    Judges the weights that a run has left.

    Args:
        state ([`State`]), incidents (`Sequence[IncidentStory]`), checkpoints (`Sequence[CheckpointRow]`):
            Of the run.
        missing (`int`):
            Steps that are known not to be in the weights.
        ended (`Mapping[str, Any]`):
            What the event of its end says: `learned` ([`~self_healing.detectors.progress.movement_of`]), `nonfinite`.

    Returns:
        [`Verdict`]: `None` as long as the run goes on, or may.
    """
    if state.name in ("running", "unknown"):
        return None
    missing = min(missing, state.step)
    if missing == state.step:
        return Verdict("do not use", [f"none of its {counted(state.step, 'step')} is in them"])
    if weights := ended.get("nonfinite"):
        return Verdict("do not use", [f"they hold NaN or Inf ({', '.join(weights[:_NAMED])})"])
    movement = ended.get("learned", {})
    why = list(_doubts(state, incidents, checkpoints, missing, movement))
    if state.name != "ended":
        of = "" if state.max_steps is None else f" of {state.max_steps:,}"
        why.insert(0, f"the run is not finished, it came to step {state.step:,}{of}")
    evaluate = "evaluate the weights before you use them."
    learned = ": ".join([*([went] if (went := _went(movement)) else []), evaluate])
    learned = learned[:1].upper() + learned[1:]
    if why:
        return Verdict("look first", why, learned)
    return Verdict("good", ["what was found was healed" if incidents else "no fault was found"], learned)


def _doubts(
    state: State,
    incidents: Sequence[IncidentStory],
    checkpoints: Sequence[CheckpointRow],
    missing: int,
    movement: Mapping[str, Any],
) -> Iterable[str]:
    open_ones = {each.title: each for each in incidents if needs_a_look(each)}
    for each in [*open_ones.values()][-_NAMED:]:
        became = {"reported": "was only reported", "fatal": "ended the run"}.get(each.outcome, "was not healed")
        yield f"{each.title} {became} (step {each.step})"
    if len(open_ones) > _NAMED:
        yield f"{len(open_ones) - _NAMED} kinds of incidents more were not healed"
    if missing:
        yield f"{missing} of {counted(state.step, 'step')} {'is' if missing == 1 else 'are'} not in the weights"
    for each in [each for each in incidents if IN_DOUBT in each.evidence][-1:]:
        yield f"how many steps are lost is not known (step {each.step}: {each.evidence[IN_DOUBT]})"
    saved = max((each.step for each in checkpoints if each.complete and each.of_this_run), default=0)
    unsaved = any(each.failure == FailureType.DISK or Action.HOLD_CHECKPOINTS in each.actions for each in incidents)
    if state.name == "ended" and unsaved and saved < state.step:
        yield f"steps {saved + 1} to {state.step} are on no disk"
    metric = movement.get("metric")
    logs, moved, spread = (number(movement.get(key)) for key in ("logs", "moved", "spread"))
    if logs is not None and moved is not None and spread is not None and moved <= _MOVED * spread:
        where = "worse" if moved < 0 else "better"
        how = (
            f"moved by {abs(moved):.2g} to the {where}, less than twice their spread of {spread:.2g} around the trend"
        )
        yield f"over {logs:.0f} logs the {metric} {how if moved or spread else 'did not move'}"
    elif movement.get("fell_back") is True:
        yield f"the {metric} is no better at the end than at the beginning"


def _went(movement: Mapping[str, Any]) -> str:
    metric, first, last = movement.get("metric"), number(movement.get("first")), number(movement.get("last"))
    return "" if first is None or last is None else f"{metric} {first:.4g} to {last:.4g}"
