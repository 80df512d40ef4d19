"""Removes torn checkpoints, and finds those whose removal makes room on a full disk."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from ..checkpoint_files import MARKER_FILE, STATE_FILE, files_of, numbered, remove_checkpoint, size_of
from ..classify import could_not_be_written, text_of
from .marker import read_marker


_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
# How safetensors and torch put them.
_FULL_TEXTS = (f"os error {errno.ENOSPC})", f"os error {errno.EDQUOT})", "No space left", "Disk quota exceeded")


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
    with suppress(OSError):
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


class DiskFull(OSError):
    """A checkpoint did not fit; its text is how much room there was."""


def is_full(error: Exception, checkpoint: Path) -> bool:
    """Whether a checkpoint could not be written because the disk is full."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL_ERRNOS
    if any(text in text_of(error) for text in _FULL_TEXTS):
        return True
    if "os error" in text_of(error):
        return False
    # torch's writer does not say why: the disk is full if another checkpoint would not fit.
    with suppress(OSError):
        others = [size_of(other) for other in checkpoint.parent.glob("checkpoint-*")]
        return bool(others) and shutil.disk_usage(checkpoint.parent).free < max(others)
    return False


def named_as_full(error: Exception, checkpoint: Path) -> Exception:
    """Names the disk that was full when a checkpoint, still there in part, could not be written: torch does not."""
    with suppress(OSError):
        usage, folder = shutil.disk_usage(checkpoint.parent), checkpoint.parent
        largest = max(map(size_of, folder.glob("checkpoint-*")), default=0)
        # Where the system says so and there is room enough, it is something else that is used up, or another's disk.
        scarce = usage.free <= max(largest, usage.total / 100)
        if scarce and could_not_be_written(error) and is_full(error, checkpoint):
            unit, name = (1e9, "GB") if usage.total >= 1e9 else (1e6, "MB")
            full = DiskFull(f"{usage.free / unit:.3g} of {usage.total / unit:.3g} {name} free at {folder}")
            full.__cause__ = error
            return full
    return error
