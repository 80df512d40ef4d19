"""
A device that is lost: nothing can be computed, saved or freed in this process any more.

What has to be written down comes first, and without a single tensor: every operation would raise, or wait for ever,
and memory of the device that is given back may end the process on the spot.
"""

from __future__ import annotations

import logging
from typing import Any

from .checkpoints.choice import newest_marked_checkpoint_of
from .classify import describe_exception, text_of
from .failures import FAILURE_RECIPES, Action, FailureType
from .launcher import EXIT_FOR_RESTART, end_process_with, restarts_on_exit
from .postmortem import where_to_go_on
from .run_record import Ending
from .session import Session


logger = logging.getLogger("self_healing")


def write_down_lost_device(session: Session, trainer: Any, error: BaseException, verdict: str = "") -> None:
    """
    Writes incident and postmortem, once in a run. Never raises.

    Args:
        session ([`Session`]):
            Of the run.
        trainer ([`~transformers.Trainer`]):
            The trainer; of its state only numbers are read.
        error (`BaseException`):
            What told of it.
        verdict (`str`, *optional*):
            Why the run ends. Defaults to the error.
    """
    if session.device_lost:
        return
    session.device_lost = True
    try:
        _write_down(session, trainer, error, verdict or describe_exception(error))
    except Exception:
        logger.exception("That the device is lost could not be written down; the exception goes on as it came.")


def _write_down(session: Session, trainer: Any, error: BaseException, verdict: str) -> None:
    journal, step = session.journal, int(trainer.state.global_step)
    incident = journal.open(step, type(error).__name__, {"message": text_of(error)[:500]})
    journal.diagnosed(incident, FailureType.DEVICE, "device", {})
    if _is_started_again(session):
        journal.acted(incident, Action.EXIT_FOR_RESTART.value, exit_code=EXIT_FOR_RESTART)
    else:
        journal.acted(incident, Action.STOP.value)
        session.close_as_fatal(incident)
    newest = newest_marked_checkpoint_of(session.run_id, str(trainer.args.output_dir)) or session.attempts.first_resume
    session.attempts.postmortem = journal.write_postmortem(
        verdict,
        FailureType.DEVICE,
        step,
        error,
        trainer.state.log_history,
        None,
        advice=f"{FAILURE_RECIPES[FailureType.DEVICE].advice} {where_to_go_on(newest)}",
        older_checkpoint=newest,
    )
    journal.dealt_with(incident)


def leave_lost_device(session: Session, error: BaseException) -> None:
    """
    Ends the process where a launcher starts it again.

    Args:
        session ([`Session`]):
            Of a run of the wrapper; what it ends with is written down.
        error (`BaseException`):
            What told of the device. It is kept, and with it all tensors of the step.

    Raises:
        SystemExit: With 75, where a launcher starts the job again.
    """
    if not _is_started_again(session):
        return
    session.end_attempt(Ending.RESTART, describe_exception(error))
    end_process_with(EXIT_FOR_RESTART, error)
    raise SystemExit(EXIT_FOR_RESTART)


def _is_started_again(session: Session) -> bool:
    """Only the wrapper ends the process: with the callback alone the exception is the user's."""
    return session.attempts.record is not None and restarts_on_exit(session.config)
