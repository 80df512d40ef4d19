"""What the terminal shows while the runs of the demo go on: side by side, or in plain lines."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .events import Event, Healed, Loaded, Ready, Ruined, Stepped, Stopped, Struck, cause_of, remedy_of
from .plot import braille_curve
from .record import RunRecord
from .runs import HEALED, PLAIN, TWIN


TITLES = {PLAIN: "plain trainer", HEALED: "with self_healing", TWIN: "fault-free twin"}
# Panels side by side need this much; a notebook or a file has no room that could be drawn over.
_NARROWEST = 80
_CURVE_LINES, _NOTE_LINES = 6, 7


class Screen(Protocol):
    """Shows what runs tell."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, name: str, event: Event) -> None:
        """Shows an event that its run's record has taken in."""


def screen_for(console: Console, runs: Mapping[str, RunRecord]) -> Screen:
    """Side by side in a terminal that can draw it; else lines, which can be searched and kept."""
    return SideBySide(console, runs) if HEALED in runs and can_draw(console) else Lines(console, runs)


def can_draw(console: Console) -> bool:
    """Whether there is a terminal whose lines can be drawn over, wide enough, with the characters of the curves."""
    draws_over = console.is_terminal and not console.is_dumb_terminal
    return draws_over and console.width >= _NARROWEST and console.encoding.startswith("utf")


def _note(event: Event) -> tuple[str, str, str] | None:
    """Style, first word and text of what is worth a line."""
    if isinstance(event, Struck):
        return "bold yellow", "fault", event.what
    if isinstance(event, Ruined):
        return "bold red", "ruined", f"{event.tensors} hold NaN"
    if isinstance(event, Stopped):
        return "bold red", "dead", f"{event.kind}: {event.message}"
    return None


class Lines:
    """
    About ten lines of progress for each run, and each event as it comes.

    Args:
        console ([`~rich.console.Console`]):
            Where to print.
        runs (`Mapping[str, RunRecord]`):
            By name.
    """

    def __init__(self, console: Console, runs: Mapping[str, RunRecord]) -> None:
        self._console, self._runs = console, runs

    def __enter__(self) -> Self:
        self._console.print("Loading torch and TRL, and reading the text.\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, name: str, event: Event) -> None:
        steps = self._runs[name].steps
        if isinstance(event, Stepped):
            if event.step % max(steps // 10, 1) == 0:
                norm = "" if math.isfinite(event.norm) else f"   gradient norm {event.norm}"
                self._say(name, event.step, f"[dim]loss {event.loss:.4f}{norm}[/]")
        elif isinstance(event, Healed):
            lost = f"{event.incident['steps_lost']} steps, {event.incident['seconds_lost']:.2f} s lost"
            self._say(name, event.step, f"[bold]cause[/]    {escape(cause_of(event.incident))}")
            self._say(name, event.step, f"[bold green]remedy[/]   {escape(remedy_of(event.incident))}; {lost}")
        elif (note := _note(event)) is not None:
            style, word, text = note
            self._say(name, getattr(event, "step", 0), f"[{style}]{word:<8}[/] {escape(text)}")

    def _say(self, name: str, step: int, text: str) -> None:
        # In a file, a line that is searched for is in one piece.
        piped = not self._console.is_terminal
        self._console.print(f"  {name:<6}  {step:>4}/{self._runs[name].steps}  {text}", soft_wrap=piped)


class SideBySide:
    """
    Two panels that move: the plain run on the left, the healed one on the right; the twin is a bar below them.

    Args:
        console ([`~rich.console.Console`]):
            Where to draw.
        runs (`Mapping[str, RunRecord]`):
            By name.
    """

    def __init__(self, console: Console, runs: Mapping[str, RunRecord]) -> None:
        self._console, self._runs = console, runs
        self._notes: dict[str, list[Text]] = {name: [] for name in runs}
        self._states = {name: "loading torch and TRL" for name in runs}
        self._began = time.monotonic()
        self._live = Live(console=console, get_renderable=self._picture, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, name: str, event: Event) -> None:
        if isinstance(event, Loaded):
            self._states[name] = "reading docstrings, tokenising"
        elif isinstance(event, Ready):
            self._states[name] = "the first step"
        elif isinstance(event, Healed):
            text = f"{_short_cause(event.incident)}, {event.incident['steps_lost']} steps lost"
            self._notes[name].append(_line(event.step, "bold green", "healed", text))
        elif (note := _note(event)) is not None:
            style, word, text = note
            # Half of 80 columns is little.
            self._notes[name].append(
                _line(getattr(event, "step", 0), style, word, text.replace("weight tensors", "tensors"))
            )

    def _picture(self) -> RenderableType:
        table = Table.grid(expand=True, padding=0)
        table.add_column(ratio=1)
        table.add_column(ratio=1)
        table.add_row(self._panel(PLAIN), self._panel(HEALED))
        return Group(table, self._below())

    def _panel(self, name: str) -> Panel:
        run = self._runs[name]
        style = "red" if run.ruined or run.stopped else "green" if name == HEALED else "default"
        width = max((self._console.width // 2) - 4, 1)
        lines: list[RenderableType] = [self._head(name), *self._curve(run, width, style)]
        notes = self._notes[name][-_NOTE_LINES:]
        lines += [*notes, *[Text("")] * (_NOTE_LINES - len(notes))]
        return Panel(Group(*lines), title=TITLES[name], border_style=style)

    def _head(self, name: str) -> Text:
        run = self._runs[name]
        if not run.losses:
            return Text(self._states[name], "dim")
        text = Text(f"step {run.step:>3}/{run.steps}  loss {run.losses[max(run.losses)]:.4f}", no_wrap=True)
        if run.stopped is not None:
            text.append("  dead", "bold red")
        elif run.ruined is not None:
            text.append("  ruined", "bold red")
        elif run.ended is not None:
            text.append("  finished", "bold green")
        return text

    def _curve(self, run: RunRecord, width: int, style: str) -> list[Text]:
        # One scale for all, so that the panels can be compared.
        shown = [loss for each in self._runs.values() for loss in each.true_losses.values()]
        low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
        drawn = braille_curve(run.true_losses, run.steps, width, _CURVE_LINES, low, high)
        return [Text(line, style, no_wrap=True) for line in drawn]

    def _below(self) -> RenderableType:
        run = self._runs[TWIN]
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=run.steps, completed=run.step)
        table.add_row(f" {TITLES[TWIN]}", bar, f"{run.step:>3}/{run.steps}  {time.monotonic() - self._began:3.0f} s ")
        return table


def _short_cause(incident: Mapping[str, Any]) -> str:
    """The row that is to blame, or the cause: there are 25 characters at 80 columns."""
    rows = [str(row["dataset_index"]) for row in incident["evidence"].get("rows", ())]
    return f"row {', '.join(rows)}" if rows else str(incident["cause"])


def _line(step: int, style: str, word: str, text: str) -> Text:
    return Text.assemble(f"{step:>3} ", (f"{word} ", style), text, no_wrap=True, overflow="ellipsis")
