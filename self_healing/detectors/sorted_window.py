"""The last numbers of a series, sorted: median, distance from a centre, mean without outliers."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from itertools import islice


class SortedWindow:
    """The last `size` numbers, in order of arrival and in order of size."""

    def __init__(self, size: int, values: Sequence[float] = ()) -> None:
        self.size = size
        self.values: deque[float] = deque(values, maxlen=size)
        self.ordered = sorted(self.values)
        # How many of the nearer half lay below the centre the last time: the place to look first.
        self._below = 0

    def __len__(self) -> int:
        return len(self.ordered)

    def add(self, value: float) -> None:
        if len(self.values) == self.size:
            del self.ordered[bisect_left(self.ordered, self.values[0])]
        self.values.append(value)
        insort(self.ordered, value)

    def median(self) -> float:
        middle = len(self.ordered) // 2
        if len(self.ordered) % 2:
            return self.ordered[middle]
        return 0.5 * (self.ordered[middle - 1] + self.ordered[middle])

    def median_distance(self, centre: float) -> float:
        """Median distance from a centre (upper median for an even count)."""
        ordered = self.ordered
        split = bisect_left(ordered, centre)
        wanted = len(ordered) // 2 + 1
        fewest, most = max(0, wanted - (len(ordered) - split)), min(wanted, split)
        below = min(max(self._below, fewest), most)
        # One more below while it is nearer than the last one above, which it replaces; fewer while it is not.
        while below < most and centre - ordered[split - 1 - below] < ordered[split + wanted - 1 - below] - centre:
            below += 1
        while below > fewest and centre - ordered[split - below] >= ordered[split + wanted - below] - centre:
            below -= 1
        self._below = below
        above = wanted - below
        furthest_below = centre - ordered[split - below] if below else 0.0
        furthest_above = ordered[split + above - 1] - centre if above else 0.0
        return max(furthest_below, furthest_above)

    def winsorized_mean(self, low: float, high: float) -> float:
        """Mean after values outside of `[low, high]` have been moved to its ends."""
        first, last = bisect_left(self.ordered, low), bisect_left(self.ordered, high)
        inside = math.fsum(islice(self.ordered, first, last))
        return (first * low + inside + (len(self.ordered) - last) * high) / len(self.ordered)
