"""Keeps the last good checkpoints of a run out of the reach of the Trainer's rotation."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint_files import MARKER_FILE, STATE_FILE, files_of, size_of
from .marker import Standing, load_marker, set_standing
from .retention import PinnedCheckpoints


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Followed:
    """A checkpoint of this run, and what is known about it."""

    path: Path
    standing: Standing
    finite: bool


class CheckpointKeeper:
    """
    Follows the checkpoints of one run, marks what standing they have, and keeps the last good ones
    ([`PinnedCheckpoints`]).

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
        self._pinned = PinnedCheckpoints(output_dir, generations, tell)
        self._size = 0
        self._followed: dict[int, _Followed] = {}
        self._warned: set[str] = set()

    @property
    def directory(self) -> Path:
        """Where the last good ones are kept."""
        return self._pinned.directory

    def about_to_save(self, step: int) -> None:
        """
        Called before a regular checkpoint is written, in case the run comes by a step for the second time: the files
        of the first are not to be overwritten where they lie. The links in `last-known-good/` lead to the same files,
        and a process killed in between would leave half of each, which cannot be told from a whole one.

        Args:
            step (`int`):
                Optimizer steps finished.
        """
        self._pinned.step = step
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
        self._followed[step] = _Followed(checkpoint, standing, finite)
        self._pinned.step = step
        with self._contained("Following a checkpoint"):
            self._pinned.follow(checkpoint, step)
            self._pinned.sweep()
            self._size = size_of(checkpoint)
            if step in self._waiting():
                self._pin_as_pending(step)
            # Rotation has left the links without the checkpoints they were made of.
            self.leave_room()

    def leave_room(self) -> None:
        """Removes kept checkpoints, the oldest first, until one more checkpoint fits beside them."""
        self._pinned.leave_room(self._size)

    def give_way(self) -> list[Path]:
        """
        Removes all kept checkpoints that free anything, after a checkpoint did not fit.

        Returns:
            `list[Path]`: those that were removed.
        """
        given_up: list[Path] = []
        with self._contained("Making room for a checkpoint"):
            for pin in self._pinned.give_way():
                # One by one: those removed before the file system refused are reported, too.
                given_up.append(pin)
        self._pinned.tell_of(given_up, self._size)
        return given_up

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
        if self._pinned.pending is not None and self._pinned.pending <= step:
            self._pinned.pending = None
        with self._contained("Keeping the last good checkpoint"):
            self._pinned.sweep()
            self._keep_newest(good)
            self._pinned.prune()
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
            pin = self._pinned.path_of(number)
            if self._pinned.holds(number) and self._followed[number].path != pin:
                with self._contained("Removing a suspect checkpoint"):
                    self._pinned.remove(pin)
        if self._pinned.pending in suspects:
            self._pinned.pending = None
        return suspects

    def reinstate(self, steps: Iterable[int]) -> list[int]:
        """Makes suspects that were found to be finite unverified again; returns their steps."""
        good = [number for number in steps if self._followed[number].finite]
        for number in good:
            self._mark(number, "unverified")
        return good

    def has_good(self, step: int) -> bool:
        """Whether there is a checkpoint of this step that is finite, and not suspect."""
        followed = self._followed.get(step)
        return followed is not None and followed.finite and followed.standing != "suspect" and followed.path.is_dir()

    def _waiting(self) -> list[int]:
        """Lists those that healthy steps make verified: what is not known to be finite never is."""
        followed = self._followed.items()
        return [number for number, each in followed if each.standing == "unverified" and each.finite]

    def _mark(self, number: int, standing: Standing, incident: str | None = None) -> None:
        followed = self._followed[number]
        followed.standing = standing
        pin = self._pinned.path_of(number)
        for place in {followed.path, pin} if self._pinned.holds(number) else {followed.path}:
            with self._contained("Marking a checkpoint"):
                set_standing(place, standing, incident)

    def _pin_as_pending(self, number: int) -> None:
        """Takes a checkpoint out of the rotation's reach until it is known whether it is good."""
        pinned, path = self._pinned, self._followed[number].path
        if pinned.pending is not None or pinned.generations == 0:
            return
        if not pinned.holds(number):
            if not path.is_dir() or not pinned.has_room_for(path):
                return
            verified = (load_marker(pinned.path_of(number)) or {}).get("standing") == "verified"
            if verified or not pinned.add_if_linked(number, path):
                return
        pinned.pending = number

    def _keep_newest(self, good: list[int]) -> None:
        for number in sorted(good, reverse=True) if self._pinned.generations else ():
            if self._pinned.holds(number):
                return
            path = self._followed[number].path
            if path.is_dir():
                self._pinned.add(number, path)
                return

    @contextmanager
    def _contained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if doing not in self._warned:
                self._warned.add(doing)
                logger.warning("%s failed; training goes on. %s", doing, error)
