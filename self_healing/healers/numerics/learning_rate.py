"""How much of the schedule's learning rate is in force, and trials of rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from ...config.healing_config import HealingConfig
from ...hf.step import Control, Window
from ...rollback.ring import StepReplayer
from ...rollback.rollback import Rollback
from ...rollback.snapshots import Snapshot
from ...run.run import REFUND_STEPS
from ...system.files import KeepsState


# ---- learning rate ----


# Held for as long as the second moments of AdamW remember, and at least this many steps.
_LEAST_HOLD = 100
# ... but for no more than a tenth of the run.
_LARGEST_SHARE = 10
_LEAST_WARMUP = 10
# From one step to the next.
_RESTART = 2.0


class ScheduleWatch:
    """
    Notices that the schedule has raised the learning rate again after it had fallen: a warm restart, after which the
    loss rises for a while, as it is meant to. A warm-up is no such thing.
    """

    def __init__(self) -> None:
        self.raised_at: int | None = None
        # What the schedule asked for at the step that was taken in last.
        self.rate = self._highest = 0.0

    def observe(self, step: int, rate: float) -> None:
        """Takes in the rate the schedule asks for at a step."""
        if rate >= _RESTART * self.rate and 0 < self.rate < self._highest:
            self.raised_at = step
        self.rate, self._highest = rate, max(rate, self._highest)

    def raised_lately(self, step: int, within: int) -> bool:
        """Whether that was less than so many steps ago."""
        return self.raised_at is not None and step - self.raised_at < within


class LearningRateControl(KeepsState):
    """The factor between the learning rate that the schedule asks for and the one that is used."""

    _state = ("_level", "_ceiling", "_changed_at", "_exponent", "reductions", "_warm_from")

    def __init__(self, config: HealingConfig) -> None:
        self.config = config
        self.hold = _LEAST_HOLD
        self.ramp = config.lr_ramp_steps or self.hold
        self.warmup = _LEAST_WARMUP
        self.reductions = 0
        self._level = 1.0
        self._ceiling = 1.0
        self._changed_at = 0
        self._exponent = 1
        self._warm_from: int | None = None
        self.touched = False
        """Whether the rate may be anything but the schedule's."""

    def begin(self, max_steps: int, beta2: float | None) -> None:
        """Takes in how long the run is and how long its optimizer remembers."""
        memory = 0 if beta2 is None or not 0 <= beta2 < 1 else round(1 / (1 - beta2))
        hold = max(_LEAST_HOLD, memory)
        self.hold = max(min(hold, max_steps // _LARGEST_SHARE), 1) if max_steps > 0 else hold
        self.ramp = self.config.lr_ramp_steps or self.hold
        self.warmup = max(self.hold // 2, _LEAST_WARMUP)

    @property
    def exhausted(self) -> bool:
        return self.reductions >= self.config.max_lr_reductions

    def scale(self, step: int) -> float:
        """The factor at an optimizer step (steps finished before it)."""
        if not self.touched:
            return 1.0
        scale = self._scale(step)
        if self._warm_from is not None and 0 <= step - self._warm_from < self.warmup:
            scale *= (step - self._warm_from + 1) / self.warmup
        return scale

    def _scale(self, step: int) -> float:
        ramped = step - self._changed_at - self.hold + 1
        if ramped <= 0:
            return self._level
        return self._level + (self._ceiling - self._level) * min(ramped / self.ramp, 1.0)

    def reduce(self, step: int, to: float | None = None, blamed: int | None = None) -> float:
        self._cut(step, step if blamed is None else blamed)
        if to is not None:
            while self._level > to and not self.exhausted:
                self._cut(step, step)
            self._level = self._ceiling = max(to, self._level)
        return self._level

    def increase(self, step: int) -> bool:
        """Undoes the newest reduction, or goes above the schedule by one; whether it is allowed to."""
        factor = self.config.lr_reduce_factor
        if self._level > factor ** (0.5 - self.config.max_lr_reductions):
            return False
        self._level /= factor**self._exponent
        self._exponent = max(self._exponent // 2, 1)
        self.reductions = max(self.reductions - 1, 0)
        if self.reductions == 0 and self._level > factor**0.5:
            # Rounded: back at the schedule's rate, or above it by whole steps.
            self._level = factor ** round(math.log(self._level, factor))
        self._ceiling = max(self._ceiling, self._level) if self.reductions else self._level
        self._changed_at, self._warm_from, self.touched = step, None, True
        return True

    def lowest(self, step: int) -> float:
        """The factor that all reductions which are left would lead to."""
        trial = LearningRateControl(self.config)
        trial.hold, trial.ramp = self.hold, self.ramp
        trial.load_state_dict(self.state_dict())
        while not trial.exhausted:
            trial._cut(step, step)
        return trial._level

    def _cut(self, step: int, blamed: int) -> None:
        if blamed - self._changed_at >= max(self.hold + self.ramp, REFUND_STEPS):
            # The ramp has come to its end; back at the schedule's rate, earlier reductions are forgotten.
            self._level = self._ceiling
            self.reductions = 0 if self._level == 1.0 else self.reductions
        now, held = self._scale(blamed), blamed - self._changed_at < self.hold
        if self.reductions == 0:
            self._level, self._ceiling, self._exponent = now * self.config.lr_reduce_factor, now, 1
        elif now > self._level:
            self._ceiling = self._level
        else:
            # After a level that had held to the end, one cut is an ordinary one again.
            self._exponent = self._exponent * 2 if held else 1
            self._level = now * self.config.lr_reduce_factor**self._exponent
            self._ceiling = (self._level * now) ** 0.5 if held else self._level
        self.touched = True
        self.reductions += 1
        self._changed_at = step
        self._warm_from = None

    def warm_up_again(self, step: int) -> int:
        """Grows from a small part of the rate in force to it, for moments that begin anew; the steps it takes."""
        self._warm_from, self.touched = step, True
        return self.warmup

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.touched = self.reductions > 0 or self._level != 1.0 or self._warm_from is not None


# ---- rate trial: which learning rate would a run that failed in its first steps have learned with? ----


# With fewer steps to try learning rates on, the ladder is climbed rung by rung.
LEAST_TRIAL_STEPS = 3
# From one rate to the next lower one that is tried.
_STRIDE = 4.0
# Below the rate that learns fastest in a few steps: one that learns for long. Adam's steps are as long as the rate,
# whatever the gradient, so that what is fastest at first is too restless later on (compare the tenth of fastai's
# `lr_find`). Without second moments the best rate is the largest that is stable.
MARGIN_ADAPTIVE, MARGIN_PLAIN = 8.0, 1.0
# A rate has to bring the loss down by so much, in nats or as a share of it, to count as learning.
_PROGRESS = 0.01


@dataclass(slots=True)
class RateTrial:
    """Trains from a state on given steps with lower and lower rates, until it gets no better."""

    window: Window
    rollback: Rollback
    start: Snapshot
    steps: Sequence[Control]
    # A loss that is higher shows that the run does not learn.
    limit: float
    # By the factor on the schedule's rate.
    losses: dict[float, float] = field(default_factory=dict)

    def find(self, now: float, lowest: float, margin: float) -> float | None:
        """The factor to go on with; `None` if the run learns with none of them."""
        scale = now / 2
        while scale * _STRIDE >= lowest and scale > 0:
            loss = self.losses[scale] = self._loss_after(scale)
            best = min(self.losses.values())
            if math.isfinite(best) and loss > best:
                break
            scale /= _STRIDE
        fastest = min(self.losses, key=self.losses.__getitem__, default=None)
        untouched = self.steps[0].loss
        if fastest is None or not self.losses[fastest] < untouched - _PROGRESS * max(abs(untouched), 1.0):
            return None
        return max(fastest / margin, lowest)

    def _loss_after(self, scale: float) -> float:
        losses = []
        with self.window.engine.retry.experiment():
            self.rollback.try_snapshot(self.start)
            for control in self.steps:
                loss = StepReplayer(self.window).train_on(control, scale)
                if not loss <= self.limit:
                    return math.inf
                losses.append(loss)
        return mean(losses[-max(len(losses) // 3, 1) :])
