"""Keeps the last good checkpoints of a run out of the reach of the Trainer's rotation."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint_files import (
    MARKER_FILE,
    PINNED_DIR,
    STATE_FILE,
    files_of,
    number_of,
    numbered,
    remove_checkpoint,
    share_files,
    size_of,
    unshared_size_of,
)
from .listing import written_at
from .marker import Standing, load_marker, read_marker, set_standing, speaks_for


logger = logging.getLogger(__name__)

# A checkpoint may grow by as much from one to the next: the log in it does.
_GROWTH = 1.05

# What file systems answer that have no hard links, or none from here to there.
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})


@dataclass(slots=True)
class _Followed:
    """A checkpoint of this run, and what is known about it."""

    path: Path
    standing: Standing
    finite: bool
    pinned: bool


class CheckpointKeeper:
    """
    Follows the checkpoints of one run and keeps the last good ones in `last-known-good/`, where the Trainer's rotation
    does not reach. They are hard links, which need no space of their own while the checkpoint itself is there.

    Once rotation has removed the checkpoint itself, they hold the space it held. So they give way whenever another
    checkpoint would not fit beside them, and none is kept where there is no room for it and the one after it.

    To be called by the first process only. What the file system refuses is told once and never stops the training.

    Args:
        output_dir (`str` or `Path`):
            Of the run.
        generations (`int`, *optional*, defaults to 2):
            How many verified checkpoints are kept; 0 for none, and then none is kept until it is verified either.
        tell (`Callable`, *optional*):
            Told, with a kind, a step and further fields, what the journal has to know.
    """

    def __init__(
        self, output_dir: str | Path, generations: int = 2, tell: Callable[..., None] = lambda *_, **__: None
    ) -> None:
        self.directory = Path(os.path.abspath(output_dir), PINNED_DIR)
        self.generations = generations
        self._tell = tell
        self._step = 0
        self._size = 0
        self._followed: dict[int, _Followed] = {}
        self._pending: int | None = None
        self._links = True
        self._swept = False
        self._warned: set[str] = set()

    def about_to_save(self, step: int) -> None:
        """
        Called before a regular checkpoint is written, in case the run comes by a step for the second time: the files
        of the first are not to be overwritten where they lie. The links in `last-known-good/` lead to the same files,
        and a process killed in between would leave half of each, which cannot be told from a whole one.

        Args:
            step (`int`):
                Optimizer steps finished.
        """
        self._step = step
        with self._contained("Making room for a checkpoint"):
            self.leave_room()
        stale = self.directory.parent / f"checkpoint-{step}"
        with self._contained("Making room for a checkpoint"):
            if not stale.is_dir():
                return
            # Without its trainer_state.json, which is written last, it is not taken for complete.
            for file in (stale / MARKER_FILE, stale / STATE_FILE):
                file.unlink(missing_ok=True)
            for file in files_of(stale):
                if file.stat().st_nlink > 1:
                    file.unlink()

    def saved(self, checkpoint: str | Path, step: int, finite: bool | None = None) -> None:
        """
        Called after a checkpoint was completely written and marked, or resumed from: it is followed from now on.

        Args:
            checkpoint (`str` or `Path`):
                The checkpoint directory.
            step (`int`):
                Optimizer steps finished.
            finite (`bool`, *optional*):
                Whether all of its state was found to be finite. Defaults to what its marker says.
        """
        checkpoint = Path(os.path.abspath(checkpoint))
        marker = load_marker(checkpoint)
        if marker is None:
            # Of the plain trainer: there is nowhere to write what standing it has.
            return
        if finite is None:
            finite = marker.get("finite") is True
        standing: Standing = marker["standing"] if finite or marker.get("standing") == "suspect" else "unverified"
        followed = _Followed(checkpoint, standing, finite, pinned=False)
        self._followed[step] = followed
        self._step = step
        with self._contained("Following a checkpoint"):
            self._sweep()
            self._size = size_of(checkpoint)
            followed.pinned = self._is_pinned(checkpoint, step)
            if self._pending == step and not followed.pinned:
                self._pending = None
            if step in self._waiting():
                self._pin_as_pending(step)
            # Rotation has left the links without the checkpoints they were made of.
            self.leave_room()

    def leave_room(self) -> None:
        """Removes kept checkpoints, the oldest first, until one more checkpoint fits beside them."""
        # Of a run that has not written any yet: what an earlier one has kept is about as large.
        size = self._size or max((size_of(pin) for _, pin in numbered(self.directory)), default=0)
        needed = int(_GROWTH * size)
        given_up = []
        while self._free() < needed and (oldest := next(self._may_give_way(), None)) is not None:
            self._let_go(oldest)
            given_up.append(oldest)
        self._tell_of(given_up, needed)

    def give_way(self) -> list[Path]:
        """
        Removes all kept checkpoints that free anything, after a checkpoint did not fit.

        Returns:
            `list[Path]`: those that were removed.
        """
        given_up = []
        with self._contained("Making room for a checkpoint"):
            while (oldest := next(self._may_give_way(), None)) is not None:
                self._let_go(oldest)
                given_up.append(oldest)
        self._tell_of(given_up, int(_GROWTH * self._size))
        return given_up

    def _free(self) -> int:
        return shutil.disk_usage(self.directory.parent).free

    def _may_give_way(self) -> Iterator[Path]:
        """Kept ones whose removal frees something, the oldest first; never the last one that can be trusted."""
        kept = sorted((pin for _, pin in numbered(self.directory)), key=written_at)
        for pin in kept:
            if unshared_size_of(pin) > 0 and any(
                _may_be_trusted(other) for other in [*self._regular(), *kept] if other != pin
            ):
                yield pin

    def _regular(self) -> list[Path]:
        return [entry for _, entry in numbered(self.directory.parent)]

    def _let_go(self, pin: Path) -> None:
        remove_checkpoint(pin)
        number = number_of(pin)
        if number is not None and number in self._followed:
            self._followed[number].pinned = False
        if self._pending == number:
            self._pending = None

    def _tell_of(self, given_up: list[Path], needed: int) -> None:
        if not given_up:
            return
        names = [pin.name for pin in given_up]
        self._tell(
            "kept_checkpoints_gave_way", self._step, removed=names, bytes_needed=needed, bytes_free=self._free()
        )
        level = logging.INFO if "gave way" in self._warned else logging.WARNING
        self._warned.add("gave way")
        logger.log(
            level,
            "Step %d: %s in %s gave way, so that the next checkpoint fits (it takes %s). There are fewer trusted "
            "checkpoints to go back to. What to do: make room on the disk; keep_verified_checkpoints=%d is what would "
            "be kept.",
            self._step,
            ", ".join(names),
            self.directory,
            _gigabytes(needed),
            self.generations,
        )

    def _has_room_for(self, number: int, beside: int = 0) -> bool:
        """Whether one more may be kept: the next checkpoint has to fit beside it once rotation has taken this one."""
        followed = self._followed[number]
        return self._free() + beside >= 2 * _GROWTH * size_of(followed.path)

    def verified_up_to(self, step: int) -> None:
        """
        Marks the run's checkpoints up to a step as verified, if they are finite: enough healthy steps came after it. A
        NaN in a row of an embedding that no batch reads is seen in no loss.

        Args:
            step (`int`):
                The newest step that is known to be good.
        """
        good = [number for number in self._waiting() if number <= step]
        if not good:
            return
        for number in good:
            self._mark(number, "verified")
        if self._pending is not None and self._pending <= step:
            self._pending = None
        with self._contained("Keeping the last good checkpoint"):
            self._sweep()
            self._keep_newest(good)
            self._prune()
            if waiting := self._waiting():
                self._pin_as_pending(max(waiting))

    def distrust(self, after: int, until: int, incident: str, verified: bool = False) -> list[int]:
        """
        Marks as suspect what was written between the state the run goes back to and the fault.

        Args:
            after (`int`):
                The step of the state gone back to.
            until (`int`):
                The step of the fault: checkpoints of later steps do not hold it.
            incident (`str`):
                Its id, which the marker names.
            verified (`bool`, *optional*, defaults to `False`):
                Whether verified ones are suspect, too: states as good as they were have turned out to be bad.

        Returns:
            `list[int]`: the steps of those that are suspect now.
        """
        trusted = ("suspect",) if verified else ("suspect", "verified")
        suspects = [
            number
            for number, followed in self._followed.items()
            if after < number <= until and followed.standing not in trusted
        ]
        for number in suspects:
            self._mark(number, "suspect", incident)
            followed = self._followed[number]
            if followed.pinned and followed.path != self._pin(number):
                with self._contained("Removing a suspect checkpoint"):
                    remove_checkpoint(self._pin(number))
                    followed.pinned = False
        if self._pending in suspects:
            self._pending = None
        return suspects

    def reinstate(self, steps: Iterable[int]) -> list[int]:
        """Takes back the suspicion of those checkpoints that were found to be finite; returns their steps."""
        good = [number for number in steps if self._followed[number].finite]
        for number in good:
            self._mark(number, "unverified")
        return good

    def has_good(self, step: int) -> bool:
        """Whether there is a checkpoint of this step that is finite, and not suspect."""
        followed = self._followed.get(step)
        return followed is not None and followed.finite and followed.standing != "suspect" and followed.path.is_dir()

    def _waiting(self) -> list[int]:
        """Those that healthy steps make verified: what is not known to be finite never is."""
        followed = self._followed.items()
        return [number for number, each in followed if each.standing == "unverified" and each.finite]

    def _pin(self, number: int) -> Path:
        return self.directory / f"checkpoint-{number}"

    def _is_pinned(self, checkpoint: Path, number: int) -> bool:
        """Whether it is what lies in `last-known-good/` under its number; what it has overwritten there is removed."""
        pin = self._pin(number)
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

    def _mark(self, number: int, standing: Standing, incident: str | None = None) -> None:
        followed = self._followed[number]
        followed.standing = standing
        for place in {followed.path, self._pin(number)} if followed.pinned else {followed.path}:
            with self._contained("Marking a checkpoint"):
                set_standing(place, standing, incident)

    def _pin_as_pending(self, number: int) -> None:
        """Takes a checkpoint out of the rotation's reach until it is known whether it is good."""
        if self._pending is not None or self.generations == 0:
            return
        if not self._followed[number].pinned:
            if not self._followed[number].path.is_dir() or not self._has_room_for(number):
                return
            verified = (load_marker(self._pin(number)) or {}).get("standing") == "verified"
            if verified or not self._try_to_link(number):
                return
        self._pending = number

    def _keep_newest(self, good: list[int]) -> None:
        for number in sorted(good, reverse=True) if self.generations else ():
            followed = self._followed[number]
            if followed.pinned:
                return
            if not followed.path.is_dir():
                continue
            if self._replaces_older_ones(number) and not self._try_to_link(number):
                self._copy(number)
            return

    def _replaces_older_ones(self, number: int) -> bool:
        """Whether there is room for one more; where there is little, the older ones are let go for it."""
        older = sorted((pin for _, pin in numbered(self.directory)), key=written_at)
        if not self._has_room_for(number, beside=sum(map(unshared_size_of, older))):
            return False
        while older and not self._has_room_for(number):
            self._let_go(older.pop(0))
        return True

    def _try_to_link(self, number: int) -> bool:
        followed = self._followed[number]
        if not self._links or not followed.path.is_dir():
            return False
        try:
            self._place(number, os.link)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._links = False
        return self._links

    def _copy(self, number: int) -> None:
        path = self._followed[number].path
        if "copy" not in self._warned:
            self._warned.add("copy")
            logger.warning(
                "%s cannot hold hard links, so the last good checkpoint is copied there, and training waits: "
                "%s each, %d of them.",
                self.directory,
                _gigabytes(size_of(path)),
                self.generations,
            )
        self._place(number, shutil.copy2)

    def _place(self, number: int, put: Callable[[Path, Path], Any]) -> None:
        followed = self._followed[number]
        # Renamed when it is whole: a process killed in between leaves nothing that looks like a checkpoint.
        temporary = self.directory / f".checkpoint-{number}.new"
        try:
            for file in files_of(followed.path):
                target = temporary / file.relative_to(followed.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                put(file, target)
            shutil.copy2(followed.path / MARKER_FILE, temporary / MARKER_FILE)
            remove_checkpoint(self._pin(number))
            temporary.rename(self._pin(number))
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        followed.pinned = True
        if "first" not in self._warned:
            self._warned.add("first")
            self._tell_of_the_first(size_of(followed.path))

    def _tell_of_the_first(self, size: int) -> None:
        # And the one that is not verified yet.
        most = (self.generations + 1) * size
        self._tell("checkpoints_kept", self._step, bytes_each=size, bytes_at_most=most)
        logger.info(
            "Step %d: the last %d verified checkpoints, and the next until it is verified, are kept in %s, where "
            "rotation cannot take them: up to %s more disk than the Trainer needs by itself (%s each). They give way "
            "before a save is given up. What to do to keep none: keep_verified_checkpoints=0.",
            self._step,
            self.generations,
            self.directory,
            _gigabytes(most),
            _gigabytes(size),
        )

    def _prune(self) -> None:
        # By the time of writing, not by number: an earlier run in the same directory may have come further.
        newest_first = sorted((pin for _, pin in numbered(self.directory)), key=written_at, reverse=True)
        verified = [pin for pin in newest_first if (load_marker(pin) or {}).get("standing") == "verified"]
        kept = verified[: self.generations]
        if not kept:
            return
        if self._pending is not None:
            kept.append(self._pin(self._pending))
        for pin in newest_first:
            if pin not in kept:
                remove_checkpoint(pin)
                if (followed := self._followed.get(number_of(pin) or 0)) is not None:
                    followed.pinned = False

    def _sweep(self) -> None:
        """Removes what a process that was killed half-way left behind."""
        if self._swept:
            return
        self._swept = True
        for leftover in self.directory.glob(".checkpoint-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    @contextmanager
    def _contained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if doing not in self._warned:
                self._warned.add(doing)
                logger.warning("%s failed; training goes on. %s", doing, error)


def _may_be_trusted(checkpoint: Path) -> bool:
    marker = read_marker(checkpoint)
    return marker is not None and speaks_for(marker)


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
