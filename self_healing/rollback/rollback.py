"""Rolls back to a trusted state, and replays the steps since where nothing is to change."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import Any, Protocol

from ..checkpoints.marker import missing_steps_in, number_of, step_of
from ..checkpoints.retention import RunCheckpoints
from ..config.healing_config import HealingConfig
from ..failures.classify import describe_exception
from ..failures.recipes import TrainingFault
from ..hf.adapter import Instrument
from ..hf.experiments import EarlierSteps
from ..hf.objective import StepSignals
from ..hf.state import LiveState
from ..hf.step import Recording, Window
from ..journal.journal import Journal
from ..ranks import votes
from ..system.random_state import tolerance
from .ring import KeptBatches, SnapshotRing, StateInPlace
from .shared_memory import SharedStates
from .snapshots import Snapshot
from .trusted import StateTrials, TrustedStates


logger = logging.getLogger("self_healing")


# ---- went back: names the states a run can go back to, and records what going back did ----


class Target(StrEnum):
    """The states that a run can go back to."""

    NEWEST = "newest"
    OLDER = "older"
    INITIAL = "initial"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class WentBack:
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


class Learned(Protocol):
    """What detectors know beside the weights."""

    def remember(self) -> dict[str, Any]:
        """Gives it, to be kept with a snapshot."""

    def recall(self, extras: dict[str, Any]) -> None:
        """Puts it back as it was at a snapshot; nothing is known from an empty one."""


class Rollback:
    """Goes back to a trusted state of a run, and applies the steps since then again."""

    def __init__(self, config: HealingConfig, journal: Journal) -> None:
        self._config, self._journal = config, journal
        # Goes back together with the weights.
        self.learned: Learned
        self.copies_in_doubt = False
        # Lets snapshots outlive the process, where another one goes on with the run.
        self.shared: SharedStates | None = None
        self._own_is_trusted: Callable[[], None] = lambda: None
        self._inherited: Callable[[LiveState], Snapshot | None] = lambda live: None
        self._build_parts()

    def go_on_from_memory(
        self,
        shared: SharedStates | None,
        own_is_trusted: Callable[[], None],
        inherited: Callable[[LiveState], Snapshot | None],
    ) -> None:
        """Called before the run begins, where processes go on from memory."""
        self.shared, self._own_is_trusted, self._inherited = shared, own_is_trusted, inherited
        self._build_parts()

    def _build_parts(self) -> None:
        self.ring, self.batches = SnapshotRing(shared=self.shared), KeptBatches()
        self.in_place = StateInPlace(self.ring, self.batches)
        self.checkpoints = RunCheckpoints(self._config, self._journal)
        self.states = TrustedStates(
            self._config,
            self._journal,
            self.ring,
            self.batches,
            self.in_place,
            self.checkpoints,
            lambda: self.learned.remember(),
            self.shared,
            self._own_is_trusted,
            self._inherited,
        )
        self.trials = StateTrials(self.ring, self.batches, self.in_place, self.states)
        self._gone_back_to: Snapshot | None = None

    # ---- a run begins and ends ----

    def begin(self, instrument: Instrument, cold: bool, resumed_from: str | None, finite: bool = True) -> None:
        """Called whenever `train()` is entered: keeps the state the run begins with."""
        first = not self.in_place.attached
        self.in_place.attach(instrument)
        if first:
            trainer = instrument.trainer
            self.checkpoints.begin(trainer.args, resumed_from, int(trainer.state.global_step), finite)
        self.states.begin(first, cold)

    def release(self) -> None:
        """Gives all host memory back."""
        self.states.release()
        self.in_place.detach()
        self._gone_back_to = None

    def start_over(self) -> None:
        """Forgets all states, and what is on disk of them: the run goes on as a new process would."""
        self.release()
        self._build_parts()

    # ---- going back ----

    def can_go_back(self) -> bool:
        """Whether there is a trusted state, in memory or on disk. Collective."""
        return bool(self.states.generations()) or self.checkpoints.newest() is not None

    def go_back(self, target: Target, step: int, incident: str) -> WentBack | None:
        """Puts the run into a state that is trusted; step counter, schedule and data go on."""
        self.ring.discard()
        self.states.streak = 0
        self.in_place.displaced = self.copies_in_doubt = True
        for option in _OTHERWISE[target]:
            went = self._to_disk(step) if option is Target.DISK else self._to_memory(option, step)
            if went is None:
                continue
            self.states.interval.last_taken = step
            # Where the newest trusted state was not good enough, verified checkpoints of its time are no better.
            deeper = target is not Target.NEWEST
            return replace(went, suspects=self.checkpoints.distrust(went.step, step, incident, verified=deeper))
        return None

    def _to_memory(self, target: Target, step: int) -> WentBack | None:
        ring = self.ring
        if target is Target.OLDER:
            if len(ring.trusted) < 2:
                return None
            ring.distrust(ring.trusted[-1])
        while True:
            snapshot = ring.initial if target is Target.INITIAL else next(reversed(ring.trusted), None)
            if snapshot is None:
                return None
            failed = not self.in_place.try_to_put(snapshot)
            if self.in_place.is_sound(failed):
                break
            # What is wrong is not in the snapshot (frozen weights), or the snapshot is wrong as well.
            if target is Target.INITIAL:
                return None
            ring.distrust(snapshot)
        if target is Target.INITIAL and ring.trusted:
            ring.distrust(ring.trusted[0])
        if "rng" in snapshot.extras:
            snapshot.extras["rng"].restore()
        self.learned.recall(snapshot.extras)
        lost = step + 1 - snapshot.as_of
        self._gone_back_to = snapshot
        return WentBack(snapshot.step, target, lost, snapshot.step - snapshot.extras["missing"])

    def _to_disk(self, step: int) -> WentBack | None:
        found = self.checkpoints.newest()
        if found is None or not self.in_place.try_to_load(found):
            return None
        self.learned.recall({})
        reached = step_of(found, default=number_of(Path(found)) or step)
        return WentBack(reached, Target.DISK, max(step + 1 - reached, 1), reached - missing_steps_in(found), found)

    def give_up_steps(self, step: int) -> None:
        """Gives up the steps since the state gone back to: as of this step the run is in that state."""
        if self._gone_back_to is not None:
            self._gone_back_to.as_of = step + 1
        self._gone_back_to = None
        self.in_place.displaced = False
        self.batches.cut_tape()

    def fall_back(self) -> bool:
        """
        Leaves the run in the best state there is, after healing itself has failed: its own if it was set aside, or the
        newest trusted one where that is not known to be finite.
        """
        in_place, own = self.in_place, self.ring.candidate
        if in_place.displaced and own is not None and in_place.try_to_put(own):
            in_place.displaced = False
        if in_place.displaced or not in_place.is_known_to_be_finite():
            in_place.displaced = True
            any(in_place.try_to_put(snapshot) for snapshot in self.states.generations())
        return not in_place.displaced

    # ---- applying the steps since then again ----

    def replay(
        self,
        window: Window,
        still_well: Callable[[StepSignals], bool],
        finished: bool = False,
        loss_in_question: bool = False,
        unlike_from: int | None = None,
    ) -> Replayed:
        """Applies the steps since the state gone back to again, bit for bit."""
        snapshot = self._gone_back_to
        if snapshot is None:
            return Replayed(None, why="the state gone back to is a checkpoint, and steps are kept for those in memory")
        recordings = self.batches.recorded(range(snapshot.as_of, self.in_place.instrument.view.step))
        # One that lacks some (its batches were larger, or memory ran out) replays nothing, and the others do neither.
        if not votes.all_ranks("can replay", recordings is not None, self.in_place.device) or recordings is None:
            why = "not all of the steps since then are kept: their rows were generated, left out, or too many"
            return Replayed(None, why=why)

        def go_back() -> None:
            self.in_place.put(snapshot)
            self.learned.recall(snapshot.extras)

        replay = Replay(window, recordings, still_well, go_back, finished, loss_in_question, unlike_from)
        replayed = replay.run()
        if replayed.steps is not None:
            self._gone_back_to = None
            self.in_place.displaced = False
        return replayed

    def reinstate(self, went: WentBack) -> WentBack:
        """
        Trusts checkpoints again that [`go_back`] made suspect and that were found to be finite: the steps since then
        came out as they had, so what turned NaN was hit from outside.
        """
        good = self.checkpoints.reinstate(went.suspects)
        return replace(went, suspects=tuple(each for each in went.suspects if each not in good))


# ---- replay: applies steps again after going back, and tells whether what comes out is what it was ----


# How far, relatively, a loss may be from what it was for the step to count as the same without another look.
_SAME = 1e-3
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


class _Ended(Enum):
    """Ways for an attempt to end."""

    WELL = auto()
    # A step does not look as it should: that is where training leads.
    UNWELL = auto()
    # A step is not finite, raises, or is another one than it was: it may have been a fault that passes.
    STRUCK = auto()


@dataclass(slots=True)
class _Played:
    """One attempt to apply the steps again."""

    losses: list[float] = field(default_factory=list)
    compared: int = 0
    other_at: int | None = None
    ended: _Ended = _Ended.STRUCK
    why: str = ""

    def end(self, ended: _Ended, why: str = "") -> _Played:
        # Where the steps had become others before, it need not be where training leads.
        self.ended = _Ended.STRUCK if ended is _Ended.UNWELL and self.other_at is not None else ended
        self.why = why
        return self


class Replay:
    """Applies the steps since a state again, until it is known whether they can be kept."""

    def __init__(
        self,
        window: Window,
        recordings: Sequence[Recording],
        still_well: Callable[[StepSignals], bool],
        go_back: Callable[[], None],
        finished: bool,
        loss_in_question: bool,
        unlike_from: int | None = None,
    ) -> None:
        self._window, self._recordings = window, recordings
        self._earlier_steps = EarlierSteps(window)
        self._still_well, self._go_back, self._finished = still_well, go_back, finished
        self._loss_in_question = loss_in_question
        self._recorded = [recording.control.loss for recording in recordings]
        alike = [unlike_from is None or recording.step < unlike_from for recording in recordings]
        self._comparable = sum(alike)

    def run(self) -> Replayed:
        """Applies the steps; leaves the run after them, or in the state that they begin with."""
        strikes, replays = 0, list[list[float]]()
        while True:
            kept = False
            try:
                played = self._play()
                if played.ended is _Ended.WELL:
                    replays.append(played.losses)
                    kept = self._is_what_it_was(played, replays)
            finally:
                if not kept:
                    # Also if it was interrupted: half-way is nowhere.
                    self._go_back()
            if kept:
                return Replayed(len(self._recordings), self._apart(played))
            strikes += played.ended is _Ended.STRUCK
            if played.ended is _Ended.UNWELL or strikes == _STRIKES or len(replays) == _REPLAYS:
                return Replayed(None, self._apart(played), played.why)

    def _is_what_it_was(self, played: _Played, replays: Sequence[Sequence[float]]) -> bool:
        if played.other_at is None:
            return True
        if len(replays) == 1:
            return False
        firsts = [losses[0] for losses in replays]
        if max(firsts) - min(firsts) > tolerance(self._window.engine.precision) * max(map(abs, firsts)):
            # They begin with the same weights: it is not the kernels that make the replays differ.
            played.why = self._does_not_repeat(firsts)
            return False
        at = first_beyond_noise(self._recorded[: self._comparable], [each[: self._comparable] for each in replays])
        if at is not None:
            played.why = self._other(at, [losses[at] for losses in replays])
        return at is None

    def _apart(self, played: _Played) -> float:
        pairs = list(zip(self._recorded, played.losses, strict=False))[: played.compared]
        return max((abs(was - now) / max(abs(was), abs(now)) for was, now in pairs if was != now), default=0.0)

    def _play(self) -> _Played:
        played = _Played()
        try:
            with self._window.experiment():
                return self._apply_all(played)
        except TrainingFault as fault:
            logger.info("The steps since then could not be applied again.", exc_info=fault.error)
            return played.end(_Ended.STRUCK, f"applied again, a step raised {describe_exception(fault.error)}")

    def _apply_all(self, played: _Played) -> _Played:
        for at in range(len(self._recordings)):
            if not self._played_well(at, played):
                return played
        if self._finished:
            return played.end(_Ended.WELL)
        self._window.begin_from_here()
        self._window.reexecute()
        return self._judged(played, self._window.signals())

    def _played_well(self, at: int, played: _Played) -> bool:
        """Applies one step again; returns whether to go on with the next."""
        signals = self._earlier_steps.replay(self._recordings[at])
        was, now = self._recorded[at], signals.loss
        played.losses.append(now)
        if played.compared == at < self._comparable and not _is_clearly_worse(was, now):
            played.compared += 1
            if not _is_same(was, now) and played.other_at is None:
                played.other_at = at
                if at > 0 and self._recorded[:at] == played.losses[:at]:
                    # Noise does not begin in the middle.
                    played.end(_Ended.STRUCK, self._other(at, [now]))
                    return False
        known = not self._loss_in_question and played.compared == at + 1 and _is_same(was, now)
        return self._judged(played, signals, known).ended is _Ended.WELL

    def _judged(self, played: _Played, signals: StepSignals, known: bool = False) -> _Played:
        if not signals.finite:
            return played.end(_Ended.STRUCK, f"applied again, step {signals.step} is not finite")
        if not self._still_well(signals) and not known:
            loss = f"loss {signals.loss:.4g}"
            return played.end(_Ended.UNWELL, f"applied again, step {signals.step} does not look as it should ({loss})")
        return played.end(_Ended.WELL)

    def _does_not_repeat(self, losses: Sequence[float]) -> str:
        now = " and ".join(f"{loss:.6g}" for loss in losses)
        return (
            f"applied again from the same weights, the loss of step {self._recordings[0].step} is {now}: something "
            "keeps a state of its own that is not put back (a counter or a running mean that is a plain attribute)"
        )

    def _other(self, at: int, losses: Sequence[float]) -> str:
        now = " and ".join(f"{loss:.6g}" for loss in losses)
        return (
            f"applied again, the loss of step {self._recordings[at].step} is {now} and was {self._recorded[at]:.6g}: "
            "further off than noise of the kernels takes it, as if more than weights, optimizer and data made it up"
        )


def first_beyond_noise(recorded: Sequence[float], replays: Sequence[Sequence[float]]) -> int | None:
    """Finds the first step where a run differs by more than noise from replays of it; `None` if there is none."""
    spread = [max(losses) - min(losses) for losses in zip(*replays, strict=True)]
    for at, (was, now) in enumerate(zip(recorded, replays[-1], strict=True)):
        if _is_clearly_worse(was, now):
            return None
        noise = max(spread[: at + 1 + _FEW])
        if not _is_same(was, now) and abs(was - now) > _TIMES * noise:
            return at
    return None


def _is_same(was: float, now: float) -> bool:
    return math.isclose(was, now, rel_tol=_SAME, abs_tol=_SAME)


def _is_clearly_worse(was: float, now: float) -> bool:
    """Whether a recorded loss is so much higher than the one that was computed again that the fault must be in it."""
    return not math.isfinite(was) or was > now + 0.1 * abs(now)
