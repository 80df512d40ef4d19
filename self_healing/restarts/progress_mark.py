"""`ProgressMark`: how far a process has come, on disk after each step, for whoever finds it killed."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path


PROGRESS_FILE = "healing_progress.bin"
# Attempt (0 without a record) and optimizer steps finished, little endian.
_MARK = struct.Struct("<qq")
# Of the training time, that marking may take.
_SHARE = 0.01


class ProgressMark:
    """Keeps the mark of one process."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file: int | None = os.open(directory / PROGRESS_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        self._next = 0.0
        self._last_took = 0.0

    def note_step(self, attempt: int, step: int) -> None:
        """Marks the attempt, and the optimizer steps finished."""
        now = time.perf_counter()
        if self._file is None or now < self._next:
            return
        try:
            os.pwrite(self._file, _MARK.pack(attempt, step), 0)
        except OSError:
            self.close()
        took = time.perf_counter() - now
        # A disk is slow twice in a row. One slow write is a machine that had something else to do.
        self._next, self._last_took = now + min(took, self._last_took) / _SHARE, took

    def close(self) -> None:
        """Lets go of the file, which stays."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_mark(directory: Path) -> tuple[int, int] | None:
    """Reads the attempt and the step that were marked last."""
    try:
        attempt, step = _MARK.unpack((directory / PROGRESS_FILE).read_bytes())
    except (OSError, struct.error):
        return None
    return int(attempt), int(step)
