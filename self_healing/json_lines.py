"""Files of JSON lines that several processes append to: a line torn by a killed process costs no other line."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from typing import Any

from .strict_json import jsonable


def append_line(path: str | os.PathLike[str], line: Mapping[str, Any], sync: bool = False) -> None:
    """
    Appends a line in one write: several processes may do so at once. After a line that was torn it begins a new one.

    Args:
        path (`str` or `PathLike`):
            The file; it is made with its directory if there is none.
        line (`Mapping`):
            What to write.
        sync (`bool`, *optional*, defaults to `False`):
            Whether it is on the disk before this returns, for those who may be killed next.
    """
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
    """
    Reads lines as far as they are whole.

    Returns:
        The objects in them, and how many other lines there are.
    """
    found, torn = [], 0
    for line in text.split("\n"):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            torn += 1
            continue
        if isinstance(entry, dict):
            found.append(entry)
        else:
            torn += 1
    return found, torn
