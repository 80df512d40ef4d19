"""Which states of a run can be trusted, in memory and on disk, and going back to one of them."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from .. import consensus
from ..checkpoint_files import number_of
from ..checkpoints.choice import newest_checkpoint_of
from ..checkpoints.keeper import CheckpointKeeper
from ..checkpoints.marker import step_of
from ..checkpoints.trainer_state import missing_steps_in
from ..classify import classify_exception
from ..config import HealingConfig
from ..failures import FailureType
from ..instrument import (
    Control,
    Instrument,
    Window,
    free_memory,
    is_out_of_memory,
    let_go,
    optimizer_in_training_mode,
    reload_checkpoint,
    with_room,
)
from ..journal.journal import Journal
from ..random_state import RandomState
from ..run.went_back import Target, WentBack
from ..signals import StepSignals
from .kept_batches import KeptBatches
from .replay import Replay, Replayed
from .snapshots import Snapshot, SnapshotRing, free_host_memory, size_of


logger = logging.getLogger("self_healing")

# Between two snapshots, at least: closer ones would be no older than what verification takes anyway.
_LEAST_INTERVAL = 5
# A run that fails this early has not got far: it goes back to where it began.
EARLY_STEPS = 50


# Where to go if there is no such state.
_OTHERWISE = {
    Target.NEWEST: (Target.NEWEST, Target.INITIAL, Target.DISK),
    Target.OLDER: (Target.OLDER, Target.DISK, Target.INITIAL, Target.NEWEST),
    Target.INITIAL: (Target.INITIAL, Target.OLDER, Target.NEWEST, Target.DISK),
    Target.DISK: (Target.DISK, Target.INITIAL, Target.NEWEST),
}


class Rollback:
    """
    Keeps states that can be gone back to, and goes back to them.

    A state is trusted once `snapshot_verify_steps` healthy steps have come after it and it was found to be finite; of
    the states in memory that is a candidate until then, on disk a checkpoint that is marked unverified.

    Args:
        config ([`HealingConfig`]):
            Interval, budget, verification.
        journal ([`Journal`]):
            Where it is written down what is kept and what it costs.
        remember (`Callable[[], dict]`), recall (`Callable[[dict], None]`):
            Detectors and statistics as of a state; putting them back.
    """

    def __init__(
        self,
        config: HealingConfig,
        journal: Journal,
        remember: Callable[[], dict[str, Any]],
        recall: Callable[[dict[str, Any]], None],
    ) -> None:
        self.config = config
        self.journal = journal
        self._remember, self._recall = remember, recall
        self._forget()

    def _forget(self) -> None:
        config = self.config
        self.ring = SnapshotRing()
        self.interval = config.snapshot_interval or _LEAST_INTERVAL
        self.streak = 0
        self.on_disk_only = not config.snapshots
        self._instrument: Instrument | None = None
        self._keeper: CheckpointKeeper | None = None
        self._unverified: deque[int] = deque()
        # Whether the state was finite when it was last looked at before a save, and at which step that was.
        self._scanned: tuple[int, bool] | None = None
        self._first_resume: str | None = None
        self._entry_step = 0
        self._cold = False
        self._last_taken = 0
        self._last_begin: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=20)
        self.batches = KeptBatches()
        self._gone_back_to: Snapshot | None = None
        # Whether the state in place is that of an experiment, or one gone back to that the run has not settled on.
        self.displaced = False
        self._optimizer: Any = None
        self._planned: int | None = None
        self._copy_seconds: deque[float] = deque(maxlen=5)

    # ---- a run begins and ends ----

    def begin(self, instrument: Instrument, cold: bool, resumed_from: str | None, finite: bool = True) -> None:
        """
        Called whenever `train()` is entered: keeps the state the run begins with.

        Args:
            instrument ([`Instrument`]):
                Of the trainer.
            cold (`bool`):
                Whether the detectors have no baseline yet.
            resumed_from (`str`, *optional*):
                The checkpoint the run was resumed from.
            finite (`bool`, *optional*, defaults to `True`):
                Whether the state the run begins with was found to be finite.
        """
        first = self._instrument is None
        self._instrument = instrument
        trainer = instrument.trainer
        self._last_begin = None
        self.batches.newest_healthy = None
        self.streak = 0
        if first:
            self._entry_step = int(trainer.state.global_step)
            self._cold = cold
            self._first_resume = resumed_from
            if trainer.args.should_save and consensus.is_first_rank():
                self._keep_checkpoints(trainer.args, resumed_from, finite)
        live = instrument.view.live_state()
        if not first and live.optimizer is self._optimizer:
            # Entered again with the same model and optimizer: what was trusted still is, unless it is yet to come.
            self._forget_beyond(int(trainer.state.global_step))
            return
        self._optimizer = live.optimizer
        self.ring.release()
        if not instrument.view.can_reexecute:
            self.on_disk_only = True
        if self.on_disk_only or not self._make_room():
            return
        step = int(trainer.state.global_step)
        self._take(step)
        if not self.on_disk_only:
            self.ring.begin_with_candidate()
            # Before the first step there may be an evaluation, for which some optimizers swap the weights.
            self.ring.wait()

    def _keep_checkpoints(self, args: Any, resumed_from: str | None, finite: bool) -> None:
        generations = self.config.keep_verified_checkpoints
        if args.push_to_hub and self.config.upload_healing_files:
            generations = 0
            logger.info("upload_healing_files=True: verified checkpoints are not kept, or all of them were uploaded.")
        self._keeper = CheckpointKeeper(str(args.output_dir), generations, tell=self.journal.event)
        if resumed_from is not None and Path(resumed_from).resolve().is_relative_to(Path(args.output_dir).resolve()):
            self._follow(Path(resumed_from), self._entry_step, finite)

    def _forget_beyond(self, step: int) -> None:
        """After a resume at an earlier step: states and steps of a future that will be another one."""
        self.ring.discard()
        for ahead in [each for each in self.ring.trusted if each.as_of > step][:1]:
            self.ring.distrust(ahead)
        if self.ring.initial is not None and self.ring.initial.as_of > step:
            self.ring.initial = None
        self.batches.forget_beyond(step)
        self._last_taken = min(self._last_taken, step)
        self._unverified = deque(each for each in self._unverified if each <= step)

    def release(self) -> None:
        """Gives all host memory back."""
        self.ring.release()
        self._optimizer = self._instrument = None
        self.batches.release()
        self._gone_back_to = None

    def start_over(self) -> None:
        """Forgets all states, and what is on disk of them: the run goes on as a new process would."""
        self.release()
        self._forget()

    def early(self, step: int) -> bool:
        """Whether the run has only just begun, with detectors that had nothing to go by."""
        return self._cold and step - self._entry_step < EARLY_STEPS

    # ---- keeping ----

    def step_begins(self, step: int, calm: bool) -> None:
        """
        Called between two steps; takes a snapshot if one is due.

        Args:
            step (`int`):
                Optimizer steps finished.
            calm (`bool`):
                Whether nothing is wrong with the loss.
        """
        now = time.perf_counter()
        if self._last_begin is not None:
            self._step_seconds.append(now - self._last_begin)
        self._last_begin = now
        due = self.ring.candidate is None and step - self._last_taken >= self.interval
        if self.on_disk_only or not due or not calm:
            return
        if self._make_room():
            self._take(step)
            # The copy is no part of the step it is held against.
            self._last_begin = time.perf_counter()

    def step_taken(self, window: Window, loss: float, healthy: bool) -> list[str]:
        """
        Takes in a step that is about to be applied; states that have stood the test become trusted.

        Args:
            window ([`Window`]):
                The step.
            loss (`float`):
                Its loss.
            healthy (`bool`):
                Whether nothing was wrong with it, nor with the loss lately.

        Returns:
            `list[str]`: the tensors of a state that was not finite, though no loss has shown it.
        """
        # What comes now, if only that a step is left out, may change what is still being copied.
        self.ring.join()
        # Whatever was put in place while it was judged: the run goes on from there.
        self.displaced = False
        control = self.batches.copy_of(window, loss)
        if self.early(window.step):
            self.batches.keep_first(control)
        else:
            self.batches.forget_first()
        self.batches.record(window, None if self.on_disk_only else control)
        self.streak = self.streak + 1 if healthy else 0
        if not healthy:
            return []
        self.batches.newest_healthy = control
        if self.streak < self.config.snapshot_verify_steps:
            return []
        verified = window.step + 1 - self.config.snapshot_verify_steps
        if self.ring.candidate is not None and self.ring.candidate.step <= verified:
            bad = self._promote(window.step)
            if bad:
                return bad
        if self._unverified and self._unverified[0] <= verified:
            while self._unverified and self._unverified[0] <= verified:
                self._unverified.popleft()
            if self._keeper is not None:
                self._keeper.verified_up_to(verified)
        return []

    def free_batches(self, of_host: bool) -> int:
        """Memory ran out, of the host or of the device: batches that are kept make room ([`KeptBatches.free`])."""
        return self.batches.free(of_host, self._device, self.ring.snapshots())

    def about_to_save(self, step: int) -> None:
        """A checkpoint is about to be written, perhaps over one that is kept."""
        if self._keeper is not None:
            self._keeper.about_to_save(step)

    def note_scan(self, step: int, finite: bool) -> None:
        """
        Takes in what was found when the state was searched for NaN and Inf, right before a save.

        Args:
            step (`int`):
                Optimizer steps finished.
            finite (`bool`):
                Whether every weight, buffer and optimizer state was finite, on all ranks.
        """
        self._scanned = step, finite

    def finite_at(self, step: int) -> bool | None:
        """Whether the state that was saved at a step was finite; `None` if it was not looked at."""
        return self._scanned[1] if self._scanned is not None and self._scanned[0] == step else None

    def leave_room(self) -> None:
        """Kept checkpoints give way, until one more checkpoint fits beside them."""
        if self._keeper is not None:
            self._keeper.leave_room()

    def give_way(self) -> list[str]:
        """After a checkpoint did not fit: removes the kept ones; the names of those that were."""
        return [] if self._keeper is None else [pin.name for pin in self._keeper.give_way()]

    def has_good_checkpoint(self, step: int) -> bool:
        """Whether there is one of this step that can be resumed from; the first process knows."""
        return self._keeper is not None and self._keeper.has_good(step)

    def checkpoint_saved(self, checkpoint: Path, step: int) -> None:
        """Takes in that a checkpoint was completely written."""
        self._follow(checkpoint, step, self.finite_at(step))

    def _follow(self, checkpoint: Path, step: int, finite: bool | None) -> None:
        if self._keeper is not None:
            self._unverified.append(step)
            self._keeper.saved(checkpoint, step, finite)

    def join(self) -> None:
        """Before `optimizer.step()`: has the device wait for a copy that is still under way."""
        self.ring.join()

    @property
    def _running(self) -> Instrument:
        if self._instrument is None:
            raise RuntimeError("there is no run to keep the states of")
        return self._instrument

    @property
    def _device(self) -> Any:
        return self._running.trainer.accelerator.device

    def _make_room(self) -> bool:
        live = self._running.view.live_state()
        while consensus.any_rank(not self.ring.fits(live), self._device):
            if not self.ring.shrink():
                self._rely_on_disk(size_of(live))
                return False
        return True

    def _rely_on_disk(self, needed: int) -> None:
        self.on_disk_only = True
        free = free_host_memory()
        self.ring.release()
        self.journal.event("snapshots_off", self._last_taken, bytes_needed=needed, bytes_free=free)
        logger.warning(
            "Snapshots are off: one takes %.2f GB of host memory, and %.2f GB are free. A run that fails goes back to "
            "its newest trusted checkpoint on disk instead; please make sure that save_steps is as many steps as you "
            "can afford to lose.",
            needed / 1e9,
            free / 1e9,
        )

    def _take(self, step: int) -> None:
        instrument = self._running
        # A schedule-free optimizer swaps the weights in place between training and evaluation.
        optimizer_in_training_mode(instrument.trainer)
        extras = self._remember() | {"rng": RandomState.capture(self._device), "control": self.batches.newest_healthy}
        live = instrument.view.live_state()
        self._last_taken = step
        try:
            with_room(lambda: self.ring.take(live, step, extras), self._device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # On Linux memory that is promised is not always there.
            self._rely_on_disk(size_of(live))

    def _promote(self, step: int) -> list[str]:
        candidate = self.ring.candidate
        assert candidate is not None
        if consensus.any_rank(candidate.torn, self._device):
            self._begin_to_wait(candidate, step)
            return []
        bad = self._searched(candidate)
        if consensus.any_rank(bool(bad), self._device):
            self.ring.discard()
            self.journal.event("snapshot_refused", step, taken_at=candidate.step, tensors=bad[:20])
            logger.warning(
                "Step %d: the snapshot of step %d is not finite (%s) and is not trusted.",
                step,
                candidate.step,
                ", ".join(bad[:5]) or "on another rank",
            )
            return bad or ["on another rank"]
        self.ring.promote()
        self.batches.forget_before(candidate.step)
        if not self.early(step + 1):
            self.ring.forget_initial()
        self._plan(candidate, step)
        return []

    def _begin_to_wait(self, torn: Snapshot, step: int) -> None:
        self.ring.discard()
        self.ring.waits = True
        self.journal.event("snapshot_refused", step, taken_at=torn.step, tensors=["written to while they were copied"])
        logger.info(
            "Step %d: something other than the optimizer wrote to the weights while the snapshot of step %d was "
            "copied; it is not trusted, and from here on training waits for the copies.",
            step,
            torn.step,
        )

    def _searched(self, candidate: Snapshot) -> list[str]:
        """What is not finite in a candidate; one that cannot be searched is as little to be trusted."""
        try:
            return with_room(candidate.nonfinite, self._device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return ["it could not be searched: out of memory"]

    def _plan(self, snapshot: Snapshot, step: int) -> None:
        """Chooses the interval by what the last copy cost, the same on all ranks."""
        typical = median(self._step_seconds) if self._step_seconds else math.inf
        if not snapshot.allocated or not self._copy_seconds:
            # The first copies into new memory take several times as long, and are few.
            self._copy_seconds.append(snapshot.seconds)
        seconds = median(self._copy_seconds)
        share = consensus.largest_of_ranks(seconds / typical, self._device)
        interval = self.config.snapshot_interval
        if not interval:
            interval = max(math.ceil(share / self.config.snapshot_overhead_budget), _LEAST_INTERVAL)
        # Near enough is left as it is: the measurement varies, and the journal is read by people.
        if self._planned is None or not 0.5 <= interval / self.interval <= 2:
            self.interval = self._planned = interval
            self.journal.event(
                "snapshots",
                step,
                # Nothing is taken while a candidate is being verified.
                interval=max(interval, self.config.snapshot_verify_steps),
                verify_steps=self.config.snapshot_verify_steps,
                bytes=self.ring.nbytes,
                seconds=seconds,
                share_of_step=share,
            )

    # ---- going back ----

    def go_back(self, target: Target, step: int, incident: str) -> WentBack | None:
        """
        Puts the run into a state that is trusted; step counter, schedule and data go on.

        Args:
            target ([`Target`]):
                Which one; the next best if there is none such.
            step (`int`):
                The optimizer step that is not applied.
            incident (`str`):
                Why: written into the checkpoints that are not trusted any more.

        Returns:
            [`WentBack`], or `None` if there is no state to go back to.
        """
        self.ring.discard()
        self.streak = 0
        self.displaced = True
        for option in _OTHERWISE[target]:
            went = self._to_disk(step) if option is Target.DISK else self._to_memory(option, step)
            if went is None:
                continue
            self._last_taken = step
            if self._keeper is not None:
                # Where the newest trusted state was not good enough, verified checkpoints of its time are no better.
                deeper = target is not Target.NEWEST
                suspects = self._keeper.distrust(went.step, step, incident, verified=deeper)
                went = replace(went, suspects=tuple(suspects))
            self._unverified.clear()
            return went
        return None

    def reinstate(self, went: WentBack) -> WentBack:
        """
        The steps since a state were applied again and came out as they had: what turned NaN was hit from outside, and
        checkpoints of that time that were found to be finite are what they seemed.

        Args:
            went ([`WentBack`]):
                What the rollback did.

        Returns:
            [`WentBack`]: without the checkpoints that are no longer suspect.
        """
        if self._keeper is None:
            return went
        good = self._keeper.reinstate(went.suspects)
        self._unverified.extend(good)
        return replace(went, suspects=tuple(each for each in went.suspects if each not in good))

    def _to_memory(self, target: Target, step: int) -> WentBack | None:
        if target is Target.OLDER:
            if len(self.ring.trusted) < 2:
                return None
            self.ring.distrust(self.ring.trusted[-1])
        while True:
            snapshot = self.ring.initial if target is Target.INITIAL else next(reversed(self.ring.trusted), None)
            if snapshot is None:
                return None
            in_place = self._restored(snapshot)
            if not consensus.any_rank(not in_place or bool(self._running.view.nonfinite_tensors()), self._device):
                break
            # What is wrong is not in the snapshot (frozen weights), or the snapshot is wrong as well.
            if target is Target.INITIAL:
                return None
            self.ring.distrust(snapshot)
        if target is Target.INITIAL and self.ring.trusted:
            self.ring.distrust(self.ring.trusted[0])
        if "rng" in snapshot.extras:
            snapshot.extras["rng"].restore()
        self._recall(snapshot.extras)
        lost = step + 1 - snapshot.as_of
        self._gone_back_to = snapshot
        return WentBack(snapshot.step, target, lost, snapshot.step - snapshot.extras["missing"])

    def _restore(self, snapshot: Snapshot) -> None:
        if self._running.failsafe.device_lost:
            return
        running = self._running
        with_room(
            lambda: self.ring.restore(snapshot, running.view.live_state()), self._device, give_up=self._give_up_memory
        )
        optimizer_in_training_mode(self._running.trainer)

    def _give_up_memory(self) -> None:
        """What is not needed to put a state in place: the gradients are those of the state that is left."""
        self._running.engine.discard()
        self.free_batches(of_host=False)

    def _restored(self, snapshot: Snapshot) -> bool:
        """Puts a state in place, at the second attempt if need be; whether it is."""
        for _ in range(2):
            try:
                self._restore(snapshot)
            except Exception as error:
                if classify_exception(error) in (FailureType.DEVICE, FailureType.PROCESS_DIED):
                    raise
                logger.warning("The state of step %d could not be put in place.", snapshot.step, exc_info=True)
                let_go(error)
            else:
                return True
            # Outside of the handler: what the failed attempt held is gone.
            free_memory(self._device)
        return False

    def _to_disk(self, step: int) -> WentBack | None:
        found = self._checkpoint()
        if found is None:
            return None
        if not self.try_checkpoint(found):
            return None
        self._recall({})
        reached = step_of(found, default=number_of(Path(found)) or step)
        return WentBack(reached, Target.DISK, max(step + 1 - reached, 1), reached - missing_steps_in(found), found)

    def settled(self, step: int) -> None:
        """The steps since the state that was gone back to are lost for good: from now on the run is in that state."""
        if self._gone_back_to is not None:
            self._gone_back_to.as_of = step + 1
        self._gone_back_to = None
        self.displaced = False
        self.batches.cut_tape()

    def replay(
        self,
        window: Window,
        still_well: Callable[[StepSignals], bool],
        finished: bool = False,
        loss_in_question: bool = False,
    ) -> Replayed:
        """
        After going back: applies the steps since then again, bit for bit. If what was wrong does not come back,
        nothing is lost; if it does, it is not that the weights were hit, but where training leads, and the run is in
        the state gone back to again.

        Args:
            window ([`Window`]):
                The step that is judged; it is computed again in the end.
            still_well (`Callable[[StepSignals], bool]`):
                Whether a step that was applied again looks as it should.
            finished (`bool`, *optional*, defaults to `False`):
                Whether the step that is judged has been applied already, and is applied again like the others.
            loss_in_question (`bool`, *optional*, defaults to `False`):
                Whether it is for the loss that the run went back.

        Returns:
            [`Replayed`]: how many steps were applied again, or why they were not.
        """
        snapshot = self._gone_back_to
        if snapshot is None:
            return Replayed(None, why="the state gone back to is a checkpoint, and steps are kept for those in memory")
        recordings = self.batches.recorded(range(snapshot.as_of, self._running.view.step))
        if recordings is None:
            why = "not all of the steps since then are kept: their rows were generated, left out, or too many"
            return Replayed(None, why=why)

        def go_back() -> None:
            self._restore(snapshot)
            self._recall(snapshot.extras)

        replayed = Replay(window, recordings, still_well, go_back, finished, loss_in_question).run()
        if replayed.steps is not None:
            self._gone_back_to = None
            self.displaced = False
        return replayed

    def can_go_back(self) -> bool:
        """Whether there is a trusted state, in memory or on disk. Collective."""
        if self.generations():
            return True
        return self._checkpoint() is not None

    def _checkpoint(self) -> str | None:
        """The newest checkpoint of this run that can be resumed from, the same on all ranks."""
        found = None
        if consensus.is_first_rank():
            output_dir = str(self._running.trainer.args.output_dir)
            found = newest_checkpoint_of(self.journal.run_id, output_dir, verified=True) or self._first_resume
        chosen: str | None = consensus.from_first_rank(found)
        return chosen

    # ---- trying out ----

    def last_healthy(self) -> Control | None:
        """The last step before anything was wrong with the loss; `None` if a rank had no room for it. Collective."""
        return self._on_all_ranks(self.batches.newest_healthy)

    def generations(self) -> list[Snapshot]:
        """Trusted states in memory, the newest first."""
        initial = [] if self.ring.initial is None else [self.ring.initial]
        return [*reversed(self.ring.trusted), *initial]

    def set_aside(self, step: int) -> bool:
        """Keeps the state as it is, however bad, to come back to after an experiment; `False` if memory is short."""
        self.ring.discard()
        if self.on_disk_only or not self.generations() or not self._make_room():
            return False
        try:
            # Waited for: the forward passes of an experiment are not those of training, and may write to it.
            with_room(lambda: self.ring.take(self._running.view.live_state(), step, {}).wait(), self._device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("Step %d: there is no memory to set the state aside for an experiment: %s", step, error)
            return False
        return True

    def set_aside_for_checkpoints(self, step: int, unmoved: bool) -> bool:
        """
        As [`set_aside`], for an experiment with checkpoints: where no state is kept in memory, the one resumed from is
        put back in the end, if nothing has been added to it.
        """
        return self.set_aside(step) or unmoved

    def try_checkpoint(self, checkpoint: str) -> bool:
        """Puts a checkpoint in place for an experiment; `False` if it cannot be loaded, or is not finite."""
        self.displaced, failed = True, False
        try:
            self._reload(checkpoint)
        except Exception as error:
            if self._running.failsafe.tells_of_lost_device(error):
                raise
            failed = True
            logger.warning("%s could not be loaded.", checkpoint, exc_info=True)
        return not consensus.any_rank(failed or bool(self._running.view.nonfinite_tensors()), self._device)

    def bring_back_from_checkpoints(self, resumed: str) -> None:
        """After [`set_aside_for_checkpoints`]: the run's own state is in place again."""
        if self.ring.candidate is not None:
            self.bring_back()
        else:
            self._reload(resumed)
            self.displaced = False

    def _reload(self, checkpoint: str) -> None:
        if self._running.failsafe.device_lost:
            return
        # It is written over what may still be being copied.
        self.ring.wait()
        reload_checkpoint(self._running.trainer, checkpoint)

    def try_on(self, snapshot: Snapshot) -> Control | None:
        """Puts a state in place for an experiment; a healthy step from before it, to compare with. Collective."""
        self.displaced = True
        self._restore(snapshot)
        control = snapshot.extras.get("control")
        if control is None and snapshot is self.ring.initial and self.batches.first_steps:
            # Its first step was computed with this state.
            control = self.batches.first_steps[0]
        return self._on_all_ranks(control)

    def _on_all_ranks(self, control: Any) -> Control | None:
        """A step that is to be computed again, by all ranks or by none."""
        kept = isinstance(control, Control)
        return None if consensus.any_rank(not kept, self._device) else control

    def prefer(self, snapshot: Snapshot) -> None:
        """Drops the states that are newer than one that was found to be better."""
        for newer in [each for each in self.ring.trusted if each.step > snapshot.step][:1]:
            self.ring.distrust(newer)

    def bring_back(self) -> None:
        """After an experiment: the state that was set aside is in place again."""
        if self.ring.candidate is not None:
            self._restore(self.ring.candidate)
            self.ring.discard()
            self.displaced = False

    def fall_back(self) -> bool:
        """
        Where healing itself has failed: puts the run's own state in place if it was set aside, and the newest that is
        trusted where that is not known to be finite.

        Returns:
            Whether the state in place is the run's own.
        """
        if self.displaced and self.ring.candidate is not None and self._restored(self.ring.candidate):
            self.displaced = False
        if self.displaced or not self._known_to_be_finite():
            self.displaced = True
            any(self._restored(snapshot) for snapshot in self.generations())
        return not self.displaced

    def _known_to_be_finite(self) -> bool:
        try:
            return not self._running.view.nonfinite_tensors()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
