"""`Symptom`: one finding of a detector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Symptom:
    """
    One finding of a detector.

    Args:
        name (`str`):
            Its name: `"nonfinite_loss"`, `"loss_spike"`, `"divergence"`, …
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
