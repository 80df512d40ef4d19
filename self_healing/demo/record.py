"""What is known of a run of the demo, taken together from what it has told."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .events import Ended, Event, Ruined, Stepped, Stopped, Struck


@dataclass(slots=True)
class RunRecord:
    """
    One run, as far as it has come.

    Args:
        steps (`int`):
            Those it is to train.
    """

    steps: int
    step: int = 0
    weights: dict[int, str] = field(default_factory=dict)
    ruined: Ruined | None = None
    stopped: Stopped | None = None
    ended: Ended | None = None

    def take_in(self, event: Event) -> None:
        """Notes what the run has told."""
        if isinstance(event, Stepped):
            self.step = event.step
            self.weights[event.step] = event.weights
        elif isinstance(event, Struck):
            self.step = event.step
        elif isinstance(event, Ruined):
            self.ruined = event
        elif isinstance(event, Stopped):
            self.step, self.stopped = event.step, event
        elif isinstance(event, Ended):
            self.step, self.ended = event.step, event

    @property
    def held_out_loss(self) -> float:
        """Loss on rows it has not seen; NaN if it is not over, or its weights are ruined."""
        return math.nan if self.ended is None else self.ended.held_out_loss


def first_difference(run: RunRecord, other: RunRecord) -> int | None:
    """Returns the first step after which the weights of two runs are not bitwise the same; `None` if there is none."""
    steps = sorted(run.weights.keys() | other.weights.keys())
    return next((step for step in steps if run.weights.get(step) != other.weights.get(step)), None)
