"""
Files that a killed process leaves whole: replaced in one move, or appended to line by line, where a torn line costs
no other. The JSON in them is strict: no NaN, no infinity, nothing that only Python knows.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


# Of values within values: a user's may hold themselves.
_DEEPEST = 20
_RANK = re.compile(r"\.rank(\d+)\b")


def jsonable(value: Any, depth: int = 0) -> Any:
    """Converts a value to strict JSON: a number that is not finite becomes its name, anything unknown its repr."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    try:
        if isinstance(value, Mapping) and depth < _DEEPEST:
            return {str(key): jsonable(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)) and depth < _DEEPEST:
            return [jsonable(inner, depth + 1) for inner in value]
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def replace_file(path: Path, text: str, *, sync: bool = False, make_directory: bool = True) -> None:
    """
    Writes a file, whole or not at all: beside it first, so that neither a kill nor a hard link to the old one sees a
    part.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    if make_directory:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def of_rank(path: Path, rank: int) -> Path:
    """Names the file that a rank has for itself, beside that of the first one: `name.rank1.json`."""
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def rank_in(path: Path) -> int:
    """Reads which rank a file is of from its name, as [`of_rank`] has put it there; 0 if none is named."""
    found = _RANK.search(path.name)
    return 0 if found is None else int(found[1])


def append_line(path: str | os.PathLike[str], line: Mapping[str, Any], sync: bool = False) -> None:
    """Appends a line in one write: several processes may do so at once."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    text = (json.dumps(jsonable(line)) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if _ends_torn(descriptor):
            text = b"\n" + text
        if os.write(descriptor, text) < len(text):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {os.fspath(path)}")
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ends_torn(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    if size == 0:
        return False
    os.lseek(descriptor, size - 1, os.SEEK_SET)
    return os.read(descriptor, 1) != b"\n"


def parse_lines(text: str) -> tuple[list[dict[str, Any]], int]:
    """Reads lines as far as they are whole."""
    found, torn = [], 0
    for line in text.split("\n"):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            torn += 1
            continue
        if isinstance(entry, dict):
            found.append(entry)
        else:
            torn += 1
    return found, torn
