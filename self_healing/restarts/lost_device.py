"""
A device that is lost: nothing can be computed, saved or freed in this process any more.

What has to be written down comes first, and without a single tensor: every operation would raise, or wait for ever,
and memory of the device that is given back may end the process on the spot.
"""

from __future__ import annotations

import logging

from ..failures.classify import describe_exception
from ..failures.recipes import FailureType, text_of
from ..healers.restarts.ending import RunEnding
from ..run.record import Ending
from ..system.processes import EXIT_FOR_RESTART, restarts_on_exit
from .process_exit import end_process_with


logger = logging.getLogger("self_healing")


def write_down_lost_device(ending: RunEnding, error: BaseException, verdict: str = "") -> None:
    """Writes incident and postmortem, once in a run."""
    if ending.run.attachment.device_lost:
        return
    ending.run.attachment.device_lost = True
    try:
        _write_down(ending, error, verdict or describe_exception(error))
    except Exception:
        logger.exception("That the device is lost could not be written down; the exception goes on as it came.")


def _write_down(ending: RunEnding, error: BaseException, verdict: str) -> None:
    journal = ending.run.journal
    incident = journal.open(ending.step, type(error).__name__, {"message": text_of(error)[:500]})
    journal.diagnosed(incident, FailureType.DEVICE, "device", {})
    restart_code = EXIT_FOR_RESTART if _is_started_again(ending) else None
    ending.stop_for_lost_device(incident, error, verdict, restart_code)


def leave_lost_device(ending: RunEnding, error: BaseException) -> None:
    """Ends the process where a launcher starts it again."""
    if not _is_started_again(ending):
        return
    ending.attempts.end(Ending.RESTART, describe_exception(error))
    end_process_with(EXIT_FOR_RESTART, error)
    raise SystemExit(EXIT_FOR_RESTART)


def _is_started_again(ending: RunEnding) -> bool:
    """Whether the process is ended: only the wrapper does; with the callback alone the exception is the user's."""
    return ending.attempts.record is not None and restarts_on_exit(ending.run.config)
