"""Goes back to a state of a run that can be trusted, in memory or on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoints.marker import missing_steps_in, number_of, step_of
from ..checkpoints.retention import RunCheckpoints
from ..config.healing_config import HealingConfig
from ..hf.adapter import Instrument
from ..hf.objective import StepSignals
from ..hf.state import LiveState
from ..hf.step import Window
from ..journal.journal import Journal
from ..ranks import votes
from ..run.went_back import Target, WentBack
from .in_place import StateInPlace
from .kept_batches import KeptBatches
from .replay import Replay, Replayed
from .ring import SnapshotRing
from .shared_states import SharedStates
from .snapshots import Snapshot
from .trials import StateTrials
from .trusted import TrustedStates


# Where to go if there is no such state.
_OTHERWISE = {
    Target.NEWEST: (Target.NEWEST, Target.INITIAL, Target.DISK),
    Target.OLDER: (Target.OLDER, Target.DISK, Target.INITIAL, Target.NEWEST),
    Target.INITIAL: (Target.INITIAL, Target.OLDER, Target.NEWEST, Target.DISK),
    Target.DISK: (Target.DISK, Target.INITIAL, Target.NEWEST),
}


class Rollback:
    """Goes back to a trusted state of a run, and applies the steps since then again."""

    def __init__(
        self,
        config: HealingConfig,
        journal: Journal,
        remember: Callable[[], dict[str, Any]],
        recall: Callable[[dict[str, Any]], None],
    ) -> None:
        self._config, self._journal = config, journal
        self._remember, self._recall = remember, recall
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
            self._remember,
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
        self._recall(snapshot.extras)
        lost = step + 1 - snapshot.as_of
        self._gone_back_to = snapshot
        return WentBack(snapshot.step, target, lost, snapshot.step - snapshot.extras["missing"])

    def _to_disk(self, step: int) -> WentBack | None:
        found = self.checkpoints.newest()
        if found is None or not self.in_place.try_to_load(found):
            return None
        self._recall({})
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
            self._recall(snapshot.extras)

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
