"""When a snapshot or a checkpoint is trusted: after healthy steps on all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..checkpoints.retention import RunCheckpoints
from ..config.healing_config import HealingConfig
from ..hf.adapter import Instrument
from ..hf.memory import is_out_of_memory, retry_after_freeing
from ..hf.state import LiveState, optimizer_in_training_mode, unwrap_optimizer
from ..hf.step import Window
from ..hf.trainer_state import ResumeRecord
from ..journal.journal import Journal
from ..ranks import votes
from ..system import processes
from ..system.random_state import RandomState
from .host_memory import TRANSFERS, free_host_memory
from .ring import KeptBatches, SnapshotRing
from .shared_memory import SharedStates, StoredState
from .snapshots import Snapshot, SnapshotInterval, size_of, size_to_be


logger = logging.getLogger("self_healing")


# A run that fails this early has not got far: it goes back to where it began.
EARLY_STEPS = 50
# The questions of the votes in which all ranks take a snapshot, trust it, or set a state aside.
TAKEN, TRUSTED = "there is no memory for a snapshot", "a snapshot is sound"
SET_ASIDE = "there is no memory to set the state aside"
# Why a snapshot is not trusted, the worst last.
_TORN, _NOT_FINITE = 1, 2


def found_wrong(search: Callable[[], list[str]]) -> list[str]:
    """What a search finds not to be finite; a state that there is no memory to search is not trusted either."""
    try:
        return search()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return ["it could not be searched: out of memory"]


class TrustedStates:
    """Takes snapshots of a run, and trusts those that have stood the test."""

    def __init__(
        self,
        config: HealingConfig,
        journal: Journal,
        checkpoints: RunCheckpoints,
        shared: SharedStates | None = None,
        inherited: StoredState | None = None,
    ) -> None:
        self._config, self._journal, self._checkpoints = config, journal, checkpoints
        self.ring, self.batches = SnapshotRing(shared=shared), KeptBatches()
        self.interval = SnapshotInterval(config)
        # Healthy steps in a row.
        self.streak = 0
        # Whether the run is in the state of an experiment, or in one gone back to that it has not yet gone on from.
        self.displaced = False
        # What the process before this one has left, until there is a trusted state of this one.
        self._inherited = inherited
        self._learned: Any = None
        self._instrument: Instrument | None = None
        self._on_disk_only = not config.snapshots
        # Until then the run has only just begun, with detectors that had nothing to go by.
        self._early_until = 0
        self._optimizer: Any = None
        # Whether a forward was seen to write to the weights: training waits for copies of them.
        self._forward_writes = False
        # The step in which a candidate was refused.
        self._refused_at = -1

    # ---- the run ----

    @property
    def instrument(self) -> Instrument:
        """Of the running `train()` call."""
        if self._instrument is None:
            raise RuntimeError("there is no run to keep the states of")
        return self._instrument

    @property
    def device(self) -> torch.device:
        """Where the run trains."""
        return self.instrument.view.device

    @property
    def live(self) -> LiveState:
        """Its tensors."""
        return self.instrument.view.live_state()

    def prepare(self, instrument: Instrument) -> None:
        """Called as soon as the weights are known: a thread takes memory for the state that the run begins with."""
        view = instrument.view
        if not self._on_disk_only and view.can_recompute:
            self.ring.reserve(size_of(view.live_state()), view.device)

    def begin(
        self, instrument: Instrument, cold: bool, learned: Any, resumed_from: str | None, finite: bool = True
    ) -> None:
        """Called whenever `train()` is entered: keeps the state it begins with, unless what is kept still holds."""
        first, self._instrument, self._learned = self._instrument is None, instrument, learned
        self.batches.newest_healthy = None
        self.streak = 0
        step = int(instrument.trainer.state.global_step)
        if first:
            self._checkpoints.begin(instrument.trainer.args, resumed_from, step, finite)
            self._early_until = step + EARLY_STEPS if cold else step
        optimizer = unwrap_optimizer(instrument.trainer.optimizer)
        if not first and optimizer is self._optimizer:
            # Entered again with the same model and optimizer: what was trusted still is, unless it is yet to come.
            self._forget_beyond(step)
            return
        self._optimizer = optimizer
        if not first:
            # Kept batches are those of another model, too.
            self.ring.release()
            self.batches.release()
        self.batches.stop_recording()
        self._on_disk_only |= not instrument.view.can_recompute
        if not self._on_disk_only and self._take(step):
            self.ring.initial, self.ring.candidate = self.ring.candidate, None
            # Before the first step there may be an evaluation, for which some optimizers swap the weights.
            self.ring.join()
            self.ring.reserve(size_to_be(self.live), self.device)

    def _forget_beyond(self, step: int) -> None:
        """Forgets states and steps of a future that will be another one: the run goes on from an earlier step."""
        ring = self.ring
        ring.discard()
        for ahead in [each for each in ring.trusted if each.as_of > step][:1]:
            ring.distrust(ahead)
        if ring.initial is not None and ring.initial.as_of > step:
            ring.initial = None
        self.batches.keep_only(range(step))
        self.interval.last_taken = min(self.interval.last_taken, step)

    def release(self) -> None:
        """Gives all host memory back: the run has ended."""
        self.ring.release()
        self.batches.release()
        self._optimizer = self._instrument = None

    def early(self, step: int) -> bool:
        """Whether the run has only just begun, with detectors that had nothing to go by."""
        return step < self._early_until

    def generations(self) -> list[Snapshot]:
        """Lists the trusted states in memory, the newest first."""
        initial = [] if self.ring.initial is None else [self.ring.initial]
        return [*reversed(self.ring.trusted), *initial]

    # ---- steps ----

    def step_begins(self, step: int) -> bool:
        """Called between two steps; returns whether a snapshot is due, if nothing is wrong with the loss."""
        shared, interval = self.ring.shared, self.interval
        if shared is not None and shared.prepared is not None and shared.prepared.snapshot.looked_at:
            shared.store()
        since = step - interval.last_taken
        if since == 1 and not self._on_disk_only and self.ring.lacks_room:
            # By now the optimizer has all its state.
            self.ring.reserve(size_to_be(self.live), self.device)
        due = since >= interval.steps and not self._on_disk_only and self.ring.candidate is None
        # Put off until its memory is pinned, where no other rank waits for this one.
        waits = due and self.ring.reserving and self.device.type in TRANSFERS and processes.world_size() == 1
        return due and not waits

    def step_taken(
        self, window: Window, loss: float, healthy: bool, vouched: Callable[[int], bool] = lambda _: True
    ) -> bool:
        """
        Takes in a step that is about to be applied, and keeps its batch; returns whether the candidate has stood the
        test with it.
        """
        step = window.step
        # Whatever was put in place while it was judged: the run goes on from there.
        self.displaced = False
        if self.ring.under_way is not None:
            # What comes now, if only that a step is left out, may change what is still being copied.
            self.ring.join()
        control = self.batches.keep(window, loss, step < self._early_until)
        if not healthy:
            self.streak = 0
            return False
        candidate = self.ring.candidate
        due = candidate is not None and self.will_trust(step) and vouched(candidate.step)
        self.streak += 1
        self.batches.newest_healthy = control
        return due

    def will_trust(self, step: int) -> bool:
        """Whether this step, if it is healthy, completes the test of the candidate, which all ranks then vote on."""
        candidate, needed = self.ring.candidate, self._config.snapshot_verify_steps
        return candidate is not None and self.streak + 1 >= needed and candidate.step + needed <= step + 1

    def verify_checkpoints(self, step: int) -> None:
        """Has the healthy steps up to one that was taken in verify what is on disk, too."""
        if not self._checkpoints.waiting:
            return
        needed = self._config.snapshot_verify_steps
        if self.streak >= needed and self._refused_at != step:
            self._checkpoints.verify_up_to(step + 1 - needed)

    # ---- taking snapshots ----

    def take_snapshot(self, step: int) -> None:
        """Takes a snapshot between two steps. All ranks have to come."""
        shared, instrument = self.ring.shared, self.instrument
        if shared is not None and instrument.view.can_hand_over:
            shared.open(lambda: size_of(self.live))
        self._take(step)
        candidate = self.ring.candidate
        if shared is not None and shared.active and candidate is not None:
            # Whether it outlives the process is a matter of this rank alone: no vote depends on it.
            random = instrument.reentry.random_state_to_resume()
            if random is not None:
                record = partial(ResumeRecord.of, instrument.trainer, instrument.ledger, random)
                shared.prepare(candidate, self.live, record)
        # The copy is no part of the step that it is held against.
        self.interval.began = time.perf_counter()

    def set_aside(self, step: int) -> bool:
        """Keeps the state as it is, however bad, as the candidate; returns `False` if memory is short."""
        self.ring.discard()
        if self._on_disk_only or not self.generations():
            return False
        if self._copy(SET_ASIDE, step, {}):
            # The forward passes of an experiment are not those of training, and may write to it.
            self.ring.join()
            return True
        self.ring.discard()
        logger.warning("Step %d: there is no memory to set the state aside for an experiment.", step)
        return False

    def _take(self, step: int) -> bool:
        """Takes a snapshot; returns `False` if memory is short, now and later. All ranks have to come."""
        # A schedule-free optimizer swaps the weights in place between training and evaluation.
        optimizer_in_training_mode(self.instrument.trainer)
        kept = {"rng": RandomState.capture(self.device), "control": self.batches.newest_healthy}
        self.interval.last_taken = step
        if self._copy(TAKEN, step, self._learned.remember() | kept):
            if self._forward_writes:
                self.ring.join()
            self.batches.record()
            return True
        self._rely_on_disk(size_of(self.live))
        return False

    def _copy(self, question: str, step: int, extras: dict[str, Any]) -> bool:
        """Copies the state into a candidate, with fewer older ones if need be. All ranks have to come."""
        live = self.live
        while True:
            fits = self.ring.fits(live)
            # On Linux memory that is promised is not always there.
            lacks = fits and self._lacks_memory(live, step, extras)
            # One vote, where it fits. Ranks that have taken it take it again, once all of them have made room.
            too_large, lacking, *_ = votes.sum_over_ranks(question, (not fits, lacks), self.device)
            if not too_large and not lacking:
                return True
            if not (too_large and self.ring.shrink()):
                return False

    def _lacks_memory(self, live: LiveState, step: int, extras: dict[str, Any]) -> bool:
        """Takes a snapshot; returns whether memory ran out on this rank."""
        try:
            retry_after_freeing(lambda: self.ring.take(live, step, extras), self.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.info("Step %d: there is no memory for a copy of the state: %s", step, error)
            return True
        return False

    def _rely_on_disk(self, needed: int) -> None:
        self._on_disk_only = True
        free = free_host_memory()
        self._let_go_of_inherited()
        self.ring.release()
        self.batches.stop_recording()
        self._journal.event("snapshots_off", self.interval.last_taken, bytes_needed=needed, bytes_free=free)
        logger.warning(
            "Snapshots are off: one takes %.2f GB of host memory, and only %.2f GB are free. A rollback will use the "
            "newest trusted checkpoint on disk instead; please set save_steps to the number of steps that you can "
            "afford to lose.",
            needed / 1e9,
            free / 1e9,
        )

    def _let_go_of_inherited(self) -> None:
        if self._inherited is not None:
            self._inherited.remove()
            self._inherited = None

    # ---- trusting them ----

    def promote(self, step: int) -> list[str]:
        """Trusts the candidate, if it is whole and finite on all ranks; returns what is not finite."""
        candidate = self.ring.candidate
        assert candidate is not None
        bad = found_wrong(candidate.nonfinite)
        wrong = _NOT_FINITE if bad else _TORN if candidate.torn else 0
        share = 0.0 if wrong else self.interval.share_of_step(candidate, step + 1 - candidate.step)
        worst, share = votes.largest(TRUSTED, (wrong, share), self.device)[:2]
        if worst == _TORN:
            return self._take_another(candidate, step)
        if worst:
            return self._refuse(candidate, step, bad or ["on another rank"])
        self.ring.promote()
        if self.ring.shared is not None:
            self.ring.shared.store()
        self._let_go_of_inherited()
        self.batches.keep_only(range(candidate.step, step + 1))
        if not self.early(step + 1):
            self.ring.forget_initial()
        if self.interval.choose(share):
            verify_steps = self._config.snapshot_verify_steps
            self._journal.event(
                "snapshots",
                step,
                # Nothing is taken while a candidate is being verified.
                interval=max(self.interval.steps, verify_steps),
                verify_steps=verify_steps,
                bytes=self.ring.nbytes,
                seconds=self.interval.held_up,
                share_of_step=share,
            )
        return []

    def _take_another(self, candidate: Snapshot, step: int) -> list[str]:
        """Drops a copy part of which is older than the rest. Of the weights it says nothing."""
        self._forward_writes = True
        self.ring.discard()
        self.interval.last_taken = step + 1 - self.interval.steps
        why = "written to while they were copied"
        self._journal.event("snapshot_refused", step, taken_at=candidate.step, tensors=[why])
        logger.info("Step %d: weights were %s at step %d; another copy is made.", step, why, candidate.step)
        return []

    def _refuse(self, candidate: Snapshot, step: int, bad: list[str]) -> list[str]:
        self._refused_at = step
        self.ring.discard()
        self._journal.event("snapshot_refused", step, taken_at=candidate.step, tensors=bad[:20])
        logger.warning(
            "Step %d: the snapshot of step %d is not finite (%s) and is not trusted.",
            step,
            candidate.step,
            ", ".join(bad[:5]),
        )
        return bad
