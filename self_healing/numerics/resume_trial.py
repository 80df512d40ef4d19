"""Is it the checkpoint a run was resumed from that makes it fail? Tried out, with older ones on the same batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ..failures.recipes import TrainingFault
from ..hf.experiments import EarlierSteps
from ..hf.objective import StepSignals
from ..hf.step import Window
from ..rollback.trusted import StateTrials


logger = logging.getLogger(__name__)

# A batch that is trained on in the experiment must not be generated anew, and is there anyway.
_ANY_SIZE = 2**63
# A gradient that is so much larger with other weights was not small because everything is learned ...
_DEAD_RATIO = 1000.0
# ... nor is one that is no larger than this.
_LEAST_GRADIENT = 1e-4


@dataclass(slots=True)
class ResumeTrial:
    """What was found out."""

    sound: str | None = None
    damaged: list[str] = field(default_factory=list)
    tried: dict[str, Any] = field(default_factory=dict)


def try_older_checkpoints(
    window: Window,
    trials: StateTrials,
    resumed: str,
    older: Iterable[str],
    scale: float,
    rise: float,
    unmoved: bool,
) -> ResumeTrial:
    """
    Computes the step with the checkpoint the run was resumed from, takes one optimizer step on it, and computes it
    once more; then the same with older ones.
    """
    trial = ResumeTrial()
    candidates = iter(older)
    first = next(candidates, None)
    if first is None or not trials.begin_with_checkpoints(window.step, unmoved):
        return trial
    try:
        try:
            with window.experiment():
                suspects = {resumed: _trained_with(window, trials, resumed, scale, trial)}
                # It was there and finite when it was resumed from; since then rotation may have removed it.
                for checkpoint in chain([first], candidates) if suspects[resumed] is not None else ():
                    found = _trained_with(window, trials, checkpoint, scale, trial)
                    if all(_is_clearly_worse(suspect, found, rise, window) for suspect in suspects.values()):
                        trial.sound, trial.damaged = checkpoint, list(suspects)
                        break
                    suspects[checkpoint] = found
        finally:
            trials.end_with_checkpoints(resumed)
            window.begin_from_here()
    except TrainingFault as fault:
        logger.info("The step could not be computed with older checkpoints.", exc_info=fault.error)
    return trial


def _trained_with(
    window: Window, trials: StateTrials, checkpoint: str, scale: float, trial: ResumeTrial
) -> list[StepSignals] | None:
    """The step before and after an update on it; `None` for a checkpoint that cannot be put in place."""
    if not trials.try_checkpoint(checkpoint):
        trial.tried[checkpoint] = "could not be loaded"
        return None
    window.begin_from_here()
    window.reexecute()
    found = [window.signals()]
    control = window.control(found[0].loss, _ANY_SIZE)
    if control is not None and found[0].finite:
        EarlierSteps(window).train_on(control, scale)
        window.reexecute()
        found.append(window.signals())
    trial.tried[checkpoint] = [{"loss": each.loss, "grad_norm": each.grad_norm} for each in found]
    return found


def _is_clearly_worse(
    suspect: list[StepSignals] | None, other: list[StepSignals] | None, rise: float, window: Window
) -> bool:
    if other is None or not all(each.finite for each in other):
        return False
    if suspect is None or not all(each.finite for each in suspect):
        return True
    if window.objective.online:
        # A loss around 0 with a sign says nothing about the weights.
        return False
    before, now = max(each.loss for each in other), max(each.loss for each in suspect)
    if not min(before, now) > 0:
        return False
    apart = math.log(now / before)
    gradient, theirs = suspect[0].grad_norm or 0.0, other[0].grad_norm or 0.0
    dead = theirs >= max(_DEAD_RATIO * gradient, _LEAST_GRADIENT) and apart > 0
    return dead or apart >= rise
