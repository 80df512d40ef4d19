"""A loss that rises and stays up."""

from __future__ import annotations

import math
from collections import deque
from operator import sub
from statistics import median

from ....failures.recipes import Symptom
from ....system.files import KeepsState
from .trend import MAD_TO_SIGMA, Reading, UsualRises


# ---- divergence: a loss that goes up and does not come down by itself ----


# Each step adds its z less the slack to the CUSUM, at most the cap.
_SLACK, _CAP = 0.5, 4.0
# So many losses of at most this z end a divergence.
_RECOVERED_BELOW, _RECOVER_STEPS = 2.0, 5
# The noise of this many losses is held against the scale of all; chance alone makes it half as large again.
_NOISE_WINDOW, _NOISIER = 20, 1.5
_LAST_LOSSES = 3
# Chance gets more opportunities the longer a run: with slack and limit this much larger for each factor e in length,
# from this many steps on, simulated runs of 20,000 steps have a tenth of the false alarms, and a loss that doubles is
# seen a step or two later. At this slack the limit alone would have to grow by 1 / slack = 2 for the rate to fall with
# the square of the length (Siegmund 1985, Sequential Analysis, chapter 2).
_CAUTION, _CAUTIOUS_FROM = 0.2, 1_000


class DivergenceDetector(KeepsState):
    """Reports a loss that rises and stays up."""

    _state = (
        *("sum", "alarmed", "_since", "_back", "_above_chance", "early"),
        *("_rises", "_highest", "_harmless", "_risen", "_last_zs", "_seen_step"),
    )

    def __init__(
        self,
        limit: float = 11.0,
        vocabulary: int | None = None,
        patience: int = 100,
    ) -> None:
        self.patience = patience
        self.sum = 0.0
        self.alarmed = False
        self._given_limit = limit
        self._rises = UsualRises(limit)
        self._highest = 0.0
        self._harmless = False
        self._risen = 0.0
        self._last_zs: deque[float] = deque(maxlen=_NOISE_WINDOW)
        self._seen_step = 0
        self._since = 0
        self._back = 0
        chance = None if vocabulary is None else math.log(vocabulary)
        self._above_chance = AboveChance(chance)
        self.early = EarlyRise(chance)

    @property
    def limit(self) -> float:
        """Sum at which a drift is a divergence: what was given, more where rises are usual, and late in a long run."""
        return self._rises.limit * self._caution

    @property
    def suspicious(self) -> bool:
        """Whether a rise is building up: until it is known to be none, losses should not enter a baseline."""
        return self.alarmed or self.sum > max(3 * _SLACK, self.limit - self._given_limit * self._caution)

    @property
    def overdue(self) -> bool:
        """Whether the loss has stayed away for `patience` steps."""
        return self.alarmed and self._since >= self.patience

    def observe(self, reading: Reading, usual_spike: bool = False) -> Symptom | None:
        """Judges one loss; `"divergence"`, once for each."""
        if not math.isfinite(reading.value):
            return None
        self._seen_step = reading.step
        above_chance = self._above_chance.observe(reading.value)
        early = self.early.observe(reading)
        if reading.z is not None and not usual_spike:
            self._add(reading.z, reading.stretch)
        if self.alarmed:
            self._watch_recovery(reading)
            return None
        # A CUSUM with this slack looks for a shift of twice as many scales (Page 1954).
        least_rise = max(2 * _SLACK * (reading.scale or 0.0), reading.least_rise, self._rises.least_rise)
        if self.sum > self.limit:
            if self._rise(reading, _LAST_LOSSES) >= least_rise:
                return self._alarm(reading, "drift", cusum=self.sum, limit=self.limit)
            # It rises no further while it waits for the loss to: it has to be able to come down again.
            self.sum = self.limit
        if above_chance:
            return self._alarm(reading, "above chance", limit=self._above_chance.limit, steps=self._above_chance.steps)
        if early:
            return self._alarm(reading, "early", limit=self.early.limit, steps=self.early.steps)
        return None

    def reset(self) -> None:
        """Ends the alarm: the loss has come back, or has been brought back."""
        self.alarmed, self._harmless, self.sum = False, False, 0.0
        self._highest = self._risen = 0.0
        self._above_chance.steps = 0
        self.early.above.clear()

    def accept_new_level(self) -> None:
        """Ends the alarm: the loss stays where it is, and has to fall below chance again before it can rise above."""
        self._remember_rise()
        self.reset()
        self._above_chance.was_below = False

    def prove_harmless(self) -> None:
        """
        Takes in that trusted weights are no better on the same data: the alarm is [`overdue`] at once, and only a rise
        well above this one is a reason for another.
        """
        self._since = max(self._since, self.patience)
        self._harmless = True
        self._rises.add_harmless(self._risen)

    @property
    def _caution(self) -> float:
        step = self._seen_step
        return 1.0 if step <= _CAUTIOUS_FROM else 1 + _CAUTION * math.log(step / _CAUTIOUS_FROM)

    def _add(self, z: float, stretch: float) -> None:
        self._last_zs.append(z)
        self.sum = max(0.0, self.sum + min(z / (stretch * self._noise()), _CAP) - _SLACK * self._caution)
        self._highest = max(self._highest, self.sum)
        if self.sum == 0.0 and not self.alarmed:
            self._remember_rise()

    def _rise(self, reading: Reading, losses: int) -> float:
        """Measures how far the last losses lie above the baseline, in natural-log units."""
        return median(list(self._last_zs)[-losses:] or [0.0]) * (reading.scale or 0.0)

    def _noise(self) -> float:
        """Estimates the scale of the last z, if it has grown, from their differences, of which a rise changes one."""
        zs = list(self._last_zs)
        moves = sorted(map(abs, map(sub, zs[1:], zs)))
        if len(moves) < _NOISE_WINDOW // 2:
            return 1.0
        scale = MAD_TO_SIGMA * moves[len(moves) // 2] / math.sqrt(2)
        return scale if scale > _NOISIER else 1.0

    def _remember_rise(self) -> None:
        """Takes in that a rise is over and was no divergence."""
        height = self.limit if self.alarmed else self._highest
        self._rises.add(self._seen_step, height / self._caution, reported=self.alarmed)
        self._highest = 0.0

    def _alarm(self, reading: Reading, test: str, **evidence: float) -> Symptom:
        self.alarmed, self._since, self._back = True, 0, 0
        self._risen = self._rise(reading, _LAST_LOSSES)
        return Symptom("divergence", reading.step, reading.evidence() | {"test": test} | evidence, "error")

    def _watch_recovery(self, reading: Reading) -> None:
        self._since += 1
        if self._harmless:
            self._rises.add_harmless(self._rise(reading, _NOISE_WINDOW))
        if reading.z is not None:
            back = reading.z <= _RECOVERED_BELOW
        elif reading.level is not None:
            # No logarithm: zero, or below.
            back = reading.value <= reading.level
        else:
            back = reading.value <= self.early.limit
        chance = self._above_chance
        back = back and (not chance.was_below or reading.value <= chance.limit)
        self._back = self._back + 1 if back else 0
        if self._back >= _RECOVER_STEPS:
            self._remember_rise()
            self.reset()


# ---- loss in nats ----


# Before there is a baseline, the loss is held against the median of this many first steps.
_FIRST_STEPS = 5
_EARLY_WINDOW = 10
# Steps in a row that are worse than chance, and a rise in nats that means something in the first steps.
_CHANCE_STEPS, _EARLY_RISE = 10, 1.0
# In nats, from one batch to another: the very first loss is that of one batch.
_FIRST_LOSS_VARIES = 0.5


class AboveChance(KeepsState):
    """Finds a loss that is worse than guessing every token, by a factor e, after it was better."""

    _state = ("steps", "was_below")

    def __init__(self, chance: float | None) -> None:
        self.chance = chance
        self.limit = math.inf if chance is None else chance + 1
        self.steps = 0
        """Steps in a row that the loss has been worse."""
        self.was_below = False

    def observe(self, loss: float) -> bool:
        """Takes in a loss, and returns whether it has been worse for long enough."""
        if self.chance is None:
            return False
        self.was_below = self.was_below or loss < self.chance
        self.steps = self.steps + 1 if loss > self.limit else 0
        return self.was_below and self.steps >= _CHANCE_STEPS


class EarlyRise(KeepsState):
    """Finds a loss that rises before it has a baseline."""

    _state = ("first", "above")

    def __init__(self, chance: float | None) -> None:
        self.first: list[float] = []
        """The losses the run began with."""
        self._chance = chance
        self.above: deque[bool] = deque(maxlen=_EARLY_WINDOW)

    @property
    def limit(self) -> float:
        """Loss that is too high for the first steps of a run: a nat above the median of the first five."""
        if not self.first:
            return math.inf
        return min(median(self.first), self.first[0] + _FIRST_LOSS_VARIES) + _EARLY_RISE

    @property
    def steps(self) -> int:
        """Steps of the last 10 whose loss was too high."""
        return sum(self.above)

    def observe(self, reading: Reading) -> bool:
        """Takes in a loss, and returns whether at least 5 of the last 10 were too high."""
        if reading.z is not None or self._chance is None:
            return False
        if len(self.first) < _FIRST_STEPS:
            self.first.append(reading.value)
        if self.first[0] > self._chance + 1:
            return False  # That is no mean cross-entropy per token, or of another vocabulary.
        self.above.append(reading.value > self.limit)
        return self.steps >= _EARLY_WINDOW // 2
