"""`OptimizerBackup`: undoes an `optimizer.step()` that ran out of memory half-way."""

from __future__ import annotations

import logging

from ..classify import classify_exception
from ..failures import FailureType
from ..instrument import TrainerView, is_out_of_memory, with_room
from ..rollback.ring import SnapshotRing


logger = logging.getLogger("self_healing")


class OptimizerBackup:
    """Copies weights and optimizer state to host memory before each step, and puts them back."""

    def __init__(self) -> None:
        self._ring = SnapshotRing(generations=1)

    def take(self, view: TrainerView) -> bool:
        """Copies the state before a step. Gives `False` where there is no host memory for it."""
        try:
            self._ring.take(view.live_state(), view.step, {}).wait()
        except Exception as error:
            if classify_exception(error) is not FailureType.OUT_OF_MEMORY:
                raise
            logger.warning(
                "Step %d: there is no host memory for the copy that optimizer_step_backup=True makes before each "
                "step (%s). Training goes on without it.",
                view.step,
                error,
            )
            return False
        return True

    def restore(self, view: TrainerView) -> bool:
        """Puts back what was copied before the step. Gives `False` where that is not possible."""
        before = self._ring.candidate
        if before is None:
            return False
        try:
            with_room(lambda: self._ring.restore(before, view.live_state()), view.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("Step %d: the copy made before the step could not be put back.", view.step)
            return False
        return True
