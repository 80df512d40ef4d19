"""The spread of sums of neighbouring values, which are not independent."""

from __future__ import annotations

import math
from collections import deque
from operator import mul
from typing import Any


# Values on either side of one through which a parabola is laid, what its middle takes of each, and how many values
# would have a mean as noisy as that middle.
_HALF = 20
_VALUES_AROUND = 2 * _HALF + 1
_PARABOLA = [
    3 * (3 * _HALF * (_HALF + 1) - 1 - 5 * away * away) / ((2 * _HALF - 1) * (2 * _HALF + 1) * (2 * _HALF + 3))
    for away in range(-_HALF, _HALF + 1)
]
_LEFT_AROUND = _VALUES_AROUND / 2.25
# Distances before anything is said about sums of them, and a correlation beyond which their spread has no bound.
_FEWEST_FOR_SUMS, _HIGHEST_CORRELATION = 20, 0.95


class SumSpread:
    """Measures how much further sums of neighbouring values stray than those of independent ones."""

    def __init__(self, memory: int = 500) -> None:
        self._fade = 1 - 1 / memory
        self._around: deque[float] = deque(maxlen=_VALUES_AROUND)
        self._last = 0.0
        # Sums of the weights, of their squares, of the squared distances, and of their products with the next.
        self._sums = [0.0] * 4
        self.deviation = 0.0
        """Standard deviation of the distances; 0 while there are too few."""
        self.inflation = 1.0
        """Ratio of the spread of sums to that of sums of independent values; 1 or more."""

    def add(self, value: float, reach: float) -> None:
        """Takes in a value; a distance of more than `reach` counts as that."""
        self._around.append(value)
        if len(self._around) < _VALUES_AROUND:
            return
        distance = self._around[_VALUES_AROUND // 2] - sum(map(mul, self._around, _PARABOLA))
        distance = min(max(distance, -reach), reach)
        fade, (weights, weights_squared, squares, products) = self._fade, self._sums
        weights, weights_squared = fade * weights + 1, fade * fade * weights_squared + 1
        squares, products = fade * squares + distance * distance, fade * products + distance * self._last
        self._sums, self._last = [weights, weights_squared, squares, products], distance
        count = weights * weights / weights_squared
        if count < _FEWEST_FOR_SUMS or squares <= 0:
            return
        self.deviation = math.sqrt(squares / weights)
        # The bias of an estimate from few values (Marriott and Pope 1954), of which a parabola takes three.
        correlation = (products / squares + 1 / _LEFT_AROUND) / (1 - 3 / _LEFT_AROUND)
        correlation = min(correlation, _HIGHEST_CORRELATION)
        correlated = correlation > 2 / math.sqrt(count)
        self.inflation = math.sqrt((1 + correlation) / (1 - correlation)) if correlated else 1.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "around": list(self._around),
            "sums": list(self._sums),
            "last": self._last,
            "deviation": self.deviation,
            "inflation": self.inflation,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._around = deque(state["around"], maxlen=_VALUES_AROUND)
        self._sums, self._last = list(state["sums"]), state["last"]
        self.deviation, self.inflation = state["deviation"], state["inflation"]
