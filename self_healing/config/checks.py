"""Checks settings that were given: their names, their values, and values that do not go together."""

import difflib
import reprlib
from collections.abc import Mapping
from typing import Any

from .schema import Schema, names_in
from .setting import SECTIONS, ConfigurationError


# Ranks give a sign of life once a second, and a thread may have to wait for its turn.
_SHORTEST_CHECK = 10.0


def raise_if_any(problems: list[str]) -> None:
    """Names all problems of a configuration at once."""
    if len(problems) == 1:
        raise ConfigurationError(problems[0])
    if problems:
        raise ConfigurationError("\n- ".join([f"{len(problems)} settings cannot be used:", *problems]))


def value_problems(schema: Schema, values: Mapping[str, Any]) -> list[str]:
    """Lists what is wrong with values, one by one and, if nothing is, with each other."""
    problems = []
    for name, value in values.items():
        allowed = schema[name].unmet(value)
        if allowed is not None:
            problems.append(
                f"`{name}` is {reprlib.repr(value)} ({type(value).__name__}), but must be {allowed}. Please change "
                f"it, or leave it out for the default, {schema[name].default!r}."
            )
    if problems:
        return problems
    if 0 < values["collective_timeout_check_seconds"] < _SHORTEST_CHECK:
        problems.append(
            f"`collective_timeout_check_seconds` is {values['collective_timeout_check_seconds']}, but must be 0 (off) "
            f"or at least {_SHORTEST_CHECK}: a rank that is busy for some seconds would end the run. Please raise it."
        )
    elif values["retry_max_seconds"] < values["retry_initial_seconds"]:
        problems.append(
            f"`retry_max_seconds` is {values['retry_max_seconds']}, but must be at least `retry_initial_seconds`, "
            f"which is {values['retry_initial_seconds']}. Please raise the first or lower the second."
        )
    return problems


def unknown(schema: Schema, section: str | None, name: Any, value: Any) -> str:
    """Says that a name is no setting, and which one may have been meant."""
    if section is None and isinstance(value, Mapping):
        close = difflib.get_close_matches(str(name), SECTIONS, n=1)
        advice = f"Did you mean [{close[0]}]?" if close else f"There are: {', '.join(SECTIONS)}."
        return f"[{name}] is not a section. {advice}"
    close = difflib.get_close_matches(str(name), schema, n=1)
    names = names_in(schema, section) if section is not None else schema
    advice = f"Did you mean {schema[close[0]]}?" if close else f"There are: {', '.join(names)}."
    return f"`{name}`{f' in [{section}]' if section is not None else ''} is not a setting. {advice}"
