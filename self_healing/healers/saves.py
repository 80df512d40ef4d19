"""Handles checkpoints that cannot be written: no torn ones are left, room is made, the run goes on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..checkpoints.retention import disk_full, expendable_checkpoint, remove_torn
from ..failures.classify import describe_exception
from ..failures.recipes import Action, FailureType, text_of
from ..hf.saving import CheckpointSaving
from ..journal.incident import Incident
from ..run.healer import Healer
from ..run.run import Run


logger = logging.getLogger("self_healing")


class SaveHealer(Healer):
    """The checkpoints of one run that could not be written, in one incident until the next one can."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._incident: Incident | None = None
        self._told = False
        self._missing: list[int] = []
        self._made_room_at: int | None = None
        self._not_rotated = False

    def attach(self, first: bool) -> None:
        if self._run.config.on_save_failure != "raise":
            instrument = self._run.instrument
            instrument.saves.writer = CheckpointSaving(instrument.trainer, self, instrument.failsafe.contained)

    def failed(self, error: Exception, checkpoint: Path, step: int, best: str | None, untouched: bool = False) -> bool:
        """Deals with a checkpoint that could not be written; whether it can be written now."""
        full = disk_full(error, checkpoint)
        told = full or error
        incident = self._opened(told, checkpoint, step)
        kept = "nothing was written to the checkpoint that was there already" if untouched else None
        why = kept or remove_torn(checkpoint)
        self._acted(
            Action.REMOVE_PARTIAL_CHECKPOINT,
            happened=why is None,
            checkpoint=str(checkpoint),
            error=describe_exception(told)[:300],
            why=why,
        )
        if why is not None and not untouched:
            logger.error(
                "What was written of %s could not be removed (%s). Please remove it: it is not complete, and must not "
                "be resumed from.",
                checkpoint,
                why,
            )
        if full is not None and self._kept_ones_give_way(incident):
            return True
        if full is not None and self._run.config.on_save_failure == "make_room" and self._made_room_at != step:
            self._made_room_at = step
            if self._make_room(incident, checkpoint, best):
                return True
        self._go_on_without(incident, told, checkpoint, step)
        return False

    def failed_together(self, error: Exception, checkpoint: Path, step: int, again: bool) -> None:
        """
        Takes in that a checkpoint of several processes could not be written, where another one has dealt with it.
        """
        incident = self._opened(error, checkpoint, step)
        if self._run.instrument.trainer.args.should_save:
            # The first one of another node, with a disk of its own.
            remove_torn(checkpoint)
        if not again:
            self._go_on_without(incident, error, checkpoint, step)

    def _go_on_without(self, incident: Incident, error: Exception, checkpoint: Path, step: int) -> None:
        self._missing.append(step)
        incident.evidence["missing"] = list(self._missing)
        self._acted(Action.GO_ON_WITHOUT, checkpoint=str(checkpoint))
        if self._told:
            logger.error(
                "Step %d: %s could not be written either (%s). Training goes on; checkpoints missing so far: %s.",
                step,
                checkpoint,
                describe_exception(error),
                ", ".join(map(str, self._missing)),
            )
        else:
            self._tell(incident)

    def _opened(
        self, error: Exception, checkpoint: Path, step: int, cause: str = "a checkpoint could not be written"
    ) -> Incident:
        if self._incident is None:
            journal = self._run.journal
            why = f"The error: {describe_exception(error)[:300]}"
            evidence = {"checkpoint": str(checkpoint), "message": text_of(error)[:500], "why": why}
            self._incident = journal.open(step, type(error).__name__, evidence)
            journal.diagnosed(self._incident, FailureType.DISK, cause, {})
            self._told = False
        return self._incident

    def _acted(self, action: Action, **result: Any) -> None:
        assert self._incident is not None
        self._run.journal.acted(self._incident, action.value, **result)

    def _tell(self, incident: Incident) -> None:
        self._told = True
        self._run.journal.dealt_with(incident)

    def _kept_ones_give_way(self, incident: Incident) -> bool:
        """They are ours, and there only because nobody needed the room: this is asked of nobody."""
        removed = self._run.rollback.checkpoints.give_way()
        if removed:
            self._acted(Action.MAKE_ROOM, kept=removed)
            incident.figures.append(f"last-known-good/ gave way: {', '.join(removed)} removed")
        return bool(removed)

    def _make_room(self, incident: Incident, checkpoint: Path, best: str | None) -> bool:
        oldest = expendable_checkpoint(self._run.run_id, checkpoint.parent, best)
        if oldest is None:
            why = "every other checkpoint is verified, the best, the newest, or kept in last-known-good/ as well"
            self._acted(Action.MAKE_ROOM, happened=False, removed=None, why=why)
            return False
        failed = remove_torn(oldest)
        self._acted(Action.MAKE_ROOM, happened=failed is None, removed=str(oldest), why=failed)
        if failed is None:
            incident.figures.append(f"{oldest.name} removed")
        return failed is None

    def not_rotated(self, error: Exception, checkpoint: Path, step: int) -> None:
        """Takes in that a checkpoint was written, and an older one could not be removed."""
        logger.warning(
            "Step %d: %s is written, but an older checkpoint could not be removed (%s: %s); save_total_limit is "
            "exceeded until one can be.",
            step,
            checkpoint,
            type(error).__name__,
            error,
        )
        self.saved(checkpoint, step)
        if not self._not_rotated:
            # Of all such removals in a run the first: the others are in the log.
            self._opened(error, checkpoint, step, "an older checkpoint could not be removed")
            self._acted(Action.GO_ON_WITHOUT, checkpoint=str(checkpoint))
            self._not_rotated = self._told = True
            self.saved(checkpoint, step)

    def saved(self, checkpoint: Path, step: int) -> None:
        """Takes in that a checkpoint was written."""
        incident = self._incident
        if incident is None:
            return
        if not self._told:
            self._tell(incident)
        if self._missing:
            steps = ", ".join(map(str, self._missing))
            missing = f"that of step {steps}" if len(self._missing) == 1 else f"those of steps {steps}"
            logger.warning("Step %d: checkpoints can be written again (%s). Missing: %s.", step, checkpoint, missing)
        self._run.journal.closed(incident, "resolved", written=str(checkpoint), missing=list(self._missing))
        self._incident, self._missing = None, []

    def run_ends(self, step: int) -> None:
        """At the end of the run: says what there is no checkpoint of."""
        incident = self._incident
        if incident is None:
            return
        self._run.journal.closed(incident, "unresolved", missing=list(self._missing))
        self._incident = None
        logger.error(
            "The last checkpoint could not be written: the steps up to %d are in this process's memory only, and lost "
            "when it ends. Please save the model where there is room: trainer.save_model(<another directory>). "
            "Incident %s.",
            step,
            incident.id,
        )
