"""Writes and reads the marker `healing.json` of a complete checkpoint, and lists the checkpoints of a directory."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from ..system.files import BESIDE_DIR, EMERGENCY_DIR, MARKER_FILE, PINNED_DIR, STATE_FILE, replace_file


logger = logging.getLogger(__name__)

TrustLevel = Literal["unverified", "verified", "suspect"]

MARKER_SCHEMA = 1
# By name of the file, for those whose checksum is known.
CHECKSUMS = "crc32"

_NUMBERED = re.compile(r"checkpoint-(\d+)")
# Bytes that are read through in a few hundredths of a second.
_AT_ONCE = 1 << 26
# Bytes that are read at once.
_PIECE = 1 << 22
# The training thread and the one that computes checksums change markers. Of the process: a path is all they share.
_CHANGING = threading.RLock()


# ---- files ----


def number_of(checkpoint: Path) -> int | None:
    """Returns the step a directory is named after, `None` if its name is not that of a checkpoint."""
    match = _NUMBERED.fullmatch(checkpoint.name)
    return None if match is None else int(match[1])


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """Lists the checkpoints in a folder, each with the step it is named after."""
    if not folder.is_dir():
        return []
    return [(number, entry) for entry in folder.iterdir() if (number := number_of(entry)) is not None]


def files_of(checkpoint: Path) -> list[Path]:
    """Lists the files of a checkpoint except its marker."""
    return sorted(file for file in checkpoint.rglob("*") if file.is_file() and not file.name.startswith(MARKER_FILE))


def crc32_of(file: Path) -> int:
    """Computes the checksum of a file, which is read once; other threads run meanwhile."""
    checksum = 0
    piece = memoryview(bytearray(_PIECE))
    with file.open("rb") as stream:
        while count := stream.readinto(piece):
            checksum = zlib.crc32(piece[:count], checksum)
    return checksum


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """
    Lists all that is called a checkpoint in an output directory, newest first; of the same step the regular one comes
    first, then the emergency one, then one that was to take its place, then the one in `last-known-good/`.
    """
    regular = numbered(Path(output_dir))
    found = [(False, -number, 0, entry) for number, entry in regular]
    written = [(number, written_at(entry)) for number, entry in regular]
    for place, name in enumerate((EMERGENCY_DIR, BESIDE_DIR, PINNED_DIR), start=1):
        for number, entry in numbered(Path(output_dir, name)):
            at = written_at(entry)
            left_behind = any(other < number and later > at for other, later in written)
            found.append((left_behind, -number, place, entry))
    return [entry for *_, entry in sorted(found)]


def written_at(checkpoint: Path) -> float:
    """Reads when a checkpoint was written, in seconds since the epoch; 0 if it cannot be told."""
    marker = load_marker(checkpoint)
    if marker is not None:
        return float(marker["time"])
    try:
        return (checkpoint / STATE_FILE).stat().st_mtime
    except OSError:
        return 0.0


# ---- writing ----


def write_marker(
    checkpoint: Path,
    run: str,
    step: int,
    bookkeeping: dict[str, Any],
    emergency: bool,
    standing: TrustLevel = "unverified",
    finite: bool | None = None,
    later: ChecksumQueue | None = None,
) -> None:
    """
    Marks a checkpoint as complete, after everything else in it was written; the marker appears whole or not at all.
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
    at_once = later is None or sum(sizes.values()) <= _AT_ONCE
    if at_once:
        content[CHECKSUMS] = {name: crc32_of(checkpoint / name) for name in sizes}
    _replace_marker(checkpoint, content)
    if later is not None and not at_once:
        later.put(checkpoint, content)


class ChecksumQueue:
    """Adds the checksums of the large checkpoints of a run to their markers, in threads for which no step waits."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def put(self, checkpoint: Path, marker: Mapping[str, Any]) -> None:
        """Begins with those of a checkpoint, whose marker was just written."""
        # No process waits at its end for a thread that does not have to finish.
        thread = threading.Thread(
            target=_add_checksums, args=(checkpoint, marker), name="self-healing-checksums", daemon=True
        )
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        thread.start()

    def wait(self, seconds: float = 60.0) -> None:
        """Waits until all are computed, but no longer than these seconds."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))


