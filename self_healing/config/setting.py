"""One setting: where it stands in TOML, which values it takes, and how it is written."""

import json
import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin


class ConfigurationError(ValueError):
    """A setting cannot be used; the message names it, its value, what is allowed and what to do."""


@dataclass(frozen=True, slots=True)
class Setting:
    """
    Where a field of [`HealingConfig`] stands in TOML, and which numbers it takes.

    It rides on the field's annotation and not in its metadata, because `HfArgumentParser` hands everything it finds in
    the metadata to `argparse.add_argument`, which refuses what it does not know.
    """

    section: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None

    def allows(self, number: float) -> bool:
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
        )

    def __str__(self) -> str:
        bounds = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most))
        return " and ".join(f"{words} {bound}" for words, bound in bounds if bound is not None)


def raise_if_any(problems: list[str]) -> None:
    """Names all problems of a configuration at once."""
    if len(problems) == 1:
        raise ConfigurationError(problems[0])
    if problems:
        raise ConfigurationError("\n- ".join([f"{len(problems)} settings cannot be used:", *problems]))


def unmet(kind: Any, setting: Setting, value: Any) -> str | None:
    """What `value` would have to be, if it is not that."""
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        met, allowed = isinstance(value, str) and value in choices, "one of " + ", ".join(map(repr, choices))
    elif kind is bool:
        met, allowed = isinstance(value, bool), "true or false"
    elif kind is int:
        met = isinstance(value, int) and not isinstance(value, bool) and setting.allows(value)
        allowed = f"an integer, {setting}"
    elif kind is float:
        # The comparison with the largest float rules out NaN and infinity, and integers that are no float.
        met = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        met, allowed = met and setting.allows(value), f"a finite number, {setting}"
    else:
        met = value is None or (isinstance(value, str) and _names_a_path(value))
        allowed = "a path, as a string that is not empty"
    return None if met else allowed


def _names_a_path(text: str) -> bool:
    # A lone surrogate (from a file name that is not UTF-8) can be written neither to TOML nor to the journal.
    return bool(text.strip()) and "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def toml_value(value: bool | int | float | str) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A TOML basic string is a JSON string, except that it may not hold the delete character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
