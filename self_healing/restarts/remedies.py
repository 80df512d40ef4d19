"""The actions of this family, when nothing else helps: saves an emergency checkpoint, waits, stops the run."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainingArguments

from ..checkpoints.choice import newest_checkpoint_of
from ..checkpoints.marker import step_of
from ..failures.classify import classify_exception, describe_exception
from ..failures.recipes import Action, FailureType
from ..failures.retry import RetryPolicy
from ..healers.restarts.emergency import save_emergency_checkpoint
from ..healers.restarts.ending import RunEnding
from ..hf.adapter import Instrument
from ..rollback.last_step import LastStep
from ..rollback.rollback import Rollback, Target
from ..run.healer import CarryOut, HealingContext
from ..run.run import RunContext
from ..system import processes
from .attempts import Attempts


logger = logging.getLogger("self_healing")


class LastResorts:
    """Saves an emergency checkpoint, waits before `train()` is entered again, or stops the run with a postmortem."""

    def __init__(
        self, run: RunContext, attempts: Attempts, ending: RunEnding, rollback: Rollback, last_step: LastStep
    ) -> None:
        self.run = run
        self.config = run.config
        self.attempts = attempts
        self.ending = ending
        self.rollback = rollback
        self.last_step = last_step

    def table(self) -> dict[Action, CarryOut]:
        """The actions, and what does each."""
        return {
            Action.EMERGENCY_CHECKPOINT: self._emergency_checkpoint,
            Action.WAIT_AND_RESUME: self._wait,
            Action.STOP: self._stop,
        }

    def _emergency_checkpoint(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        if not self.config.emergency_checkpoint:
            return {"checkpoint": None, "why": "emergency_checkpoint=False", "happened": False}
        why = self._not_worth_saving(context)
        if why:
            return {"checkpoint": None, "why": why, "happened": False}
        if processes.world_size() > 1:
            self.last_step.leave(context.running)
        try:
            checkpoints = self.rollback.checkpoints
            checkpoints.leave_room()
            point = save_emergency_checkpoint(
                context.running,
                self.run.run_id,
                give_way=lambda: bool(checkpoints.give_way()),
                about_to_write=self.attempts.about_to_write,
                heals=context.error is not None,
                later=self.run.checksums,
            )
        except Exception as error:
            if classify_exception(error) is FailureType.DEVICE:
                raise
            logger.warning(
                "The emergency checkpoint could not be written (%s); falling back on the newest regular one.",
                describe_exception(error),
            )
            logger.debug("Why it could not be written:", exc_info=True)
            return {"checkpoint": None, "why": describe_exception(error), "happened": False}
        if point is None:
            return {"checkpoint": None, "why": _why_there_is_none(context.running), "happened": False}
        self.attempts.resume_point = point
        return {"checkpoint": point.path}

    def _not_worth_saving(self, context: HealingContext) -> str:
        """Says why a checkpoint of the state gone back to would mislead: there is none, or one that got further."""
        if Action.ROLL_BACK not in context.attempted:
            return ""
        if context.went_back is None:
            return "there is no trusted state to save"
        trainer = context.running.trainer
        trained = self.attempts.steps.trained_steps(int(trainer.state.global_step) + 1)
        if trained <= 0 or context.went_back.target is Target.INITIAL:
            return "it would hold the state the run began with"
        newest = newest_checkpoint_of(self.run.run_id, str(trainer.args.output_dir))
        if newest is not None and step_of(newest, default=0) >= trained:
            return f"{newest} holds more training"
        return ""

    def _wait(self, _: HealingContext, __: TrainingArguments) -> dict[str, Any]:
        seconds = RetryPolicy.of(self.config).draw_wait(max(self.run.budget.used, 1))
        self.run.sleep(seconds)
        return {"waited_seconds": round(seconds, 3)}

    def _stop(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        verdict = context.verdict or "it was asked to stop"
        error = self.ending.stop(context.incident, verdict, context.error, context.resume_from)
        self.rollback.release()
        raise error


def _why_there_is_none(instrument: Instrument) -> str:
    """Says why an emergency checkpoint was not even begun."""
    if processes.world_size() > 1:
        return "several processes train together, and the others may not be able to save"
    return f"the weights cannot be trusted: it happened {instrument.reentry.phase.value}"
