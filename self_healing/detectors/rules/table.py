"""The table of rules: read from TOML with a user's own merged over it, and written as TOML."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from ...config.schema import read_toml, toml_value
from .checks import CONDITION_DEFAULTS, CONDITION_KEYS, RULE_KEYS, problems_of
from .rule import Condition, MetricRule


class RuleError(ValueError):
    """A table of rules cannot be used; the message names file, rule, key, value and what is allowed."""


def load_rules(path: str | os.PathLike[str] | None = None) -> tuple[MetricRule, ...]:
    """Reads the table of the package, with a user's table merged over it."""
    table = _default_table()
    if path is not None:
        own = read_toml(Path(path), RuleError)
        problems = problems_of(own, table)
        if problems:
            several = [f"{path}: {len(problems)} things in the table of rules cannot be used:", *problems]
            raise RuleError("\n- ".join(several) if len(problems) > 1 else f"{path}: {problems[0]}")
        for name, keys in own.items():
            table[name] = {**table.get(name, {}), **keys}
    return tuple(_rule(name, keys) for name, keys in table.items())


def rules_to_toml(rules: Iterable[MetricRule]) -> str:
    """Writes the rules as TOML that [`load_rules`] reads back to equal ones."""
    sections = []
    for rule in rules:
        lines = [f"[{rule.name if re.fullmatch(r'[A-Za-z0-9_-]+', rule.name) else toml_value(rule.name)}]"]
        for name in RULE_KEYS:
            value = getattr(rule, name)
            if name == "red_flag":
                parts = "".join(f"\n    {_condition_to_toml(part)}," for part in value)
                lines.append(f"red_flag = [{parts}\n]")
            else:
                # Also what is the default of the class: the package's table may say something else.
                lines.append(f"{name} = {toml_value(value)}")
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


def _condition_to_toml(part: Condition) -> str:
    keys = {name: getattr(part, "relation" if name == "is" else name) for name in CONDITION_KEYS}
    shown = {name: value for name, value in keys.items() if name == "value" or value != CONDITION_DEFAULTS.get(name)}
    return "{ " + ", ".join(f"{name} = {toml_value(value)}" for name, value in shown.items()) + " }"


def _default_table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files(__package__).joinpath("metric_rules.toml").read_text(encoding="utf-8"))


def _rule(name: str, keys: Mapping[str, Any]) -> MetricRule:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}
    values["red_flag"] = tuple(_condition(part) for part in keys["red_flag"])
    return MetricRule(name=name, **values)


def _condition(keys: Mapping[str, Any]) -> Condition:
    values: dict[str, Any] = {("relation" if key == "is" else key): value for key, value in keys.items()}
    for key in ("value", "tolerance", "share"):
        if key in values:
            values[key] = float(values[key])
    return Condition(**values)
