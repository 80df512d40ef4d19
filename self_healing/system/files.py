"""The files that self_healing writes beside those of the Trainer: their names, and a `.gitignore` that hides them."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


logger = logging.getLogger("self_healing")

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
    "memory_snapshot*.pickle",
    "incidents/*",
    "hangs/*",
    f"{PINNED_DIR}/*",
    f"{EMERGENCY_DIR}/*",
)
# The same, with what ours begin with: others may well use these names.
REPORT_FILES = {REPORT_FILE: '{\n "schema": "self_healing.report/', BRIEFING_FILE: "<!-- self_healing: "}
# In each checkpoint.
CHECKPOINT_FILES = (MARKER_FILE, f"{MARKER_FILE}.tmp", GENERATED_FILE)
# Left by a process that is killed while it writes or removes one of them; and in each checkpoint.
LEFTOVERS = ("healing_*.tmp", ".healing_*.tmp", "postmortem*.tmp", "incidents/*.pt.tmp", ".checkpoint-*.gone")
CHECKPOINT_LEFTOVERS = (f"{MARKER_FILE}.tmp",)
GITIGNORE = ".gitignore"

_HEADER = "# Written by self_healing: what it keeps here holds text of samples, and is not for the Hub or for git."
# As the Trainer names them, here and on the Hub.
_OWN_FOLDERS = (PINNED_DIR, EMERGENCY_DIR, BESIDE_DIR)
_CHECKPOINTS = ("checkpoint-*", "last-checkpoint")


def own_patterns(output_dir: str | os.PathLike[str], healing_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Returns patterns of `fnmatch` for all files of self_healing in an `output_dir`, relative to it."""
    prefixes = _prefixes(output_dir, healing_dir)
    patterns = [prefix + name for prefix in prefixes for name in (*RUN_FILES, *_own_reports(output_dir, prefix))]
    patterns += [f"{checkpoint}/{name}" for checkpoint in _CHECKPOINTS for name in CHECKPOINT_FILES]
    if _is_own_gitignore(Path(output_dir, GITIGNORE)):
        patterns.append(GITIGNORE)
    return patterns


def remove_leftovers(
    output_dir: str | os.PathLike[str], healing_dir: str | os.PathLike[str] | None = None
) -> list[Path]:
    """Removes leftovers of processes that were killed while they wrote or removed a file of self_healing."""
    places = [Path(output_dir), *(Path(output_dir, name) for name in _OWN_FOLDERS)]
    found = [entry for place in places for name in LEFTOVERS for entry in place.glob(name)]
    if healing_dir is not None:
        found += [entry for name in LEFTOVERS for entry in Path(healing_dir).glob(name)]
    found += [
        entry for place in places for name in CHECKPOINT_LEFTOVERS for entry in place.glob(f"{_CHECKPOINTS[0]}/{name}")
    ]
    for entry in found:
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with suppress(OSError):
                entry.unlink()
    return [entry for entry in found if not entry.exists()]


def hide_from_uploads(
    output_dir: str | os.PathLike[str], healing_dir: str | os.PathLike[str] | None = None, hide: bool = True
) -> None:
    """
    Writes a `.gitignore` that names the files of self_healing: the Hub leaves them out, whatever uploads the folder.
    """
    path = Path(output_dir, GITIGNORE)
    try:
        if path.exists() and not _is_own_gitignore(path):
            return
        if not hide:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([_HEADER, *_gitignore(output_dir, healing_dir)]) + "\n", encoding="utf-8")
    except OSError as error:
        logger.info("%s could not be written: %s.", path, error)


def _gitignore(output_dir: str | os.PathLike[str], healing_dir: str | os.PathLike[str] | None) -> Iterator[str]:
    yield f"/{GITIGNORE}"
    for prefix in _prefixes(output_dir, healing_dir):
        for name in (*RUN_FILES, *_own_reports(output_dir, prefix)):
            yield f"/{prefix}{name.removesuffix('*') if name.endswith('/*') else name}"
    for checkpoint in _CHECKPOINTS:
        for name in CHECKPOINT_FILES:
            yield f"/{checkpoint}/{name}"


def _prefixes(output_dir: str | os.PathLike[str], healing_dir: str | os.PathLike[str] | None) -> tuple[str, ...]:
    if healing_dir is None:
        return ("",)
    inside = os.path.relpath(os.path.abspath(healing_dir), os.path.abspath(output_dir))
    if inside == os.curdir or inside.startswith(os.pardir):
        return ("",)
    return ("", f"{Path(inside).as_posix()}/")


def _own_reports(output_dir: str | os.PathLike[str], prefix: str) -> list[str]:
    return [name for name in REPORT_FILES if not is_foreign_report(Path(output_dir, prefix, name))]


def is_foreign_report(path: Path) -> bool:
    """Whether there is a file that has the name of one of our reports, and is none."""
    begins = REPORT_FILES[path.name]
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(len(begins)) != begins
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def _is_own_gitignore(path: Path) -> bool:
    try:
        return path.read_text(encoding="utf-8").startswith(_HEADER)
    except (OSError, ValueError):
        return False
