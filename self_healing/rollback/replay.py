"""Applies steps again after going back, and tells whether what comes out is what it was."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from ..failures.classify import describe_exception
from ..failures.recipes import TrainingFault
from ..hf.experiments import EarlierSteps
from ..hf.objective import StepSignals
from ..hf.step import Recording, Window
from ..system.random_state import tolerance


logger = logging.getLogger("self_healing")

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
