"""Earlier processes of a run, and the counters it continues."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ...checkpoints.marker import read_marker, step_of
from ...failures.classify import describe_exception
from ...failures.recipes import FAILURE_RECIPES, Action, FailureType, UnrecoverableTrainingError
from ...hf.adapter import Instrument
from ...hf.trainer_state import PENDING, Pending, ResumePoint, load_generated
from ...journal.incident import Incident
from ...ranks import votes
from ...rollback.shared_memory import StateUnusable, StoredState
from ...run.incidents import may_be_repeated
from ...run.record import Attempt, Ending, RunRecord
from ...run.run import Run
from ...run.status import RunState, StatusKeeper
from ...system.files import POSTMORTEM_FILE, STATE_FILE
from ...system.processes import launch_of
from .start import Start, note_checkpoint


logger = logging.getLogger("self_healing")


# ---- attempts: what earlier processes of a run have left, and what this one leaves to the next ----


class HealedSteps(Protocol):
    """What healing inside of steps has decided, for the next process, and what it has left open."""

    def recovery_state(self) -> dict[str, Any]: ...

    def load_recovery_state(self, recorded: Mapping[str, Any]) -> None: ...

    def reset_ladder(self) -> None: ...

    def trained_steps(self, finished: int) -> int: ...

    def close_outcomes(self, unfollowed: str | None = None) -> None: ...

    def close_as_fatal(self, incident: Incident) -> None: ...


class Attempts:
    """
    Keeps what a run must not forget with the process it runs in, if there is a record of it, and counts how often
    `train()` was entered.
    """

    def __init__(self, run: Run, steps: HealedSteps) -> None:
        self._run = run
        self.steps = steps
        # Told to those who look into the output directory, by the first process.
        self.status: StatusKeeper | None = None
        # The emergency checkpoint that the next entry goes on from.
        self.resume_point: ResumePoint | None = None
        self.record: RunRecord | None = None
        # Whether earlier processes wrote it: their incidents and budgets are this one's, too.
        self.taken_up = False
        # How often `train()` was entered, in this process and before.
        self._entries = self._entries_before = 0
        # The state in shared memory that the first entry of this process resumed from.
        self.memory: StoredState | None = None
        # What the first entry of this process resumed from.
        self.first_resume: str | None = None
        self.postmortem: str | None = None
        # Of all processes in one optimizer step; 0 where that is not known.
        self.rows = 0

    def enter(self) -> None:
        """Counts that `train()` was entered."""
        self._entries += 1
        self._run.journal.attempt = self._entries_before + self._entries

    def in_memory(self, checkpoint: str | None) -> bool:
        """Whether what was resumed from is a state in shared memory."""
        return self.memory is not None and checkpoint == self.memory.checkpoint

    @property
    def entered(self) -> bool:
        """Whether `train()` was entered already: in this process, and since it went back to an older checkpoint."""
        return self._entries > 0

    @property
    def in_first_entry(self) -> bool:
        """Whether this is the first entry into `train()` since then."""
        return self._entries == 1

    # ---- the record ----

    def keep(self, record: RunRecord, taken_up: bool) -> None:
        """From here on what must not be forgotten with this process is in the run directory."""
        self.record, self.taken_up = record, taken_up
        journal = self._run.journal
        if taken_up:
            incidents = [Incident.from_dict(entry) for entry in record.incidents]
            journal.take_up(incidents, [entry["incident"] for entry in record.incidents])
            self.load_recovery_state()
            for incident in journal.incidents:
                if incident.outcome == "open":
                    self._run.outcomes.wait_for(incident)
        journal.changed = self.write
        journal.attempts = record.describe_attempts

    def load_recovery_state(self) -> None:
        """Takes over budgets and learning rate as the process before this one left them, later than any checkpoint."""
        if self.record is None or not self.taken_up:
            return
        self.steps.load_recovery_state(self.record.recovery_state)

    def write(self) -> None:
        """Writes down what must not be forgotten."""
        record, run = self.record, self._run
        if record is None or run.journal.rank != 0:
            return
        if run.attached is not None:
            record.newest.last_step = max(record.newest.last_step, run.step)
        record.incidents = [incident.to_dict() for incident in run.journal.of_all_ranks]
        record.recovery_state = self.steps.recovery_state()
        record.write()

    # ---- the status ----

    def tell_status(self, output_dir: Path, max_steps: int) -> None:
        """Tells those who look into the `output_dir` that the run goes on, until the trainer is itself again."""
        run = self._run
        if run.journal.rank != 0 or (self.record is not None and not self.record.kept):
            # The status is that of the process that trained there first, as the record is.
            return
        self.status = status = self.status or StatusKeeper(output_dir)
        status.begin(run.run_id, run.journal.path, run.step, max_steps, marks=self.record is None)
        if self.record is None:
            run.instrument.on_detach.append(partial(_left, status, run.instrument))

    # ---- this process's part ----

    def begin(self, checkpoint: str | None, step: int) -> None:
        """This process begins its part in the run."""
        if self.record is None:
            return
        marks = self._run.journal.rank == 0
        launch = launch_of()
        attempt = self.record.begin_attempt(checkpoint, step, marks, launch.job, launch.agent)
        attempt.rows = self.rows
        self._entries_before = attempt.number - 1
        self.write()

    def begin_from_older(self, checkpoint: str | None, step: int) -> None:
        """
        The checkpoint that was resumed from is damaged: the next entry goes on from an older one, as a new process.
        """
        self.resume_point = self.memory = None
        self._entries_before, self._entries = self._entries_before + self._entries, 0
        # Budget and ladder are the run's, and not those the checkpoint was written with.
        self.taken_up = True
        if self.record is not None and self.record.attempts:
            newest = self.record.newest
            newest.resumed_from, newest.first_step = checkpoint, min(newest.first_step, step)
        self.write()

    @property
    def ended(self) -> bool:
        """Whether it is written down how this process's part in the run has ended."""
        record = self.record
        return record is None or not record.attempts or record.newest.ending is not Ending.RUNNING

    def end(self, ending: Ending, why: str = "") -> None:
        """Writes down how this process's part in the run ends; what was written first counts."""
        record = self.record
        if record is None or self.ended:
            return
        if ending is Ending.FINISHED and self.taken_up:
            # What an earlier process died of is not what became of the run.
            self._run.journal.set_aside_postmortem()
        record.end_attempt(ending, why, self._run.step)
        if self.status is not None:
            self.status.end_attempt(ending, record.newest.last_step, why)
        record.postmortem = self.postmortem
        self.write()
        record.close()


