"""`Diagnosis`: the cause of a failure, as the experiments showed it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..failures.recipes import Cause, FailureType


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of a failure and the experiments that showed it."""

    failure: FailureType
    cause: Cause
    evidence: dict[str, Any] = field(default_factory=dict)
    poison: dict[int, list[int]] = field(default_factory=dict)
    rows: int = 0
    poison_rows: int = 0
    everywhere: bool = False
