"""Writes and reads the marker `healing.json` of a complete checkpoint: its files and its standing."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from ..checkpoint_files import EMERGENCY_DIR, MARKER_FILE, PINNED_DIR, crc32_of, files_of
from ..files import replace_file


Standing = Literal["unverified", "verified", "suspect"]
# Called with a checkpoint, what its marker says, and where the same files may be by then.
ChecksumsLater = Callable[[Path, dict[str, Any], Sequence[Path]], None]

MARKER_SCHEMA = 1
# By name of the file, for those whose checksum is known.
CHECKSUMS = "crc32"

# Of the marker itself, at its end.
_SEAL = "seal"
_SEALED = re.compile(rf'(.*), "{_SEAL}": (\d+)\}}', re.DOTALL)
_STANDINGS = get_args(Standing)
# Of steps, bytes and checksums.
_PAST_ANY_COUNT = 1 << 63
# Bytes that are read through in a few hundredths of a second.
_AT_ONCE = 1 << 26
# The training thread and the one that computes checksums change markers. Of the process: a path is all they share.
_CHANGING = threading.RLock()


def write_marker(
    checkpoint: Path,
    run: str,
    step: int,
    bookkeeping: dict[str, Any],
    emergency: bool,
    standing: Standing = "unverified",
    finite: bool | None = None,
    later: ChecksumsLater | None = None,
) -> None:
    """
    Marks a checkpoint as complete, after everything else in it was written; the marker appears whole or not at all.

    Args:
        checkpoint (`Path`):
            The checkpoint directory.
        run (`str`):
            The run it belongs to.
        step (`int`):
            Optimizer steps finished.
        bookkeeping (`dict`):
            Running loss, metrics and token counts as of that step.
        emergency (`bool`):
            Whether it was written because of an exception.
        standing (`str`, *optional*, defaults to `"unverified"`):
            `"verified"` once enough healthy steps came after it, `"suspect"` if it was written while the run was bad.
        finite (`bool`, *optional*):
            Whether every weight, buffer and optimizer state was finite when it was written; `None` if that was not
            looked at, and then it never becomes verified.
        later (`Callable`, *optional*):
            Adds the checksums of a large one to its marker later, so that no step waits for them. Given the
            checkpoint, what its marker says, and where the same files may be by then. Defaults to computing all at
            once.
    """
    # Without the random state of one process, which a resume gets over. Of several it shows that each has written.
    needed = (file for file in files_of(checkpoint) if file.name != "rng_state.pth")
    sizes = {str(file.relative_to(checkpoint)): file.stat().st_size for file in needed}
    content: dict[str, Any] = {
        "schema": MARKER_SCHEMA,
        "time": time.time(),
        "run": run,
        "step": step,
        "emergency": emergency,
        "standing": standing,
        "finite": finite,
        "files": sizes,
        "bookkeeping": bookkeeping,
    }
    if later is None or sum(sizes.values()) <= _AT_ONCE:
        content[CHECKSUMS] = {name: crc32_of(checkpoint / name) for name in sizes}
        replace_marker(checkpoint, content)
        return
    replace_marker(checkpoint, content)
    folder = checkpoint.parent
    # Where it is linked or moved to before they are computed.
    beside = folder.parent if folder.name == EMERGENCY_DIR else folder / PINNED_DIR
    later(checkpoint, content, (beside / checkpoint.name,))


def read_marker(checkpoint: Path) -> dict[str, Any] | None:
    """Reads the marker of a checkpoint; `None` if there is none that holds for the files there."""
    content = load_marker(checkpoint)
    if content is None:
        return None
    try:
        whole = all((checkpoint / name).stat().st_size == size for name, size in content["files"].items())
    except OSError:
        return None
    return content if whole else None


def load_marker(checkpoint: Path) -> dict[str, Any] | None:
    """Reads the marker as it was written, whether or not it holds for the files there; `None` if there is none."""
    try:
        return _read(checkpoint)
    except (OSError, ValueError):
        return None


def damage_of_marker(checkpoint: Path) -> str | None:
    """Says why the marker of a checkpoint cannot be believed; `None` if it can be, or if there is none."""
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


def set_standing(checkpoint: Path, standing: Standing, incident: str | None = None) -> None:
    """
    Changes the standing of a checkpoint; one without a marker is left as it is.

    Args:
        checkpoint (`Path`):
            The checkpoint directory.
        standing (`str`):
            `"unverified"`, `"verified"` or `"suspect"`.
        incident (`str`, *optional*):
            The incident that made it suspect.
    """

    def change(content: dict[str, Any]) -> None:
        content["standing"] = standing
        content.pop("incident", None)
        if incident is not None:
            content["incident"] = incident

    change_marker(checkpoint, change)


def speaks_for(marker: Mapping[str, Any]) -> bool:
    """Whether a marker speaks for its checkpoint: not suspect, and not known to hold NaN or Inf."""
    return marker.get("standing") != "suspect" and marker.get("finite") is not False


def standing_of(checkpoint: str | Path) -> str:
    """Reads the standing of a checkpoint from its marker; `"unmarked"` if it has none."""
    return str((load_marker(Path(checkpoint)) or {}).get("standing", "unmarked"))


def step_of(checkpoint: str, default: int) -> int:
    """Reads the step that a checkpoint was written at from its marker."""
    marker = read_marker(Path(checkpoint))
    return default if marker is None else int(marker["step"])


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
    if not 0 <= content["step"] < _PAST_ANY_COUNT:
        raise ValueError("`step` in it is unusable")
    if content.get("standing", _STANDINGS[0]) not in _STANDINGS:
        raise ValueError(f"`standing` in it is {content['standing']!r}")
    for name in ("files", CHECKSUMS):
        numbers = content.get(name, {})
        if not isinstance(numbers, dict) or not all(
            type(number) is int and 0 <= number < _PAST_ANY_COUNT for number in numbers.values()
        ):
            raise ValueError(f"`{name}` in it is unusable")


def _holds(text: str) -> bool:
    """Whether a marker ends with the checksum of what stands before it."""
    sealed = _SEALED.fullmatch(text)
    return sealed is not None and zlib.crc32(sealed[1].encode()) == int(sealed[2])
