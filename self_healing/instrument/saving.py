"""Handles checkpoints that the Trainer cannot write because of the disk: puts its state back, and training goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ..failures.classify import classify_exception, costs_its_save
from ..failures.recipes import FailureType
from ..hf.saving import SavingTogether, was_rotating
from ..ranks import votes
from ..system import processes
from ..system.files import STATE_FILE
from ..system.random_state import RandomState


class SaveOutcomes(Protocol):
    """The events of saving checkpoints."""

    def failed(self, error: Exception, checkpoint: Path, step: int, best: str | None, untouched: bool) -> bool:
        """Called when a checkpoint could not be written."""

    def failed_together(self, error: Exception, checkpoint: Path, step: int, again: bool) -> None:
        """Called on the other ranks with what [`failed`] has returned on the first one."""

    def not_rotated(self, error: Exception, checkpoint: Path, step: int) -> None:
        """Called when a checkpoint was written, and an older one could not be removed."""

    def saved(self, checkpoint: Path, step: int) -> None:
        """Called when a checkpoint was written."""


class CheckpointSaving:
    """Writes the checkpoints of one trainer's schedule."""

    def __init__(
        self, trainer: Any, outcomes: SaveOutcomes, contained: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._trainer = trainer
        self._outcomes = outcomes
        self._contained = contained
        self._best: tuple[float | None, int | None] = (None, None)

    def evaluation_may_follow(self) -> None:
        """Called before the Trainer evaluates: a best model that cannot be saved is not the best one on disk."""
        state = self._trainer.state
        self._best = state.best_metric, state.best_global_step

    def write(self, save: Callable[..., None], model: Any, trial: Any, *args: Any, **kwargs: Any) -> bool:
        """Calls the Trainer's `_save_checkpoint`."""
        trainer, together = self._trainer, SavingTogether(self._trainer)
        several = processes.world_size() > 1
        if several and not together.possible:
            save(model, trial, *args, **kwargs)
            return True
        step = int(trainer.state.global_step)
        checkpoint = Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{step}"
        rewind = self._mark()
        while True:
            before = _files_of(checkpoint)
            try:
                if several:
                    together.save(save, checkpoint, model, trial, *args, **kwargs)
                else:
                    save(model, trial, *args, **kwargs)
            except Exception as error:
                # Of a connection, and not of a file: it is waited for, and the save is made again.
                lost = getattr(error, "errno", 0) is None and classify_exception(error) is FailureType.NETWORK
                if (lost and not several) or not costs_its_save(error):
                    raise
                written, again = was_rotating(error), None
                with self._contained():
                    if written:
                        self._outcomes.not_rotated(error, checkpoint, step)
                    else:
                        rewind()
                        best = trainer.state.best_model_checkpoint
                        # One that is to be written again may have been marked as incomplete before.
                        complete = str(checkpoint / STATE_FILE) in before
                        untouched = complete and _files_of(checkpoint) == before
                        decides = processes.is_first_rank()
                        again = decides and self._outcomes.failed(error, checkpoint, step, best, untouched)
                if written:
                    return True
                if several:
                    again = self._decided_together(again, error, checkpoint, step)
                if again is None:
                    # Handling it has failed as well.
                    raise
                if not again:
                    if trainer.state.best_global_step == step:
                        trainer.state.best_metric, trainer.state.best_global_step = self._best
                    return False
            else:
                with self._contained():
                    self._outcomes.saved(checkpoint, step)
                return True

    def _decided_together(self, again: bool | None, error: Exception, checkpoint: Path, step: int) -> bool | None:
        """What the first rank has decided, and done about the files; `None` where that has failed on any rank."""
        device = self._trainer.accelerator.device
        failed, wanted, *_ = votes.sum_over_ranks(
            "the checkpoint is written once more", [again is None, bool(again)], device
        )
        if failed:
            return None
        again = wanted > 0
        if not processes.is_first_rank():
            with self._contained():
                self._outcomes.failed_together(error, checkpoint, step, again)
        return again

    def _mark(self) -> Callable[[], None]:
        """Notes what saving changes beside files; the function it returns puts that back."""
        state = self._trainer.state
        best = state.best_model_checkpoint
        callbacks = {
            name: list(kept) if isinstance(kept, list) else kept for name, kept in state.stateful_callbacks.items()
        }
        rng = RandomState.capture(self._trainer.accelerator.device)

        def rewind() -> None:
            state.best_model_checkpoint = best
            state.stateful_callbacks = {
                name: list(kept) if isinstance(kept, list) else kept for name, kept in callbacks.items()
            }
            rng.restore()

        return rewind


def _files_of(checkpoint: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, size and time of change of all files; none for a checkpoint that is not there."""
    found: dict[str, tuple[int, int, int]] = {}
    with contextlib.suppress(OSError):
        for path in checkpoint.rglob("*"):
            if path.is_file():
                status = path.stat()
                found[str(path)] = status.st_ino, status.st_size, status.st_mtime_ns
    return found
