"""Findings about a checkpoint: the reason against it, or remarks on one that can be resumed from."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Unusable(Exception):
    """Carries the reason why a checkpoint cannot be resumed from."""


@dataclass(slots=True)
class Findings:
    """
    Remarks on a checkpoint that can be used.

    Args:
        notes (`list[str]`):
            What was not looked at.
        doubts (`list[str]`):
            What the user who resumes from it is warned of.
        missing (`list[str]`):
            Files of ranks that had not written their part.
    """

    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turns an exception of reading a file into the reason against its checkpoint."""
    try:
        yield
    except Unusable:
        raise
    except Exception as error:
        raise Unusable(f"{file.name} cannot be read ({in_short(error)})") from None


def in_short(error: Exception) -> str:
    """Describes an error in one line."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}"


def json_object_in(file: Path) -> dict[str, Any]:
    """
    Reads a JSON object.

    Raises:
        ValueError: The file holds something else.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def few(names: Collection[str]) -> str:
    """Names the first, and says how many more there are."""
    first, *rest = sorted(names)
    return f"{first} and {len(rest)} more" if rest else first
