"""The settings of a config by name, each with the values it takes, from the fields that declare them."""

import numbers
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .command_line import LeftOut
from .setting import Setting


# YAML 1.1 reads these words as booleans, unless they are quoted.
_YAML_WORDS = {True: ("yes", "on"), False: ("no", "off")}


@dataclass(frozen=True, slots=True)
class Declared:
    """A setting as its field declares it."""

    name: str
    kind: Any  # a type or a `Literal`
    setting: Setting
    default: Any

    def __str__(self) -> str:
        return f"`{self.name}` in [{self.setting.section}]"

    def converted(self, value: Any) -> Any:
        """Converts a value to what is kept: numbers and paths of other libraries become Python's own."""
        if get_origin(self.kind) is Literal:
            words = _YAML_WORDS[value] if isinstance(value, bool) else ()
            return next((choice for choice in get_args(self.kind) if choice in words), value)
        if isinstance(value, bool | int | float | str):
            return value
        try:
            if self.kind is int and isinstance(value, numbers.Integral):
                return int(value)
            if self.kind is float and isinstance(value, numbers.Real):
                return float(value)
        except OverflowError:
            return value
        return os.fspath(value) if self.kind not in (bool, int, float) and isinstance(value, os.PathLike) else value

    def unmet(self, value: Any) -> str | None:
        """Returns what `value` would have to be, or `None` if it is that."""
        if get_origin(self.kind) is Literal:
            choices = get_args(self.kind)
            met, allowed = isinstance(value, str) and value in choices, "one of " + ", ".join(map(repr, choices))
        elif self.kind is bool:
            met, allowed = isinstance(value, bool), "true or false"
        elif self.kind is int:
            met = isinstance(value, int) and not isinstance(value, bool) and self.setting.allows(value)
            allowed = f"an integer, {self.setting}"
        elif self.kind is float:
            # The comparison with the largest float rules out NaN and infinity, and integers that are no float.
            met = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
            met, allowed = met and self.setting.allows(value), f"a finite number, {self.setting}"
        else:
            met = value is None or (isinstance(value, str) and _names_a_path(value))
            allowed = "a path, as a non-empty string"
        return None if met else allowed


Schema = Mapping[str, Declared]


@cache
def schema_of(config: type[Any]) -> Schema:
    """Reads the settings that a config declares from its annotations, because parsers overwrite `Field.type`."""
    hints = get_type_hints(config, include_extras=True)
    schema = {}
    for f in fields(config):
        kind, setting = get_args(hints[f.name])
        default = f.default.value if isinstance(f.default, LeftOut) else f.default
        schema[f.name] = Declared(f.name, kind, setting, default)
    return schema


def names_in(schema: Schema, section: str) -> list[str]:
    """Lists the settings of a section."""
    return [name for name, declared in schema.items() if declared.setting.section == section]


def _names_a_path(text: str) -> bool:
    # A lone surrogate (from a file name that is not UTF-8) can be written neither to TOML nor to the journal.
    return bool(text.strip()) and "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)
