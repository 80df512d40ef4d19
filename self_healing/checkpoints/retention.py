"""Keeps verified checkpoints out of the reach of the Trainer's rotation, and removes torn ones."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config.healing_config import HealingConfig
from ..failures.classify import could_not_be_written
from ..failures.recipes import text_of
from ..journal.journal import Journal
from ..ranks import votes
from ..system import processes
from ..system.files import MARKER_FILE, PINNED_DIR, STATE_FILE
from .choice import newest_checkpoint_of
from .marker import (
    TrustLevel,
    files_of,
    load_marker,
    number_of,
    numbered,
    read_marker,
    set_standing,
    speaks_for,
    standing_of,
    written_at,
)


logger = logging.getLogger("self_healing")

# A checkpoint may grow by as much from one to the next: the log in it does.
_GROWTH = 1.05
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
# How safetensors and torch put them.
_FULL_TEXTS = (f"os error {errno.ENOSPC})", f"os error {errno.EDQUOT})", "No space left", "Disk quota exceeded")


@dataclass(slots=True)
class _Followed:
    """A checkpoint of this run, and what is known about it."""

    path: Path
    standing: TrustLevel
    finite: bool
    pinned: bool


class RunCheckpoints:
    """Follows the checkpoints of one run: each is unverified until healthy steps have come after it."""

    def __init__(self, config: HealingConfig, journal: Journal) -> None:
        self._config = config
        self._journal = journal
        # And where the last good ones are kept.
        self._output_dir = self.directory = Path()
        self._device = torch.device("cpu")
        self._resumed_from: str | None = None
        # Whether this rank follows them, and how many verified ones are kept.
        self._follows = False
        self._generations = 0
        self._followed: dict[int, _Followed] = {}
        # Those that healthy steps make verified: what is not known to be finite never is.
        self.waiting: list[int] = []
        # Of the last checkpoint, in bytes; 0 if this run has not written any yet.
        self._size = 0
        self._step = 0
        # The step of the last search for NaN and Inf before a save, and whether the state was finite on all ranks.
        self.searched: tuple[int, bool] | None = None
        self._told: set[str] = set()

    def begin(self, args: Any, resumed_from: str | None, step: int, finite: bool) -> None:
        """Begins to follow them, the one it was resumed from first, when `train()` is entered for the first time."""
        self._output_dir, self._device = Path(os.path.abspath(args.output_dir)), args.device
        self.directory, self._resumed_from = self._output_dir / PINNED_DIR, resumed_from
        self._follows = args.should_save and processes.is_first_rank()
        if not self._follows:
            return
        self._generations = self._config.keep_verified_checkpoints
        if args.push_to_hub and self._config.upload_healing_files:
            self._generations = 0
            logger.info("upload_healing_files=True: verified checkpoints are not kept, or all of them were uploaded.")
        if resumed_from is not None and Path(resumed_from).resolve().is_relative_to(self._output_dir.resolve()):
            self._follow(Path(resumed_from), step, finite)

    # ---- saving ----

    def finite_at(self, step: int) -> bool | None:
        """Whether the state that was saved at a step was finite; `None` if it was not searched."""
        return self.searched[1] if self.searched is not None and self.searched[0] == step else None

    def about_to_save(self, step: int) -> None:
        """
        Called before a regular checkpoint is written, in case the run comes by a step for the second time: the files
        of the first are not to be overwritten where they lie.
        """
        if not self._follows:
            return
        self._step = step
        self.leave_room()
        stale = self._output_dir / f"checkpoint-{step}"
        with self._contained("Making room for a checkpoint"):
            if not stale.is_dir():
                return
            # Without its trainer_state.json, which is written last, it is not taken for complete.
            for file in (stale / MARKER_FILE, stale / STATE_FILE):
                file.unlink(missing_ok=True)
            for file in files_of(stale):
                if file.stat().st_nlink > 1:
                    file.unlink()

    def saved(self, checkpoint: Path, step: int) -> None:
        """Follows a checkpoint that was completely written and marked."""
        if self._follows:
            self._follow(checkpoint, step, self.finite_at(step))

    def _follow(self, checkpoint: Path, step: int, finite: bool | None) -> None:
        checkpoint, pin = Path(os.path.abspath(checkpoint)), self._pin_of(step)
        marker, theirs = load_marker(checkpoint), load_marker(pin)
        if marker is None:
            # Of the plain trainer: there is nowhere to write what standing it has.
            return
        if finite is None:
            finite = marker["finite"] is True
        standing: TrustLevel = marker["standing"] if finite or marker["standing"] == "suspect" else "unverified"
        pinned = theirs is not None and (marker["run"], marker["time"]) == (theirs["run"], theirs["time"])
        # Of those that rotation has taken nothing is left to follow.
        self._followed = {number: each for number, each in self._followed.items() if each.pinned or each.path.is_dir()}
        self._followed[step] = _Followed(checkpoint, standing, finite, pinned)
        self._count_waiting()
        self._step = step
        with self._contained("Keeping a checkpoint"):
            self._size = _size_of(checkpoint)
            if step in self.waiting:
                self._pin_until_known(step)
        # Rotation has left the links without the checkpoints they were made of.
        self.leave_room()

    # ---- trusting ----

    def verify_up_to(self, step: int) -> None:
        """Marks those up to a step as verified, if they are finite: enough healthy steps came after it."""
        if not self.waiting or step < min(self.waiting):
            return
        good = [number for number in self.waiting if number <= step]
        for number in good:
            self._mark(number, "verified")
        with self._contained("Keeping a checkpoint"):
            newest = self._followed[max(good)]
            if self._generations and not newest.pinned and self._has_room_for(newest.path):
                self._link(max(good))
            self._prune()
            if self.waiting:
                self._pin_until_known(max(self.waiting))

    def distrust(self, after: int, until: int, incident: str, verified: bool = False) -> tuple[int, ...]:
        """Marks as suspect what was written between the state the run goes back to and the fault."""
        trusted = ("suspect",) if verified else ("suspect", "verified")
        suspects = tuple(
            number
            for number, followed in self._followed.items()
            if after < number <= until and followed.standing not in trusted
        )
        for number in suspects:
            self._mark(number, "suspect", incident)
            if self._followed[number].pinned and self._followed[number].path != self._pin_of(number):
                with self._contained("Removing a suspect checkpoint"):
                    self._remove(self._pin_of(number))
        return suspects

    def reinstate(self, suspects: Iterable[int]) -> list[int]:
        """Makes suspects that were found to be finite unverified again; returns their steps."""
        good = [number for number in suspects if number in self._followed and self._followed[number].finite]
        for number in good:
            self._mark(number, "unverified")
        return good

    def has_good(self, step: int) -> bool:
        """Whether there is one of this step that is finite, and not suspect; the first rank knows."""
        followed = self._followed.get(step)
        return followed is not None and followed.finite and followed.standing != "suspect" and followed.path.is_dir()

    def newest(self, of_steps: range | None = None) -> str | None:
        """
        Finds the newest one that the run can go back to, of some steps, or else the one it was resumed from.
        Collective.
        """

        def look() -> str | None:
            newest = newest_checkpoint_of(self._journal.run_id, str(self._output_dir), True, of_steps)
            return newest or (self._resumed_from if of_steps is None else None)

        return votes.looked_up_by_first_rank("newest checkpoint to go back to", look, self._device)

    def _count_waiting(self) -> None:
        followed = self._followed.items()
        self.waiting = [number for number, each in followed if each.standing == "unverified" and each.finite]

    def _mark(self, number: int, standing: TrustLevel, incident: str | None = None) -> None:
        followed = self._followed[number]
        followed.standing = standing
        self._count_waiting()
        for place in {followed.path, self._pin_of(number)} if followed.pinned else {followed.path}:
            with self._contained("Marking a checkpoint"):
                set_standing(place, standing, incident)

    # ---- pinning ----

    def _pin_of(self, number: int) -> Path:
        return self.directory / f"checkpoint-{number}"

    def _pin_until_known(self, number: int) -> None:
        """Takes a checkpoint out of the rotation's reach until it is known whether it is good; one at a time."""
        if self._pinned_and_waiting() or self._generations == 0:
            return
        if self._has_room_for(self._followed[number].path) and standing_of(self._pin_of(number)) != "verified":
            self._link(number)

    def _pinned_and_waiting(self) -> list[int]:
        return [number for number in self.waiting if self._followed[number].pinned]

    def _link(self, number: int) -> None:
        # Renamed when it is whole: a process killed in between leaves nothing that looks like a checkpoint.
        checkpoint, temporary = self._followed[number].path, self.directory / f".checkpoint-{number}.new"
        try:
            for file in files_of(checkpoint):
                target = temporary / file.relative_to(checkpoint)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, target)
            shutil.copy2(checkpoint / MARKER_FILE, temporary / MARKER_FILE)
            _remove_checkpoint(self._pin_of(number))
            temporary.rename(self._pin_of(number))
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._followed[number].pinned = True
        if "first" not in self._told:
            self._told.add("first")
            self._tell_of_the_first(_size_of(checkpoint))

    def _remove(self, pin: Path) -> None:
        _remove_checkpoint(pin)
        number = number_of(pin)
        if number in self._followed:
            self._followed[number].pinned = False

    def _prune(self) -> None:
        """Removes all but the newest verified ones and the pending one."""
        newest_first = self._oldest_first()[::-1]
        kept = [pin for pin in newest_first if standing_of(pin) == "verified"][: self._generations]
        if not kept:
            return
        kept += map(self._pin_of, self._pinned_and_waiting())
        for pin in newest_first:
            if pin not in kept:
                self._remove(pin)

    def _oldest_first(self) -> list[Path]:
        # By the time of writing, not by number: an earlier run in the same directory may have come further.
        return sorted((pin for _, pin in numbered(self.directory)), key=written_at)

    # ---- making room ----

    def leave_room(self) -> None:
        """Removes kept checkpoints, the oldest first, until one more checkpoint fits beside them."""
        if self._follows:
            # What an earlier run has kept is about as large.
            self._make_room(self._size or max(map(_size_of, self._oldest_first()), default=0))

    def give_way(self) -> list[str]:
        """Removes all kept checkpoints that free anything, after one did not fit; returns their names."""
        return self._make_room(self._size, all_of_them=True) if self._follows else []

    def _make_room(self, size: int, all_of_them: bool = False) -> list[str]:
        names: list[str] = []
        with self._contained("Making room for a checkpoint"):
            while all_of_them or self._free() < _GROWTH * size:
                if (pin := self._may_give_way()) is None:
                    break
                self._remove(pin)
                names.append(pin.name)
        if names:
            self._tell_of(names, size)
        return names

    def _may_give_way(self) -> Path | None:
        """The oldest one whose removal frees something; never the last one that can be trusted."""
        kept = self._oldest_first()
        others = [*kept, *(entry for _, entry in numbered(self._output_dir))]
        for pin in kept:
            trusted = ((marker := read_marker(other)) and speaks_for(marker) for other in others if other != pin)
            # Bytes that no other hard link holds.
            frees = any(status.st_nlink == 1 and status.st_size for status in map(Path.stat, files_of(pin)))
            if frees and any(trusted):
                return pin
        return None

    def _has_room_for(self, checkpoint: Path) -> bool:
        """Whether one may be kept that is there: the next has to fit beside it once rotation has taken this one."""
        return checkpoint.is_dir() and self._free() >= 2 * _GROWTH * _size_of(checkpoint)

    def _free(self) -> int:
        return shutil.disk_usage(self._output_dir).free

    # ---- telling ----

    def _tell_of_the_first(self, size: int) -> None:
        # And the one that is not verified yet.
        most = (self._generations + 1) * size
        self._journal.event("checkpoints_kept", self._step, bytes_each=size, bytes_at_most=most)
        logger.info(
            "Step %d: the last %d verified checkpoints, and the next until it is verified, are kept in %s, where "
            "rotation cannot take them: up to %s more disk than the Trainer needs by itself (%s each). They give way "
            "before a save is given up. What to do to keep none: keep_verified_checkpoints=0.",
            self._step,
            self._generations,
            self.directory,
            _gigabytes(most),
            _gigabytes(size),
        )

    def _tell_of(self, names: list[str], size: int) -> None:
        """Reports those that gave way to a checkpoint of a size: each time in the journal, once in the log."""
        needed, free = int(_GROWTH * size), self._free()
        self._journal.event(
            "kept_checkpoints_gave_way", self._step, removed=names, bytes_needed=needed, bytes_free=free
        )
        if "gave way" not in self._told:
            self._told.add("gave way")
            logger.warning(
                "Step %d: removed %s from %s, so that the next checkpoint fits (it takes %s). There are fewer trusted "
                "checkpoints to go back to. What to do: free disk space; keep_verified_checkpoints=%d is what would "
                "be kept.",
                self._step,
                ", ".join(names),
                self.directory,
                _gigabytes(needed),
                self._generations,
            )

    @contextmanager
    def _contained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if doing not in self._told:
                self._told.add(doing)
                logger.warning("%s failed; training goes on. %s", doing, error)


