"""TOML files: read with errors that name the line, and values written as TOML has them."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any


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
