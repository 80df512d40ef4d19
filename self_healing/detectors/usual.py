"""Memory of what is usual in a run, however odd: spikes that come again and again, rises that were no divergence."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from ..healers.numerics.detectors.trend import Reading


# Steps for which a spike is remembered, and a rise: of these there are fewer.
_SPIKES_REMEMBERED = 2_000
_RISES_REMEMBERED = 5_000
# Of the values that stray this many scales or more, at most this many are kept: the furthest.
_TAIL_FROM = 3.0
_TAIL_SIZE = 64
# The law of the tail is taken from this many of its largest values, and believed to where one in 100,000 steps lies.
_FEWEST_OF_TAIL, _MOST_OF_TAIL = 5, 10
_ONE_STEP_IN = 100_000
# What stands out from others of its kind is half as high again.
_STANDS_OUT = 1.5
_RISES_KEPT = 16


class UsualSpikes:
    """Remembers what strayed far in the last 2,000 steps, and says how high a spike has to be to stand out from it."""

    def __init__(self) -> None:
        self._tail: list[tuple[int, float]] = []
        self._spikes: deque[int] = deque(maxlen=2)
        self._began: int | None = None

    @property
    def known(self) -> bool:
        """Whether there have been two spikes: one more of their size is no news."""
        return len(self._spikes) == 2

    def stands_out(self, reading: Reading) -> bool:
        """Whether a spike is higher (in natural-log units) than what is usual. Changes nothing."""
        since = reading.step - _SPIKES_REMEMBERED
        heights = sorted((height for at, height in self._tail if at > since), reverse=True)
        again = self.known and self._spikes[0] > since and len(heights) > 1
        usual = _STANDS_OUT * heights[1] if again else 0.0
        return reading.height > max(usual, self._furthest_of_tail(heights, reading.step))

    def add(self, reading: Reading, spike: bool = True) -> None:
        """Takes in how far a value strays."""
        if self._began is None:
            self._began = reading.step
        if spike:
            self._spikes.append(reading.step)
        if reading.z is None or (reading.z < _TAIL_FROM and not spike):
            return
        since = reading.step - _SPIKES_REMEMBERED
        self._tail = [each for each in self._tail if each[0] > since]
        self._tail.append((reading.step, reading.height))
        if len(self._tail) > _TAIL_SIZE:
            self._tail.remove(min(self._tail, key=lambda each: each[1]))

    def _furthest_of_tail(self, heights: list[float], step: int) -> float:
        """Extrapolates the tail to the height that one step in 100,000 exceeds; 0 where too few values are known."""
        largest = min(_MOST_OF_TAIL, len(heights) - 1)
        if largest < _FEWEST_OF_TAIL or self._began is None or heights[largest] <= 0:
            return 0.0
        base = heights[largest]
        exponent = sum(math.log(height / base) for height in heights[:largest]) / largest
        seen = min(max(step - self._began, 1), _SPIKES_REMEMBERED)
        return float(base * max(largest * _ONE_STEP_IN / seen, 1.0) ** exponent)

    def state_dict(self) -> dict[str, Any]:
        return {"recent": [list(each) for each in self._tail], "spikes": list(self._spikes), "began": self._began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tail = [(step, height) for step, height in state["recent"]]
        # Before there was a tail, all that was remembered were spikes.
        self._spikes = deque(state.get("spikes", [step for step, _ in self._tail]), maxlen=2)
        self._began = state.get("began", self._tail[0][0] if self._tail else None)


class UsualRises:
    """
    Remembers how far a CUSUM rose in the last 5,000 steps without anything being wrong: data in shards, or sorted
    within each epoch, make the loss rise again and again.
    """

    def __init__(self, limit: float) -> None:
        self._rises: list[tuple[int, float]] = []
        self.limit = limit
        """Sum a CUSUM has to exceed now."""
        self._least = limit
        self._harmless = 0.0

    @property
    def least_rise(self) -> float:
        """Least rise of the loss that counts, in natural-log units."""
        return min(2 * self._harmless, math.log(2))

    def add_harmless(self, rise: float) -> None:
        """Takes in how far, in natural-log units, the loss was up when the weights were found not to be to blame."""
        self._harmless = max(self._harmless, rise)

    def add(self, step: int, height: float, reported: bool = False) -> None:
        """Takes in a rise that is over: the furthest the CUSUM went, and whether it was reported."""
        if height <= self._least / 4:
            return
        self._rises = [each for each in self._rises if each[0] > step - _RISES_REMEMBERED]
        self._rises += [(step, height)] * (2 if reported else 1)
        for _ in range(len(self._rises) - _RISES_KEPT):
            self._rises.remove(min(self._rises, key=lambda each: each[1]))
        self._set_limit()

    def _set_limit(self) -> None:
        heights = sorted((height for _, height in self._rises), reverse=True)
        wanted = _STANDS_OUT * heights[1] if len(heights) > 1 else 0.0
        self.limit = min(max(wanted, self._least), 3 * self._least)

    def state_dict(self) -> dict[str, Any]:
        return {"rises": [list(each) for each in self._rises], "harmless": self._harmless}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rises = [(step, height) for step, height in state["rises"]]
        self._harmless = state.get("harmless", 0.0)
        self._set_limit()
