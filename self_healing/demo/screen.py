"""What the terminal shows while the runs of the demo go on."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape

from .events import Event, Healed, Ruined, Stepped, Stopped, Struck, cause_of, remedy_of
from .record import RunRecord
from .runs import HEALED, PLAIN, TWIN


TITLES = {PLAIN: "plain trainer", HEALED: "with self_healing", TWIN: "fault-free twin"}


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

    def show(self, name: str, event: Event) -> None:
        """Shows an event that its run's record has taken in."""
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
