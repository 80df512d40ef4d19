"""Tells what one should know of a run that has come to its end."""

from __future__ import annotations

import logging

from .instrument import BestChoice
from .numerics.state import NumericsState
from .run.context import RunContext


logger = logging.getLogger("self_healing")

# Share of the steps of a run.
_MANY = 0.2


def tell_of_best_model(run: RunContext, best: str, choice: BestChoice) -> None:
    """
    Tells that the best checkpoint could not be loaded, and what the model holds in its place.

    Args:
        run ([`RunContext`]):
            The run.
        best (`str`), choice ([`BestChoice`]):
            That checkpoint, and what was loaded.
    """
    run.journal.event(
        "best_model_passed_over", run.step, path=best, reason=choice.refused, instead=choice.path, metric=choice.metric
    )
    instead = "they are those of the last step"
    if choice.path is not None:
        instead = f"they are those of the next best, {choice.path} ({choice.metric:.4g})"
    logger.error(
        "Step %d: the best checkpoint, %s, is not loaded, because its weights are no good: %s. The weights at the "
        "end of this run are not the best: %s. Nothing of the run is lost; evaluate them before you use them.",
        run.step,
        best,
        choice.refused,
        instead,
    )


def tell_what_to_know(numerics: NumericsState, steps: int) -> None:
    """
    Tells what one should know before one trusts, or resumes, a run that has come to its end.

    Args:
        numerics ([`NumericsState`]):
            Of the run.
        steps (`int`):
            Optimizer steps finished.
    """
    scale = numerics.learning_rate.scale(steps)
    if scale != 1.0:
        logger.warning(
            "The learning rate in force at the end is %.3g times the schedule's. A resume without "
            "SelfHealingCallback would go on with the schedule's.",
            scale,
        )
    lost = steps - numerics.missing.trained(steps)
    if lost > _MANY * steps:
        logger.warning(
            "%d of %d steps are not in the weights: please look at the incidents (self-healing report) before "
            "you use this model.",
            min(lost, steps),
            steps,
        )
