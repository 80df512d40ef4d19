"""LogTrend: level and scale of a quantity over a run, the baseline of z-scores."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import mul, sub
from statistics import median
from typing import Any

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
# How far below the level a value may lie, in scales, that need not be looked at at once, or one scale below so many
# of the last ones.
_LOWEST, _LATELY = 2.5, 10
# Far above what float32 holds, and far enough below what a double does for sums of a few of them.
_LARGEST, _LARGEST_LOGARITHM = 1e300, 690.0


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
        self._held: deque[float] = deque()
        self._outside: deque[float] = deque(maxlen=_LEVEL_WINDOW)
        self._forget()
        # ---- read by others: published with each change, for they are read more often ----
        self.ready = False
        """Whether enough values have been accepted to judge others by them."""
        self.level: float | None = None
        """The baseline in the quantity's own units; `None` before the first accepted value."""
        self.scale = floor
        """Usual distance from the baseline, in natural-log units; what a z is counted in."""
        self.stretch, self.least_rise = 1.0, 0.0
        self._enter(())

    def _forget(self) -> None:
        self._recent = SortedWindow(_LEVEL_WINDOW)
        self._deviations = SortedWindow(_SCALE_WINDOW)
        self._sums = SumSpread()
        self._accepted, self._level, self._scale = 0, 0.0, self.floor

    def z(self, value: float) -> float | None:
        """Distance of a value from the baseline, in scales; `None` without a baseline, or a logarithm."""
        if not (self.ready and 0 < value < _LARGEST):
            return None
        return (math.log(value + (self._added or 0.0)) - self._level) / self.scale

    def evidence(self, value: float, z: float | None) -> dict[str, Any]:
        """Returns what a symptom shows of a value."""
        level, scale = (self.level, self.scale) if self.ready else (None, None)
        return {"value": value, "baseline": level, "z": z, "scale": scale, "window": len(self._recent.ordered)}

    def value_at(self, z: float) -> float | None:
        """Gives the value that lies so many scales from the baseline; `None` before there is one."""
        if not self.ready:
            return None
        logarithm = self._level + z * self.scale
        return math.exp(logarithm) - (self._added or 0.0) if logarithm < _LARGEST_LOGARITHM else math.inf

    def accept(self, value: float, z: float | None, hold: bool = False) -> bool:
        """Takes a value into the baseline, unless it is a spike or has no logarithm."""
        if not 0 < value < _LARGEST:
            return False
        if z is not None and z > self.reject_above:
            self.refuse(value)
            return False
        if self._added is None or self._first:
            self._begin_with(value)
        self._outside.clear()
        held = self._held
        held.append(math.log(value + (self._added or 0.0)))
        if not hold:
            self._enter(held)
            held.clear()
        elif len(held) > _LEVEL_WINDOW:
            self._enter([held.popleft()])
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
        self._forget()
        self._held.clear()
        self._enter([math.log(earlier + self._added) for earlier in before])

    def refuse(self, value: float) -> None:
        """Keeps a value out of the baseline, and those that waited: something was indeed building up."""
        self._outside.extend(self._held)
        self._held.clear()
        if 0 < value < _LARGEST:
            self._outside.append(math.log(value + (self._added or 0.0)))

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
        self._enter(values)
        return True

    def _enter(self, logarithms: Iterable[float]) -> None:
        recent, deviations = self._recent, self._deviations
        for logarithm in logarithms:
            # The first few deviations would be from a level that is not one yet.
            if len(recent.ordered) >= 5:
                spread = deviations.spread_with(logarithm - self._level)
                self._scale = max(MAD_TO_SIGMA * spread, self.floor)
            if self.in_sums:
                self._sums.add(logarithm, _SUMS_REACH * self._scale)
            middle = self._level = recent.add(logarithm)
            self._accepted += 1
            # Before there is a scale, the median alone; then the mean of what is no further from it than this.
            if deviations.ordered:
                low, high, ordered = middle - 2 * self._scale, middle + 2 * self._scale, recent.ordered
                first, last = bisect_left(ordered, low), bisect_left(ordered, high)
                total = first * low + math.fsum(ordered[first:last]) + (len(ordered) - last) * high
                self._level = total / len(ordered)
        added, level = self._added or 0.0, math.exp(self._level)
        self.ready = self._accepted >= _WARMUP
        self.level = level - added if self._accepted else None
        # A quarter of the offset, 0.5 % of the first value, is no deviation worth a symptom either.
        least = 0.25 * added / level
        if self._accepted < _LEVEL_WINDOW:
            least = max(least, self.early_floor)
        self.scale = max(self._scale, least)
        self.stretch = max(self._sums.deviation / self.scale, 1.0) * self._sums.inflation
        self.least_rise = _EARLY_RISE if self._accepted < _LEVEL_WINDOW else 0.0

    def reach(self, steps: int) -> tuple[float, float, float, float]:
        """
        What level and scale can come down to within so many values, however many of them are accepted, of which none
        lies below the lowest: that, level and scale in logarithms, and what is added to a value before. Once it is
        [`ready`].
        """
        values = [*self._recent.values]
        spreads = self._deviations.ordered
        # So many deviations lie within the median distance at least, wherever their centre may come to lie.
        inside = len(spreads) // 2 + 1 - steps
        spread = min(map(sub, spreads[inside - 1 :], spreads)) / 2 if inside > 1 else 0.0
        scale = max(MAD_TO_SIGMA * spread, self.floor)
        # A quantity that falls lies below its level all the time.
        lowest = min(self._level - _LOWEST * self._scale, min(values[-_LATELY:]) - self._scale)
        added = min(steps, _LEVEL_WINDOW - len(values))
        replaced = steps - added
        worst = sorted([min(value, lowest) for value in values[:replaced]] + values[replaced:] + [lowest] * added)
        most = worst[(len(worst) - 1) // 2] + 2 * scale
        within = bisect_left(worst, most)
        level = (math.fsum(worst[:within]) + (len(worst) - within) * most) / len(worst)
        # With fewer of them it may lie between that and what it is without them.
        level = min(level, (level * len(worst) - lowest * added) / len(values))
        if self._accepted + steps < _LEVEL_WINDOW:
            scale = max(scale, self.early_floor)
        return lowest, level, scale, self._added or 0.0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._enter(())


# ---- sorted window: the last numbers of a series, sorted: median, distance from a centre ----


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

    def add(self, value: float) -> float:
        """Takes in a number; the median with it."""
        values, ordered = self.values, self.ordered
        if len(values) == self.size:
            del ordered[bisect_left(ordered, values[0])]
        values.append(value)
        insort(ordered, value)
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else 0.5 * (ordered[middle - 1] + ordered[middle])

    def spread_with(self, value: float) -> float:
        """Takes in a number; the median distance from the median with it (upper median for an even count)."""
        centre, ordered = self.add(value), self.ordered
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
TAIL_FROM = 3.0
_TAIL_SIZE = 64
# The law of the tail is taken from this many of its largest values, and believed to where one in 100,000 steps lies.
_FEWEST_OF_TAIL, _MOST_OF_TAIL = 5, 10
_ONE_STEP_IN = 100_000
# What stands out from others of its kind is half as high again.
_STANDS_OUT = 1.5
_RISES_KEPT = 16


class UsualSpikes(KeepsState):
    """Remembers what strayed far in the last 2,000 steps, and says how high a spike has to be to stand out from it."""

    _state = ("_recent", "_spikes", "began")

    def __init__(self) -> None:
        self._recent: list[tuple[int, float]] = []
        self._spikes: deque[int] = deque(maxlen=2)
        self.began: int | None = None

    def stands_out(self, step: int, height: float) -> bool:
        """Whether a spike is higher (in natural-log units) than what is usual. Changes nothing."""
        since = step - _SPIKES_REMEMBERED
        heights = sorted((height for at, height in self._recent if at > since), reverse=True)
        # After two spikes, one more of their size is no news.
        again = len(self._spikes) == 2 and self._spikes[0] > since and len(heights) > 1
        usual = _STANDS_OUT * heights[1] if again else 0.0
        return height > max(usual, self._furthest_of_tail(heights, step))

    def add(self, step: int, z: float, scale: float, spike: bool) -> None:
        """Takes in how far a value strays."""
        if self.began is None:
            self.began = step
        if spike:
            self._spikes.append(step)
        elif z < TAIL_FROM:
            return
        since = step - _SPIKES_REMEMBERED
        self._recent = [each for each in self._recent if each[0] > since]
        self._recent.append((step, z * scale))
        if len(self._recent) > _TAIL_SIZE:
            self._recent.remove(min(self._recent, key=lambda each: each[1]))

    def _furthest_of_tail(self, heights: list[float], step: int) -> float:
        """Extrapolates the tail to the height that one step in 100,000 exceeds; 0 where too few values are known."""
        largest = min(_MOST_OF_TAIL, len(heights) - 1)
        if largest < _FEWEST_OF_TAIL or self.began is None or heights[largest] <= 0:
            return 0.0
        base = heights[largest]
        exponent = sum(math.log(height / base) for height in heights[:largest]) / largest
        seen = min(max(step - self.began, 1), _SPIKES_REMEMBERED)
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
        self.worth_noting = limit / 4
        """Sum from which a rise is remembered."""
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
        self._rises = [each for each in self._rises if each[0] > step - _RISES_REMEMBERED]
        self._rises += [(step, height)] * (2 if reported else 1)
        for _ in range(len(self._rises) - _RISES_KEPT):
            self._rises.remove(min(self._rises, key=lambda each: each[1]))
        heights = sorted((height for _, height in self._rises), reverse=True)
        wanted = _STANDS_OUT * heights[1] if len(heights) > 1 else 0.0
        self.limit = min(max(wanted, self._least), 3 * self._least)
