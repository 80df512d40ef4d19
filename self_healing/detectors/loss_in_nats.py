"""Tests of a loss in nats, a mean cross-entropy per token: worse than chance, and higher than in the first steps."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from ..healers.numerics.detectors.trend import Reading


# Before there is a baseline, the loss is held against the median of this many first steps.
_FIRST_STEPS = 5
_EARLY_WINDOW = 10
# In nats, from one batch to another: the very first loss is that of one batch.
_FIRST_LOSS_VARIES = 0.5


class AboveChance:
    """Finds a loss that is worse than guessing every token, by a factor e, after it was better."""

    def __init__(self, chance: float | None, steps: int) -> None:
        self.chance = chance
        self.limit = math.inf if chance is None else chance + 1
        self.steps = 0
        """Steps in a row that the loss has been worse."""
        self._steps_needed = steps
        self._was_below = False

    def observe(self, loss: float) -> bool:
        """Takes in a loss, and returns whether it has been worse for long enough."""
        if self.chance is None:
            return False
        self._was_below = self._was_below or loss < self.chance
        self.steps = self.steps + 1 if loss > self.limit else 0
        return self._was_below and self.steps >= self._steps_needed

    def is_recovered(self, loss: float) -> bool:
        """Whether a loss that was better than chance is not worse."""
        return not self._was_below or loss <= self.limit

    def reset(self) -> None:
        """Counts from 0 again."""
        self.steps = 0

    def forget_below(self) -> None:
        """Asks for a loss better than chance once more before one can be worse."""
        self._was_below = False

    def state_dict(self) -> dict[str, Any]:
        return {"above_chance": self.steps, "was_below_chance": self._was_below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._was_below = state["above_chance"], state["was_below_chance"]


class EarlyRise:
    """Finds a loss that rises before it has a baseline."""

    def __init__(self, chance: float | None, rise: float) -> None:
        self.rise = rise
        self.first: list[float] = []
        """The losses the run began with."""
        self._chance = chance
        self._above: deque[bool] = deque(maxlen=_EARLY_WINDOW)

    @property
    def limit(self) -> float:
        """Loss that is too high for the first steps of a run: `rise` above the median of the first five."""
        if not self.first:
            return math.inf
        return min(median(self.first), self.first[0] + _FIRST_LOSS_VARIES) + self.rise

    @property
    def steps(self) -> int:
        """Steps of the last 10 whose loss was too high."""
        return sum(self._above)

    def observe(self, reading: Reading) -> bool:
        """Takes in a loss, and returns whether at least 5 of the last 10 were too high."""
        if reading.z is not None or self._chance is None:
            return False
        if len(self.first) < _FIRST_STEPS:
            self.first.append(reading.value)
        if self.first[0] > self._chance + 1:
            return False  # That is no mean cross-entropy per token, or of another vocabulary.
        self._above.append(reading.value > self.limit)
        return self.steps >= _EARLY_WINDOW // 2

    def keep_first(self, first: list[float]) -> None:
        """Takes the losses a run began with from a state in which more of them were known."""
        if len(first) > len(self.first):
            self.first = list(first)

    def reset(self) -> None:
        """Forgets which of the last losses were too high."""
        self._above.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"first": list(self.first), "early": list(self._above)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = list(state["first"])
        self._above = deque(state["early"], maxlen=_EARLY_WINDOW)
