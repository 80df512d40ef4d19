"""Settings as their fields declare them: ranges, sections, TOML, and what is wrong with values that are given."""

from __future__ import annotations

import difflib
import json
import os
import reprlib
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints


# ---- schema: the settings of a config by name, each with the values it takes, from the fields that declare them ----


# YAML 1.1 reads these words as booleans, unless they are quoted.
_YAML_WORDS = {True: ("yes", "on"), False: ("no", "off")}


@dataclass(frozen=True, slots=True)
class Declared:
    """A setting as its field declares it."""

    name: str
    kind: Any  # a type or a `Literal`
    setting: Setting
    default: Any
    meaning: str

    def __str__(self) -> str:
        return f"`{self.name}` in [{self.setting.section}]"

    def converted(self, value: Any) -> Any:
        """Converts a value to what is kept."""
        if get_origin(self.kind) is Literal:
            words = _YAML_WORDS[value] if isinstance(value, bool) else ()
            return next((choice for choice in get_args(self.kind) if choice in words), value)
        return os.fspath(value) if isinstance(value, os.PathLike) else value

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
            met = value is None or (isinstance(value, str) and bool(value.strip()))
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
        schema[f.name] = Declared(f.name, kind, setting, default, f.metadata["help"])
    return schema


def names_in(schema: Schema, section: str) -> list[str]:
    """Lists the settings of a section."""
    return [name for name, declared in schema.items() if declared.setting.section == section]


# ---- setting: the annotation of a setting: the section it stands in, and the numbers it takes ----


SECTIONS = (
    *("preset", "nonfinite", "detection", "clipping", "rollback", "memory", "data", "recovery", "hangs", "restarts"),
    "journal",
)


# Settings of the modules that this library grew from which have no place here, and what takes it.
FORMER_SETTINGS: Mapping[str, str] = {
    "loss_spike_window": "The baseline of the loss chooses its window by itself; for a factor on it, set "
    "`loss_spike_factor`.",
    "grad_vanishing_threshold": "A gradient is called vanishing by a fixed bound, for many steps in a row; it is "
    "reported and changes nothing.",
    "zclip_enabled": "Please set `zclip_mode`: 'clip' for true, 'observe' or 'off' for false.",
    "batch_reduce_factor": "A batch that does not fit is divided by its smallest factor, and the accumulation grows "
    "by the same: set `oom_reduce_batch` to false if it must not.",
    "max_batch_reductions": "A batch is divided until it fits or is 1: set `oom_reduce_batch` to false for none.",
    "api_retry_backoff_factor": "Each wait is twice as long as the one before, up to `api_retry_max_delay`.",
    "emergency_checkpoint_dir": "Emergency checkpoints are written below the `output_dir` of the training arguments.",
    "save_on_spike": "Weights of a spike are not saved: `on_spike` and `on_divergence` say what is done.",
    "save_on_nan": "Weights that are not finite are never saved: `on_nonfinite` says what is done.",
    "postmortem_path": "It is `postmortem.json` in `healing_dir`; please set that.",
    "dry_run_steps": "Please pass it to the call: SelfHealingTrainer(trainer).dry_run(num_steps=...).",
}


class ConfigurationError(ValueError):
    """A setting cannot be used; the message names it, its value, what is allowed and what to do."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Annotates a field of [`HealingConfig`] with its section in TOML and the numbers it takes."""

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


# ---- checks: checks settings that were given: their names, their values, and values that do not go together ----


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
    elif values["api_retry_max_delay"] < values["api_retry_base_delay"]:
        problems.append(
            f"`api_retry_max_delay` is {values['api_retry_max_delay']}, but must be at least `api_retry_base_delay`, "
            f"which is {values['api_retry_base_delay']}. Please raise the first or lower the second."
        )
    return problems


def unknown(schema: Schema, section: str | None, name: Any, value: Any) -> str:
    """Says that a name is no setting, and which one may have been meant."""
    if section is None and isinstance(value, Mapping):
        close = difflib.get_close_matches(str(name), SECTIONS, n=1)
        advice = f"Did you mean [{close[0]}]?" if close else f"There are: {', '.join(SECTIONS)}."
        return f"[{name}] is not a section. {advice}"
    named = f"`{name}`{f' in [{section}]' if section is not None else ''}"
    if name in FORMER_SETTINGS:
        return f"{named} is not a setting any more. {FORMER_SETTINGS[name]}"
    close = difflib.get_close_matches(str(name), schema, n=1)
    names = names_in(schema, section) if section is not None else schema
    advice = f"Did you mean {schema[close[0]]}?" if close else f"There are: {', '.join(names)}."
    return f"{named} is not a setting. {advice}"


# ---- sections: settings in sections, as a TOML file has them: taken out of a mapping, and written as text ----


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


# ---- command line: settings that presets change, as parsers of command lines have to see them ----


@dataclass(frozen=True, slots=True)
class LeftOut:
    """
    The default of a setting that presets change, as parsers of command lines hand it over where nothing was given.
    """

    value: Any

    def __str__(self) -> str:
        return str(self.value)


# ---- toml: tOML files: read with errors that name the line, and values written as TOML has them ----


def read_toml(path: str | os.PathLike[str], error: type[ValueError], advice: str = "") -> dict[str, Any]:
    """Reads a TOML file."""
    content = Path(path).read_bytes()
    try:
        # utf-8-sig, because some editors put an invisible mark at the start that TOML refuses. With the line break,
        # a last line that was cut short is an error at that line and not "at end of document".
        return tomllib.loads(content.decode("utf-8-sig") + "\n")
    except UnicodeDecodeError as cause:
        line = content.count(b"\n", 0, cause.start) + 1
        raise error(f"{path} is not UTF-8 text at line {line}. Please save it as UTF-8.") from cause
    except ValueError as cause:  # TOMLDecodeError, or an integer with more digits than Python reads
        raise error(f"{path} is not valid TOML: {cause}. Please correct it there{advice}.") from cause


def toml_value(value: bool | int | float | str | tuple[Any, ...]) -> str:
    """Writes a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A TOML basic string is a JSON string, except that it may not hold the delete character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return repr(value)
