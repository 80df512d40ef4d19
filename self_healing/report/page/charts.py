"""The charts of a run: which lines there are, in which unit, on which scale, and each in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ..records import LoggedMetric, RunReport, StepColumns
from . import wording


# Stretches a run went back from that overlap are lines of their own, the newest first.
_LAYERS = 3
# Above that many times its median, a line is flat on a linear scale but for its peaks.
_FLAT = 30.0

# Ticks are reckoned beyond the highest value, and the largest float is not far from it.
_HIGHEST = 1e300

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """
    One line of a chart.

    Args:
        label (`str`):
            What it is.
        kind (`str`):
            `"measured"`, `"peak"` (the highest of several steps), `"second"` (a bound, or something to compare with),
            `"usual"` or `"undone"` (steps that are not in the weights).
        steps (`list[int]`):
            In ascending order.
        values (`list[float | None]`):
            In the unit of the chart; `None` is a gap.
    """

    label: str
    kind: str
    steps: list[int]
    values: list[float | None]

    @property
    def drawn(self) -> bool:
        """Whether there is anything to see."""
        return any(value is not None for value in self.values)


@dataclass(frozen=True, slots=True)
class Chart:
    """
    One chart.

    Args:
        name (`str`):
            Unique on the page.
        title (`str`), unit (`str`):
            For the reader; the unit may be empty.
        lines (`list[Line]`):
            The first is what it is about.
        summary (`str`):
            What is to be seen, in a sentence.
        logarithmic (`bool`), from_zero (`bool`):
            Its scale.
    """

    name: str
    title: str
    unit: str
    lines: list[Line] = field(default_factory=list)
    summary: str = ""
    logarithmic: bool = False
    from_zero: bool = True


def charts_of(report: RunReport) -> list[Chart]:
    """Makes the charts for which the run has values, in the order in which one looks at them."""
    kept, series = report.series.kept, report.series
    memory = "GB" if max(_there([*kept.memory_peak, *kept.memory, *kept.host_memory]), default=0) >= 1e9 else "MB"
    bytes_in_unit = 1e9 if memory == "GB" else 1e6
    quick = max(_there(kept.seconds), default=0) < 1
    host = "usual" if any(_there(kept.memory)) else "measured"
    total = [series.memory_total] * len(kept) if any(_there(kept.memory)) else []
    scheduled: list[float | None] = [
        rate / scale if rate is not None and scale else rate
        for rate, scale in zip(kept.learning_rate, kept.learning_rate_scale, strict=False)
    ]
    reduced = any(scale != 1 for scale in kept.learning_rate_scale if scale is not None)
    several = f"highest of {max(kept.steps, default=1)} steps" if max(kept.steps, default=1) > 1 else ""
    # Before anything is usual, it is a limit so far away that the norm would be a flat line below it.
    bound = [
        None if usual is None else value
        for usual, value in zip(kept.grad_norm_usual, kept.grad_norm_bound, strict=False)
    ]
    logged_only = series.source == "logs"
    found = [
        Chart(
            "loss",
            "Loss, as the trainer logged it" if logged_only else "True loss",
            "",
            [
                _line("loss", "measured", kept, kept.loss),
                *([_line(several, "peak", kept, kept.loss_max)] if several else ()),
                *_undone(series.discarded, "loss"),
                *_logged("evaluation", series.logged.get("eval_loss")),
            ],
        ),
        Chart(
            "grad_norm",
            "Gradient norm, before clipping",
            "",
            [
                _line("gradient norm", "measured", kept, kept.grad_norm),
                *([_line(several, "peak", kept, kept.grad_norm_max)] if several else ()),
                *_undone(series.discarded, "grad_norm"),
                _line("usual", "usual", kept, kept.grad_norm_usual),
                _line("looked into above", "second", kept, bound),
            ],
        ),
        Chart("reward", "Reward", "", _logged("reward", series.logged.get("reward"), "measured")),
        Chart(
            "learning_rate",
            "Learning rate",
            "",
            [
                _line("in force", "measured", kept, kept.learning_rate),
                *([_line("of the schedule", "second", kept, scheduled)] if reduced else ()),
            ],
        ),
        Chart(
            "memory",
            "Memory",
            memory,
            [
                _line("accelerator", "measured", kept, kept.memory, 1 / bytes_in_unit),
                _line("its peak so far", "peak", kept, kept.memory_peak, 1 / bytes_in_unit),
                _line("process, on the host", host, kept, kept.host_memory, 1 / bytes_in_unit),
                _line("accelerator has", "second", kept, total, 1 / bytes_in_unit),
            ],
        ),
        Chart(
            "seconds",
            "Time of a step",
            "ms" if quick else "s",
            [
                _line("step time", "measured", kept, kept.seconds, 1000.0 if quick else 1.0),
                _line("forward, backward, update", "usual", kept, kept.busy, 1000.0 if quick else 1.0),
            ],
            _of_times(kept),
        ),
    ]
    return [_finished(chart) for chart in found if any(line.drawn for line in chart.lines)]


def _line(label: str, kind: str, columns: StepColumns, values: Values, times: float = 1.0) -> Line:
    return Line(label, kind, columns.step[: len(values)], [_short(value, times) for value in values])


def _short(value: float | None, times: float = 1.0) -> float | None:
    """With six digits, which is more than a screen shows, and less than half of the bytes."""
    if value is None or not abs(value * times) < _HIGHEST:
        return None
    short = float(f"{value * times:.6g}")
    return int(short) if short == int(short) else short


def _undone(discarded: Sequence[StepColumns], column: str) -> list[Line]:
    """Stretches that are not in the weights: as many lines as it takes for none to lie over another."""
    layers: list[list[StepColumns]] = []
    for stretch in reversed([each for each in discarded if len(each)]):
        first, last = stretch.step[0], stretch.step[-1]
        free = next(
            (layer for layer in layers if all(last < other.step[0] or first > other.step[-1] for other in layer)), None
        )
        if free is not None:
            free.append(stretch)
        elif len(layers) < _LAYERS:
            layers.append([stretch])
    lines = []
    for layer in layers:
        steps: list[int] = []
        values: list[float | None] = []
        for stretch in sorted(layer, key=lambda each: each.step[0]):
            if steps and stretch.step[0] > steps[-1] + 1:
                # A gap, or the line would run on to the next stretch.
                steps.append(steps[-1] + 1)
                values.append(None)
            steps += stretch.step
            values += [_short(value) for value in getattr(stretch, column)]
        lines.append(Line("not in the weights", "undone", steps, values))
    return lines


def _logged(label: str, metric: LoggedMetric | None, kind: str = "second") -> list[Line]:
    if metric is None:
        return []
    # Logged after the step that incidents count as not yet finished; of a step that is logged twice the last counts.
    values = {max(step - 1, 0): value for step, value in zip(metric.step, metric.value, strict=False)}
    steps = sorted(values)
    return [Line(label, kind, steps, [_short(values[step]) for step in steps])]


def _there(values: Values) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _finished(chart: Chart) -> Chart:
    lines = [line for line in chart.lines if line.drawn]
    everything = [value for line in lines for value in _there(line.values)]
    about = lines[0]
    usual = median(_there(about.values))
    logarithmic = min(everything) > 0 and max(everything) > _FLAT * usual
    summary = chart.summary or _summary(chart, about)
    from_zero = chart.name not in ("loss", "reward") and not logarithmic
    return Chart(chart.name, chart.title, chart.unit, lines, summary, logarithmic, from_zero)


def _of_times(kept: StepColumns) -> str:
    points = [(step, value) for step, value in zip(kept.step, kept.seconds, strict=False) if value is not None]
    if not points:
        return ""
    step, longest = max(points, key=lambda point: point[1])
    usual = median(value for _, value in points)
    return f"usually {wording.duration(usual)}, longest {wording.duration(longest)} at step {step}"


def _summary(chart: Chart, line: Line) -> str:
    points = [(step, value) for step, value in zip(line.steps, line.values, strict=True) if value is not None]
    unit = f" {chart.unit}" if chart.unit else ""
    (_, first), (_, last) = points[0], points[-1]
    text = f"{wording.number(first)} → {wording.number(last)}{unit}"
    if chart.name == "loss":
        low = min(points, key=lambda point: point[1])
        return f"{text}, lowest {wording.number(low[1])} at step {low[0]}"
    high = max(points, key=lambda point: point[1])
    return f"{text}, highest {wording.number(high[1])}{unit} at step {high[0]}"
