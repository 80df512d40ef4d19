"""A loss that rises and stays up."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from operator import sub
from statistics import median
from typing import Any

from ....failures.recipes import Symptom
from ....system.files import KeepsState
from .trend import MAD_TO_SIGMA, LogTrend, UsualRises


# ---- divergence: a loss that goes up and does not come down by itself ----


# Each step adds its z less the slack to the CUSUM, at most the cap.
SLACK, _CAP = 0.5, 4.0
# Sum above which a rise may be building up.
SUSPICIOUS = 3 * SLACK
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
        *("sum", "alarmed", "_since", "_back", "above_chance", "early"),
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
        self.alarmed = self.suspicious = False
        """Whether a loss has risen and is not back; whether a rise is building up, which should enter no baseline."""
        self._given_limit = limit
        self._rises = UsualRises(limit)
        self._highest = 0.0
        self._harmless = False
        self._risen = 0.0
        self._last_zs: deque[float] = deque(maxlen=_NOISE_WINDOW)
        self._seen_step = 0
        self._caution = 1.0
        self._since = 0
        self._back = 0
        chance = None if vocabulary is None else math.log(vocabulary)
        self.above_chance = AboveChance(chance)
        self.early = EarlyRise(chance)

    @property
    def limit(self) -> float:
        """Sum at which a drift is a divergence: what was given, more where rises are usual, and late in a long run."""
        return self._rises.limit * self._caution

    @property
    def overdue(self) -> bool:
        """Whether the loss has stayed away for `patience` steps."""
        return self.alarmed and self._since >= self.patience

    def observe(
        self, step: int, loss: float, z: float | None, trend: LogTrend, usual_spike: bool = False
    ) -> Symptom | None:
        """Judges one loss; `"divergence"`, once for each."""
        if not math.isfinite(loss):
            return None
        self._seen_step = step
        if step > _CAUTIOUS_FROM:
            self._caution = _caution_at(step)
        chance = self.above_chance
        # Mostly it is below, and has been before.
        asked = chance.chance is not None and (loss > chance.limit or chance.steps or not chance.was_below)
        worse = asked and chance.observe(loss)
        early = z is None and self.early.observe(loss)
        if z is not None and not usual_spike:
            self._add(z, trend.stretch)
        self.suspicious = self.alarmed or self.sum > SUSPICIOUS
        if self.sum > SUSPICIOUS:
            self._weigh()
        if self.alarmed:
            self._watch_recovery(loss, z, trend)
            return None
        if self.sum > SLACK and self.sum > self.limit:
            # A CUSUM with this slack looks for a shift of twice as many scales (Page 1954).
            least_rise = max(
                self._rises.least_rise, *((2 * SLACK * trend.scale, trend.least_rise) if trend.ready else ())
            )
            if self._rise(trend, _LAST_LOSSES) >= least_rise:
                return self._alarm(step, loss, z, trend, "drift", cusum=self.sum, limit=self.limit)
            # It rises no further while it waits for the loss to: it has to be able to come down again.
            self.sum = self.limit
        if worse:
            return self._alarm(step, loss, z, trend, "above chance", limit=chance.limit, steps=chance.steps)
        if early:
            return self._alarm(step, loss, z, trend, "early", limit=self.early.limit, steps=self.early.steps)
        return None

    def reset(self) -> None:
        """Ends the alarm: the loss has come back, or has been brought back."""
        self.alarmed = self.suspicious = self._harmless = False
        self.sum = 0.0
        self._highest = self._risen = 0.0
        self.above_chance.steps = 0
        self.early.above.clear()

    def accept_new_level(self) -> None:
        """Ends the alarm: the loss stays where it is, and has to fall below chance again before it can rise above."""
        self._remember_rise()
        self.reset()
        self.above_chance.was_below = False

    def prove_harmless(self) -> None:
        """
        Takes in that trusted weights are no better on the same data: the alarm is [`overdue`] at once, and only a rise
        well above this one is a reason for another.
        """
        self._since = max(self._since, self.patience)
        self._harmless = True
        self._rises.add_harmless(self._risen)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._caution = _caution_at(self._seen_step)
        self._weigh()

    def _weigh(self) -> None:
        usual = (self._rises.limit - self._given_limit) * self._caution
        self.suspicious = self.alarmed or self.sum > max(SUSPICIOUS, usual)

    def _add(self, z: float, stretch: float) -> None:
        self._last_zs.append(z)
        zs, noise, caution = list(self._last_zs), 1.0, self._caution
        if len(zs) > _NOISE_WINDOW // 2:
            # The scale of the last z, if it has grown, from their differences, of which a rise changes one.
            scale = MAD_TO_SIGMA * sorted(map(abs, map(sub, zs[1:], zs)))[(len(zs) - 1) // 2] / math.sqrt(2)
            noise = scale if scale > _NOISIER else 1.0
        self.sum = max(0.0, self.sum + min(z / (stretch * noise), _CAP) - SLACK * caution)
        self._highest = max(self._highest, self.sum)
        if self.sum == 0.0 and not self.alarmed:
            if self._highest / caution > self._rises.worth_noting:
                self._remember_rise()
            self._highest = 0.0

    def _rise(self, trend: LogTrend, losses: int) -> float:
        """Measures how far the last losses lie above the baseline, in natural-log units."""
        return median(list(self._last_zs)[-losses:] or [0.0]) * (trend.scale if trend.ready else 0.0)

    def _remember_rise(self) -> None:
        """Takes in that a rise is over and was no divergence."""
        height = self.limit if self.alarmed else self._highest
        self._rises.add(self._seen_step, height / self._caution, reported=self.alarmed)
        self._highest = 0.0

    def _alarm(
        self, step: int, loss: float, z: float | None, trend: LogTrend, test: str, **evidence: float
    ) -> Symptom:
        self.alarmed = self.suspicious = True
        self._since = self._back = 0
        self._risen = self._rise(trend, _LAST_LOSSES)
        return Symptom("divergence", step, trend.evidence(loss, z) | {"test": test} | evidence, "error")

    def _watch_recovery(self, loss: float, z: float | None, trend: LogTrend) -> None:
        self._since += 1
        if self._harmless:
            self._rises.add_harmless(self._rise(trend, _NOISE_WINDOW))
        if z is not None:
            back = z <= _RECOVERED_BELOW
        elif trend.ready:
            # No logarithm: zero, or below.
            back = loss <= (trend.level or 0.0)
        else:
            back = loss <= self.early.limit
        chance = self.above_chance
        back = back and (not chance.was_below or loss <= chance.limit)
        self._back = self._back + 1 if back else 0
        if self._back >= _RECOVER_STEPS:
            self._remember_rise()
            self.reset()


def _caution_at(step: int) -> float:
    return 1.0 if step <= _CAUTIOUS_FROM else 1 + _CAUTION * math.log(step / _CAUTIOUS_FROM)


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

    def observe(self, loss: float) -> bool:
        """Takes in a loss, and returns whether at least 5 of the last 10 were too high."""
        if self._chance is None:
            return False
        if len(self.first) < _FIRST_STEPS:
            self.first.append(loss)
        if self.first[0] > self._chance + 1:
            return False  # That is no mean cross-entropy per token, or of another vocabulary.
        self.above.append(loss > self.limit)
        return self.steps >= _EARLY_WINDOW // 2
