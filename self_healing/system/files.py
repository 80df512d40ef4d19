"""Files that a killed process leaves whole, and the names of all files that this library writes."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar


logger = logging.getLogger("self_healing")


# ---- files ----


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


def replace_file(path: Path, content: str | bytes, *, sync: bool = False, make_directory: bool = True) -> None:
    """
    Writes a file, whole or not at all: beside it first, so that neither a kill nor a hard link to the old one sees a
    part.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    if make_directory:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
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
        # Not at the end of a line that a killed process has left torn.
        os.lseek(descriptor, max(os.fstat(descriptor).st_size - 1, 0), os.SEEK_SET)
        if os.read(descriptor, 1) not in (b"", b"\n"):
            text = b"\n" + text
        if os.write(descriptor, text) < len(text):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {os.fspath(path)}")
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


# ---- own files ----


# In each checkpoint: of the Trainer, which writes it last; the marker of a complete one; what is left of a generation
# cycle.
STATE_FILE = "trainer_state.json"
MARKER_FILE = "healing.json"
GENERATED_FILE = "generated.pt"

# In the output directory, besides the Trainer's own `checkpoint-<step>`.
PINNED_DIR = "last-known-good"
EMERGENCY_DIR = "emergency"
# Checkpoints that are to take the place of one in `emergency/`, or among the Trainer's own.
BESIDE_DIR = os.path.join(EMERGENCY_DIR, "beside")

# In the directory of the run's journal: as long as it is there, training goes on without healing.
OFF_FILE = "healing_off.json"
EVENTS_FILE = "healing_events.jsonl"
POSTMORTEM_FILE = "postmortem.json"
REPORT_FILE = "report.json"
BRIEFING_FILE = "agent.md"

# In `output_dir`, or in `healing_dir`, as patterns of `fnmatch`.
RUN_FILES = (
    "healing_*",
    ".healing_*",
    "quarantine.jsonl",
    "postmortem*.json",
    "postmortem*.tmp",
    "incidents/*",
    "hangs/*",
    f"{PINNED_DIR}/*",
    f"{EMERGENCY_DIR}/*",
)
# The same, with what ours begin with: others may well use these names.
REPORT_FILES = {REPORT_FILE: '{\n "schema": "self_healing.report/', BRIEFING_FILE: "<!-- self_healing: "}
# In each checkpoint.
CHECKPOINT_FILES = (MARKER_FILE, f"{MARKER_FILE}.tmp", GENERATED_FILE)
GITIGNORE = ".gitignore"

_HEADER = "# Written by self_healing: what it keeps here holds text of samples, and is not for the Hub or for git."
# As the Trainer names them, here and on the Hub.
_CHECKPOINTS = ("checkpoint-*", "last-checkpoint")
# Of the checkpoints that are removed or linked at this moment.
_LEFTOVER = re.compile(r"\.checkpoint-\d+\.(gone|new)")


def own_patterns(output_dir: str | os.PathLike[str], healing_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Returns patterns of `fnmatch` for all files of self_healing in an `output_dir`, relative to it."""
    prefixes = _prefixes(output_dir, healing_dir)
    ours = [prefix + name for prefix in prefixes for name in REPORT_FILES]
    patterns = [prefix + name for prefix in prefixes for name in RUN_FILES]
    patterns += [report for report in ours if not is_foreign(Path(output_dir, report))]
    patterns += [f"{checkpoint}/{name}" for checkpoint in _CHECKPOINTS for name in CHECKPOINT_FILES]
    gitignore = Path(output_dir, GITIGNORE)
    return patterns if is_foreign(gitignore) or not gitignore.exists() else [*patterns, GITIGNORE]


def remove_leftovers(output_dir: str | os.PathLike[str]) -> None:
    """Removes checkpoints that a process was removing or linking when it was killed; other files are written anew."""
    for name in ("", PINNED_DIR, EMERGENCY_DIR, BESIDE_DIR):
        for leftover in Path(output_dir, name).glob(".checkpoint-*"):
            # A directory of the user's own may begin like them.
            if _LEFTOVER.fullmatch(leftover.name):
                shutil.rmtree(leftover, ignore_errors=True)


def hide_from_uploads(
    output_dir: str | os.PathLike[str], healing_dir: str | os.PathLike[str] | None = None, hide: bool = True
) -> None:
    """
    Writes a `.gitignore` that names the files of self_healing: the Hub leaves them out, whatever uploads the folder.
    """
    path = Path(output_dir, GITIGNORE)
    try:
        if is_foreign(path):
            return
        if not hide:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        ignored = sorted({GITIGNORE, *own_patterns(output_dir, healing_dir)})
        path.write_text("\n".join([_HEADER, *(f"/{pattern}" for pattern in ignored), ""]), encoding="utf-8")
    except OSError as error:
        logger.info("%s could not be written: %s.", path, error)


def _prefixes(output_dir: str | os.PathLike[str], healing_dir: str | os.PathLike[str] | None) -> tuple[str, ...]:
    if healing_dir is None:
        return ("",)
    inside = os.path.relpath(os.path.abspath(healing_dir), os.path.abspath(output_dir))
    if inside == os.curdir or inside.startswith(os.pardir):
        return ("",)
    return ("", f"{Path(inside).as_posix()}/")


def is_foreign(path: Path) -> bool:
    """Whether there is a file that has the name of our `.gitignore` or one of our reports, and is none."""
    begins = _HEADER if path.name == GITIGNORE else REPORT_FILES[path.name]
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(len(begins)) != begins
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


# ---- saved state ----


class KeepsState:
    """Saves and loads the attributes that its class names, as JSON: numbers, rows of them, and parts like itself."""

    _state: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Returns everything it remembers, ready for JSON; exact."""
        return {name.lstrip("_"): _saved(getattr(self, name)) for name in self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what [`state_dict`] gave."""
        for name in self._state:
            setattr(self, name, _loaded(getattr(self, name), state[name.lstrip("_")]))


def _saved(value: Any) -> Any:
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, (list, deque)):
        return [list(each) if isinstance(each, tuple) else each for each in value]
    return value


def _loaded(usual: Any, value: Any) -> Any:
    if hasattr(usual, "load_state_dict"):
        usual.load_state_dict(value)
        return usual
    if isinstance(usual, (list, deque)):
        rows = [tuple(each) if isinstance(each, list) else each for each in value]
        return deque(rows, maxlen=usual.maxlen) if isinstance(usual, deque) else rows
    return value


def take_over_whole(part: Any, saved: Any) -> bool:
    """Loads the saved state of a part, or leaves the part as it is; returns whether it could be loaded."""
    before = part.state_dict()
    try:
        part.load_state_dict(saved)
    except Exception:
        part.load_state_dict(before)
        return False
    return True
