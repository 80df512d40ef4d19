"""When a snapshot or a checkpoint is trusted: after healthy steps on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from ..checkpoints.retention import RunCheckpoints
from ..config.healing_config import HealingConfig
from ..hf.memory import is_out_of_memory, with_room
from ..hf.state import LiveState, optimizer_in_training_mode
from ..hf.step import Control, Window
from ..hf.trainer_state import ResumeRecord
from ..journal.journal import Journal
from ..ranks import votes
from ..system.random_state import RandomState
from .host_memory import free_host_memory, size_of
from .ring import KeptBatches, SnapshotRing, StateInPlace
from .shared_memory import SharedStates
from .snapshots import Snapshot, SnapshotInterval


logger = logging.getLogger("self_healing")


# ---- trusted: decides which states of a run are kept in host memory, and which of them are trusted ----


# A run that fails this early has not got far: it goes back to where it began.
EARLY_STEPS = 50
# Votes after which ranks do not meet any more in what they are about.
TAKEN, TRUSTED = "there is no memory for a snapshot", "a snapshot is sound"
SET_ASIDE = "there is no memory to set the state aside"


class TrustedStates:
    """Takes snapshots of a run, and trusts those that have stood the test."""

    def __init__(
        self,
        config: HealingConfig,
        journal: Journal,
        ring: SnapshotRing,
        batches: KeptBatches,
        in_place: StateInPlace,
        checkpoints: RunCheckpoints,
        remember: Callable[[], dict[str, Any]],
        shared: SharedStates | None = None,
        own_is_trusted: Callable[[], None] = lambda: None,
        inherited: Callable[[LiveState], Snapshot | None] = lambda live: None,
    ) -> None:
        self._own_is_trusted, self._inherited = own_is_trusted, inherited
        self._config, self._journal, self._remember = config, journal, remember
        self._shared = shared
        self._ring, self._batches = ring, batches
        self._in_place, self._checkpoints = in_place, checkpoints
        self.interval = SnapshotInterval(config)
        # Healthy steps in a row.
        self.streak = 0
        self._on_disk_only = not config.snapshots
        self._entry_step = 0
        self._cold = False
        self._optimizer: Any = None
        # The step in which a candidate was refused.
        self._refused_at = -1

    # ---- a run begins and ends ----

    def begin(self, first: bool, cold: bool) -> None:
        """Called whenever `train()` is entered: keeps the state it begins with, unless what is kept still holds."""
        self.interval.entry_begins()
        self._batches.newest_healthy = None
        self.streak = 0
        instrument = self._in_place.instrument
        step = int(instrument.trainer.state.global_step)
        if first:
            self._entry_step, self._cold = step, cold
        optimizer = self._in_place.live.optimizer
        if not first and optimizer is self._optimizer:
            # Entered again with the same model and optimizer: what was trusted still is, unless it is yet to come.
            self._forget_beyond(step)
            return
        self._optimizer = optimizer
        self._ring.release()
        if not instrument.view.can_reexecute:
            self._on_disk_only = True
        if self._on_disk_only:
            return
        self._take(step, self._inherited(self._in_place.live) if first else None)
        if not self._on_disk_only:
            self._ring.begin_with_candidate()
            # Before the first step there may be an evaluation, for which some optimizers swap the weights.
            self._ring.wait()

    def _forget_beyond(self, step: int) -> None:
        """Forgets states and steps of a future that will be another one: the run goes on from an earlier step."""
        ring = self._ring
        ring.discard()
        for ahead in [each for each in ring.trusted if each.as_of > step][:1]:
            ring.distrust(ahead)
        if ring.initial is not None and ring.initial.as_of > step:
            ring.initial = None
        self._batches.forget_beyond(step)
        self.interval.last_taken = min(self.interval.last_taken, step)

    def release(self) -> None:
        """Gives all host memory back."""
        self._ring.release()
        self._batches.release()
        self._optimizer = None

    def early(self, step: int) -> bool:
        """Whether the run has only just begun, with detectors that had nothing to go by."""
        return self._cold and step - self._entry_step < EARLY_STEPS

    def generations(self) -> list[Snapshot]:
        """Lists the trusted states in memory, the newest first."""
        initial = [] if self._ring.initial is None else [self._ring.initial]
        return [*reversed(self._ring.trusted), *initial]

    # ---- steps ----

    def step_begins(self, step: int, calm: bool) -> bool:
        """Called between two steps."""
        if self._shared is not None:
            # By now all copies that the last step began with are complete, or training waits for them.
            self._shared.store()
        due = self.interval.step_begins(step)
        return due and calm and not self._on_disk_only and self._ring.candidate is None

    def take_snapshot(self, step: int) -> None:
        """Takes a snapshot between two steps. All ranks have to come."""
        if self._shared is not None and self._in_place.instrument.view.can_hand_over:
            self._shared.open(lambda: size_of(self._in_place.live))
        self._take(step)
        self._let_outlive()
        self.interval.copied()

    def _let_outlive(self) -> None:
        """Lets the candidate outlive the process. A matter of this rank alone: no vote depends on it."""
        candidate, shared = self._ring.candidate, self._shared
        if candidate is None or shared is None or not shared.active:
            return
        instrument = self._in_place.instrument
        random = instrument.reentry.random_state_to_resume()
        if random is not None:
            record = partial(ResumeRecord.of, instrument.trainer, instrument.ledger, random)
            shared.prepare(candidate, self._in_place.live, record)

    def keep_batch(self, window: Window, loss: float) -> Control | None:
        """Keeps the batch of a step that is about to be applied."""
        # Whatever was put in place while it was judged: the run goes on from there.
        self._in_place.displaced = False
        # What comes now, if only that a step is left out, may change what is still being copied.
        self._ring.join()
        batches = self._batches
        control = batches.copy_of(window, loss)
        if self.early(window.step):
            batches.keep_first(control)
        else:
            batches.forget_first()
        batches.record(window, None if self._on_disk_only else control)
        return control

    def step_taken(
        self, step: int, healthy: bool, control: Control | None, vouched: Callable[[int], bool] = lambda _: True
    ) -> bool:
        """Takes in a step that is about to be applied."""
        self.streak = self.streak + 1 if healthy else 0
        if not healthy:
            return False
        self._batches.newest_healthy = control
        candidate = self._ring.candidate
        if candidate is None or not self._verifies or candidate.step > self._verified(step):
            return False
        return vouched(candidate.step)

    def will_trust(self, step: int) -> bool:
        """Whether the candidate has stood the test with this step, if the step is healthy, but for what ranks say."""
        candidate, needed = self._ring.candidate, self._config.snapshot_verify_steps
        return candidate is not None and self.streak + 1 >= needed and candidate.step <= self._verified(step)

    @property
    def _verifies(self) -> bool:
        return self.streak >= self._config.snapshot_verify_steps

    def _verified(self, step: int) -> int:
        return step + 1 - self._config.snapshot_verify_steps

    def verify_checkpoints(self, step: int) -> None:
        """Has the healthy steps up to one that was taken in verify what is on disk, too."""
        if self._verifies and self._refused_at != step:
            self._checkpoints.verify_up_to(self._verified(step))

    # ---- taking snapshots ----

    def set_aside(self, step: int) -> bool:
        """Keeps the state as it is, however bad, as the candidate; returns `False` if memory is short."""
        self._ring.discard()
        if self._on_disk_only or not self.generations() or not self._make_room():
            return False
        live, device = self._in_place.live, self._in_place.device
        # Waited for: the forward passes of an experiment are not those of training, and may write to it.
        if votes.any_rank(SET_ASIDE, self._lacks_memory(live, step, {}, wait=True), device):
            self._ring.discard()
            logger.warning("Step %d: there is no memory to set the state aside for an experiment.", step)
            return False
        return True

    def _make_room(self) -> bool:
        """Gives up older states until a copy of the one there is now fits on all ranks. All of them have to come."""
        live = self._in_place.live
        while not votes.all_ranks("a snapshot fits", self._ring.fits(live), self._in_place.device):
            if not self._ring.shrink():
                self._rely_on_disk(size_of(live))
                return False
        return True

    def _rely_on_disk(self, needed: int) -> None:
        self._on_disk_only = True
        free = free_host_memory()
        self._own_is_trusted()
        self._ring.release()
        self._journal.event("snapshots_off", self.interval.last_taken, bytes_needed=needed, bytes_free=free)
        logger.warning(
            "Snapshots are off: one takes %.2f GB of host memory, and %.2f GB are free. A run that fails goes back to "
            "its newest trusted checkpoint on disk instead; please make sure that save_steps is as many steps as you "
            "can afford to lose.",
            needed / 1e9,
            free / 1e9,
        )

    def _take(self, step: int, there: Snapshot | None = None) -> None:
        """Takes a snapshot, unless one is there already, with fewer older ones if need be. All ranks have to come."""
        device = self._in_place.device
        # A schedule-free optimizer swaps the weights in place between training and evaluation.
        optimizer_in_training_mode(self._in_place.instrument.trainer)
        extras = self._remember() | {"rng": RandomState.capture(device), "control": self._batches.newest_healthy}
        live = self._in_place.live
        self.interval.last_taken = step

        def take() -> tuple[bool, bool]:
            if not self._ring.fits(live):
                return True, False
            if there is not None and there.step == step:
                self._ring.hold(there, live, extras)
                return False, False
            # On Linux memory that is promised is not always there.
            return False, self._lacks_memory(live, step, extras)

        while True:
            # One vote, where it fits. Ranks that have taken it take it again, once all of them have made room.
            too_large, lacking, *_ = votes.sum_over_ranks(TAKEN, take(), device)
            if not too_large and not lacking:
                return
            if not (too_large and self._ring.shrink()):
                self._rely_on_disk(size_of(live))
                return

    def _lacks_memory(self, live: LiveState, step: int, extras: dict[str, Any], wait: bool = False) -> bool:
        """Takes a snapshot; returns whether memory ran out on this rank."""
        try:
            taken = with_room(lambda: self._ring.take(live, step, extras), self._in_place.device)
            if wait:
                taken.wait()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.info("Step %d: there is no memory for a copy of the state: %s", step, error)
            return True
        return False

    # ---- trusting them ----

    def promote(self, step: int) -> list[str]:
        """Trusts the candidate, if it is whole and finite on all ranks."""
        candidate = self._ring.candidate
        if candidate is None:
            raise RuntimeError("there is no snapshot to be trusted")
        bad: list[str] = []

        def look() -> tuple[float, float, float]:
            if candidate.torn:
                return 1.0, 0.0, 0.0
            bad.extend(self._search(candidate))
            return 0.0, float(bool(bad)), 0.0 if bad else self.interval.share_of_step(candidate)

        torn, unsound, share = votes.largest(TRUSTED, look(), self._in_place.device)
        if torn:
            self._begin_to_wait(candidate, step)
            return []
        if unsound:
            self._refused_at = step
            self._ring.discard()
            self._journal.event("snapshot_refused", step, taken_at=candidate.step, tensors=bad[:20])
            logger.warning(
                "Step %d: the snapshot of step %d is not finite (%s) and is not trusted.",
                step,
                candidate.step,
                ", ".join(bad[:5]) or "on another rank",
            )
            return bad or ["on another rank"]
        self._ring.promote()
        if self._shared is not None:
            self._shared.store()
        self._own_is_trusted()
        self._batches.forget_before(candidate.step)
        if not self.early(step + 1):
            self._ring.forget_initial()
        self._choose_interval(share, step)
        return []

    def _begin_to_wait(self, torn: Snapshot, step: int) -> None:
        self._ring.discard()
        self._ring.waits = True
        refused = ["written to while they were copied"]
        self._journal.event("snapshot_refused", step, taken_at=torn.step, tensors=refused)
        logger.info(
            "Step %d: something other than the optimizer wrote to the weights while the snapshot of step %d was "
            "copied; it is not trusted, and from here on training waits for the copies.",
            step,
            torn.step,
        )

    def _search(self, candidate: Snapshot) -> list[str]:
        """Searches a candidate for tensors that are not finite; one that cannot be searched is not trusted either."""
        try:
            return with_room(candidate.nonfinite, self._in_place.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return ["it could not be searched: out of memory"]

    def _choose_interval(self, share: float, step: int) -> None:
        choice = self.interval.choose(share)
        if choice is None:
            return
        verify_steps = self._config.snapshot_verify_steps
        self._journal.event(
            "snapshots",
            step,
            # Nothing is taken while a candidate is being verified.
            interval=max(choice.steps, verify_steps),
            verify_steps=verify_steps,
            bytes=self._ring.nbytes,
            seconds=choice.seconds,
            share_of_step=choice.share_of_step,
        )


# ---- trials: puts earlier states of a run in place for an experiment, and its own state back afterwards ----


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
