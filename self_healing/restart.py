"""A process that takes up what an earlier one left: which run it continues, from where, and whether it may."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .checkpoint_files import STATE_FILE, number_of
from .checkpoints import newest_verdict_of, read_marker
from .failures import FAILURE_RECIPES, FailureType
from .launcher import Launch
from .run_record import Attempt, Ending, RunRecord, first_call
from .vetting import Verdict


logger = logging.getLogger("self_healing")

# A clock that is read from two files, in whole seconds.
_CLOCK_SLACK = 2.0
# Endings after which a person looks at the run before it is started by hand, and not a launcher.
_LOOKED_AT = frozenset({Ending.FAILED, Ending.GAVE_UP, Ending.INTERRUPTED})


@dataclass(frozen=True, slots=True)
class Start:
    """
    Where a process begins.

    Args:
        checkpoint (`str`, *optional*):
            What it resumes from; `None` for the beginning.
        step (`int`):
            Optimizer steps finished there.
        record ([`RunRecord`], *optional*):
            Of the run that it continues; `None` for a new one.
        by_hand (`bool`):
            Whether somebody who has looked at the failure started it.
        by_agent (`bool`):
            Whether a launcher that has lived on started it again.
        beside (`bool`):
            Whether another process that lives trains into the same directory: the record there is that one's.
    """

    checkpoint: str | None
    step: int = 0
    record: RunRecord | None = None
    by_hand: bool = False
    by_agent: bool = False
    beside: bool = False

    @property
    def died(self) -> bool:
        """Whether the process before this one ended without saying so."""
        return self.record is not None and self.record.ending is Ending.RUNNING

    @property
    def spends(self) -> bool:
        """Whether it is one more attempt without progress: the one before began at the same step, or later."""
        record = self.record
        if record is None or self.by_hand or record.ending is Ending.FINISHED:
            return False
        if record.ending is Ending.PREEMPTED and not self.by_agent:
            # A machine that is taken away again and again is no fault of the run. Where the launcher was not taken
            # away with it, the signal came from the launcher, because another process had failed.
            return False
        return self.step <= record.newest.first_step

    @property
    def steps_to_repeat(self) -> int:
        """Steps that the process before this one had finished, and that are in no checkpoint."""
        return 0 if self.record is None else max(self.record.newest.last_step - self.step, 0)


def of_this_job(record: RunRecord, launch: Launch) -> bool:
    """
    Whether a launcher that has started this process again has started the one that wrote a record as well. A job that
    died before it trained comes to the same place, and finds what another one has left there.
    """
    newest = record.newest
    if launch.by_agent and (launch.agent_began is None or newest.began >= launch.agent_began - _CLOCK_SLACK):
        return True
    return launch.requeued and newest.job == launch.job


def continues(record: RunRecord, launch: Launch, requested: Any) -> bool:
    """
    Whether this process goes on with the run of a record by itself, whatever checkpoint was asked for: a launcher has
    started the same script again, and it has come to the same place.

    Args:
        record ([`RunRecord`]):
            What is found in the output directory.
        launch ([`Launch`]):
            How this process was started.
        requested:
            `resume_from_checkpoint`.
    """
    if not launch.started_again or requested is False or not first_call(record.directory):
        return False
    if not of_this_job(record, launch):
        logger.warning(
            "In %s lies run %s of a job before this one (its last process began %s): it is not taken up, and this "
            "process begins as it was asked to. Please give each job an output_dir of its own.",
            record.directory,
            record.run,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.newest.began)),
        )
        return False
    if record.newest.call != 1:
        logger.warning(
            "The script had trained into %s %d times when it was started again, and which of these calls of train() "
            "this one is cannot be known: it begins as it was asked to. Please give each of them an output_dir of its "
            "own; after a restart they then go on where they were.",
            record.directory,
            record.newest.call,
        )
        return False
    return True


def newest_of(record: RunRecord, output_dir: str, passed_over: list[Verdict]) -> Verdict | None:
    """The newest checkpoint of that very run that can be trusted: another run may have left some in its place."""
    return newest_verdict_of(
        record.run, output_dir, passed_over=passed_over, wrote=lambda checkpoint: was_writing(record, checkpoint)
    )


def _is_of(record: RunRecord, checkpoint: Path, marker: dict[str, Any] | None) -> bool:
    return was_writing(record, checkpoint) if marker is None else marker.get("run") == record.run


def was_writing(record: RunRecord, checkpoint: Path) -> bool:
    """
    Whether a checkpoint without a marker is of this run: the one it was writing when it was killed, or one that it has
    gone on from since.
    """
    gone_on_from = (attempt.resumed_from for attempt in record.attempts if attempt.resumed_from is not None)
    if any(os.path.abspath(each) == os.path.abspath(checkpoint) for each in gone_on_from):
        return True
    return _was_about_to_save(record, checkpoint)


def bookkeeping_of(record: RunRecord | None, checkpoint: Path) -> Mapping[str, Any] | None:
    """What the marker of a checkpoint was to say, if the process was killed before it could write it."""
    if record is None or record.saving is None or not _was_about_to_save(record, checkpoint):
        return None
    with contextlib.suppress(ValueError, TypeError):
        found = json.loads(str(record.saving.get("bookkeeping")))
        return found if isinstance(found, dict) and found else None
    return None


def _was_about_to_save(record: RunRecord, checkpoint: Path) -> bool:
    saving = record.saving or {}
    if os.path.abspath(record.directory / str(saving.get("checkpoint"))) != os.path.abspath(checkpoint):
        return False
    try:
        # Written last: one that was there before is of another run.
        return (checkpoint / STATE_FILE).stat().st_mtime >= float(saving["time"]) - _CLOCK_SLACK
    except (OSError, LookupError, TypeError, ValueError):
        return False


def start_of(
    checkpoint: str | None, record: RunRecord | None, launch: Launch, taken_up: bool, requested: Any
) -> Start:
    """
    What it means to begin at a checkpoint.

    Args:
        checkpoint (`str`, *optional*):
            The one that was chosen.
        record ([`RunRecord`], *optional*):
            What is found in the run directory.
        launch ([`Launch`]):
            How this process was started.
        taken_up (`bool`):
            Whether [`continues`] said so.
        requested:
            `resume_from_checkpoint`.
    """
    step = 0 if checkpoint is None else step_in(Path(checkpoint))
    if record is None or not record.attempts:
        return Start(checkpoint, step)
    if not taken_up:
        newest_wanted = requested is True or requested == "auto"
        if not newest_wanted or record.ending is Ending.FINISHED:
            # Whoever names a checkpoint begins another branch: what the run wrote after it is not of this one.
            return Start(checkpoint, step)
        marker = None if checkpoint is None else read_marker(Path(checkpoint))
        if checkpoint is not None and not _is_of(record, Path(checkpoint), marker):
            logger.warning(
                "%s is the newest checkpoint in %s, but not of the run that was last trained there (%s, which came to "
                "step %d): it belongs to %s. If that is not what you want, name the checkpoint to go on from.",
                checkpoint,
                record.directory,
                record.run,
                record.newest.last_step,
                "another run" if marker is None else f"run {marker.get('run')}",
            )
            return Start(checkpoint, step)
    again = launch.started_again and of_this_job(record, launch)
    # A pod is started again without being told so, by the same words.
    unattended = again or (launch.in_a_pod and requested == "auto")
    by_hand = not unattended and record.ending in _LOOKED_AT
    return Start(checkpoint, step, record, by_hand, launch.by_agent)


def step_in(checkpoint: Path) -> int:
    """Optimizer steps finished in a checkpoint."""
    marker = read_marker(checkpoint)
    if marker is not None:
        return int(marker["step"])
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))["global_step"])
    return number_of(checkpoint) or 0


def log_history_in(checkpoint: str | None) -> list[dict[str, Any]]:
    """What had been logged when a checkpoint was written; nothing if that cannot be read."""
    if checkpoint is None:
        return []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return list(json.loads(Path(checkpoint, STATE_FILE).read_text(encoding="utf-8"))["log_history"])
    return []


def trains_beside(record: RunRecord | None, launch: Launch, restarted: bool) -> bool:
    """Whether the process of a record still trains; a launcher that has started it again knows that it does not."""
    if record is None or not record.attempts or not still_alive(record.newest):
        return False
    return not (restarted and of_this_job(record, launch))


def still_alive(attempt: Attempt) -> bool:
    """Whether another process of this machine, that of an attempt that has not ended, is still there."""
    elsewhere = attempt.host != socket.gethostname() or attempt.pid == os.getpid()
    if attempt.ending is not Ending.RUNNING or elsewhere:
        return False
    try:
        process = psutil.Process(attempt.pid)
        # A number is given out again: the process must be older than what it wrote.
        return bool(process.create_time() <= attempt.began) and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, OverflowError):
        return False


@dataclass(slots=True)
class Refusal:
    """
    Why a run is not continued once more.

    Args:
        verdict (`str`):
            In words.
        advice (`str`):
            What to do.
        step (`int`):
            Which the run had come to.
        postmortem (`str`, *optional*):
            Where it is told already.
        first_verdict (`str`, *optional*):
            Of the start that was refused first, if this is not the one: what is remembered, so that no start quotes
            all those before it. Defaults to `verdict`.
    """

    verdict: str
    advice: str
    step: int
    postmortem: str | None = None
    first_verdict: str | None = None


def gave_up(record: RunRecord) -> Refusal:
    """The process before this one had ended the run for good, and a launcher has started it all the same."""
    step = max(attempt.last_step for attempt in record.attempts)
    return Refusal(
        f"it had ended for good at step {step} ({record.newest.why})",
        "Once the cause is removed, start the job by hand: resume_from_checkpoint=True goes on from the newest "
        "checkpoint that can be trusted, with new attempts.",
        step,
        record.postmortem,
        record.newest.why,
    )


def crash_loop(record: RunRecord, attempts_allowed: int) -> Refusal:
    """The run has ended again and again without getting further."""
    last = record.newest
    loop = [attempt for attempt in record.attempts if attempt.first_step >= last.first_step]
    told = f": {last.why}" if last.why else ""
    step = max(attempt.last_step for attempt in loop)
    verdict = (
        f"the job was started {len(loop)} times from step {last.first_step} and never came beyond step "
        f"{step} (last end: {last.ending.value}{told}); the budget of "
        f"{attempts_allowed} attempts without progress is spent"
    )
    advice = FAILURE_RECIPES[FailureType.PROCESS_DIED].advice if last.ending is Ending.RUNNING else ""
    advice = (
        f"{advice} Look at what the attempts have in common (chain, attempts). Started by hand with "
        "resume_from_checkpoint=True, the job gets new attempts."
    ).strip()
    return Refusal(verdict, advice, step)