def _add_checksums(checkpoint: Path, marker: Mapping[str, Any]) -> None:
    # By now it may have been moved among the regular ones, or rotated away while links to it are kept.
    folder = checkpoint.parent
    moved = folder.parent if folder.name in (EMERGENCY_DIR, Path(BESIDE_DIR).name) else folder / PINNED_DIR
    places = (checkpoint, moved / checkpoint.name)

    def add(content: dict[str, Any]) -> None:
        # Written once more in the meantime, it is another one.
        if all(content[key] == marker[key] for key in ("run", "time")):
            content[CHECKSUMS] = checksums

    try:
        for place in places:
            with suppress(FileNotFoundError):
                checksums = {name: crc32_of(place / name) for name in marker["files"]}
                for each in places:
                    change_marker(each, add)
                return
    except OSError as error:
        logger.info("%s has no checksums: %s", checkpoint, error)


def change_marker(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the marker of a checkpoint, and no time of its directory; one without a marker is left as it is."""
    with _CHANGING:
        content = load_marker(checkpoint)
        if content is None:
            return
        change(content)
        times = checkpoint.stat()
        _replace_marker(checkpoint, content)
        # The Trainer deletes the directory that was changed longest ago.
        os.utime(checkpoint, ns=(times.st_atime_ns, times.st_mtime_ns))


def _replace_marker(checkpoint: Path, content: dict[str, Any]) -> None:
    with _CHANGING:
        # A checkpoint that has been removed meanwhile does not come back for its marker.
        replace_file(checkpoint / MARKER_FILE, json.dumps(content), make_directory=False)


def set_standing(checkpoint: Path, standing: TrustLevel, incident: str | None = None) -> None:
    """Changes the standing of a checkpoint; a suspect one names the incident that made it so."""

    def change(content: dict[str, Any]) -> None:
        content["standing"] = standing
        content.pop("incident", None)
        if incident is not None:
            content["incident"] = incident

    change_marker(checkpoint, change)


# ---- reading ----


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
        content = json.loads((checkpoint / MARKER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and content.get("schema") == MARKER_SCHEMA else None


def speaks_for(marker: Mapping[str, Any]) -> bool:
    """Whether a marker speaks for its checkpoint: not suspect, and not known to hold NaN or Inf."""
    return marker["standing"] != "suspect" and marker["finite"] is not False


def standing_of(checkpoint: str | Path) -> str:
    """Reads the standing of a checkpoint from its marker; `"unmarked"` if it has none."""
    return str((load_marker(Path(checkpoint)) or {}).get("standing", "unmarked"))


def step_of(checkpoint: str, default: int) -> int:
    """Reads the step that a checkpoint was written at from its marker."""
    marker = read_marker(Path(checkpoint))
    return default if marker is None else int(marker["step"])


# ---- the callback's entry in the state of the Trainer ----


def healing_state_of(stateful_callbacks: Mapping[str, Any]) -> dict[str, Any] | None:
    """Finds the state that the callback keeps in a trainer's, whatever its class is; `None` if there is none."""
    for entry in stateful_callbacks.values():
        attributes = entry.get("attributes") if isinstance(entry, Mapping) else None
        state = attributes.get("healing_state") if isinstance(attributes, Mapping) else None
        if isinstance(state, dict):
            return state
    return None


def missing_steps_in(checkpoint: str) -> int:
    """Counts the steps up to a checkpoint that are not in its weights; 0 where that is not known."""
    try:
        state = json.loads(Path(checkpoint, STATE_FILE).read_text(encoding="utf-8"))
        kept = healing_state_of(state["stateful_callbacks"]) or {}
        return int(kept["missing_steps"]["count"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return 0
