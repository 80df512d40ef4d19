"""Bounds of loss and gradient norm within which a step has nothing that a detector would say at once."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np

from ....hf.objective import StepSignals
from .divergence import SLACK, SUSPICIOUS
from .panel import CO_SPIKE_Z, OF_ITS_LOGARITHM, DetectorPanel
from .progress import PRACTICALLY_ZERO


# So many steps may wait to be observed. The more, the farther the bounds have to be kept from what is usual.
MOST_WAITING = 6
_LARGEST = sys.float_info.max
# Roundings of a logarithm decide nothing.
_LESS = 0.999


@dataclass(slots=True)
class Bounds:
    """
    What the next steps have to keep within to be observed later, all in one loop: wherever within them they lie, and
    whatever they make of the baselines, none of them has a symptom, and no rise of the loss becomes suspicious. So
    when a step is observed decides nothing.
    """

    steps: int = MOST_WAITING
    lowest_loss: float = -_LARGEST
    highest_loss: float = _LARGEST
    lowest_norm: float = -_LARGEST
    highest_norm: float = _LARGEST
    # How far the CUSUM of the loss can have risen, and what level and scale can have come down to: in its own units.
    risen: float = 0.0
    level: float = 0.0
    scale: float = math.inf
    slack: float = 0.0

    def admit(self, signals: StepSignals) -> bool:
        """Takes in a step that may wait; `False` for one that has to be observed at once. NaN passes no comparison."""
        loss, norm = signals.loss, signals.grad_norm
        if self.steps <= 0 or not self.lowest_loss <= loss <= self.highest_loss:
            return False
        if norm is not None and not self.lowest_norm <= norm <= self.highest_norm:
            return False
        # A logarithm of 1 + x is less than x; what is below its level may count for less, if the spread has grown.
        self.risen = max(self.risen + max((loss - self.level) / self.scale, 0.0) - self.slack, 0.0)
        self.steps -= 1
        return self.risen <= SUSPICIOUS

    def single(self) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """Lowest and highest loss and norm of the next step, as float32 on the safe side; `None` if none may wait."""
        if self.steps <= 0:
            return None
        rise = _LESS * (SUSPICIOUS + self.slack - self.risen) * self.scale
        highest = min(self.highest_loss, self.level + rise)
        lows, highs = (self.lowest_loss, self.lowest_norm), (highest, self.highest_norm)
        lowest, norm = (_single(each, math.inf) for each in lows)
        highest, largest = (_single(each, -math.inf) for each in highs)
        return (lowest, norm), (highest, largest)


def _single(value: float, towards: float) -> float:
    """Rounds to float32, where that differs in one direction; what it does not hold is the largest that it does."""
    limit = float(np.finfo(np.float32).max)
    value = min(max(value, -limit), limit)
    rounded = float(np.float32(value))
    wrong = rounded < value if towards > 0 else rounded > value
    return float(np.nextafter(np.float32(rounded), np.float32(towards))) if wrong else rounded


def bounds_of(panel: DetectorPanel) -> Bounds | None:
    """The bounds of the next steps; `None` while each has to be observed at once, as it is applied."""
    applies, bounds = panel.apply, Bounds()
    judged = applies & OF_ITS_LOGARITHM and not panel.signed_loss
    if judged and not (panel.loss_trend.ready and _bound_loss(bounds, panel)):
        return None
    for name, detector in (("never_learned", panel.never_learned), ("slow_rise", panel.slow_rise)):
        if name in applies:
            # What looks back now and then does so when its step is applied.
            bounds.steps = min(bounds.steps, detector.until_look - 1)
    if "dead_loss" in applies:
        bounds.lowest_loss = max(bounds.lowest_loss, math.ulp(0.0))
    bounds.highest_norm = min(panel.gradient_spike.explosion, _LARGEST)
    spike = min(panel.gradient_spike.threshold, panel.co_spike_z if "co_spike" in applies else math.inf)
    if math.isfinite(spike) and panel.gradient_trend.ready:
        lowest, logarithm, scale, added = panel.gradient_trend.reach(MOST_WAITING)
        bounds.lowest_norm = math.exp(lowest) - added
        bounds.highest_norm = min(bounds.highest_norm, math.exp(logarithm + _LESS * spike * scale) - added)
    elif math.isfinite(spike):
        # No norm is known to be usual; a run may have none.
        bounds.highest_norm = -math.inf
    if "vanishing_gradient" in applies:
        bounds.lowest_norm = max(bounds.lowest_norm, PRACTICALLY_ZERO)
    return bounds


def _bound_loss(bounds: Bounds, panel: DetectorPanel) -> bool:
    divergence = panel.divergence
    if divergence.alarmed or divergence.sum > SUSPICIOUS:
        return False
    lowest, logarithm, scale, added = panel.loss_trend.reach(MOST_WAITING)
    level = math.exp(logarithm)
    # What has no logarithm is none that has a sign.
    bounds.lowest_loss = max(math.exp(lowest) - added, math.ulp(0.0))
    highest = min(level * math.exp(_LESS * CO_SPIKE_Z * scale) - added, panel.divergence.above_chance.limit)
    factor = panel.loss_spike.factor
    bounds.highest_loss = min(highest, factor * (level - added)) if factor > 0 else highest
    bounds.risen, bounds.slack = divergence.sum, SLACK
    bounds.level, bounds.scale = level - added, level * scale
    return True
