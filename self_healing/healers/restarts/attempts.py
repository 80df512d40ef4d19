"""Takes up what earlier processes left of a run, or refuses to try it once more."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...checkpoints.marker import step_of
from ...failures.recipes import FAILURE_RECIPES, Action, FailureType, UnrecoverableTrainingError
from ...restarts.attempts import Attempts
from ...rollback.shared_memory import StateUnusable
from ...run.incidents import may_be_repeated
from ...run.record import Attempt, Ending, RunRecord
from ...run.run import RunContext
from ...system.files import POSTMORTEM_FILE, STATE_FILE
from .start import Start, note_checkpoint


logger = logging.getLogger("self_healing")


@dataclass(slots=True)
class Refusal:
    """A run is not continued once more, and why."""

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


def crash_loop(record: RunRecord, attempts_allowed: int, died: bool) -> Refusal:
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
    advice = FAILURE_RECIPES[FailureType.PROCESS_DIED].advice if died else ""
    advice = (
        f"{advice} Look at what the attempts have in common (chain, attempts). Started by hand with "
        "resume_from_checkpoint=True, the job gets new attempts."
    ).strip()
    return Refusal(verdict, advice, step)


def take_up(run: RunContext, attempts: Attempts, start: Start) -> None:
    """Goes on with what an earlier process left, if that may be tried once more, and begins this process's attempt."""
    refusal: Refusal | None = None
    try:
        refusal = _judge(run, attempts, start)
    except Exception:
        logger.exception("self_healing failed while it looked at earlier attempts; training goes on without them.")
    attempts.begin(start.checkpoint, start.step)
    if refusal is not None:
        _refuse(run, attempts, start, refusal)


def _judge(run: RunContext, attempts: Attempts, start: Start) -> Refusal | None:
    """Takes in how the process before this one ended. Gives why the run is not continued, if it is not."""
    record = start.record
    if record is None:
        return None
    earlier, refusal = record.newest, None
    if start.by_hand:
        attempts.steps.reset_ladder()
    # Before it is written down how that one ended.
    spends, died = start.spends, start.died
    if died:
        _infer_death(run, start, earlier)
    if record.ending is Ending.GAVE_UP and not start.by_hand:
        refusal = gave_up(record)
    elif spends and not run.budget.spend(earlier.last_step):
        refusal = crash_loop(record, run.config.max_recovery_attempts, died)
    _count_repeated_steps(run, start, refusal is not None)
    if refusal is None:
        logger.warning(
            "Attempt %d of run %s goes on from %s (step %d); the one before ended at step %d: %s.",
            earlier.number + 1,
            run.run_id,
            start.place,
            start.step,
            earlier.last_step,
            (earlier.why or earlier.ending.value).removesuffix("."),
        )
        _warn_about_rows(earlier.rows, attempts.rows, start.step)
    return refusal


def _warn_about_rows(before: int, now: int, step: int) -> None:
    """Warns that steps have another number of rows than those so far: processes or settings have changed."""
    if 0 in (before, now, step) or before == now:
        return
    logger.warning(
        "A step has %d rows from here on, and had %d (processes x per_device_train_batch_size x "
        "gradient_accumulation_steps): the learning rate was chosen for the other size, and the place in the data is "
        "counted as if all %d steps had been of the new one, so that some rows of this epoch are %s. If that is not "
        "what you want, set gradient_accumulation_steps so that the product stays.",
        now,
        before,
        step,
        "left out" if now > before else "trained on twice",
    )


def _infer_death(run: RunContext, start: Start, earlier: Attempt) -> None:
    """Opens the incident of a process that was killed, which only the next one can write down."""
    evidence = {
        "pid": earlier.pid,
        "host": earlier.host,
        "attempt": earlier.number,
        "resumed_from": start.checkpoint,
    }
    with run.incident(earlier.last_step, "process_died", evidence) as opened:
        opened.diagnosed(FailureType.PROCESS_DIED, "killed, or crashed in native code")
        opened.incident.steps_repeated = start.steps_to_repeat
        opened.acted(Action.RESUME, checkpoint=start.checkpoint, from_step=start.step)
    earlier.ending, earlier.why = Ending.RESTART, "killed, or crashed in native code"


