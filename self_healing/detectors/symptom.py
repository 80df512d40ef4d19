"""`Symptom`: one finding of a detector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Symptom:
    """One finding of a detector."""

    name: str
    step: int
    evidence: dict[str, Any]
    severity: Severity = "warning"
