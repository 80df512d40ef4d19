"""
Writes the tables of settings into configuration.md, from `HealingConfig` itself.

```bash
python docs/settings_table.py
```
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from self_healing import HealingConfig
from self_healing.config.schema import SECTIONS, Setting


PAGE = Path(__file__).parent / "configuration.md"
# What people set.
FIRST = ("healing_preset", "healing_dir", "nan_patience", "max_recovery_attempts", "on_bad_sample")
FIELDS = {field.name: field for field in dataclasses.fields(HealingConfig)}
HINTS = {name: get_args(hint) for name, hint in get_type_hints(HealingConfig, include_extras=True).items()}
PRESETS = (HealingConfig(), HealingConfig.aggressive(), HealingConfig.conservative())


def first_table() -> str:
    """The settings that people set, with the section in which each stands in TOML."""
    rows = [(*_row(name)[:3], f"`[{HINTS[name][1].section}]`", _row(name)[3]) for name in FIRST]
    return _table(("setting", "default", "allowed", "in TOML", "what it does"), rows)


def presets_table() -> str:
    """What each preset changes; what it leaves alone is left out."""
    rows = []
    for name in FIELDS:
        default, *others = (_value(getattr(preset, name)) for preset in PRESETS)
        if name != "healing_preset" and {default} != set(others):
            rows.append((f"`{name}`", default, *("" if value == default else value for value in others)))
    return _table(("setting", "default", "aggressive", "conservative"), rows)


def settings_table() -> str:
    """All other settings, section by section."""
    rows: list[tuple[str, ...]] = []
    for section in SECTIONS:
        names = [name for name in FIELDS if HINTS[name][1].section == section and name not in FIRST]
        rows += [(f"**[{section}]**", "", "", ""), *map(_row, names)] if names else []
    return _table(("setting", "default", "allowed", "what it does"), rows)


def _table(head: Any, rows: Any) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _row(name: str) -> tuple[str, ...]:
    kind, setting = HINTS[name]
    meaning = FIELDS[name].metadata["help"].replace("|", "\\|")
    return f"`{name}`", _value(getattr(PRESETS[0], name)), _allowed(kind, setting), meaning


def _allowed(kind: Any, setting: Setting) -> str:
    if get_origin(kind) is Literal:
        # Each is named in what the setting does.
        return ""
    if kind in (int, float):
        return str(setting).replace("at least", "≥").replace("at most", "≤").replace("above", ">").replace(" and", ",")
    # What a switch or a path may be, its default and its name say.
    return ""


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "not set" if value is None else f"{value}"


TABLES = {"first": first_table, "presets": presets_table, "settings": settings_table}


def page_with_table(page: str) -> str:
    """The page with the tables between their marks replaced."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n\n{table()}\n\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
