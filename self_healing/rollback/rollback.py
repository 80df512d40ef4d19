"""Rolls back to a trusted state, and replays the steps since where nothing is to change."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoints.marker import missing_steps_in, number_of, step_of
from ..checkpoints.retention import RunCheckpoints
from ..config.healing_config import HealingConfig
from ..failures.classify import classify_exception, describe_exception
from ..failures.recipes import FailureType, Target, TrainingFault
from ..hf.memory import release_frames, retry_after_freeing
from ..hf.objective import StepSignals
from ..hf.state import optimizer_in_training_mode, reload_checkpoint
from ..hf.step import Control, Recording, Window
from ..journal.journal import Journal
from ..ranks import votes
from ..system.random_state import RandomState, tolerance
from .ring import StepReplayer
from .shared_memory import SharedStates, StoredState
from .snapshots import Snapshot
from .trusted import TrustedStates, found_wrong


logger = logging.getLogger("self_healing")


# ---- went back: names the states a run can go back to, and records what going back did ----


@dataclass(frozen=True, slots=True)
class RollbackRecord:
    """The result of a rollback."""

    step: int
    target: Target
    steps_lost: int
    trained: int
    checkpoint: str | None = None
    suspects: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns what the journal says of it."""
        place: dict[str, Any] = {"checkpoint": self.checkpoint} if self.checkpoint else {}
        if self.suspects:
            place["suspect_checkpoints"] = list(self.suspects)
        return {"to_step": self.step, "state": self.target.value, "lost": self.steps_lost, **place}


# ---- rollback: goes back to a state of a run that can be trusted, in memory or on disk ----


# Where to go if there is no such state.
_OTHERWISE = {
    Target.NEWEST: (Target.NEWEST, Target.INITIAL, Target.DISK),
    Target.OLDER: (Target.OLDER, Target.DISK, Target.INITIAL, Target.NEWEST),
    Target.INITIAL: (Target.INITIAL, Target.OLDER, Target.NEWEST, Target.DISK),
    Target.DISK: (Target.DISK, Target.INITIAL, Target.NEWEST),
}


# How far, relatively, a loss is above another that is clearly better, at most: a run with less noise tells sooner.
CLEARLY = 0.1


