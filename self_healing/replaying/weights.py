"""Chooses the weights that a step is computed again with: those it had, or the nearest that there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints.marker import checkpoints_in, load_marker, speaks_for, written_at
from ..checkpoints.vetting import finished_steps, vet_weights
from .incidents import KeptIncident, ReplayError


@dataclass(frozen=True, slots=True)
class WeightsChoice:
    """The weights for a replay."""

    told: str
    exact: bool
    checkpoint: str | None
    tensors: Mapping[str, Any]


def choose_weights(
    incident: KeptIncident, kept: Mapping[str, Any], places: list[Path], checkpoint: str | None
) -> WeightsChoice:
    """
    Chooses the weights: a checkpoint that was asked for, those kept with the incident, or the newest checkpoint from
    before it that is not suspect and whose weights are finite.
    """
    if checkpoint is not None:
        why = vet_weights(Path(checkpoint)) if Path(checkpoint).is_dir() else "there is no such directory"
        if why is not None:
            raise ReplayError(f"--checkpoint {checkpoint}: its weights cannot be loaded ({why}).")
        step = _step_of(Path(checkpoint))
        return WeightsChoice(_of_checkpoint(checkpoint, step, incident.step), step == incident.step, checkpoint, {})
    if kept.get("weights"):
        return WeightsChoice("those of the step itself, kept with the incident", True, None, kept["weights"])
    candidates = []
    for path in dict.fromkeys(each for place in places for each in checkpoints_in(place)):
        step = _step_of(path)
        if step is not None and step <= incident.step and _may_be_of(incident, kept, path):
            candidates.append((step, path))
    for step, path in sorted(candidates, key=lambda each: each[0], reverse=True):
        if vet_weights(path) is None:
            told = _of_checkpoint(str(path), step, incident.step)
            return WeightsChoice(told, step == incident.step, str(path), {})
    told = "those of the model that training began with: no checkpoint from before the incident is there"
    return WeightsChoice(told, incident.step == 0, None, {})


def _may_be_of(incident: KeptIncident, kept: Mapping[str, Any], checkpoint: Path) -> bool:
    """Whether a checkpoint is not suspect, nor of a later run into the same directory, as far as its marker tells."""
    marker = load_marker(checkpoint)
    if marker is None:
        return True
    earlier = written_at(checkpoint) <= kept.get("time", incident.path.stat().st_mtime)
    return speaks_for(marker) and (earlier or marker.get("run") == incident.id.rpartition("-")[0])


def _of_checkpoint(path: str, step: int | None, at: int) -> str:
    if step is None:
        return f"those in {path}, of a step that is not known"
    if step == at:
        return f"those of the step itself, from {path}"
    apart = abs(at - step)
    when = "before" if step < at else "after"
    return f"those of step {step}, {apart} step{'' if apart == 1 else 's'} {when} the incident, from {path}"


def _step_of(checkpoint: Path) -> int | None:
    try:
        return finished_steps(checkpoint)
    except Exception:
        # Weights alone have no step, and a directory that cannot be read is refused elsewhere.
        return None
