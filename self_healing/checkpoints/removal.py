"""Removes torn checkpoints, and finds those whose removal makes room on a full disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ..checkpoint_files import MARKER_FILE, STATE_FILE, files_of, numbered, remove_checkpoint
from .marker import read_marker


def remove_torn(checkpoint: Path) -> str | None:
    """
    Removes a checkpoint; what is left of it, however far that gets, is not taken for a whole one.

    Returns:
        Why not all of it is gone; `None` if it is.
    """
    failed: OSError | None = None
    for name in (MARKER_FILE, STATE_FILE):
        try:
            (checkpoint / name).unlink(missing_ok=True)
        except OSError as error:
            failed = error
    try:
        if checkpoint.exists():
            remove_checkpoint(checkpoint)
    except OSError as error:
        failed = error
        shutil.rmtree(checkpoint, ignore_errors=True)
    if not checkpoint.exists() and not checkpoint.with_name(f".{checkpoint.name}.gone").exists():
        return None
    return f"{type(failed).__name__}: {failed}"


def expendable_checkpoint(run: str, output_dir: Path, best: str | None) -> Path | None:
    """
    Finds the oldest checkpoint of a run whose removal makes room, and loses nothing that is known to be good.

    Args:
        run (`str`), output_dir (`Path`):
            The run, and where it writes.
        best (`str`, *optional*):
            The best checkpoint so far, which is kept.

    Returns:
        Never a verified one, the newest, or one that is hard-linked to `last-known-good/` and would free nothing.
    """
    marked = [(number, entry, read_marker(entry)) for number, entry in sorted(numbered(output_dir))]
    own = [(entry, marker) for _, entry, marker in marked if marker is not None and marker.get("run") == run]
    for entry, marker in own[:-1]:
        is_best = best is not None and os.path.abspath(best) == os.path.abspath(entry)
        linked = any(file.stat().st_nlink > 1 for file in files_of(entry))
        if marker.get("standing") != "verified" and not is_best and not linked:
            return entry
    return None
