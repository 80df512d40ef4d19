"""
Writes the table of settings into configuration.md, from `HealingConfig` itself.

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
BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"


def settings_table() -> str:
    """The tables of all settings, a section each, as Markdown."""
    hints = get_type_hints(HealingConfig, include_extras=True)
    presets = [HealingConfig(), HealingConfig.aggressive(), HealingConfig.conservative()]
    parts = []
    for section, title in SECTIONS.items():
        lines = [
            f"### `[{section}]`: {title}",
            "",
            "| setting | allowed | default | aggressive | conservative | what it does |",
            "|---|---|---|---|---|---|",
        ]
        for field in dataclasses.fields(HealingConfig):
            kind, setting = get_args(hints[field.name])
            if setting.section != section:
                continue
            default, *others = [getattr(preset, field.name) for preset in presets]
            # A preset that leaves a setting alone shows nothing, so that what it changes stands out.
            cells = [_value(default), *("" if value == default else _value(value) for value in others)]
            meaning = field.metadata["help"].replace("|", "\\|")
            lines.append(f"| `{field.name}` | {_allowed(kind, setting)} | {' | '.join(cells)} | {meaning} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _allowed(kind: Any, setting: Setting) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return f"{'integer' if kind is int else 'number'}, {setting}"
    return "a path"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "not set" if value is None else f"{value}"


def page_with_table(page: str) -> str:
    """The page with the table between its two marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{settings_table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
