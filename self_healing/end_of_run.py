"""Ends a run that has taken its last step, and tells what to know before its weights are used."""

from __future__ import annotations

import logging
from pathlib import Path

from .healers.assembly import Run
from .healers.numerics.state import NumericsState
from .healers.restarts.emergency import owe_evaluation
from .hf.adapter import Instrument
from .hf.saving import BestChoice
from .report.verdict import movement_of
from .run.run import RunContext
from .run.status import RunState


logger = logging.getLogger("self_healing")

# Share of the steps of a run.
_MANY = 0.2


def heal_the_last_step(run: Run) -> None:
    """Heals what the last step has left, which would be handed over as trained. All ranks have to come."""
    with run.context.heartbeat.section("judge"):
        run.context.attachment.healers.last_step_taken()


def end_run(run: Run, instrument: Instrument, step: int) -> None:
    """Closes what is open, and gives the trainer back as it was."""
    context, args, leaves = run.context, instrument.trainer.args, run.departure.begun
    healers = context.attachment.healers
    run.numerics.close_outcomes(unfollowed="resolved")
    healers.run_ends(step)
    if context.stop.incident is not None:
        # Seen in the last log: there is no step left to stop before.
        context.dealing_with(context.stop.incident).close("reported")
        context.stop.incident = None
    movement = movement_of(instrument.trainer.state.log_history)
    looked_at = context.config.on_nonfinite == "heal" or not instrument.view.can_reexecute
    weights = [] if looked_at else instrument.view.nonfinite_weights()[:5]
    context.journal.event(
        "run_ended",
        step,
        incidents=len(context.journal.incidents),
        **({"learned": movement} if movement else {}),
        **({"nonfinite": weights} if weights else {}),
        **run.numerics.rate_in_force(),
    )
    if run.attempts.status is not None and not leaves:
        run.attempts.status.end(RunState.ENDED, step)
    _tell_what_to_know(run.numerics, step)
    if leaves and instrument.leaving.owes_evaluation and args.should_save:
        owe_evaluation(Path(args.output_dir or ".") / f"checkpoint-{step}")
    instrument.detach()
    run.rollback.release()
    if not leaves:
        context.checksums.wait()
    elif run.attempts.record is None and step < instrument.trainer.state.max_steps:
        run.departure.leave(step, str(args.output_dir))


def tell_of_best_model(context: RunContext, best: str, choice: BestChoice) -> None:
    """Tells that the best checkpoint could not be loaded, and what the model holds in its place."""
    context.journal.event(
        "best_model_passed_over",
        context.step,
        path=best,
        reason=choice.refused,
        instead=choice.path,
        metric=choice.metric,
    )
    instead = "they are those of the last step"
    if choice.path is not None:
        instead = f"they are those of the next best, {choice.path} ({choice.metric:.4g})"
    logger.error(
        "Step %d: the best checkpoint, %s, is not loaded, because its weights cannot be used: %s. The weights at the "
        "end of this run are not the best: %s. Nothing of the run is lost; evaluate them before you use them.",
        context.step,
        best,
        choice.refused,
        instead,
    )


def _tell_what_to_know(numerics: NumericsState, steps: int) -> None:
    """Before the run is trusted, or resumed."""
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