def _left(status: StatusKeeper, instrument: Instrument) -> None:
    """The trainer is given back; without the wrapper, an exception on its way out of `train()` is the end."""
    error = sys.exc_info()[1]
    if error is not None and not instrument.failsafe.switched_off:
        status.end(RunState.STOPPED, instrument.view.step, describe_exception(error))


# ---- earlier attempts: takes up what earlier processes left of a run, or refuses to try it once more ----


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


def take_up(run: Run, attempts: Attempts, start: Start) -> None:
    """Goes on with what an earlier process left, if that may be tried once more, and begins this process's attempt."""
    refusal: Refusal | None = None
    try:
        refusal = _judge(run, attempts, start)
    except Exception:
        logger.exception("self_healing failed while it looked at earlier attempts; training goes on without them.")
    attempts.begin(start.checkpoint, start.step)
    if refusal is not None:
        _refuse(run, attempts, start, refusal)


def _judge(run: Run, attempts: Attempts, start: Start) -> Refusal | None:
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


def _infer_death(run: Run, start: Start, earlier: Attempt) -> None:
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


def _count_repeated_steps(run: Run, start: Start, refused: bool) -> None:
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


def go_on_from_disk(run: Run, attempts: Attempts, checkpoint: str | None, why: StateUnusable) -> None:
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


def _refuse(run: Run, attempts: Attempts, start: Start, refused: Refusal) -> NoReturn:
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


# ---- resumed bookkeeping ----


def continue_bookkeeping(
    run: Run, attempts: Attempts, instrument: Instrument, resumed_from: str | None, step: int
) -> None:
    """
    Takes over what was written down beside the checkpoint that was resumed from, and does first what is pending of it.
    """
    point = attempts.resume_point
    if point is not None and point.path == resumed_from:
        instrument.reentry.continue_from(point, run.started_at)
    elif resumed_from is not None:
        marker = read_marker(Path(resumed_from))
        bookkeeping = marker["bookkeeping"] if marker is not None and marker.get("step") == step else None
        if bookkeeping is not None:
            _take_over(instrument, bookkeeping)
            load_generated(instrument.trainer, Path(resumed_from))
        pending = Pending.from_dict(None if bookkeeping is None else bookkeeping.get(PENDING))
        if not attempts.in_memory(resumed_from):
            # Where each rank has left its own in memory, what all of them take part in is the same.
            device = instrument.view.device
            pending = votes.from_first_rank("what is pending of the checkpoint", lambda: pending, device)
        if pending:
            # A process that had to leave, or was killed after an exception, had no time for it.
            instrument.reentry.continue_in_another_process(resumed_from, pending, run.started_at)


def _take_over(instrument: Instrument, bookkeeping: Mapping[str, Any]) -> None:
    try:
        instrument.ledger.take_over(bookkeeping)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        logger.warning(
            "Running loss and metrics of the checkpoint cannot be taken over (%s: %s): the next log and the "
            "totals count from here; training itself is not affected.",
            type(error).__name__,
            error,
        )
