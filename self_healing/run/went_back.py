"""Names the states a run can go back to, and records what going back did."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Target(StrEnum):
    """The states that a run can go back to."""

    NEWEST = "newest"
    OLDER = "older"
    INITIAL = "initial"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class WentBack:
    """The result of a rollback."""

    step: int
    target: Target
    steps_lost: int
    trained: int
    checkpoint: str | None = None
    suspects: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns what the journal says of it."""
        place: dict[str, Any] = {"checkpoint": self.checkpoint} if self.checkpoint else {}
        if self.suspects:
            place["suspect_checkpoints"] = list(self.suspects)
        return {"to_step": self.step, "state": self.target.value, "lost": self.steps_lost, **place}