def _size_of(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in files_of(checkpoint))


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"


# ---- removing ----


def _remove_checkpoint(checkpoint: Path) -> None:
    """Removes a checkpoint; a process killed in between leaves nothing that looks like one."""
    if not checkpoint.exists():
        return
    gone = checkpoint.with_name(f".{checkpoint.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.rename(gone)
    shutil.rmtree(gone)


def remove_torn(checkpoint: Path) -> str | None:
    """Removes a checkpoint; what is left of it, however far that gets, is not taken for a whole one."""
    failed: OSError | None = None
    for name in (MARKER_FILE, STATE_FILE):
        try:
            (checkpoint / name).unlink(missing_ok=True)
        except OSError as error:
            failed = error
    try:
        _remove_checkpoint(checkpoint)
    except OSError as error:
        failed = error
        shutil.rmtree(checkpoint, ignore_errors=True)
    with suppress(OSError):
        if not checkpoint.exists() and not checkpoint.with_name(f".{checkpoint.name}.gone").exists():
            return None
    return f"{type(failed).__name__}: {failed}"


def expendable_checkpoint(run: str, output_dir: Path, best: str | None) -> Path | None:
    """
    Finds the oldest checkpoint of a run whose removal makes room, and loses nothing that is known to be good: never
    the best, a verified one, the newest, or one that is hard-linked to `last-known-good/` and would free nothing.
    """
    marked = [(number, entry, read_marker(entry)) for number, entry in sorted(numbered(output_dir))]
    own = [(entry, marker) for _, entry, marker in marked if marker is not None and marker["run"] == run]
    for entry, marker in own[:-1]:
        is_best = best is not None and os.path.abspath(best) == os.path.abspath(entry)
        linked = any(file.stat().st_nlink > 1 for file in files_of(entry))
        if marker["standing"] != "verified" and not is_best and not linked:
            return entry
    return None


class DiskFull(OSError):
    """A checkpoint did not fit; its text is how much room there was."""


def disk_full(error: Exception, checkpoint: Path) -> Exception | None:
    """
    Finds out whether a checkpoint, still there in part, could not be written because the disk is full: torch does not
    say.
    """
    try:
        usage, folder = shutil.disk_usage(checkpoint.parent), checkpoint.parent
        largest = max(map(_size_of, folder.glob("checkpoint-*")), default=0)
    except OSError:
        return None
    text, scarce = text_of(error), usage.free <= max(largest, usage.total / 100)
    if isinstance(error, OSError) and error.errno is not None:
        full = error.errno in _FULL_ERRNOS
    elif "os error" in text or any(each in text for each in _FULL_TEXTS):
        full = any(each in text for each in _FULL_TEXTS)
    else:
        full = scarce and could_not_be_written(error)
    if not full or not scarce:
        return error if full else None
    unit, name = (1e9, "GB") if usage.total >= 1e9 else (1e6, "MB")
    named = DiskFull(f"{usage.free / unit:.3g} of {usage.total / unit:.3g} {name} free at {folder}")
    named.__cause__ = error
    return named
