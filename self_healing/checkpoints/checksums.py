"""Computes checksums of the files of a checkpoint where no step waits for them, and writes them into its marker."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint_files import crc32_of
from .marker import CHECKSUMS, change_marker


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MarkedCheckpoint:
    """
    A marked checkpoint whose checksums are still to be computed.

    Args:
        path (`Path`):
            The checkpoint directory.
        links (`Sequence[Path]`):
            Where the same checkpoint may be by then, too or instead.
        run (`str`), time (`float`):
            What its marker says, so that no other checkpoint gets these checksums.
        files (`dict[str, tuple[int, int, int]]`):
            What each file was when the marker was written: inode, size, time of change.
    """

    path: Path
    links: Sequence[Path]
    run: str
    time: float
    files: dict[str, tuple[int, int, int]]

    @classmethod
    def of(cls, checkpoint: Path, marker: dict[str, Any], links: Sequence[Path] = ()) -> MarkedCheckpoint:
        """Takes what the files of a checkpoint are, right after its marker was written."""
        files = identities(checkpoint, list(marker["files"]))
        return cls(checkpoint, links, marker["run"], marker["time"], files)

    def compute(self) -> None:
        """Computes them, and adds them to its marker, unless a file has changed or it is not there any more."""
        places = (self.path, *self.links)
        for place in places:
            # It may have been moved, or rotated away, since.
            with contextlib.suppress(FileNotFoundError):
                checksums = {name: crc32_of(place / name) for name in self.files}
                if identities(place, list(self.files)) == self.files:
                    break
                # Written once more in the meantime: the checksums are of neither.
        else:
            return
        for place in places:
            change_marker(place, lambda content: self._add(content, checksums))

    def _add(self, content: dict[str, Any], checksums: dict[str, int]) -> None:
        if (content.get("run"), content.get("time")) == (self.run, self.time):
            content[CHECKSUMS] = checksums


class ChecksumQueue:
    """
    Computes the checksums of the large checkpoints of a run in a thread of its own, the newest first.

    A process that ends before they are computed leaves a marker without them, which is as good as any from before
    there were checksums.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._next: MarkedCheckpoint | None = None
        self._busy = False

    def put(self, checkpoint: Path, marker: dict[str, Any], links: Sequence[Path] = ()) -> None:
        """
        Computes the checksums of a checkpoint and adds them to its marker; one that still waits for its turn gives
        way.

        Args:
            checkpoint (`Path`):
                The checkpoint directory, whose marker is written.
            marker (`dict`):
                What it says.
            links (`Sequence[Path]`):
                Where the same checkpoint may be by then, too or instead.
        """
        waiting = MarkedCheckpoint.of(checkpoint, marker, links)
        with self._turn:
            self._next = waiting
            if not self._busy:
                self._busy = True
                # No process waits at its end for a thread that does not have to finish.
                threading.Thread(target=self._work, name="self-healing-checksums", daemon=True).start()

    def wait(self, seconds: float = 60.0) -> None:
        """Waits until all that were asked for are computed, but no longer than these seconds."""
        with self._turn:
            self._turn.wait_for(lambda: not self._busy, seconds)

    def _work(self) -> None:
        while (checkpoint := self._take()) is not None:
            try:
                checkpoint.compute()
            except OSError as error:
                logger.info("%s has no checksums: %s", checkpoint.path, error)
            except Exception:
                logger.warning("%s has no checksums.", checkpoint.path, exc_info=True)

    def _take(self) -> MarkedCheckpoint | None:
        with self._turn:
            taken, self._next = self._next, None
            if taken is None:
                self._busy = False
                self._turn.notify_all()
            return taken


def identities(checkpoint: Path, names: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    """Inode, size and time of change of files, which tell whether one was written to."""
    found = {}
    for name in names:
        status = os.stat(checkpoint / name)
        found[name] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found
