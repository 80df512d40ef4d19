"""Puts another state in place of the one that a run is in."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ..failures.classify import classify_exception
from ..failures.recipes import FailureType
from ..hf.adapter import Instrument
from ..hf.memory import free_memory, is_out_of_memory, let_go, with_room
from ..hf.state import LiveState, optimizer_in_training_mode, reload_checkpoint
from ..ranks import votes
from .kept_batches import KeptBatches
from .ring import SnapshotRing
from .snapshots import Snapshot


logger = logging.getLogger("self_healing")


class StateInPlace:
    """The state that a run is in, which snapshots and checkpoints are written over."""

    def __init__(self, ring: SnapshotRing, batches: KeptBatches) -> None:
        self._ring, self._batches = ring, batches
        self._instrument: Instrument | None = None
        # Whether it is that of an experiment, or one gone back to that the run has not yet gone on from.
        self.displaced = False

    def attach(self, instrument: Instrument) -> None:
        """Takes the instrument of the running `train()` call."""
        self._instrument = instrument

    def detach(self) -> None:
        """Lets go of it: the run has ended."""
        self._instrument = None

    @property
    def attached(self) -> bool:
        """Whether `train()` was entered, and the run has not ended."""
        return self._instrument is not None

    @property
    def instrument(self) -> Instrument:
        """Of the running `train()` call."""
        if self._instrument is None:
            raise RuntimeError("there is no run to keep the states of")
        return self._instrument

    @property
    def device(self) -> torch.device:
        """Where the run trains."""
        device: torch.device = self.instrument.trainer.accelerator.device
        return device

    @property
    def live(self) -> LiveState:
        """Its tensors."""
        return self.instrument.view.live_state()

    def put(self, snapshot: Snapshot) -> None:
        """Writes a snapshot over it."""
        if self.instrument.failsafe.device_lost:
            return
        with_room(lambda: self._ring.restore(snapshot, self.live), self.device, give_up=self._give_up_memory)
        self.instrument.engine.state_put()
        optimizer_in_training_mode(self.instrument.trainer)

    def _give_up_memory(self) -> None:
        # The gradients are those of the state that is left.
        self.instrument.engine.discard()
        self.free_batches(of_host=False)

    def free_batches(self, of_host: bool) -> int:
        """Frees memory of the host or of the device that kept batches take ([`KeptBatches.free`])."""
        return self._batches.free(of_host, self.device, self._ring.snapshots())

    def try_to_put(self, snapshot: Snapshot) -> bool:
        """Writes a snapshot over it, at the second attempt if need be; returns whether that succeeded."""
        for _ in range(2):
            try:
                self.put(snapshot)
            except Exception as error:
                if classify_exception(error) in (FailureType.DEVICE, FailureType.PROCESS_DIED):
                    raise
                logger.warning("The state of step %d could not be put in place.", snapshot.step, exc_info=True)
                let_go(error)
            else:
                return True
            # Outside of the handler: what the failed attempt held is gone.
            free_memory(self.device)
        return False

    def load(self, checkpoint: str) -> None:
        """Writes a checkpoint over it."""
        if self.instrument.failsafe.device_lost:
            return
        # It is written over what may still be being copied.
        self._ring.wait()
        reload_checkpoint(self.instrument.trainer, checkpoint)

    def try_to_load(self, checkpoint: str) -> bool:
        """Writes a checkpoint over it, if all ranks have it: nodes may have disks of their own."""
        if not votes.all_ranks("the checkpoint is here", Path(checkpoint).is_dir(), self.device):
            logger.warning("%s is not there on all ranks, and is not loaded.", checkpoint)
            return False
        failed = False
        try:
            self.load(checkpoint)
        except Exception as error:
            if self.instrument.failsafe.tells_of_lost_device(error):
                raise
            failed = True
            logger.warning("%s could not be loaded.", checkpoint, exc_info=True)
        return self.is_sound(failed)

    def is_sound(self, failed: bool = False) -> bool:
        """Searches it for NaN and Inf."""
        return votes.all_ranks(
            "the state put in place is sound",
            not failed and not self.instrument.view.nonfinite_tensors(),
            self.device,
        )

    def is_known_to_be_finite(self) -> bool:
        """Whether a search of this rank finds it finite; `False` where there is no memory to search it."""
        try:
            return not self.instrument.view.nonfinite_tensors()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
