"""`Diagnosis`: the cause of a failure, as the experiments showed it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..failures import Cause, FailureType


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """
    The cause of a failure and the experiments that showed it.

    Args:
        failure (`FailureType`):
            What it is.
        cause ([`Cause`]):
            In a few words.
        evidence (`dict`):
            What the experiments gave.
        poison (`dict[int, list[int]]`):
            Rows (pairs, segments) of each micro-batch that are non-finite by themselves.
        rows (`int`):
            Rows in the step, on all ranks.
        poison_rows (`int`):
            How many of them are poison, on all ranks.
        everywhere (`bool`):
            Whether neither a row of the step nor any of those from elsewhere in the data is finite.
    """

    failure: FailureType
    cause: Cause
    evidence: dict[str, Any] = field(default_factory=dict)
    poison: dict[int, list[int]] = field(default_factory=dict)
    rows: int = 0
    poison_rows: int = 0
    everywhere: bool = False
