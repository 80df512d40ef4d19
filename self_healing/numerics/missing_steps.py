"""How many of a run's steps are not in its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class MissingSteps:
    """
    Counts the steps that are not in the weights: those that were left out, and those that went with a state the run
    went back from.
    """

    def __init__(self) -> None:
        self.count = 0
        # Steps finished when `train()` was entered first, and how many of them were in the weights.
        self.entry_step = self.trained_at_entry = 0
        self._newest = -1

    def begin(self, step: int) -> None:
        """Takes in where the run is when `train()` is entered for the first time."""
        self.goes_on_at(step)
        self.entry_step, self.trained_at_entry = step, self.trained(step)

    def trained(self, step: int) -> int:
        """How many of the first `step` steps are in the weights."""
        return step - self.count

    def left_out(self, step: int) -> None:
        """A step is not applied."""
        if step > self._newest:
            self.count += 1
            self._newest = step

    def went_back(self, finished: int, trained: int) -> None:
        """The weights are those of an earlier state."""
        self.count = finished - trained
        self._newest = finished - 1

    def applied_again(self, steps: int) -> None:
        """Steps that were gone are in the weights after all."""
        self.count -= steps

    def goes_on_at(self, step: int) -> None:
        """
        The run goes on from so many finished steps; one that was left out and not finished is decided about again.
        """
        if self._newest >= step:
            self.count -= 1
            self._newest = step - 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "newest": self._newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self._newest = int(state["count"]), int(state["newest"])
