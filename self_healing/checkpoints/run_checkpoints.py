"""Follows the checkpoints of a run until they are verified, and finds the newest one to go back to."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .. import consensus
from ..config import HealingConfig
from ..journal.journal import Journal
from .choice import newest_checkpoint_of
from .keeper import CheckpointKeeper


logger = logging.getLogger("self_healing")


class RunCheckpoints:
    """
    Follows the checkpoints of one run: each is unverified until healthy steps have come after it.

    Every rank has one and may call it; only the first rank, if it saves, has a [`CheckpointKeeper`] and does anything.

    Args:
        config ([`HealingConfig`]):
            How many verified checkpoints are kept.
        journal ([`Journal`]):
            Where it is written down what is kept and what it costs.
    """

    def __init__(self, config: HealingConfig, journal: Journal) -> None:
        self._config = config
        self._journal = journal
        self._keeper: CheckpointKeeper | None = None
        # Steps of those that healthy steps may still verify, the oldest first.
        self.unverified: deque[int] = deque()
        # The step of the last search for NaN and Inf before a save, and whether the state was finite.
        self._searched: tuple[int, bool] | None = None
        self._output_dir = ""
        self._device = torch.device("cpu")
        self._resumed_from: str | None = None

    def begin(self, args: Any, resumed_from: str | None, step: int, finite: bool) -> None:
        """
        Begins to follow them, when `train()` is entered for the first time.

        Args:
            args ([`~transformers.TrainingArguments`]):
                Of the trainer.
            resumed_from (`str`, *optional*):
                The checkpoint the run was resumed from.
            step (`int`):
                Optimizer steps finished in it.
            finite (`bool`):
                Whether the state the run begins with was found to be finite.
        """
        self._output_dir, self._device = str(args.output_dir), args.device
        self._resumed_from = resumed_from
        if not args.should_save or not consensus.is_first_rank():
            return
        generations = self._config.keep_verified_checkpoints
        if args.push_to_hub and self._config.upload_healing_files:
            generations = 0
            logger.info("upload_healing_files=True: verified checkpoints are not kept, or all of them were uploaded.")
        self._keeper = CheckpointKeeper(self._output_dir, generations, tell=self._journal.event)
        if resumed_from is not None and Path(resumed_from).resolve().is_relative_to(Path(args.output_dir).resolve()):
            self._follow(Path(resumed_from), step, finite)

    # ---- saving ----

    def note_search(self, step: int, finite: bool) -> None:
        """
        Takes in what was found when the state was searched for NaN and Inf, right before a save.

        Args:
            step (`int`):
                Optimizer steps finished.
            finite (`bool`):
                Whether every weight, buffer and optimizer state was finite, on all ranks.
        """
        self._searched = step, finite

    def finite_at(self, step: int) -> bool | None:
        """Whether the state that was saved at a step was finite; `None` if it was not searched."""
        return self._searched[1] if self._searched is not None and self._searched[0] == step else None

    def about_to_save(self, step: int) -> None:
        """Prepares for a checkpoint that is about to be written, perhaps over one that is kept."""
        if self._keeper is not None:
            self._keeper.about_to_save(step)

    def saved(self, checkpoint: Path, step: int) -> None:
        """Follows a checkpoint that was completely written."""
        self._follow(checkpoint, step, self.finite_at(step))

    def _follow(self, checkpoint: Path, step: int, finite: bool | None) -> None:
        if self._keeper is not None:
            self.unverified.append(step)
            self._keeper.saved(checkpoint, step, finite)

    def leave_room(self) -> None:
        """Removes kept checkpoints until one more checkpoint fits beside them."""
        if self._keeper is not None:
            self._keeper.leave_room()

    def give_way(self) -> list[str]:
        """Removes the kept checkpoints, after one did not fit beside them; returns the names of those removed."""
        return [] if self._keeper is None else [pin.name for pin in self._keeper.give_way()]

    # ---- trusting ----

    def verify_up_to(self, step: int) -> None:
        """Marks those up to a step as verified: enough healthy steps have come after it."""
        if not self.unverified or self.unverified[0] > step:
            return
        while self.unverified and self.unverified[0] <= step:
            self.unverified.popleft()
        if self._keeper is not None:
            self._keeper.verified_up_to(step)

    def forget_beyond(self, step: int) -> None:
        """Forgets those of later steps: the run goes on from this one."""
        self.unverified = deque(each for each in self.unverified if each <= step)

    def distrust(self, after: int, until: int, incident: str, verified: bool) -> tuple[int, ...]:
        """Marks those between the state gone back to and the fault as suspect ([`CheckpointKeeper.distrust`])."""
        self.unverified.clear()
        return () if self._keeper is None else tuple(self._keeper.distrust(after, until, incident, verified))

    def reinstate(self, suspects: Iterable[int]) -> list[int]:
        """Makes suspects that were found to be finite unverified again; returns their steps."""
        good = [] if self._keeper is None else self._keeper.reinstate(suspects)
        self.unverified.extend(good)
        return good

    def has_good(self, step: int) -> bool:
        """Whether there is one of this step that can be resumed from; the first rank knows."""
        return self._keeper is not None and self._keeper.has_good(step)

    def newest(self) -> str | None:
        """Finds the newest one that the run can go back to, or else the one it was resumed from. Collective."""
        return consensus.looked_up_by_first_rank("newest checkpoint to go back to", self._newest_here, self._device)

    def _newest_here(self) -> str | None:
        newest = newest_checkpoint_of(self._journal.run_id, self._output_dir, verified=True)
        return newest or self._resumed_from
