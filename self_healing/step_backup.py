"""A copy of weights and optimizer state from before each `optimizer.step()`, to undo one that failed half-way."""

from __future__ import annotations

from .instrument import Instrument, with_room
from .snapshots import SnapshotRing


class StepBackup:
    """
    The state right before the step that is being taken.

    Costs one copy of weights and optimizer state a step; on a GPU the step has to wait for it.

    Args:
        instrument ([`Instrument`]):
            Of the trainer.
    """

    def __init__(self, instrument: Instrument) -> None:
        self._instrument = instrument
        self._ring = SnapshotRing(generations=1)

    def take(self) -> None:
        """Copies the state as it is now."""
        self._ring.take(self._instrument.view.live_state(), self._instrument.view.step, {}).wait()

    def put_back(self) -> None:
        """Writes it into the live tensors."""
        if self._ring.candidate is None:
            raise RuntimeError("no state was copied before the step")
        candidate, instrument = self._ring.candidate, self._instrument
        with_room(lambda: self._ring.restore(candidate, instrument.view.live_state()), instrument.view.device)