class Rollback:
    """Puts earlier states of a run in its place: for an experiment, or to go on from, the steps since then again."""

    def __init__(self, config: HealingConfig, journal: Journal) -> None:
        self._config, self._journal = config, journal
        # What detectors know beside the weights, which goes back together with them: it is asked to `remember()`, and
        # to `recall()` that.
        self.learned: Any = None
        self.copies_in_doubt = False
        self.begin_anew()

    def begin_anew(self, shared: SharedStates | None = None, inherited: StoredState | None = None) -> None:
        """Called before the run begins; once more where processes go on from memory."""
        # Lets snapshots outlive the process, where another one goes on with the run.
        self.shared = shared
        self.checkpoints = RunCheckpoints(self._config, self._journal)
        self.states = TrustedStates(self._config, self._journal, self.checkpoints, shared, inherited)
        self.ring, self.batches = self.states.ring, self.states.batches
        self._gone_back_to: Snapshot | None = None

    def release(self) -> None:
        """Gives all host memory back."""
        self.states.release()
        self._gone_back_to = None

    # ---- in place ----

    def put(self, snapshot: Snapshot) -> None:
        """Writes a snapshot over the state that the run is in."""
        states = self.states
        if states.instrument.failsafe.device_lost:
            return
        retry_after_freeing(
            lambda: self.ring.restore(snapshot, states.live), states.device, give_up=self._give_up_memory
        )
        states.instrument.engine.state_put()
        states.instrument.call.half_way = ""
        optimizer_in_training_mode(states.instrument.trainer)

    def _give_up_memory(self) -> None:
        # The gradients are those of the state that is left.
        self.states.instrument.engine.discard()
        self.free_batches(of_host=False)

    def free_batches(self, of_host: bool) -> int:
        """Frees memory of the host or of the device that kept batches take ([`KeptBatches.free`])."""
        return self.batches.free(of_host, self.states.device, self.ring.snapshots())

    def _try_to_put(self, snapshot: Snapshot) -> bool:
        """Writes a snapshot over it; returns whether that succeeded."""
        try:
            self.put(snapshot)
        except Exception as error:
            if classify_exception(error) in (FailureType.DEVICE, FailureType.PROCESS_DIED):
                raise
            logger.warning("The state of step %d could not be put in place.", snapshot.step, exc_info=True)
            release_frames(error)
            return False
        return True

    def _try_to_load(self, checkpoint: str) -> bool:
        """Writes a checkpoint over it, if all ranks have it: nodes may have disks of their own."""
        if not votes.all_ranks("the checkpoint is here", Path(checkpoint).is_dir(), self.states.device):
            logger.warning("%s is not there on all ranks, and is not loaded.", checkpoint)
            return False
        instrument, failed = self.states.instrument, False
        try:
            # It is written over what may still be being copied.
            self.ring.wait()
            reload_checkpoint(instrument.trainer, checkpoint)
        except Exception as error:
            if instrument.failsafe.tells_of_lost_device(error):
                raise
            failed = True
            logger.warning("%s could not be loaded.", checkpoint, exc_info=True)
        return self._is_sound(failed)

    def _is_sound(self, failed: bool) -> bool:
        """Searches it for NaN and Inf."""
        sound = not failed and not self.states.instrument.view.nonfinite_tensors()
        return votes.all_ranks("the state put in place is sound", sound, self.states.device)

    # ---- experiments: is an earlier state better at a batch, or have the data become harder? ----

    def try_snapshot(self, snapshot: Snapshot) -> Control | None:
        """Puts a state in place; returns a healthy step from before it, to compare with. Collective."""
        self.states.displaced = True
        self.put(snapshot)
        control = snapshot.extras.get("control")
        if control is None and snapshot is self.ring.initial and self.batches.first_steps:
            # Its first step was computed with this state.
            control = self.batches.first_steps[0]
        return self._on_all_ranks(control)

    def last_healthy(self) -> Control | None:
        """Returns the last step before anything was wrong with the loss; `None` if a rank lacks it. Collective."""
        return self._on_all_ranks(self.batches.newest_healthy)

    def _on_all_ranks(self, control: Control | None) -> Control | None:
        """Returns a step that all ranks have kept; else `None`, for all of them compute it again or none does."""
        kept = votes.all_ranks("has a control", control is not None, self.states.device)
        return control if kept else None

    def prefer(self, snapshot: Snapshot) -> None:
        """Drops the states that are newer than one that was found to be better."""
        for newer in [each for each in self.ring.trusted if each.step > snapshot.step][:1]:
            self.ring.distrust(newer)

    def end_trial(self) -> None:
        """Puts the run's own state back that was set aside."""
        if self.ring.candidate is not None:
            self.put(self.ring.candidate)
            self.ring.discard()
            self.states.displaced = False

    # ---- going back ----

    def can_go_back(self) -> bool:
        """Whether there is a trusted state, in memory or on disk. Collective."""
        return bool(self.states.generations()) or self.checkpoints.newest() is not None

    def go_back(self, target: Target, step: int, incident: str) -> RollbackRecord | None:
        """Puts the run into a state that is trusted; step counter, schedule and data go on."""
        self.ring.discard()
        self.states.streak = 0
        self.states.displaced = self.copies_in_doubt = True
        went = self._to_newer_on_disk(step) if target is Target.NEWEST else None
        for option in _OTHERWISE[target]:
            if went is None and option is Target.DISK:
                went = self._to_disk(step, self.checkpoints.newest())
            elif went is None:
                went = self._to_memory(option, step)
            if went is None:
                continue
            self.states.interval.last_taken = step
            # Where the newest trusted state was not good enough, verified checkpoints of its time are no better.
            deeper = target is not Target.NEWEST
            return replace(went, suspects=self.checkpoints.distrust(went.step, step, incident, verified=deeper))
        return None

    def _to_memory(self, target: Target, step: int) -> RollbackRecord | None:
        ring = self.ring
        if target is Target.OLDER:
            if len(ring.trusted) < 2:
                return None
            ring.distrust(ring.trusted[-1])
        while True:
            snapshot = ring.initial if target is Target.INITIAL else next(reversed(ring.trusted), None)
            if snapshot is None:
                return None
            failed = not self._try_to_put(snapshot)
            if self._is_sound(failed):
                break
            # What is wrong is not in the snapshot (frozen weights), or the snapshot is wrong as well.
            if target is Target.INITIAL:
                return None
            ring.distrust(snapshot)
        if target is Target.INITIAL and ring.trusted:
            ring.distrust(ring.trusted[0])
        snapshot.extras["rng"].restore()
        self.learned.recall(snapshot.extras)
        lost = step + 1 - snapshot.as_of
        self._gone_back_to = snapshot
        return RollbackRecord(snapshot.step, target, lost, snapshot.step - snapshot.extras["missing"])

    def _to_newer_on_disk(self, step: int) -> RollbackRecord | None:
        """Goes back to a checkpoint where fewer steps are lost with it than with a snapshot: none is applied again."""
        newest = next(iter(self.states.generations()), None)
        if newest is None or self._steps_since(newest) is not None:
            return None
        # Up to this step: an earlier process of the run may have come further.
        return self._to_disk(step, self.checkpoints.newest(range(newest.as_of + 1, step + 1)))

    def _to_disk(self, step: int, found: str | None) -> RollbackRecord | None:
        if found is None or not self._try_to_load(found):
            return None
        self.learned.recall({})
        reached = step_of(found, default=number_of(Path(found)) or step)
        return RollbackRecord(
            reached, Target.DISK, max(step + 1 - reached, 1), reached - missing_steps_in(found), found
        )

    def give_up_steps(self, step: int) -> None:
        """Gives up the steps since the state gone back to: as of this step the run is in that state."""
        if self._gone_back_to is not None:
            self._gone_back_to.as_of = step + 1
        self._gone_back_to = None
        self.states.displaced = False
        self.batches.stop_recording()
        if self.states.generations():
            self.batches.record()

    def fall_back(self) -> bool:
        """
        Leaves the run in the best state there is, after healing itself has failed: its own if it was set aside, or the
        newest trusted one where that is not known to be finite.
        """
        states, own = self.states, self.ring.candidate
        if states.displaced and own is not None and self._try_to_put(own):
            states.displaced = False
        if states.displaced or found_wrong(states.instrument.view.nonfinite_tensors):
            states.displaced = True
            any(self._try_to_put(snapshot) for snapshot in states.generations())
        return not states.displaced

    def reinstate(self, went: RollbackRecord) -> RollbackRecord:
        """
        Trusts checkpoints again that [`go_back`] made suspect and that were found to be finite: the steps since then
        came out as they had, so what turned NaN was hit from outside.
        """
        good = self.checkpoints.reinstate(went.suspects)
        return replace(went, suspects=tuple(each for each in went.suspects if each not in good))

    # ---- applying the steps since then again ----

    def _steps_since(self, snapshot: Snapshot) -> list[Recording] | None:
        """Returns all steps since a state, to be applied again; `None` if a rank lacks some. Collective."""
        recordings = self.batches.recorded(range(snapshot.as_of, self.states.instrument.view.step))
        # Its batches were larger, or memory ran out: the others apply none again either.
        kept = votes.all_ranks("can replay", recordings is not None, self.states.device)
        return recordings if kept else None

    def repeat(self, window: Window) -> Replayed:
        """
        Makes the weights of the last finished step anew, from the newest trusted state; where they do not come out as
        they were, or others than all of its steps are in them, it leaves the live ones.
        """
        states, call, known = self.states, self.states.instrument.call, self.learned.remember()
        newest, retry, why = next(iter(states.generations()), None), window.engine.retry, call.half_way
        if newest is None or known["missing"] != newest.extras["missing"] or not states.set_aside(window.step):
            return Replayed(None, why="no trusted state since which all steps were taken, or no memory beside it")
        rng, heals, watched = RandomState.capture(states.device), retry.heals, retry.watched
        replayed = Replayed(None, why="it was interrupted")
        # Sizes are looked for with the step that did not fit.
        retry.heals = retry.watched = False
        states.displaced, self._gone_back_to = True, newest
        try:
            self.put(newest)
            replayed = self.replay(window, lambda signals: True, finished=True)
        finally:
            retry.heals, retry.watched = heals, watched
            if replayed.steps is None:
                self.end_trial()
                self.learned.recall(known)
                call.half_way = why
            self.ring.discard()
            self._gone_back_to = None
            rng.restore()
        return replayed

    def replay(
        self,
        window: Window,
        still_well: Callable[[StepSignals], bool],
        finished: bool = False,
        loss_in_question: bool = False,
        unlike_from: int | None = None,
        clearly: float = CLEARLY,
    ) -> Replayed:
        """Applies the steps since the state gone back to again, bit for bit."""
        snapshot = self._gone_back_to
        if snapshot is None:
            return Replayed(None, why="the state gone back to is a checkpoint, and steps are kept for those in memory")
        recordings = self._steps_since(snapshot)
        if recordings is None:
            why = "not all of the steps since then are kept: their rows were generated, left out, or too many"
            return Replayed(None, why=why)
        fault = loss_in_question, unlike_from, clearly
        replayed = Replay(self, snapshot, window, recordings, still_well, finished, *fault).run()
        if replayed.steps is not None:
            self._gone_back_to = None
            self.states.displaced = False
        return replayed


