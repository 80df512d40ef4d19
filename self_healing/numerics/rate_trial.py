"""Which learning rate would a run that failed in its first steps have learned with? Tried out, on those steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

from ..failures.recipes import TrainingFault
from ..hf.experiments import EarlierSteps
from ..hf.memory import let_go
from ..hf.step import Control, Window
from ..rollback.snapshots import Snapshot
from ..rollback.trusted import StateTrials


logger = logging.getLogger(__name__)

# From one rate to the next lower one that is tried.
_STRIDE = 4.0
# Below the rate that learns fastest in a few steps: one that learns for long. Adam's steps are as long as the rate,
# whatever the gradient, so that what is fastest at first is too restless later on (compare the tenth of fastai's
# `lr_find`). Without second moments the best rate is the largest that is stable.
_MARGIN_ADAPTIVE, _MARGIN_PLAIN = 8.0, 1.0
# A rate has to bring the loss down by so much, in nats or as a share of it, to count as learning.
_PROGRESS = 0.01


@dataclass(frozen=True, slots=True)
class RateTrial:
    """What was found out."""

    scale: float | None
    losses: dict[float, float] = field(default_factory=dict)


def try_rates(
    window: Window,
    trials: StateTrials,
    start: Snapshot,
    steps: Sequence[Control],
    now: float,
    lowest: float,
    limit: float,
    adaptive: bool,
) -> RateTrial:
    """Trains from a state on given steps with lower and lower rates, until it gets no better."""
    margin = _MARGIN_ADAPTIVE if adaptive else _MARGIN_PLAIN
    losses: dict[float, float] = {}
    scale = now / 2
    while scale * _STRIDE >= lowest and scale > 0:
        losses[scale] = _loss_after(window, trials, start, steps, scale, limit)
        best = min(losses.values())
        if math.isfinite(best) and losses[scale] > best:
            break
        scale /= _STRIDE
    fastest = min(losses, key=lambda each: losses[each], default=None)
    untouched = mean(control.loss for control in steps[:1])
    if fastest is None or not losses[fastest] < untouched - _PROGRESS * max(abs(untouched), 1.0):
        return RateTrial(None, losses)
    return RateTrial(max(fastest / margin, lowest), losses)


def _loss_after(
    window: Window, trials: StateTrials, start: Snapshot, steps: Sequence[Control], scale: float, limit: float
) -> float:
    """Of the last steps; computed once more where a fault strikes meanwhile, from the state anew."""
    try:
        return _train_from(window, trials, start, steps, scale, limit)
    except TrainingFault as fault:
        logger.info("Learning rates are tried out once more.", exc_info=fault.error)
        let_go(fault.error)
    return _train_from(window, trials, start, steps, scale, limit)


def _train_from(
    window: Window, trials: StateTrials, start: Snapshot, steps: Sequence[Control], scale: float, limit: float
) -> float:
    losses = []
    with window.experiment():
        trials.try_snapshot(start)
        for control in steps:
            loss = EarlierSteps(window).train_on(control, scale)
            if not loss <= limit:
                return math.inf
            losses.append(loss)
    return mean(losses[-max(len(losses) // 3, 1) :])
