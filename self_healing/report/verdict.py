"""The verdict on the weights of a run that is over: *good*, *look first* or *do not use*, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import linear_regression, median
from typing import Any

from ..failures.recipes import Action, FailureType
from ..journal.incident import IN_DOUBT, counted
from .records import Checkpoint, IncidentStory, State, Verdict, capital


# Of a loss or reward: fewer logs say nothing of its trend, and larger ones cannot be squared.
_FEWEST_LOGS, _LARGEST = 20, 1e30
# A movement below this many times the spread of the logs around their trend is none.
_MOVED = 2.0
_NAMED = 3


def movement_of(history: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Measures what a run has learned by what the trainer has logged: its reward, or else its loss."""
    entries = [entry for entry in history if "loss" in entry]
    metric = "reward" if any("reward" in entry for entry in entries) else "loss"
    numbers = [entry[metric] for entry in entries if isinstance(entry.get(metric), int | float)]
    values = [float(value) for value in numbers if abs(value) < _LARGEST]
    if len(values) < 2:
        return {}
    told = {"metric": metric, "logs": len(values), "first": values[0], "last": values[-1]}
    if len(values) < _FEWEST_LOGS:
        # Too few for a trend, but not for a loss that has gone off.
        return told | ({"fell_back": True} if metric == "loss" and values[-1] > 2 * abs(values[0]) else {})
    trends = []
    for at in (range(1, len(values) + 1), [math.log(step) for step in range(1, len(values) + 1)]):
        slope, begin = linear_regression(at, values)
        spread = 1.4826 * median(abs(value - begin - slope * x) for value, x in zip(values, at, strict=True))
        trends.append((spread, slope * (at[-1] - at[0])))
    spread, moved = min(trends)
    better, fifth = 1 if metric == "reward" else -1, len(values) // 5
    if better * (median(values[-fifth:]) - median(values[:fifth])) <= 0:
        told["fell_back"] = True
    return {**told, "moved": better * moved, "spread": spread}


def needs_a_look(incident: IncidentStory) -> bool:
    """Whether an incident leaves a doubt about the weights: it was not healed, or a red flag was only reported."""
    if incident.outcome == "reported":
        return incident.severity != "info" and incident.failure != FailureType.REPORTING
    return incident.outcome in ("unresolved", "fatal")


def judge_weights(
    state: State,
    incidents: Sequence[IncidentStory],
    checkpoints: Sequence[Checkpoint],
    missing: int,
    ended: Mapping[str, Any],
) -> Verdict | None:
    """Judges the weights that a run has left, of whose steps some are `missing`; `ended` is the event of its end."""
    if state.name in ("running", "unknown"):
        return None
    missing = min(missing, state.step)
    if missing == state.step:
        return Verdict("do not use", [f"none of its {counted(state.step, 'step')} is in them"])
    if weights := ended.get("nonfinite"):
        return Verdict("do not use", [f"they hold NaN or Inf ({', '.join(weights[:_NAMED])})"])
    movement = ended.get("learned", {})
    why = [*_doubts(state, incidents, checkpoints, missing), *_doubt_about(movement)]
    if state.name != "ended":
        of = "" if state.max_steps is None else f" of {state.max_steps:,}"
        if state.why and not any(each.outcome == "fatal" for each in incidents):
            of += f" ({state.why})"
        why.insert(0, f"the run is not finished, it came to step {state.step:,}{of}")
    went = f"{movement['metric']} {movement['first']:.4g} to {movement['last']:.4g}: " if movement else ""
    learned = capital(f"{went}evaluate the weights before you use them.")
    if why:
        return Verdict("look first", why, learned)
    return Verdict("good", ["what was found was healed" if incidents else "no fault was found"], learned)


def _doubts(
    state: State, incidents: Sequence[IncidentStory], checkpoints: Sequence[Checkpoint], missing: int
) -> Iterable[str]:
    open_ones = {each.title: each for each in incidents if needs_a_look(each)}
    for each in [*open_ones.values()][-_NAMED:]:
        became = {"reported": "was only reported", "fatal": "ended the run"}.get(each.outcome, "was not healed")
        yield f"{each.title} {became} (step {each.step})"
    if len(open_ones) > _NAMED:
        yield f"{len(open_ones) - _NAMED} more kinds of incidents were not healed"
    if missing:
        yield f"{missing} of {counted(state.step, 'step')} {'is' if missing == 1 else 'are'} not in the weights"
    for each in [each for each in incidents if IN_DOUBT in each.evidence][-1:]:
        yield f"how many steps are lost is not known (step {each.step}: {each.evidence[IN_DOUBT]})"
    saved = max((each.step for each in checkpoints if each.complete and each.of_this_run), default=0)
    unsaved = any(each.failure == FailureType.DISK or Action.HOLD_CHECKPOINTS in each.actions for each in incidents)
    if state.name == "ended" and unsaved and saved < state.step:
        yield f"steps {saved + 1} to {state.step} are on no disk"


def _doubt_about(movement: Mapping[str, Any]) -> Iterable[str]:
    metric, moved, spread = movement.get("metric"), movement.get("moved"), movement.get("spread")
    if moved is not None and spread is not None and moved <= _MOVED * spread:
        where = "worse" if moved < 0 else "better"
        how = (
            f"moved by {abs(moved):.2g} to the {where}, less than twice their spread of {spread:.2g} around the trend"
        )
        yield f"over {movement['logs']} logs the {metric} {how if moved or spread else 'did not move'}"
    elif movement.get("fell_back"):
        yield f"the {metric} is no better at the end than at the beginning"
