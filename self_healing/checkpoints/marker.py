"""The marker `healing.json` of a checkpoint: what it says about the files there, and whether it can be believed."""

from __future__ import annotations

import json
import os
import re
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoint_files import MARKER_FILE
from ..files import replace_file


MARKER_SCHEMA = 1
# By name of the file, for those whose checksum is known.
CHECKSUMS = "crc32"

# Of the marker itself, at its end.
_SEAL = "seal"
_SEALED = re.compile(rf'(.*), "{_SEAL}": (\d+)\}}', re.DOTALL)
_STANDINGS = ("unverified", "verified", "suspect")
_PIECE = 1 << 22
# The training thread and the one that computes checksums change markers.
_CHANGING = threading.RLock()


def load_marker(checkpoint: Path) -> dict[str, Any] | None:
    """The marker as it was written, whether or not it holds for the files there; `None` if there is none to read."""
    try:
        return _read(checkpoint)
    except (OSError, ValueError):
        return None


def damage_of_marker(checkpoint: Path) -> str | None:
    """Why what its marker says cannot be believed; `None` if it can be, or if there is no marker."""
    try:
        _read(checkpoint)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__
    return None


def replace_marker(checkpoint: Path, content: dict[str, Any]) -> None:
    """Writes the marker of a checkpoint, whole or not at all."""
    text = json.dumps({key: value for key, value in content.items() if key != _SEAL})[:-1]
    sealed = f'{text}, "{_SEAL}": {zlib.crc32(text.encode())}}}'
    with _CHANGING:
        # A checkpoint that has been removed meanwhile does not come back for its marker.
        replace_file(checkpoint / MARKER_FILE, sealed, make_directory=False)


def change_marker(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> bool:
    """
    Changes the marker of a checkpoint, and no time of its directory; one without a marker is left as it is.

    Args:
        checkpoint (`Path`):
            The checkpoint directory.
        change (`Callable[[dict], None]`):
            Changes what the marker says.

    Returns:
        Whether there was a marker.
    """
    with _CHANGING:
        content = load_marker(checkpoint)
        if content is None:
            return False
        change(content)
        times = checkpoint.stat()
        replace_marker(checkpoint, content)
        # The Trainer deletes the directory that was changed longest ago.
        os.utime(checkpoint, ns=(times.st_atime_ns, times.st_mtime_ns))
    return True


def crc32_of(file: Path) -> int:
    """The checksum of a file, which is read once; other threads go on meanwhile."""
    checksum = 0
    piece = memoryview(bytearray(_PIECE))
    with file.open("rb") as stream:
        while count := stream.readinto(piece):
            checksum = zlib.crc32(piece[:count], checksum)
    return checksum


def _read(checkpoint: Path) -> dict[str, Any]:
    text = (checkpoint / MARKER_FILE).read_text(encoding="utf-8")
    try:
        content = json.loads(text)
    except ValueError:
        raise ValueError("it is not JSON") from None
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    if content.get("schema") != MARKER_SCHEMA:
        raise ValueError(f"its schema is {content.get('schema')!r}, and {MARKER_SCHEMA} is known")
    # Markers of earlier versions have neither checksums nor a seal.
    if (_SEAL in content or CHECKSUMS in content) and not _holds(text):
        raise ValueError("it is not what was written (its own checksum differs)")
    _check_content(content)
    return content


def _check_content(content: dict[str, Any]) -> None:
    for name, kind in (("step", int), ("files", dict), ("bookkeeping", dict)):
        if not isinstance(content.get(name), kind) or isinstance(content.get(name), bool):
            raise ValueError(f"`{name}` is missing in it" if name not in content else f"`{name}` in it is unusable")
    if content.get("standing", _STANDINGS[0]) not in _STANDINGS:
        raise ValueError(f"`standing` in it is {content['standing']!r}")
    for name in ("files", CHECKSUMS):
        numbers = content.get(name, {})
        if not isinstance(numbers, dict) or not all(type(number) is int for number in numbers.values()):
            raise ValueError(f"`{name}` in it is unusable")


def _holds(text: str) -> bool:
    """Whether a marker ends with the checksum of what stands before it."""
    sealed = _SEALED.fullmatch(text)
    return sealed is not None and zlib.crc32(sealed[1].encode()) == int(sealed[2])
