"""The loss curves of the runs as a PNG."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from .faults import DemoFault
from .record import RunRecord


# Drawn larger and made smaller: Pillow's lines are not smooth.
_SCALE = 3
_WIDTH, _HEIGHT = 960, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 96, 48
_INK, _PALE, _GRID = "#1f2328", "#6e7781", "#e6e8eb"
# Plain, healed, fault-free. Healed runs over the twin, which is broad and pale: that they are one is to be seen.
_COLOURS = ("#cf222e", "#1a7f37", "#9cc9f5")
_BREADTHS = (2.4, 1.6, 6.0)


class _Canvas:
    """Draws by steps and losses on a picture."""

    def __init__(self, steps: int, low: float, high: float) -> None:
        self.image = Image.new("RGB", (_WIDTH * _SCALE, _HEIGHT * _SCALE), "white")
        self._draw = ImageDraw.Draw(self.image)
        self._steps, self._low, self._high = steps, low, high

    def at(self, step: float, loss: float) -> tuple[float, float]:
        across = (step - 1) / max(self._steps - 1, 1) * (_WIDTH - _LEFT - _RIGHT)
        down = (self._high - loss) / (self._high - self._low) * (_HEIGHT - _TOP - _BOTTOM)
        return _LEFT + across, _TOP + down

    def line(self, points: Sequence[tuple[float, float]], colour: str, breadth: float) -> None:
        scaled = [(x * _SCALE, y * _SCALE) for x, y in points]
        self._draw.line(scaled, colour, round(breadth * _SCALE), joint="curve")

    def text(
        self, place: tuple[float, float], text: str, colour: str = _INK, size: int = 14, anchor: str = "la"
    ) -> None:
        font = ImageFont.load_default(size * _SCALE)
        self._draw.text((place[0] * _SCALE, place[1] * _SCALE), text, colour, font, anchor)

    def cross(self, place: tuple[float, float], colour: str, reach: float = 6) -> None:
        x, y = place
        self.line([(x - reach, y - reach), (x + reach, y + reach)], colour, 2.6)
        self.line([(x - reach, y + reach), (x + reach, y - reach)], colour, 2.6)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.image.resize((_WIDTH, _HEIGHT), Image.Resampling.LANCZOS).save(path, optimize=True)


def draw_curves(path: str | os.PathLike[str], runs: Mapping[str, RunRecord], faults: Sequence[DemoFault]) -> None:
    """
    Draws the loss of each run by step, the faults, and where a run was ruined and died.

    Args:
        path (`str` or `os.PathLike`):
            The PNG to write.
        runs (`Mapping[str, RunRecord]`):
            The plain run, the healed one and the twin, by the title they get.
        faults (`Sequence[DemoFault]`):
            Marked at their steps.
    """
    steps = max(run.steps for run in runs.values())
    shown = [loss for run in runs.values() for loss in run.true_losses.values()] or [0.0, 1.0]
    low, high = min(shown), max(shown)
    margin = 0.05 * (high - low) or 0.5
    canvas = _Canvas(steps, low - margin, high + margin)
    _axes(canvas, steps, low, high)
    for fault in faults:
        top, foot = canvas.at(fault.step, high + margin), canvas.at(fault.step, low - margin)
        canvas.line([top, foot], _PALE, 1)
        canvas.text((top[0] + 5, top[1] + 2), fault.name, _PALE, 13)
    titled = list(zip(runs.items(), _COLOURS, _BREADTHS, strict=True))
    for (_, run), colour, breadth in reversed(titled):
        canvas.line([canvas.at(step, loss) for step, loss in sorted(run.true_losses.items())], colour, breadth)
        _mark_the_end(canvas, run, colour, low)
    _legend(canvas, titled)
    canvas.save(Path(path))


def _axes(canvas: _Canvas, steps: int, low: float, high: float) -> None:
    canvas.text((_LEFT, 14), "Training loss while three faults strike", size=18)
    for number in range(5):
        loss = low + (high - low) * number / 4
        start = canvas.at(1, loss)
        canvas.line([start, canvas.at(steps, loss)], _GRID, 1)
        canvas.text((start[0] - 8, start[1]), f"{loss:.2f}", _PALE, 13, "rm")
    for number in range(5):
        step = 1 + (steps - 1) * number / 4
        canvas.text((canvas.at(step, low)[0], _HEIGHT - _BOTTOM + 10), f"{step:.0f}", _PALE, 13, "ma")
    canvas.text(((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6), "optimizer step", _PALE, 13, "mb")


def _mark_the_end(canvas: _Canvas, run: RunRecord, colour: str, low: float) -> None:
    """A dashed line on the ground for steps that trained nothing, and a cross where the run died."""
    last = max(run.true_losses, default=1)
    if run.ruined is not None:
        canvas.cross(canvas.at(last, run.true_losses.get(last, low)), colour)
        canvas.text((canvas.at(run.ruined.step, low)[0] + 8, canvas.at(1, low)[1] - 22), "weights are NaN", colour, 13)
        for step in range(run.ruined.step, run.step, 2):
            canvas.line([canvas.at(step, low), canvas.at(min(step + 1, run.step), low)], colour, 2)
    if run.stopped is not None:
        place = canvas.at(run.step, low if run.ruined is not None else run.true_losses.get(last, low))
        canvas.cross(place, colour)
        canvas.text((place[0] + 12, place[1] - 8), f"dead: {run.stopped.kind}", colour, 13)


def _legend(canvas: _Canvas, titled: Sequence[tuple[tuple[str, RunRecord], str, float]]) -> None:
    x = float(_LEFT)
    for (title, run), colour, breadth in titled:
        canvas.line([(x, 58), (x + 26, 58)], colour, breadth)
        loss = f"{title}: held-out loss {run.held_out_loss:.4f}"
        canvas.text((x + 34, 58), loss, size=14, anchor="lm")
        x += 290