def _count_repeated_steps(run: RunContext, start: Start, refused: bool) -> None:
    """Adds to the last incident of the process before this one what it costs: that shows where the run goes on."""
    incident = next(iter(run.journal.incidents[-1:]), None)
    if incident is None or incident.outcome not in ("open", "fatal"):
        return
    if not may_be_repeated(incident) and (refused or incident.outcome == "open"):
        return
    incident.steps_repeated = max(incident.steps_repeated, start.steps_to_repeat)
    if refused:
        return
    if incident.outcome == "fatal":
        # Only that process ended with it. Whether the run does is still to be seen.
        incident.outcome = "open"
        run.journal.acted(incident, Action.RESUME.value, checkpoint=start.checkpoint, from_step=start.step)
        run.outcomes.wait_for(incident)
    run.journal.taken_up(incident, start.step, start.checkpoint)


def go_on_from_disk(run: RunContext, attempts: Attempts, checkpoint: str | None, why: StateUnusable) -> None:
    """Goes on from disk in place of a state in memory that does not fit the trainer, and counts what that costs."""
    step = 0 if checkpoint is None else step_of(checkpoint, default=0)
    came_to = 0 if attempts.record is None else max(attempt.last_step for attempt in attempts.record.attempts[:-1])
    logger.warning(
        "The state in shared memory cannot be gone on from: %s. Going on from %s (step %d) instead; %d steps are done "
        "again.",
        why,
        checkpoint or "the beginning",
        step,
        max(came_to - step, 0),
    )
    if checkpoint is not None and run.journal.rank == 0:
        note_checkpoint(run.journal, checkpoint, step)
    incident = next(iter(run.journal.incidents[-1:]), None)
    if incident is not None and incident.outcome == "open" and incident.steps_repeated < came_to - step:
        incident.steps_repeated = came_to - step
        run.journal.taken_up(incident, step, checkpoint)
    attempts.begin_from_older(checkpoint, step)


def _refuse(run: RunContext, attempts: Attempts, start: Start, refused: Refusal) -> NoReturn:
    """Ends a run that is not tried once more; the postmortem speaks of all its attempts and all its processes."""
    others = run.journal.errors_of_other_ranks(start.step) if refused.postmortem is None else []
    told = "".join(
        f"; rank {other['rank']} at step {other['step']}: {other['error']['type']}: {other['error']['message']}"
        for other in others
    )
    still_open = [incident for incident in run.journal.incidents if incident.outcome == "open"]
    if still_open:
        attempts.steps.close_as_fatal(still_open[-1])
    if refused.postmortem is None and run.journal.rank > 0:
        # Its own stays what it is: the only place that names what this process ended with.
        refused.postmortem = str(run.directory / POSTMORTEM_FILE)
    elif refused.postmortem is None:
        refused.postmortem = run.journal.write_postmortem(
            refused.verdict + told,
            FailureType.PROCESS_DIED,
            refused.step,
            None,
            _log_history_in(start.checkpoint),
            None,
            advice=refused.advice,
            older_checkpoint=start.checkpoint,
            other_ranks=others,
        )
    attempts.postmortem = refused.postmortem
    attempts.end(Ending.GAVE_UP, refused.first_verdict or refused.verdict + told)
    raise UnrecoverableTrainingError(
        f"Training is not started again: {refused.verdict}{told}. What to do: {refused.advice} "
        f"Postmortem: {refused.postmortem or 'could not be written'}.",
        failure=FailureType.PROCESS_DIED,
        postmortem=refused.postmortem,
    )


def _log_history_in(checkpoint: str | None) -> list[dict[str, Any]]:
    """Reads the log history of a checkpoint; empty if it cannot be read."""
    if checkpoint is None:
        return []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return list(json.loads(Path(checkpoint, STATE_FILE).read_text(encoding="utf-8"))["log_history"])
    return []
