"""What a detector saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Symptom:
    """
    What a detector saw in one step.

    Args:
        name (`str`):
            What it is called: `"nonfinite_loss"`, `"loss_spike"`, `"divergence"`, …
        step (`int`):
            The step it was seen in.
        evidence (`dict`):
            The values that were judged, and what they were judged by: baseline, z, window, threshold.
        severity (`str`, *optional*, defaults to `"warning"`):
            `"info"` (worth a note), `"warning"` (something is wrong) or `"error"` (the run is going down).
    """

    name: str
    step: int
    evidence: dict[str, Any]
    severity: Severity = "warning"
