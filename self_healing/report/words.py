"""Puts numbers of a report into words that fit on a line."""

from __future__ import annotations

import math
import time
from itertools import pairwise

from ..journal.incident import counted as counted
from .records import Goodput, RunReport


def printable(text: str) -> str:
    """Leaves out what steers a terminal, and what no encoding has: texts of exceptions, and parts of file names."""
    return "".join(each if each.isprintable() or each == "\n" else " " for each in text)


def sentence(text: str) -> str:
    """Ends a text as a sentence ends."""
    text = text.rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def duration(seconds: float) -> str:
    """A time in two units at most: `"0.4 s"`, `"3 min 20 s"`, `"5 h 12 min"`, `"2 d 3 h"`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    whole = round(seconds)
    for (large, length), (small, below) in pairwise(units):
        if whole >= length:
            rest = whole % length // below
            return f"{whole // length} {large}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def size(count: float | None) -> str:
    """Bytes, in the largest unit that leaves a digit before the point; a dash if they are not known."""
    if count is None or not math.isfinite(count):
        return "-"
    units = ("B", "KB", "MB", "GB", "TB")
    place = min(int(math.log(max(count, 1), 1000)), len(units) - 1)
    return f"{count / 1000**place:.{0 if place == 0 else 1}f} {units[place]}"


def moment(at: float | None) -> str:
    """Date and time here; a dash if it is not known."""
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def goodput_line(goodput: Goodput) -> str:
    """Where the wall time went, in a line."""
    steps = f"{goodput.steps_useful:,} of {counted(goodput.steps_done, 'step')} computed are in the weights"
    if goodput.share is None:
        return f"Goodput: {steps}; wall time {duration(goodput.wall)}."
    parts = (
        ("lost steps", goodput.lost_steps),
        ("healing", goodput.healing),
        ("between processes", goodput.down),
        ("start-up, data, evaluation, checkpoints", goodput.other),
    )
    rest = ", ".join(f"{what} {duration(seconds)}" for what, seconds in parts if seconds >= 0.05)
    return (
        f"Goodput: {100 * goodput.share:.1f} % of {duration(goodput.wall)} were spent on steps that are in the weights"
        f"{f' ({rest})' if rest else ''}. {steps[:1].upper()}{steps[1:]}."
    )


def headline(report: RunReport) -> str:
    """State and incidents, in a line."""
    of = "" if report.state.max_steps is None else f" of {report.state.max_steps:,}"
    cost = f", {report.lost.removesuffix(' lost')} and {duration(report.seconds_lost)} lost"
    incidents = counted(len(report.incidents), "incident") + (cost if report.incidents else "")
    return f"{report.state.name}, step {report.state.step:,}{of}; {incidents}"
