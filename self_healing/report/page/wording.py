"""Numbers and values of the journal as the page writes them; times and sizes are written as in every report."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .. import words


_LONGEST = 600
_MOST_ITEMS = 12


def number(value: float | None) -> str:
    """`1234`, `0.0123`, `1.2e-05`: four digits that count, and whole numbers whole."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value)
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "−∞"}.get(value, "NaN")
    if value == int(value) and abs(value) < 1e15:
        # Without separators: most are steps, and part of the names of checkpoints.
        return f"{int(value)}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−", 1) if value < 0 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """`360 ms`, `41.0 s`, `2 min 5 s`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    return f"{1000 * seconds:.3g} ms" if 0.0005 <= seconds < 1 else words.duration(seconds)


def share(part: float | None) -> str:
    """`97.3 %`; never 100 % of what is not whole."""
    if part is None:
        return "–"
    percent = 100 * part
    if 99.95 <= percent < 100:
        return "> 99.9 %"
    return f"{percent:.3g} %"


def moment_for_machines(seconds: float) -> str:
    """The same for the `datetime` of a `<time>` element."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def spoken(name: str) -> str:
    """A name of the journal, to be read: `quarantine_rows` as `quarantine rows`."""
    return name.replace("_", " ")


def plain(value: Any) -> str:
    """A value of the journal in one line; what is long is cut, and says so."""
    if isinstance(value, str):
        return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}… ({len(value):,} characters)"
    if isinstance(value, Mapping):
        shown = [f"{spoken(str(key))} {plain(each)}" for key, each in list(value.items())[:_MOST_ITEMS]]
        more = len(value) - _MOST_ITEMS
    elif isinstance(value, Sequence):
        shown = [f"({plain(each)})" if isinstance(each, Mapping) else plain(each) for each in value[:_MOST_ITEMS]]
        more = len(value) - _MOST_ITEMS
    else:
        return number(value) if isinstance(value, int | float) or value is None else str(value)
    text = ", ".join(shown) or "none"
    text = text if len(text) <= 2 * _LONGEST else f"{text[: 2 * _LONGEST]}…"
    return f"{text}, and {more} more" if more > 0 else text
