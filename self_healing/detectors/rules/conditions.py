"""Conditions, held against what was logged of a metric."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from numbers import Real
from statistics import median
from typing import Any

from .rule import EARLY, TRENDS, Condition


# How the other relations compare a value with its bound; "near" compares the distance between them with its tolerance.
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "below": operator.lt,
    "above": operator.gt,
    "at_least": operator.ge,
    "at_most": operator.le,
    "near": operator.le,
}
# A trend must exceed the standard error of the difference of two medians by this factor. Windows overlap from one
# observation to the next and metrics are not independent: two or three would cry wolf in a long run.
_STANDARD_ERRORS = 4.0


class Series:
    """Remembers one metric: its newest value, the last ones, its early level and its range."""

    __slots__ = ("early", "highest", "log", "lowest", "recent", "start", "value")

    def __init__(self, window: int) -> None:
        self.recent: deque[float] = deque(maxlen=window)
        self.early: list[float] = []
        self.start: float | None = None
        self.lowest = math.inf
        self.highest = -math.inf
        self.value = math.nan
        self.log = 0

    def add(self, value: float, log: int) -> None:
        self.value, self.log = value, log
        self.recent.append(value)
        if value < self.lowest:
            self.lowest = value
        if value > self.highest:
            self.highest = value
        if self.start is None:
            self.early.append(value)
            if len(self.early) == EARLY:
                self.start = median(self.early)

    def state_dict(self) -> dict[str, Any]:
        # A series that exists but was never observed (its value was NaN) has no finite bounds to save.
        return {
            "recent": list(self.recent),
            "early": list(self.early),
            "range": [self.lowest, self.highest, self.value] if self.log else None,
            "log": self.log,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.recent.extend(state["recent"])
        self.early = list(state["early"])
        self.start = median(self.early) if len(self.early) == EARLY else None
        if state["range"] is not None:
            self.lowest, self.highest, self.value = state["range"]
        self.log = state["log"]


def finite_number(value: Any) -> float | None:
    """Converts a value to a finite float; `None` where it is none, as trainers log strings and `None` as well."""
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, Real):
            return None
        try:
            value = float(value)
        except OverflowError:
            return None
    return value if math.isfinite(value) else None


def bound_of(part: Condition, series: Series, limits: Mapping[str, float]) -> float | None:
    if not part.of:
        return part.value
    if part.of == "start":
        reference = series.start
    elif part.of == "lowest":
        reference = series.lowest
    elif part.of == "highest":
        reference = series.highest
    else:
        reference = limits.get(part.of.removeprefix("args."))
    if reference is None:
        return None
    return part.value * (abs(reference) if part.relation in TRENDS else reference)


def holds(part: Condition, series: Series, limits: Mapping[str, float]) -> bool:
    bound = bound_of(part, series, limits) if part.of else part.value
    if bound is None:
        return False
    if part.relation in TRENDS:
        return _moves(part, series.recent, bound)
    values = [series.value] if part.share is None else list(series.recent)[-part.window :]
    if part.relation == "near":
        values, bound = [abs(value - bound) for value in values], part.tolerance
    holding = sum(map(_COMPARISONS[part.relation], values, repeat(bound)))
    return holding >= (1 if part.share is None else part.share * len(values))


def _moves(part: Condition, recent: Sequence[float], size: float) -> bool:
    if len(recent) < part.window:
        return False
    window = list(recent)[-part.window :]
    third = part.window // 3
    first, last = median(window[:third]), median(window[-third:])
    if part.relation == "flat":
        return abs(last - first) < size
    change = last - first if part.relation == "rising" else first - last
    if change < size:
        return False
    thirds = window[:third], window[third:-third], window[-third:]
    middle = median(thirds[1])
    if not min(first, last) <= middle <= max(first, last):
        return False
    centred = zip(thirds, (first, middle, last), strict=True)
    deviations = [abs(value - centre) for values, centre in centred for value in values]
    # 1.4826 MAD is the scale, and 1.2533 that over the root of n the standard error of a median of n (normal noise).
    return change > _STANDARD_ERRORS * 1.2533 * math.sqrt(2 / third) * 1.4826 * median(deviations)
