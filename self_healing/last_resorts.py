"""What a run does when nothing else helps: save what can be resumed from, wait, and stop with directions."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainingArguments

from . import consensus
from .checkpoints.choice import newest_checkpoint_of
from .checkpoints.emergency import save_emergency_checkpoint
from .checkpoints.marker import step_of
from .classify import classify_exception, describe_exception
from .config import HealingConfig
from .failures import Action, FailureType
from .instrument import Instrument
from .retry import RetryPolicy
from .run.remedies import CarryOut, HealingContext
from .run_ending import RunEnding
from .session import Session
from .went_back import Target


logger = logging.getLogger("self_healing")


class LastResorts:
    """
    Saves an emergency checkpoint, waits before `train()` is entered again, or stops the run with a postmortem.

    Args:
        config ([`HealingConfig`]):
            Waits, and whether an emergency checkpoint is wanted.
        session ([`Session`]):
            The memory of the run.
    """

    def __init__(self, config: HealingConfig, session: Session) -> None:
        self.config = config
        self.session = session

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
        try:
            rollback = self.session.rollback
            rollback.leave_room()
            point = save_emergency_checkpoint(
                context.running,
                self.session.run_id,
                give_way=lambda: bool(rollback.give_way()),
                about_to_write=self.session.attempts.about_to_write,
                heals=context.error is not None,
                later=self.session.checksums.put,
            )
        except Exception as error:
            if classify_exception(error) is FailureType.DEVICE:
                raise
            logger.warning(
                "The emergency checkpoint could not be written (%s); falling back on the newest regular one.",
                describe_exception(error),
                exc_info=True,
            )
            return {"checkpoint": None, "why": describe_exception(error), "happened": False}
        if point is None:
            return {"checkpoint": None, "why": _why_there_is_none(context.running), "happened": False}
        self.session.resume_point = point
        return {"checkpoint": point.path}

    def _not_worth_saving(self, context: HealingContext) -> str:
        """Why a checkpoint of the state gone back to would mislead: there is none, or one that got further."""
        if Action.ROLL_BACK not in context.attempted:
            return ""
        if context.went_back is None:
            return "there is no trusted state to save"
        trainer = context.running.trainer
        trained = self.session.numerics.missing.trained(int(trainer.state.global_step) + 1)
        if trained <= 0 or context.went_back.target is Target.INITIAL:
            return "it would hold the state the run began with"
        newest = newest_checkpoint_of(self.session.run_id, str(trainer.args.output_dir))
        if newest is not None and step_of(newest, default=0) >= trained:
            return f"{newest} holds more training"
        return ""

    def _wait(self, _: HealingContext, __: TrainingArguments) -> dict[str, Any]:
        seconds = RetryPolicy.of(self.config).draw_wait(max(self.session.budget.used, 1))
        self.session.sleep(seconds)
        return {"waited_seconds": round(seconds, 3)}

    def _stop(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        session, trainer = self.session, context.running.trainer
        session.rollback.release()
        verdict = context.verdict or "it was asked to stop"
        raise RunEnding(session, trainer).stop(context.incident, verdict, context.error, context.resume_from)


def _why_there_is_none(instrument: Instrument) -> str:
    """Why an emergency checkpoint was not even begun."""
    if consensus.world_size() > 1:
        return "several processes train together, and the others may not be able to save"
    return f"the weights cannot be trusted: it happened {instrument.reentry.phase.value}"