# ---- replay: applies steps again after going back, and tells whether what comes out is what it was ----


# How far, relatively, a loss may be from what it was for the step to count as the same without another look.
_SAME = 1e-3
# How far the first two may be, of the weights gone back to and after one update: no fault has come in between.
_ROUNDING = 1e-5
# How often steps are applied again from the state that was gone back to, where a fault strikes meanwhile.
_STRIKES = 2
# How many times the spread of replays another run of the same steps, the one that was recorded, may lie outside of it.
# It is that of all steps up to the one that is looked at and of a few more: two runs that drift apart cross.
_TIMES, _FEW = 5, 5
# How many replays are held against each other at most: two may be close by chance.
_REPLAYS = 3


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of applying steps again."""

    steps: int | None
    apart: float = 0.0
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        repeats = "within noise" if self.apart else "bitwise"
        return {"replayed": self.steps, "repeats": repeats, "apart": self.apart}


class _Struck(Exception):
    """A step is not finite, raises, or comes after one that was another: it may have been a fault that passes."""


class _Unwell(Exception):
    """A step does not look as it should: that is where training leads."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Applies the steps since a state again, until it is known whether they can be kept."""

    rollback: Rollback
    snapshot: Snapshot
    window: Window
    recordings: Sequence[Recording]
    still_well: Callable[[StepSignals], bool]
    finished: bool
    loss_in_question: bool
    # The first step that need not come out as it was.
    unlike_from: int | None
    # How far, relatively, a loss that was recorded is above the one there is now where a fault was in it.
    clearly: float

    def run(self) -> Replayed:
        """Applies the steps; leaves the run after them, or in the state that they begin with."""
        strikes, replays, why = 0, list[list[float]](), ""
        while strikes < _STRIKES and len(replays) < _REPLAYS:
            kept = False
            try:
                losses = self._apply_all()
                replays.append(losses)
                why = self._why_another(replays)
                kept = not why
            except _Struck as error:
                strikes, why = strikes + 1, str(error)
            except _Unwell as error:
                return Replayed(None, why=str(error))
            finally:
                if not kept:
                    # Also if it was interrupted: half-way is nowhere.
                    self.rollback.put(self.snapshot)
                    self.rollback.learned.recall(self.snapshot.extras)
            if kept:
                pairs = self._compared(losses) if self.loss_in_question else self._paired(losses)
                apart = [abs(was - now) / max(abs(was), abs(now)) for was, now in pairs if was != now]
                return Replayed(len(self.recordings), max(apart, default=0.0))
        return Replayed(None, why=why)

    def _apply_all(self) -> list[float]:
        steps, losses = StepReplayer(self.window), list[float]()
        try:
            with self.window.engine.retry.experiment():
                for recording in self.recordings:
                    signals = steps.replay(recording)
                    losses.append(signals.loss)
                    self._judge(signals, losses, recorded=True)
                if not self.finished:
                    self.window.begin_from_here()
                    self.window.recompute()
                    self._judge(self.window.signals(), losses, recorded=False)
            if half_way := self.rollback.states.instrument.call.half_way:
                raise _Struck(f"applied again, {half_way}")
        except TrainingFault as fault:
            logger.info("The steps since then could not be applied again.", exc_info=fault.error)
            raise _Struck(f"applied again, a step raised {describe_exception(fault.error)}") from fault
        return losses

    def _judge(self, signals: StepSignals, losses: Sequence[float], recorded: bool) -> None:
        if not signals.finite:
            raise _Struck(f"applied again, step {signals.step} is not finite")
        pairs = self._compared(losses)
        known = recorded and not self.loss_in_question and len(pairs) == len(losses) and _is_same(*pairs[-1])
        if self.still_well(signals) or known:
            return
        # Where the steps had become others before, it need not be where training leads.
        raised = _Unwell if all(_is_same(was, now) for was, now in pairs) else _Struck
        raise raised(f"applied again, step {signals.step} does not look as it should (loss {signals.loss:.4g})")

    def _paired(self, losses: Sequence[float]) -> list[tuple[float, float]]:
        """Pairs the losses there were with those of a replay, as far as they are to be the same."""
        pairs = list[tuple[float, float]]()
        for recording, now in zip(self.recordings, losses, strict=False):
            was, unlike = recording.control.loss, self.unlike_from is not None and recording.step >= self.unlike_from
            if unlike or not math.isfinite(was):
                break
            pairs.append((was, now))
        return pairs

    def _compared(self, losses: Sequence[float]) -> list[tuple[float, float]]:
        """Pairs them up to the step in which the fault must be."""
        pairs = self._paired(losses)
        fault = next((at for at, (was, now) in enumerate(pairs) if was > now + self.clearly * abs(now)), len(pairs))
        if fault < len(pairs):
            # It may have begun with less.
            while fault and pairs[fault - 1][0] > pairs[fault - 1][1] and not _is_same(*pairs[fault - 1]):
                fault -= 1
        return pairs[:fault]

    def _why_another(self, replays: Sequence[Sequence[float]]) -> str:
        """Says why what came out is another run than there was, as far as is known; nothing if it is the same."""
        pairs, begins_otherwise = self._compared(replays[-1]), self._begins_otherwise(replays)
        if not begins_otherwise and all(_is_same(was, now) for was, now in pairs):
            return ""
        if len(replays) == 1:
            return "applied again once, the losses are others than they were"
        firsts, first = [losses[0] for losses in replays], self.recordings[0].step
        if max(firsts) - min(firsts) > tolerance(self.window.engine.precision) * max(map(abs, firsts)):
            # They begin with the same weights: it is not the kernels that make the replays differ.
            return (
                f"applied again from the same weights, the loss of step {first} is {_listed(firsts)}: something keeps "
                "a state of its own that is not put back (a counter or a running mean that is a plain attribute)"
            )
        if begins_otherwise:
            return begins_otherwise
        spread = [max(losses) - min(losses) for losses in zip(*replays, strict=True)]
        for at, (was, now) in enumerate(pairs):
            if not _is_same(was, now) and abs(was - now) > _TIMES * max(spread[: at + 1 + _FEW]):
                found = _listed([losses[at] for losses in replays])
                return (
                    f"applied again, the loss of step {first + at} is {found} and was {was:.6g}: further off than "
                    "noise of the kernels takes it, as if more than weights, optimizer and data made it up"
                )
        return ""

    def _begins_otherwise(self, replays: Sequence[Sequence[float]]) -> str:
        """Says which of the first losses all replays have otherwise: what it is computed with is not as it was."""
        noise = max((max(losses) - min(losses) for losses in [*zip(*replays, strict=True)][: 2 + _FEW]), default=0.0)
        for at, (was, now) in enumerate(self._paired(replays[-1])[:2]):
            if abs(was - now) > max(_ROUNDING * abs(now), _TIMES * noise):
                return (
                    f"applied again {('from the same weights', 'by one update')[at]}, the loss of step "
                    f"{self.recordings[at].step} is {_listed([losses[at] for losses in replays])} and was {was:.6g}: "
                    "no noise, but something that callbacks set, which are not called again (a weight of the loss, "
                    "label smoothing, dropout, gradients)"
                )
        return ""


def _is_same(was: float, now: float) -> bool:
    return math.isclose(was, now, rel_tol=_SAME, abs_tol=_SAME)


def _listed(losses: Sequence[float]) -> str:
    return " and ".join(f"{loss:.6g}" for loss in losses)
