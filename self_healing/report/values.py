"""
Takes only what a journal can say: a value of another kind is as if it were not there, and is counted.

A file may be whole JSON and still say anything: a disk has failed, or another program has changed it. It is looked at
here, once, where its lines are read, and what tells a run from them need not doubt the kind of any value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..restarts.status import is_moment


Check = Callable[[Any], bool]

# Larger ones are neither a count, nor a seed, nor a size.
_LARGEST = 1 << 64
# Nesting of what this library writes is less than half of it.
_DEEPEST = 20


def is_text(value: Any) -> bool:
    """Whether it is a text."""
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    """Whether it is a whole number that counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def is_time(value: Any) -> bool:
    """Whether it is a moment in seconds since the epoch, or a span of them."""
    return _is_number(value) and is_moment(value)


def is_finite(value: Any) -> bool:
    """Whether it is a number that is finite."""
    return _is_number(value) and math.isfinite(value)


def is_flag(value: Any) -> bool:
    """Whether it is a truth value."""
    return isinstance(value, bool)


def is_list(value: Any) -> bool:
    """Whether it is a list."""
    return isinstance(value, list)


def is_texts(value: Any) -> bool:
    """Whether it is a list of texts."""
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def is_mapping(value: Any) -> bool:
    """Whether it has values by name."""
    return isinstance(value, Mapping)


def or_none(check: Check) -> Check:
    """Takes `None` as well."""
    return lambda value: value is None or check(value)


# What every event has; a line without one of these is none.
REQUIRED: Mapping[str, Check] = {"run": is_text, "step": is_count, "kind": is_text}
# What the report relies on; anything else may be of any kind.
EVENT: Mapping[str, Check] = {
    **REQUIRED,
    **dict.fromkeys(("incident", "symptom", "cause", "outcome", "action", "verdict", "output_dir", "host"), is_text),
    **dict.fromkeys(("failure", "objective", "resumed_from"), or_none(is_text)),
    **dict.fromkeys(("rank", "attempt", "pid", "max_steps"), is_count),
    **dict.fromkeys(("steps_lost", "steps_repeated", "reductions", "lr_reductions"), is_count),
    **dict.fromkeys(("time", "seconds_lost", "process_began"), is_time),
    **dict.fromkeys(("scale", "learning_rate_scale", "learning_rate"), is_finite),
    **dict.fromkeys(("detectors", "rules", "nonfinite"), is_texts),
    "happened": is_flag,
    "evidence": is_mapping,
    "limits": is_mapping,
    "learned": is_mapping,
}
EVIDENCE: Mapping[str, Check] = {"tensors": is_list, "tensors_total": is_count, "rows": is_list, "samples": is_list}
# Of a line of the quarantine.
QUARANTINED: Mapping[str, Check] = {
    **dict.fromkeys(("run", "incident", "kind", "content_hash", "text_hash", "preview"), or_none(is_text)),
    **dict.fromkeys(("step", "dataset_index"), or_none(is_count)),
    "epoch": or_none(is_finite),
    "time": or_none(is_time),
}


def taken(entry: Mapping[str, Any], checks: Mapping[str, Check]) -> tuple[dict[str, Any], int]:
    """
    Takes the values of an entry that are what they should be.

    Args:
        entry (`Mapping[str, Any]`):
            What was read.
        checks (`Mapping[str, Check]`):
            By name, for the values that have to be of one kind.

    Returns:
        Those values, and how many others there are.
    """
    found = {
        name: value
        for name, value in entry.items()
        if _is_bounded(value) and ((check := checks.get(name)) is None or check(value))
    }
    return found, len(entry) - len(found)


def taken_event(entry: Mapping[str, Any]) -> tuple[dict[str, Any] | None, int]:
    """
    Takes an event of a journal.

    Args:
        entry (`Mapping[str, Any]`):
            A line of it.

    Returns:
        The event, and how many of its values were left out; `None` if it is none.
    """
    event, odd = taken(entry, EVENT)
    if not event.keys() >= REQUIRED.keys():
        return None, 0
    if "evidence" in event:
        event["evidence"], more = taken(event["evidence"], EVIDENCE)
        odd += more
    return event, odd


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_bounded(value)


def _is_bounded(value: Any, depth: int = 0) -> bool:
    """Whether all numbers in it can be reckoned with, and all of it can be walked through."""
    if isinstance(value, int):
        return -_LARGEST < value < _LARGEST
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return depth < _DEEPEST and all(_is_bounded(each, depth + 1) for each in inner)
