"""The baseline of spikes and drifts: the level of a positive quantity, and how far it usually strays from it."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any, NamedTuple

from ....detectors.sorted_window import SortedWindow
from ....detectors.sum_spread import SumSpread


# Turns a median absolute deviation into the standard deviation of a normal distribution, 1 / Φ⁻¹(3/4).
MAD_TO_SIGMA = 1.4826
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


class LogTrend:
    """Robust baseline of the logarithm of a positive quantity (a loss, a gradient norm)."""

    def __init__(
        self,
        level_window: int = 50,
        scale_window: int = 200,
        warmup: int = 20,
        floor: float = 0.01,
        early_floor: float = 0.1,
        early_rise: float = 0.33,
        reject_above: float = 6.0,
        offset: float = 0.02,
        first: int = 1,
        in_sums: bool = True,
    ) -> None:
        self.warmup = warmup
        self.floor = floor
        self.early_floor = early_floor
        self.early_rise = early_rise
        self.reject_above = reject_above
        self.offset = offset
        self.first = min(first, warmup)
        self.in_sums = in_sums
        self._added: float | None = None
        self._first: list[float] = []
        self._recent = SortedWindow(level_window)
        self._deviations = SortedWindow(scale_window)
        self._sums = SumSpread()
        self._level = 0.0
        self._scale = floor
        self._accepted = 0
        self._held: deque[float] = deque()
        self._outside: deque[float] = deque(maxlen=level_window)
        self.level: float | None = None
        """The baseline in the quantity's own units; `None` before the first accepted value."""
        self.scale = floor
        """Usual distance from the baseline, in natural-log units; what a z is counted in."""
        self._stretch, self._least_rise = 1.0, 0.0
        self._publish()

    @property
    def ready(self) -> bool:
        """Whether enough values have been accepted to judge others by them."""
        return self._accepted >= self.warmup

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
        while self._held and (not hold or len(self._held) > self._recent.size):
            self._enter(self._held.popleft())
        return True

    def _begin_with(self, value: float) -> None:
        """Takes in one of the first values; once all are known, those before it enter again, with their offset."""
        if self._added is None:
            self._added = self.offset * value
        self._first.append(value)
        if len(self._first) < self.first:
            return
        before, self._first = self._first[:-1], []
        if not before:
            return
        self._added = self.offset * median([*before, value])
        self._recent, self._deviations = SortedWindow(self._recent.size), SortedWindow(self._deviations.size)
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
        return len(self._outside) == self._recent.size

    def relearn(self) -> bool:
        """
        Makes the values that were refused, with none accepted in between, the new baseline, if they have a level: at
        least 20 of them that stray no more than four times as far as the accepted ones did, or 50 %.
        """
        values = list(self._outside)
        if len(values) < 20:
            return False
        centre = median(values)
        # Four in five, and not half: two levels that alternate are not one.
        reach = sorted(abs(value - centre) for value in values)[len(values) * 4 // 5]
        if reach > FOUR_IN_FIVE * max(4 * self._scale, 0.5):
            return False
        self._recent = SortedWindow(self._recent.size)
        self._deviations = SortedWindow(self._deviations.size)
        self._outside.clear()
        self._accepted = max(self._accepted, self.warmup)
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
        if self._accepted < self._recent.size:
            least = max(least, self.early_floor)
        self.scale = max(self._scale, least)
        self._stretch = max(self._sums.deviation / self.scale, 1.0) * self._sums.inflation
        self._least_rise = self.early_rise if self._accepted < self._recent.size else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Returns everything it remembers, ready for JSON; exact."""
        return {
            "recent": list(self._recent.values),
            "deviations": list(self._deviations.values),
            "held": list(self._held),
            "level": self._level,
            "scale": self._scale,
            "accepted": self._accepted,
            "added": self._added,
            "first": list(self._first),
            "outside": list(self._outside),
            "sums": self._sums.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent = SortedWindow(self._recent.size, state["recent"])
        self._deviations = SortedWindow(self._deviations.size, state["deviations"])
        self._held = deque(state["held"])
        self._level = state["level"]
        self._scale = state["scale"]
        self._accepted = state["accepted"]
        self._added = state["added"]
        self._first = list(state.get("first", ()))
        self._outside = deque(state["outside"], maxlen=self._recent.size)
        self._sums = SumSpread()
        if "sums" in state:
            self._sums.load_state_dict(state["sums"])
        self._publish()


def _has_logarithm(value: float) -> bool:
    # Far above what float32 holds, and far enough below what a double does for sums of a few of them.
    return 0 < value < 1e300
