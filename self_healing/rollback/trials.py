"""Puts earlier states of a run in place for an experiment, and its own state back afterwards."""

from __future__ import annotations

from ..hf.step import Control
from ..ranks import votes
from .in_place import StateInPlace
from .kept_batches import KeptBatches
from .ring import SnapshotRing
from .snapshots import Snapshot
from .trusted import TrustedStates


class StateTrials:
    """Tries out states of a run: is an earlier one better at this batch, is it the data that have become harder?"""

    def __init__(
        self, ring: SnapshotRing, batches: KeptBatches, in_place: StateInPlace, states: TrustedStates
    ) -> None:
        self._ring, self._batches = ring, batches
        self._in_place = in_place
        self.states = states

    def begin(self, step: int) -> bool:
        """Sets the run's own state aside, however bad it is; returns `False` if memory is short."""
        return self.states.set_aside(step)

    def begin_with_checkpoints(self, step: int, unmoved: bool) -> bool:
        """Sets the run's own state aside as [`begin`] does, for an experiment with checkpoints."""
        return self.begin(step) or unmoved

    def try_snapshot(self, snapshot: Snapshot) -> Control | None:
        """Puts a state in place; returns a healthy step from before it, to compare with. Collective."""
        self._in_place.displaced = True
        self._in_place.put(snapshot)
        control = snapshot.extras.get("control")
        if control is None and snapshot is self._ring.initial and self._batches.first_steps:
            # Its first step was computed with this state.
            control = self._batches.first_steps[0]
        return self._on_all_ranks(control)

    def put_back(self, snapshot: Snapshot) -> None:
        """Puts a state in place that the run goes on from, whatever an experiment was left by."""
        self._in_place.put(snapshot)

    def try_checkpoint(self, checkpoint: str) -> bool:
        """Puts a checkpoint in place; returns `False` if it cannot be loaded, or is not finite. Collective."""
        self._in_place.displaced = True
        return self._in_place.try_to_load(checkpoint)

    def last_healthy(self) -> Control | None:
        """Returns the last step before anything was wrong with the loss; `None` if a rank lacks it. Collective."""
        return self._on_all_ranks(self._batches.newest_healthy)

    def _on_all_ranks(self, control: Control | None) -> Control | None:
        """Returns a step that all ranks have kept; else `None`, for all of them compute it again or none does."""
        kept = votes.all_ranks("has a control", control is not None, self._in_place.device)
        return control if kept else None

    def prefer(self, snapshot: Snapshot) -> None:
        """Drops the states that are newer than one that was found to be better."""
        for newer in [each for each in self._ring.trusted if each.step > snapshot.step][:1]:
            self._ring.distrust(newer)

    def end(self) -> None:
        """Puts the run's own state back, if it was set aside."""
        if self._ring.candidate is not None:
            self._in_place.put(self._ring.candidate)
            self._ring.discard()
            self._in_place.displaced = False

    def end_with_checkpoints(self, resumed_from: str) -> None:
        """Puts the run's own state back, after [`begin_with_checkpoints`]."""
        if self._ring.candidate is not None:
            self.end()
        else:
            self._in_place.load(resumed_from)
            self._in_place.displaced = False
