"""Keeps checkpoints in `last-known-good/`, which the Trainer's rotation does not reach."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..checkpoint_files import (
    MARKER_FILE,
    PINNED_DIR,
    files_of,
    number_of,
    numbered,
    remove_checkpoint,
    share_files,
    size_of,
    unshared_size_of,
)
from .listing import written_at
from .marker import load_marker, read_marker, speaks_for


logger = logging.getLogger(__name__)

# A checkpoint may grow by as much from one to the next: the log in it does.
_GROWTH = 1.05

# What file systems answer that have no hard links, or none from here to there.
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})


class PinnedCheckpoints:
    """
    Keeps checkpoints in `last-known-good/`, as hard links: they need no space of their own while the checkpoint itself
    is there.

    Once rotation has removed the checkpoint itself, they hold the space it held. So they give way whenever another
    checkpoint would not fit beside them, and none is kept where there is no room for it and the one after it. Adding,
    removing and making room stay in one class, because each changes what the others count.

    Args:
        output_dir (`str` or `Path`):
            Of the run.
        generations (`int`):
            How many verified checkpoints are kept.
        tell (`Callable`):
            Told, with a kind, a step and further fields, what the journal has to know.
    """

    def __init__(self, output_dir: str | Path, generations: int, tell: Callable[..., None]) -> None:
        self.directory = Path(os.path.abspath(output_dir), PINNED_DIR)
        self.generations = generations
        # Optimizer steps finished, as the journal is told.
        self.step = 0
        # The one that is kept until it is known whether it is good.
        self.pending: int | None = None
        self._tell = tell
        self._of_this_run: set[int] = set()
        self._links = True
        self._swept = False
        self._told: set[str] = set()

    def path_of(self, number: int) -> Path:
        """Names the place where the checkpoint of a step is kept, if it is."""
        return self.directory / f"checkpoint-{number}"

    def holds(self, number: int) -> bool:
        """Whether the checkpoint that this run has written at a step is kept."""
        return number in self._of_this_run

    def follow(self, checkpoint: Path, number: int) -> None:
        """Notes whether a checkpoint is kept under its number; what it has overwritten there is removed."""
        self._of_this_run.discard(number)
        if self._has(checkpoint, self.path_of(number)):
            self._of_this_run.add(number)
        elif self.pending == number:
            self.pending = None

    def _has(self, checkpoint: Path, pin: Path) -> bool:
        if checkpoint == pin:
            return True
        if not pin.is_dir():
            return False
        mine, theirs = load_marker(checkpoint), load_marker(pin)
        if mine and theirs and (mine.get("run"), mine.get("time")) == (theirs.get("run"), theirs.get("time")):
            return True
        if share_files(checkpoint, pin):
            remove_checkpoint(pin)
        return False

    # ---- adding ----

    def add_if_linked(self, number: int, checkpoint: Path) -> bool:
        """Keeps a checkpoint as hard links; returns `False` if that is not possible here."""
        if not self._links or not checkpoint.is_dir():
            return False
        try:
            self._place(number, checkpoint, os.link)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._links = False
        return self._links

    def add(self, number: int, checkpoint: Path) -> None:
        """Keeps a checkpoint if there is room for it, as a copy where there are no hard links."""
        if not self._replaces_older_ones(checkpoint) or self.add_if_linked(number, checkpoint):
            return
        if "copy" not in self._told:
            self._told.add("copy")
            logger.warning(
                "%s cannot hold hard links, so the last good checkpoint is copied there, and training waits: "
                "%s each, %d of them.",
                self.directory,
                _gigabytes(size_of(checkpoint)),
                self.generations,
            )
        self._place(number, checkpoint, shutil.copy2)

    def _place(self, number: int, checkpoint: Path, put: Callable[[Path, Path], Any]) -> None:
        # Renamed when it is whole: a process killed in between leaves nothing that looks like a checkpoint.
        temporary = self.directory / f".checkpoint-{number}.new"
        try:
            for file in files_of(checkpoint):
                target = temporary / file.relative_to(checkpoint)
                target.parent.mkdir(parents=True, exist_ok=True)
                put(file, target)
            shutil.copy2(checkpoint / MARKER_FILE, temporary / MARKER_FILE)
            remove_checkpoint(self.path_of(number))
            temporary.rename(self.path_of(number))
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._of_this_run.add(number)
        if "first" not in self._told:
            self._told.add("first")
            self._tell_of_the_first(size_of(checkpoint))

    def _tell_of_the_first(self, size: int) -> None:
        # And the one that is not verified yet.
        most = (self.generations + 1) * size
        self._tell("checkpoints_kept", self.step, bytes_each=size, bytes_at_most=most)
        logger.info(
            "Step %d: the last %d verified checkpoints, and the next until it is verified, are kept in %s, where "
            "rotation cannot take them: up to %s more disk than the Trainer needs by itself (%s each). They give way "
            "before a save is given up. What to do to keep none: keep_verified_checkpoints=0.",
            self.step,
            self.generations,
            self.directory,
            _gigabytes(most),
            _gigabytes(size),
        )

    # ---- removing ----

    def remove(self, pin: Path) -> None:
        """Removes one."""
        remove_checkpoint(pin)
        number = number_of(pin)
        if number is not None:
            self._of_this_run.discard(number)
        if self.pending == number:
            self.pending = None

    def prune(self) -> None:
        """Removes all but the newest verified ones and the pending one."""
        # By the time of writing, not by number: an earlier run in the same directory may have come further.
        newest_first = sorted((pin for _, pin in numbered(self.directory)), key=written_at, reverse=True)
        verified = [pin for pin in newest_first if (load_marker(pin) or {}).get("standing") == "verified"]
        kept = verified[: self.generations]
        if not kept:
            return
        if self.pending is not None:
            kept.append(self.path_of(self.pending))
        for pin in newest_first:
            if pin not in kept:
                self.remove(pin)

    def sweep(self) -> None:
        """Removes what a process that was killed half-way left behind; once."""
        if self._swept:
            return
        self._swept = True
        for leftover in self.directory.glob(".checkpoint-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _oldest_first(self) -> list[Path]:
        return sorted((pin for _, pin in numbered(self.directory)), key=written_at)

    # ---- making room ----

    def has_room_for(self, checkpoint: Path, beside: int = 0) -> bool:
        """Whether one more may be kept: the next checkpoint has to fit beside it once rotation has taken this one."""
        return self._free() + beside >= 2 * _GROWTH * size_of(checkpoint)

    def _replaces_older_ones(self, checkpoint: Path) -> bool:
        """Makes room for one more by removing older ones; returns whether there is any."""
        older = self._oldest_first()
        if not self.has_room_for(checkpoint, beside=sum(map(unshared_size_of, older))):
            return False
        while older and not self.has_room_for(checkpoint):
            self.remove(older.pop(0))
        return True

    def leave_room(self, size: int) -> None:
        """
        Removes the oldest until one more checkpoint fits beside them.

        Args:
            size (`int`):
                Of the last checkpoint, in bytes; 0 if this run has not written any yet.
        """
        # What an earlier run has kept is about as large.
        size = size or max((size_of(pin) for _, pin in numbered(self.directory)), default=0)
        given_up, giving_way = list[Path](), self.give_way()
        while self._free() < _needed(size) and (pin := next(giving_way, None)) is not None:
            given_up.append(pin)
        self.tell_of(given_up, size)

    def give_way(self) -> Iterator[Path]:
        """Removes those whose removal frees something, the oldest first: one with each that is asked for."""
        while (oldest := next(self._may_give_way(), None)) is not None:
            self.remove(oldest)
            yield oldest

    def _free(self) -> int:
        return shutil.disk_usage(self.directory.parent).free

    def _may_give_way(self) -> Iterator[Path]:
        """Yields those whose removal frees something, the oldest first; never the last one that can be trusted."""
        kept = self._oldest_first()
        for pin in kept:
            if unshared_size_of(pin) > 0 and any(
                _may_be_trusted(other) for other in [*self._regular(), *kept] if other != pin
            ):
                yield pin

    def _regular(self) -> list[Path]:
        return [entry for _, entry in numbered(self.directory.parent)]

    def tell_of(self, given_up: list[Path], size: int) -> None:
        """Reports those that gave way to a checkpoint of a size, in journal and log."""
        if not given_up:
            return
        names, needed = [pin.name for pin in given_up], _needed(size)
        self._tell("kept_checkpoints_gave_way", self.step, removed=names, bytes_needed=needed, bytes_free=self._free())
        level = logging.INFO if "gave way" in self._told else logging.WARNING
        self._told.add("gave way")
        logger.log(
            level,
            "Step %d: %s in %s gave way, so that the next checkpoint fits (it takes %s). There are fewer trusted "
            "checkpoints to go back to. What to do: make room on the disk; keep_verified_checkpoints=%d is what would "
            "be kept.",
            self.step,
            ", ".join(names),
            self.directory,
            _gigabytes(needed),
            self.generations,
        )


def _needed(size: int) -> int:
    """Bytes that the next checkpoint takes."""
    return int(_GROWTH * size)


def _may_be_trusted(checkpoint: Path) -> bool:
    marker = read_marker(checkpoint)
    return marker is not None and speaks_for(marker)


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
