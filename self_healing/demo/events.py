"""What a run of the demo tells while it goes on, from its own process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Loaded:
    """The libraries are imported; the run can have its text."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """
    A step is finished, as the trainer's own log tells it.

    Args:
        step (`int`):
            Optimizer steps finished.
        loss (`float`):
            As logged.
        norm (`float`):
            Gradient norm, as logged.
        weights (`str`):
            Digest of all weights after the step.
    """

    step: int
    loss: float
    norm: float
    weights: str


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault strikes: `what` it does, after how many finished steps."""

    step: int
    what: str


@dataclass(frozen=True, slots=True)
class Healed:
    """An incident was dealt with: as [`HealingReport`] gives it."""

    step: int
    incident: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ruined:
    """The first step after which weights are no longer numbers; `tensors` says how many."""

    step: int
    tensors: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """An exception has left `train()`."""

    step: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Ended:
    """
    The run is over, one way or the other.

    Args:
        step (`int`):
            Optimizer steps finished.
        held_out_loss (`float`):
            Of the weights as they are now.
        struck (`frozenset[str]`):
            Kinds of faults that have struck.
        incidents (`Sequence[Mapping]`):
            As [`HealingReport`] gives them.
    """

    step: int
    held_out_loss: float
    struck: frozenset[str]
    incidents: Sequence[dict[str, Any]]


Event = Loaded | Stepped | Struck | Healed | Ruined | Stopped | Ended


def cause_of(incident: Mapping[str, Any]) -> str:
    """The cause with what names it: the row, or the exception."""
    rows = [str(row["dataset_index"]) for row in incident["evidence"].get("rows", ())]
    if rows:
        return f"{incident['cause']}: row {', '.join(rows)}"
    return f"{incident['cause']}: {incident['symptom'].replace('_', ' ')}"


def remedy_of(incident: Mapping[str, Any]) -> str:
    """The actions, in words."""
    return ", ".join(action.replace("_", " ") for action in incident["actions"]) or "nothing"
