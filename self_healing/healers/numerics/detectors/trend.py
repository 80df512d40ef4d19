"""LogTrend: level and scale of a quantity over a run, the baseline of z-scores."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from operator import mul
from statistics import median
from typing import Any, NamedTuple

from ....system.files import KeepsState


# ---- trend ----


# Turns a median absolute deviation into the standard deviation of a normal distribution, 1 / Φ⁻¹(3/4).
MAD_TO_SIGMA = 1.4826
# Accepted values that level and scale are taken from, and before others are judged by them.
_LEVEL_WINDOW, _SCALE_WINDOW, _WARMUP = 50, 200, 20
# Added to each value, as a share of the first one, and a rise of the logarithm that means nothing at first.
_OFFSET, _EARLY_RISE = 0.02, 0.33
# In scales: a spike counts in the spread of sums as it does in a sum, where it is capped.
_SUMS_REACH = 4
# Four in five values of a normal distribution lie within this many standard deviations, Φ⁻¹(0.9).
FOUR_IN_FIVE = 1.2816


class Reading(NamedTuple):
    """One value next to its baseline."""

    step: int
    value: float
    z: float | None
    level: float | None
    scale: float | None
    window: int
    stretch: float = 1.0
    least_rise: float = 0.0

    @property
    def height(self) -> float:
        """Distance from the baseline, in natural-log units; 0 without one."""
        return 0.0 if self.z is None or self.scale is None else self.z * self.scale

    def evidence(self) -> dict[str, Any]:
        """Returns what a symptom shows of it."""
        return {
            "value": self.value,
            "baseline": self.level,
            "z": self.z,
            "scale": self.scale,
            "window": self.window,
        }


class LogTrend(KeepsState):
    """Robust baseline of the logarithm of a positive quantity (a loss, a gradient norm)."""

    _state = (
        *("_recent", "_deviations", "_held", "_level", "_scale", "_accepted"),
        *("_added", "_first", "_outside", "_sums"),
    )

    def __init__(
        self,
        floor: float = 0.01,
        early_floor: float = 0.1,
        reject_above: float = 6.0,
        first: int = 1,
        in_sums: bool = True,
    ) -> None:
        self.floor = floor
        self.early_floor = early_floor
        self.reject_above = reject_above
        self.first = first
        self.in_sums = in_sums
        self._added: float | None = None
        self._first: list[float] = []
        self._recent = SortedWindow(_LEVEL_WINDOW)
        self._deviations = SortedWindow(_SCALE_WINDOW)
        self._sums = SumSpread()
        self._level = 0.0
        self._scale = floor
        self._accepted = 0
        self._held: deque[float] = deque()
        self._outside: deque[float] = deque(maxlen=_LEVEL_WINDOW)
        self.level: float | None = None
        """The baseline in the quantity's own units; `None` before the first accepted value."""
        self.scale = floor
        """Usual distance from the baseline, in natural-log units; what a z is counted in."""
        self._stretch, self._least_rise = 1.0, 0.0
        self._publish()

    @property
    def ready(self) -> bool:
        """Whether enough values have been accepted to judge others by them."""
        return self._accepted >= _WARMUP

    def read(self, step: int, value: float) -> Reading:
        """Sets a value next to the baseline. Changes nothing."""
        if not self.ready:
            return Reading(step, value, None, None, None, len(self._recent))
        z = (self._logarithm(value) - self._level) / self.scale if _has_logarithm(value) else None
        return Reading(step, value, z, self.level, self.scale, len(self._recent), self._stretch, self._least_rise)

    def value_at(self, z: float) -> float | None:
        """Gives the value that lies so many scales from the baseline; `None` before there is one."""
        return math.exp(self._level + z * self.scale) - (self._added or 0.0) if self.ready else None

    def accept(self, reading: Reading, hold: bool = False) -> bool:
        """Takes a value into the baseline, unless it is a spike or has no logarithm."""
        if not _has_logarithm(reading.value):
            return False
        if reading.z is not None and reading.z > self.reject_above:
            self.refuse(reading)
            return False
        if self._added is None or self._first:
            self._begin_with(reading.value)
        self._outside.clear()
        self._held.append(self._logarithm(reading.value))
        while self._held and (not hold or len(self._held) > _LEVEL_WINDOW):
            self._enter(self._held.popleft())
        return True

    def _begin_with(self, value: float) -> None:
        """Takes in one of the first values; once all are known, those before it enter again, with their offset."""
        if self._added is None:
            self._added = _OFFSET * value
        self._first.append(value)
        if len(self._first) < self.first:
            return
        before, self._first = self._first[:-1], []
        if not before:
            return
        self._added = _OFFSET * median([*before, value])
        self._recent, self._deviations = SortedWindow(_LEVEL_WINDOW), SortedWindow(_SCALE_WINDOW)
        self._sums, self._accepted, self._level, self._scale = SumSpread(), 0, 0.0, self.floor
        self._held.clear()
        for earlier in before:
            self._enter(self._logarithm(earlier))

    def refuse(self, reading: Reading) -> None:
        """Keeps a value out of the baseline, and those that waited: something was indeed building up."""
        self._outside.extend(self._held)
        self._held.clear()
        if _has_logarithm(reading.value):
            self._outside.append(self._logarithm(reading.value))

    @property
    def overdue(self) -> bool:
        """Whether a whole window of values has been refused, with none accepted in between."""
        return len(self._outside) == _LEVEL_WINDOW

    def relearn(self) -> bool:
        """
        Makes the values that were refused, with none accepted in between, the new baseline, if they have a level: at
        least 20 of them that stray no more than four times as far as the accepted ones did, or 50 %.
        """
        values = list(self._outside)
        if len(values) < _WARMUP:
            return False
        centre = median(values)
        # Four in five, and not half: two levels that alternate are not one.
        reach = sorted(abs(value - centre) for value in values)[len(values) * 4 // 5]
        if reach > FOUR_IN_FIVE * max(4 * self._scale, 0.5):
            return False
        self._recent = SortedWindow(_LEVEL_WINDOW)
        self._deviations = SortedWindow(_SCALE_WINDOW)
        self._outside.clear()
        self._accepted = max(self._accepted, _WARMUP)
        for value in values:
            self._enter(value)
        return True

    def _logarithm(self, value: float) -> float:
        return math.log(value + (self._added or 0.0))

    def _enter(self, logarithm: float) -> None:
        # The first few deviations would be from a level that is not one yet.
        if len(self._recent) >= 5:
            self._deviations.add(logarithm - self._level)
            spread = self._deviations.median_distance(self._deviations.median())
            self._scale = max(MAD_TO_SIGMA * spread, self.floor)
        if self.in_sums:
            self._sums.add(logarithm, _SUMS_REACH * self._scale)
        self._recent.add(logarithm)
        self._accepted += 1
        middle = self._recent.median()
        reach = 2 * self._scale
        # Before there is a scale, the median alone.
        self._level = self._recent.winsorized_mean(middle - reach, middle + reach) if self._deviations else middle
        self._publish()

    def _publish(self) -> None:
        """Computes level and scale as others read them, once for each change and not for each time they are read."""
        added, level = self._added or 0.0, math.exp(self._level)
        self.level = level - added if self._accepted else None
        # A quarter of the offset, 0.5 % of the first value, is no deviation worth a symptom either.
        least = 0.25 * added / level
        if self._accepted < _LEVEL_WINDOW:
            least = max(least, self.early_floor)
        self.scale = max(self._scale, least)
        self._stretch = max(self._sums.deviation / self.scale, 1.0) * self._sums.inflation
        self._least_rise = _EARLY_RISE if self._accepted < _LEVEL_WINDOW else 0.0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._publish()


def _has_logarithm(value: float) -> bool:
    # Far above what float32 holds, and far enough below what a double does for sums of a few of them.
    return 0 < value < 1e300


# ---- sorted window: the last numbers of a series, sorted: median, distance from a centre, mean without outliers ----


class SortedWindow:
    """The last `size` numbers, in order of arrival and in order of size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.load_state_dict(())

    def state_dict(self) -> list[float]:
        return list(self.values)

    def load_state_dict(self, values: Sequence[float]) -> None:
        self.values: deque[float] = deque(values, maxlen=self.size)
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


# ---- sum spread: the spread of sums of neighbouring values, which are not independent ----


# Values on either side of one through which a parabola is laid, what its middle takes of each, and how many values
# would have a mean as noisy as that middle.
_HALF = 20
_VALUES_AROUND = 2 * _HALF + 1
_PARABOLA = [
    3 * (3 * _HALF * (_HALF + 1) - 1 - 5 * away * away) / ((2 * _HALF - 1) * (2 * _HALF + 1) * (2 * _HALF + 3))
    for away in range(-_HALF, _HALF + 1)
]
_LEFT_AROUND = _VALUES_AROUND / 2.25
# What is left of a distance at the next one: they are remembered for about 500 steps.
_FADE = 1 - 1 / 500
# Distances before anything is said about sums of them, and a correlation beyond which their spread has no bound.
_FEWEST_FOR_SUMS, _HIGHEST_CORRELATION = 20, 0.95


class SumSpread(KeepsState):
    """Measures how much further sums of neighbouring values stray than those of independent ones."""

    _state = ("_around", "_sums", "_last", "deviation", "inflation")

    def __init__(self) -> None:
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
        fade, (weights, weights_squared, squares, products) = _FADE, self._sums
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


# ---- usual ----


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


class UsualSpikes(KeepsState):
    """Remembers what strayed far in the last 2,000 steps, and says how high a spike has to be to stand out from it."""

    _state = ("_recent", "_spikes", "_began")

    def __init__(self) -> None:
        self._recent: list[tuple[int, float]] = []
        self._spikes: deque[int] = deque(maxlen=2)
        self._began: int | None = None

    def stands_out(self, reading: Reading) -> bool:
        """Whether a spike is higher (in natural-log units) than what is usual. Changes nothing."""
        since = reading.step - _SPIKES_REMEMBERED
        heights = sorted((height for at, height in self._recent if at > since), reverse=True)
        # After two spikes, one more of their size is no news.
        again = len(self._spikes) == 2 and self._spikes[0] > since and len(heights) > 1
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
        self._recent = [each for each in self._recent if each[0] > since]
        self._recent.append((reading.step, reading.height))
        if len(self._recent) > _TAIL_SIZE:
            self._recent.remove(min(self._recent, key=lambda each: each[1]))

    def _furthest_of_tail(self, heights: list[float], step: int) -> float:
        """Extrapolates the tail to the height that one step in 100,000 exceeds; 0 where too few values are known."""
        largest = min(_MOST_OF_TAIL, len(heights) - 1)
        if largest < _FEWEST_OF_TAIL or self._began is None or heights[largest] <= 0:
            return 0.0
        base = heights[largest]
        exponent = sum(math.log(height / base) for height in heights[:largest]) / largest
        seen = min(max(step - self._began, 1), _SPIKES_REMEMBERED)
        return float(base * max(largest * _ONE_STEP_IN / seen, 1.0) ** exponent)


class UsualRises(KeepsState):
    """
    Remembers how far a CUSUM rose in the last 5,000 steps without anything being wrong: data in shards, or sorted
    within each epoch, make the loss rise again and again.
    """

    _state = ("_rises", "_harmless", "limit")

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
        heights = sorted((height for _, height in self._rises), reverse=True)
        wanted = _STANDS_OUT * heights[1] if len(heights) > 1 else 0.0
        self.limit = min(max(wanted, self._least), 3 * self._least)
