"""A loss that rises and stays up."""

from __future__ import annotations

import math
from collections import deque
from operator import sub
from statistics import median
from typing import Any

from ....failures.recipes import Symptom
from .trend import MAD_TO_SIGMA, Reading, UsualRises


# ---- divergence: a loss that goes up and does not come down by itself ----


# The noise of this many losses is held against the scale of all; chance alone makes it half as large again.
_NOISE_WINDOW, _NOISIER = 20, 1.5
_LAST_LOSSES = 3
# Chance gets more opportunities the longer a run: with slack and limit this much larger for each factor e in length,
# from this many steps on, simulated runs of 20,000 steps have a tenth of the false alarms, and a loss that doubles is
# seen a step or two later. At this slack the limit alone would have to grow by 1 / slack = 2 for the rate to fall with
# the square of the length (Siegmund 1985, Sequential Analysis, chapter 2).
_CAUTION, _CAUTIOUS_FROM = 0.2, 1_000


class DivergenceDetector:
    """Reports a loss that rises and stays up."""

    def __init__(
        self,
        slack: float = 0.5,
        limit: float = 11.0,
        cap: float = 4.0,
        vocabulary: int | None = None,
        chance_steps: int = 10,
        early_rise: float = 1.0,
        recovered_below: float = 2.0,
        recover_steps: int = 5,
        patience: int = 100,
    ) -> None:
        self.slack = slack
        self.cap = cap
        self.recovered_below = recovered_below
        self.recover_steps = recover_steps
        self.patience = patience
        self.sum = 0.0
        self.alarmed = False
        self._given_limit = limit
        self._rises = UsualRises(limit)
        self._highest = 0.0
        self._harmless = False
        self._risen = 0.0
        self._last_zs: deque[float] = deque(maxlen=_NOISE_WINDOW)
        self._move_to(0)
        self._since = 0
        self._back = 0
        self._first_zs: list[float] = []
        self._further = 0.0
        self._rose_again = False
        chance = None if vocabulary is None else math.log(vocabulary)
        self._above_chance = AboveChance(chance, chance_steps)
        self.early = EarlyRise(chance, early_rise)

    @property
    def limit(self) -> float:
        """Sum at which a drift is a divergence: what was given, more where rises are usual, and late in a long run."""
        return self._rises.limit * self._caution

    @property
    def suspicious(self) -> bool:
        """Whether a rise is building up: until it is known to be none, losses should not enter a baseline."""
        return self.alarmed or self.sum > max(3 * self.slack, self.limit - self._given_limit * self._caution)

    @property
    def overdue(self) -> bool:
        """Whether the loss has stayed away for `patience` steps."""
        return self.alarmed and self._since >= self.patience

    def observe(self, reading: Reading, usual_spike: bool = False) -> Symptom | None:
        """Judges one loss; `"divergence"`, once for each, and `"second_rise"`."""
        if not math.isfinite(reading.value):
            return None
        self._move_to(reading.step)
        above_chance = self._above_chance.observe(reading.value)
        early = self.early.observe(reading)
        if reading.z is not None and not usual_spike:
            self._add(reading.z, reading.stretch)
        if self.alarmed:
            self._watch_recovery(reading)
            return self._second_rise(reading) if self.alarmed and not usual_spike else None
        # A CUSUM with this slack looks for a shift of twice as many scales (Page 1954).
        least_rise = max(2 * self.slack * (reading.scale or 0.0), reading.least_rise, self._rises.least_rise)
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
        self._above_chance.reset()
        self.early.reset()

    def accept_new_level(self) -> None:
        """Ends the alarm: the loss stays where it is, and has to fall below chance again before it can rise above."""
        self._remember_rise()
        self.reset()
        self._above_chance.forget_below()

    def prove_harmless(self) -> None:
        """
        Takes in that trusted weights are no better on the same data: the alarm is [`overdue`] at once, and only a rise
        well above this one is a reason for another.
        """
        self._since = max(self._since, self.patience)
        self._harmless = True
        self._rises.add_harmless(self._risen)

    def _move_to(self, step: int) -> None:
        self._step = step
        self._caution = 1 + _CAUTION * math.log(max(step / _CAUTIOUS_FROM, 1.0))

    def _add(self, z: float, stretch: float) -> None:
        self._last_zs.append(z)
        self.sum = max(0.0, self.sum + min(z / (stretch * self._noise()), self.cap) - self.slack * self._caution)
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
        self._rises.add(self._step, height / self._caution, reported=self.alarmed)
        self._highest = 0.0

    def _alarm(self, reading: Reading, test: str, **evidence: float) -> Symptom:
        self.alarmed, self._since, self._back = True, 0, 0
        self._risen = self._rise(reading, _LAST_LOSSES)
        self._first_zs, self._further, self._rose_again = [], 0.0, False
        return Symptom("divergence", reading.step, reading.evidence() | {"test": test} | evidence, "error")

    def _second_rise(self, reading: Reading) -> Symptom | None:
        """Reports a loss that rises further than where the alarm found it."""
        if reading.z is None or self._rose_again:
            return None
        if len(self._first_zs) < _NOISE_WINDOW:
            self._first_zs.append(reading.z)
            return None
        further = (reading.z - median(self._first_zs)) / (reading.stretch * self._noise())
        self._further = max(0.0, self._further + min(further, self.cap) - 2 * self.slack)
        if self._further <= self.limit:
            return None
        self._rose_again = True
        evidence = reading.evidence() | {"cusum": self._further, "limit": self.limit, "steps": self._since}
        return Symptom("second_rise", reading.step, evidence)

    def _watch_recovery(self, reading: Reading) -> None:
        self._since += 1
        if self._harmless:
            self._rises.add_harmless(self._rise(reading, _NOISE_WINDOW))
        if reading.z is not None:
            back = reading.z <= self.recovered_below
        elif reading.level is not None:
            # No logarithm: zero, or below.
            back = reading.value <= reading.level
        else:
            back = reading.value <= self.early.limit
        back = back and self._above_chance.is_recovered(reading.value)
        self._back = self._back + 1 if back else 0
        if self._back >= self.recover_steps:
            self._remember_rise()
            self.reset()

    def state_dict(self) -> dict[str, Any]:
        return {
            "sum": self.sum,
            "alarmed": self.alarmed,
            "since": self._since,
            "back": self._back,
            "first_zs": list(self._first_zs),
            "further": self._further,
            "rose_again": self._rose_again,
            **self._above_chance.state_dict(),
            **self.early.state_dict(),
            "usual_rises": self._rises.state_dict(),
            "highest": self._highest,
            "harmless": self._harmless,
            "risen": self._risen,
            "last_zs": list(self._last_zs),
            "step": self._step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum = state["sum"]
        self.alarmed = state["alarmed"]
        self._since = state["since"]
        self._back = state["back"]
        self._first_zs, self._further = list(state.get("first_zs", ())), state.get("further", 0.0)
        self._rose_again = state.get("rose_again", False)
        self._above_chance.load_state_dict(state)
        self.early.load_state_dict(state)
        self._rises = UsualRises(self._given_limit)
        if "usual_rises" in state:
            self._rises.load_state_dict(state["usual_rises"])
        self._highest, self._risen = state.get("highest", 0.0), state.get("risen", 0.0)
        self._harmless = state.get("harmless", False)
        self._last_zs = deque(state.get("last_zs", ()), maxlen=_NOISE_WINDOW)
        self._move_to(state.get("step", 0))


# ---- loss in nats ----


# Before there is a baseline, the loss is held against the median of this many first steps.
_FIRST_STEPS = 5
_EARLY_WINDOW = 10
# In nats, from one batch to another: the very first loss is that of one batch.
_FIRST_LOSS_VARIES = 0.5


class AboveChance:
    """Finds a loss that is worse than guessing every token, by a factor e, after it was better."""

    def __init__(self, chance: float | None, steps: int) -> None:
        self.chance = chance
        self.limit = math.inf if chance is None else chance + 1
        self.steps = 0
        """Steps in a row that the loss has been worse."""
        self._steps_needed = steps
        self._was_below = False

    def observe(self, loss: float) -> bool:
        """Takes in a loss, and returns whether it has been worse for long enough."""
        if self.chance is None:
            return False
        self._was_below = self._was_below or loss < self.chance
        self.steps = self.steps + 1 if loss > self.limit else 0
        return self._was_below and self.steps >= self._steps_needed

    def is_recovered(self, loss: float) -> bool:
        """Whether a loss that was better than chance is not worse."""
        return not self._was_below or loss <= self.limit

    def reset(self) -> None:
        """Counts from 0 again."""
        self.steps = 0

    def forget_below(self) -> None:
        """Asks for a loss better than chance once more before one can be worse."""
        self._was_below = False

    def state_dict(self) -> dict[str, Any]:
        return {"above_chance": self.steps, "was_below_chance": self._was_below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._was_below = state["above_chance"], state["was_below_chance"]


class EarlyRise:
    """Finds a loss that rises before it has a baseline."""

    def __init__(self, chance: float | None, rise: float) -> None:
        self.rise = rise
        self.first: list[float] = []
        """The losses the run began with."""
        self._chance = chance
        self._above: deque[bool] = deque(maxlen=_EARLY_WINDOW)

    @property
    def limit(self) -> float:
        """Loss that is too high for the first steps of a run: `rise` above the median of the first five."""
        if not self.first:
            return math.inf
        return min(median(self.first), self.first[0] + _FIRST_LOSS_VARIES) + self.rise

    @property
    def steps(self) -> int:
        """Steps of the last 10 whose loss was too high."""
        return sum(self._above)

    def observe(self, reading: Reading) -> bool:
        """Takes in a loss, and returns whether at least 5 of the last 10 were too high."""
        if reading.z is not None or self._chance is None:
            return False
        if len(self.first) < _FIRST_STEPS:
            self.first.append(reading.value)
        if self.first[0] > self._chance + 1:
            return False  # That is no mean cross-entropy per token, or of another vocabulary.
        self._above.append(reading.value > self.limit)
        return self.steps >= _EARLY_WINDOW // 2

    def keep_first(self, first: list[float]) -> None:
        """Takes the losses a run began with from a state in which more of them were known."""
        if len(first) > len(self.first):
            self.first = list(first)

    def reset(self) -> None:
        """Forgets which of the last losses were too high."""
        self._above.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"first": list(self.first), "early": list(self._above)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = list(state["first"])
        self._above = deque(state["early"], maxlen=_EARLY_WINDOW)
