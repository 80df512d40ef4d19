"""Checks a user's table of rules: its keys, their values, and conditions that do not fit together."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

from ...failures.recipes import Severity
from .conditions import finite_number
from .rule import OBJECTIVES, TRENDS, Condition, Relation, RuleAction


def _is_number(value: Any) -> bool:
    return finite_number(value) is not None


def _is_count(value: Any, least: int, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


# From a key to whether a value is allowed, and what is. A window is bounded because it is gone through at every log.
_Check = tuple[Callable[[Any], bool], str]


def _choice(choices: tuple[str, ...]) -> _Check:
    return (lambda value: isinstance(value, str) and value in choices), "one of " + ", ".join(map(repr, choices))


_TEXT: _Check = (lambda value: isinstance(value, str)), "text"
_COUNT: _Check = (lambda value: _is_count(value, 1)), "an integer, at least 1"
RULE_KEYS: dict[str, _Check] = {
    "metric": (_is_name, 'the name of a metric, or a pattern such as "rewards/*/mean"'),
    "objectives": (
        lambda value: isinstance(value, list) and bool(value) and all(name in OBJECTIVES for name in value),
        "a list of one or more of " + ", ".join(map(repr, OBJECTIVES)),
    ),
    "healthy": _TEXT,
    "red_flag": (
        lambda value: isinstance(value, list) and bool(value) and all(isinstance(part, dict) for part in value),
        'a list of one or more conditions such as { is = "below", value = 0.01 }',
    ),
    "steps": _COUNT,
    "observations": _COUNT,
    "severity": _choice(get_args(Severity)),
    "action": _choice(get_args(RuleAction)),
    "diagnosis": _TEXT,
    "remedy": _TEXT,
    "about": _TEXT,
    "source": _TEXT,
    "enabled": ((lambda value: isinstance(value, bool)), "true or false"),
}
CONDITION_KEYS: dict[str, _Check] = {
    "metric": (
        lambda value: _is_name(value) and not set(value) & set("*?["),
        "the exact name of a metric (only the rule's own `metric` may be a pattern)",
    ),
    "is": _choice(get_args(Relation)),
    "value": (_is_number, "a finite number"),
    "of": (
        lambda value: isinstance(value, str) and re.fullmatch(r"start|lowest|highest|args\.\w+", value) is not None,
        "'start', 'lowest', 'highest' or an argument of the trainer such as 'args.max_completion_length'",
    ),
    "tolerance": ((lambda value: _is_number(value) and value >= 0), "a finite number, at least 0"),
    "share": ((lambda value: _is_number(value) and 0 < value <= 1), "a number above 0 and at most 1"),
    "window": ((lambda value: _is_count(value, 1, 1000)), "an integer from 1 to 1000"),
}
CONDITION_DEFAULTS = {field.name: field.default for field in fields(Condition)}
# With fewer, a third has too few values for a median that noise does not move.
_SHORTEST_TREND = 15


def problems_of(own: Mapping[str, Any], table: Mapping[str, Any]) -> list[str]:
    """Lists what is wrong with a user's table."""
    problems: list[str] = []
    for name, keys in own.items():
        if not isinstance(keys, dict):
            problems.append(
                f"`{name}` is at the top level, set to {reprlib.repr(keys)}. Please put it below the rule it is for, "
                f"such as [{next(iter(table))}]."
            )
            continue
        missing = [key for key in ("metric", "red_flag") if key not in keys]
        if name not in table and missing:
            close = difflib.get_close_matches(name, table, n=1)
            advice = f"Did you mean [{close[0]}]?" if close else f"The rules there are: {', '.join(table)}."
            problems.append(f"[{name}] is a new rule and needs {_listed(missing)}. {advice}")
        problems += _unfit(keys, RULE_KEYS, f"[{name}]")
        if "red_flag" in keys and RULE_KEYS["red_flag"][0](keys["red_flag"]):
            for number, part in enumerate(keys["red_flag"], start=1):
                where = f"condition {number} of `red_flag` in [{name}]"
                found = _unfit(part, CONDITION_KEYS, where)
                problems += found or _inconsistent(part, where)
    return problems


def _unfit(keys: Mapping[str, Any], known: Mapping[str, _Check], where: str) -> list[str]:
    problems = []
    for key, value in keys.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            advice = f"Did you mean `{close[0]}`?" if close else f"There are: {', '.join(known)}."
            problems.append(f"`{key}` in {where} is not a key. {advice}")
            continue
        fits, allowed = known[key]
        if not fits(value):
            problems.append(
                f"`{key}` in {where} is {reprlib.repr(value)} ({type(value).__name__}), but must be {allowed}."
            )
    return problems


def _inconsistent(part: Mapping[str, Any], where: str) -> list[str]:
    if "is" not in part:
        return [f"{where} does not say what is compared. Please set `is` to {CONDITION_KEYS['is'][1]}."]
    relation, problems = part["is"], []
    if "value" not in part:
        problems.append(f"{where} has no `value`. Please say what the metric is compared with.")
    if "tolerance" in part and relation != "near":
        problems.append(f'{where} has a `tolerance`, which only `is = "near"` reads. Please take it out.')
    if relation in TRENDS:
        if part.get("value", 1) <= 0:
            problems.append(f"{where} is a trend of size {part['value']}, but must be above 0: it is an amount.")
        if part.get("window", _SHORTEST_TREND) < _SHORTEST_TREND:
            problems.append(
                f"{where} is a trend over {part['window']} observations, but must be at least {_SHORTEST_TREND}."
            )
        if "share" in part:
            problems.append(f"{where} is a trend and cannot have a `share`. Please take it out.")
    elif "window" in part and "share" not in part:
        problems.append(f"{where} has a `window`, which only trends and a `share` read. Please set `share`, too.")
    return problems


def _listed(keys: Sequence[str]) -> str:
    return " and ".join(f"`{key}`" for key in keys)
