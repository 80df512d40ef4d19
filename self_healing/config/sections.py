"""Settings in sections, as a TOML file has them: taken out of a mapping, and written as text."""

import reprlib
from collections.abc import Mapping
from typing import Any

from ..toml import toml_value
from .checks import unknown
from .schema import Schema, names_in
from .setting import SECTIONS, ConfigurationError


def values_in(config: Mapping[str, Any], schema: Schema) -> tuple[dict[str, Any], list[str]]:
    """Takes the values of settings out of a mapping that names them by themselves, by section, or both."""
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"The settings are {reprlib.repr(config)} ({type(config).__name__}), but must be a mapping of names "
            "to values. Please pass a dict; an empty one gives the defaults."
        )
    given: list[tuple[str | None, Any, Any]] = []  # (section, name, value)
    problems: list[str] = []
    for key, value in config.items():
        if key not in SECTIONS:
            given.append((None, key, value))
        elif isinstance(value, Mapping):
            given.extend((key, name, nested) for name, nested in value.items())
        else:
            problems.append(
                f"`{key}` is a section, but is set to {reprlib.repr(value)}. Please put settings below it, such "
                f"as {schema[names_in(schema, key)[0]]}."
            )

    values: dict[str, Any] = {}
    for section, name, value in given:
        if name not in schema:
            problems.append(unknown(schema, section, name, value))
            continue
        own = schema[name].setting.section
        if section not in (None, own):
            problems.append(f"`{name}` is in [{section}], but belongs in [{own}]. Please move it.")
        elif name in values:
            problems.append(f"`{name}` is given twice, at the top and in [{own}]. Please keep one.")
        else:
            values[name] = schema[name].converted(value)
    return values, problems


def as_toml(values: Mapping[str, Any], schema: Schema) -> str:
    """Writes a value for each setting as TOML, by section."""
    sections = []
    for section in SECTIONS:
        lines = [f"[{section}]"]
        for name in names_in(schema, section):
            value = values[name]
            # TOML has no null; the comment shows that the setting exists.
            lines.append(f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}")
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)
