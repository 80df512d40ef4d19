"""A chart as a still picture (SVG), for where no script runs: the geometry; the markup is in `page.html`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from . import wording
from .charts import Chart, Line
from .thinning import thin


WIDTH, HEIGHT = 720, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, WIDTH - 10, 30, HEIGHT - 24
_BUCKETS = 300
# Classes of colours, the worst last.
TONES = ("calm", "good", "busy", "warn", "bad")
# Width of a mark with one digit, and of each further one.
_MARK, _DIGIT = 18, 6.5


@dataclass(frozen=True, slots=True)
class Mark:
    """
    One incident on the charts, or several that are too close to each other.

    Args:
        label (`str`):
            `"3"`, or `"3–5"`.
        step (`int`):
            Where; of several, the first.
        tone (`str`):
            The class of its colour; of several, that of the worst.
        anchor (`str`):
            Where its story is.
        title (`str`):
            For the pointer, and to be read out.
        x (`float`):
            In the picture.
    """

    label: str
    step: int
    tone: str
    anchor: str
    title: str
    x: float = 0.0

    @property
    def width(self) -> float:
        """In the picture, by what is written in it."""
        return _MARK + _DIGIT * (len(self.label) - 1)


@dataclass(frozen=True, slots=True)
class Picture:
    """
    The geometry of one chart.

    Args:
        across (`list[tuple[float, str]]`), up (`list[tuple[float, str]]`):
            Ticks: where, and what is written beside them.
        paths (`list[tuple[str, str]]`):
            The kind of each line, and its path.
        marks (`list[Mark]`):
            The incidents.
    """

    across: list[tuple[float, str]]
    up: list[tuple[float, str]]
    paths: list[tuple[str, str]]
    marks: list[Mark]
    left: int = _LEFT
    right: int = _RIGHT
    top: int = _TOP
    bottom: int = _BOTTOM
    width: int = WIDTH
    height: int = HEIGHT


def picture_of(chart: Chart, marks: Sequence[Mark], steps: tuple[int, int]) -> Picture:
    """
    Draws a chart.

    Args:
        chart ([`Chart`]):
            The chart.
        marks (`Sequence[Mark]`):
            The incidents, in the order of their steps.
        steps (`tuple[int, int]`):
            The first and the last step that are shown; the same for all charts.
    """
    first, last = steps
    values = [value for line in chart.lines for value in line.values if value is not None]
    low, high = min(values), max(values)
    if chart.from_zero:
        low = min(low, 0)
    ticks = _decades(low, high) if chart.logarithmic else _ticks(low, high, 4)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def x(step: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * (step - first) / max(last - first, 1), 1)

    def y(value: float) -> float:
        if chart.logarithmic:
            part = (math.log(value) - math.log(low)) / max(math.log(high) - math.log(low), 1e-12)
        else:
            part = (value - low) / max(high - low, 1e-300)
        return round(_BOTTOM - (_BOTTOM - _TOP) * part, 1)

    def path(line: Line) -> str:
        drawn, parts = False, []
        for step, value in zip(*thin(line.steps, line.values, _BUCKETS), strict=True):
            if value is None:
                drawn = False
                continue
            parts.append(f"{'L' if drawn else 'M'}{x(step):g} {y(value):g}")
            drawn = True
        return "".join(parts)

    return Picture(
        [(x(tick), wording.number(tick)) for tick in _ticks(first, last, 8) if first <= tick <= last],
        [(y(tick), wording.number(tick)) for tick in ticks],
        # What it is about is drawn last, over the others.
        [(line.kind, path(line)) for line in reversed(chart.lines)],
        _placed(marks, x),
    )


def together(marks: Sequence[Mark]) -> Mark:
    """One mark for several incidents next to each other, in the colour of the worst."""
    first, last = marks[0], marks[-1]
    if len(marks) == 1:
        return first
    label = f"{first.label}–{last.label}"
    worst = max(marks, key=lambda mark: TONES.index(mark.tone))
    title = f"Incidents {first.label} to {last.label}, steps {first.step} to {last.step}; the first: {first.title}"
    return replace(first, label=label, tone=worst.tone, title=title)


def _placed(marks: Sequence[Mark], x: Callable[[float], float]) -> list[Mark]:
    groups: list[list[Mark]] = []
    end = -math.inf
    for mark in marks:
        at = x(mark.step)
        if groups and at - mark.width / 2 < end:
            groups[-1].append(mark)
        else:
            groups.append([mark])
        merged = together(groups[-1])
        end = x(merged.step) + merged.width / 2 + 2
    return [
        replace(merged, x=min(max(x(merged.step), _LEFT + merged.width / 2), _RIGHT - merged.width / 2))
        for merged in map(together, groups)
    ]


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    spread = high - low or abs(high) or 1.0
    rough = spread / about
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    begin, end = math.floor(low / apart + 1e-9), math.ceil(high / apart - 1e-9)
    # Rounded, or 3 * 0.1 would be written with all its digits.
    return [float(f"{index * apart:.12g}") for index in range(begin, max(end, begin + 1) + 1)]


def _decades(low: float, high: float) -> list[float]:
    begin, end = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    apart = max(1, (end - begin + 4) // 5)
    return [10.0**power for power in range(begin, max(end, begin + 1) + apart, apart)]
