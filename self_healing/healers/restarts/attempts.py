"""Earlier processes of a run, and the counters it continues."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ...checkpoints.marker import read_marker, step_of
from ...failures.recipes import FAILURE_RECIPES, Action, FailureType, UnrecoverableTrainingError
from ...hf.adapter import Instrument
from ...hf.trainer_state import PENDING, Pending, ResumePoint, load_generated
from ...journal.incident import Incident
from ...ranks import votes
from ...rollback.shared_memory import StateUnusable, StoredState
from ...run.incidents import may_be_repeated
from ...run.record import Attempt, ExitReason, RunRecord
from ...run.run import Run
from ...run.status import StatusKeeper
from ...system.files import POSTMORTEM_FILE
from ...system.processes import contained, launch_of
from .start import Start, note_checkpoint


logger = logging.getLogger("self_healing")


# ---- attempts: what earlier processes of a run have left, and what this one leaves to the next ----


@dataclass(eq=False, slots=True)
class Attempts:
    """
    Keeps what a run must not forget with the process it runs in, if there is a record of it, and counts how often
    `train()` was entered.
    """

    run: Run
    # The emergency checkpoint that the next entry goes on from.
    resume_point: ResumePoint | None = None
    record: RunRecord | None = None
    # Whether earlier processes wrote it: their incidents and budgets are this one's, too.
    taken_up: bool = False
    # The state in shared memory that the first entry of this process resumed from.
    memory: StoredState | None = None
    # What the first entry of this process resumed from.
    first_resume: str | None = None
    postmortem: str | None = None
    # How often `train()` was entered, in this process and before; since the run went back to an older checkpoint.
    entries: int = 0
    _entries_before: int = 0

    def enter(self) -> None:
        """Counts that `train()` was entered."""
        self.entries += 1
        self.run.journal.attempt = self._entries_before + self.entries

    def in_memory(self, checkpoint: str | None) -> bool:
        """Whether what was resumed from is a state in shared memory."""
        return self.memory is not None and checkpoint == self.memory.checkpoint

    # ---- the record ----

    def keep(self, record: RunRecord, taken_up: bool) -> None:
        """From here on what must not be forgotten with this process is in the run directory."""
        self.record, self.taken_up = record, taken_up
        journal = self.run.journal
        if taken_up:
            incidents = [Incident.from_dict(entry) for entry in record.incidents]
            journal.take_up(incidents)
            self.load_recovery_state()
            for incident in journal.incidents:
                if incident.outcome == "open":
                    self.run.outcomes.wait_for(incident)
        journal.changed = self.write
        journal.attempts = record.describe_attempts

    def load_recovery_state(self) -> None:
        """Takes over budgets and learning rate as the process before this one left them, later than any checkpoint."""
        if self.record is not None and self.taken_up:
            self.run.numerics.load_recovery_state(self.record.recovery_state)

    def write(self) -> None:
        """Writes down what must not be forgotten."""
        record, run = self.record, self.run
        if record is None or run.journal.rank != 0:
            return
        if run.attached is not None:
            record.newest.last_step = max(record.newest.last_step, run.step)
        record.incidents = list(map(Incident.to_dict, run.journal.of_all_ranks))
        record.recovery_state = run.numerics.recovery_state()
        record.write()

    def tell_status(self, output_dir: Path, max_steps: int) -> None:
        """Tells those who look into the `output_dir` that the run goes on, until the trainer is itself again."""
        run = self.run
        known = None if run.status is None else run.status.status
        if run.journal.rank != 0 or (known is not None and not known.over):
            return
        run.status = run.status or StatusKeeper(output_dir)
        number = 0 if self.record is None else self.record.newest.number
        run.status.begin(run.run_id, run.journal.path, run.step, max_steps, number)

    # ---- this process's part ----

    def begin(self, checkpoint: str | None, step: int) -> None:
        """This process begins its part in the run."""
        if self.record is None:
            return
        launch = launch_of()
        attempt = self.record.begin_attempt(checkpoint, step, launch.job, launch.agent)
        self._entries_before = attempt.number - 1
        self.write()

    def begin_from_older(self, checkpoint: str | None, step: int) -> None:
        """The next entry goes on from a checkpoint instead of the state it was to go on from, as a new process."""
        self.resume_point = self.memory = None
        self._entries_before, self.entries = self._entries_before + self.entries, 0
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
        return record is None or not record.attempts or record.newest.ending is not ExitReason.RUNNING

    def end(self, ending: ExitReason, why: str = "") -> None:
        """Writes down how this process's part in the run ends; what was written first counts."""
        record = self.record
        if record is None or self.ended:
            return
        if ending is ExitReason.FINISHED and self.taken_up:
            # What an earlier process died of is not what became of the run.
            self.run.journal.set_aside_postmortem()
        newest = record.newest
        newest.ending, newest.why, newest.last_step = ending, why, max(newest.last_step, self.run.step)
        if self.run.status is not None:
            self.run.status.end_attempt(ending, newest.last_step, why)
        record.postmortem = self.postmortem
        self.write()


# ---- earlier attempts: takes up what earlier processes left of a run, or refuses to try it once more ----


@dataclass(slots=True)
class Refusal:
    """A run is not continued once more, and why."""

    verdict: str
    advice: str
    step: int
    postmortem: str | None = None
    # What the process that ended the run for good had said, if one had.
    why: str = ""


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
    advice = (
        f"{FAILURE_RECIPES[FailureType.PROCESS_DIED].advice} Look at what the attempts have in common (chain, "
        "attempts). Started by hand with resume_from_checkpoint=True, the job gets new attempts."
    )
    return Refusal(verdict, advice, step)


def take_up(run: Run, start: Start) -> None:
    """Goes on with what an earlier process left, if that may be tried once more, and begins this process's attempt."""
    refusal: Refusal | None = None
    with contained(logger, "self_healing failed while it looked at earlier attempts; training goes on without them."):
        refusal = _judge(run, start)
    run.part(Attempts).begin(start.checkpoint, start.step)
    if refusal is not None:
        _refuse(run, start, refusal)


def _judge(run: Run, start: Start) -> Refusal | None:
    """Takes in how the process before this one ended. Gives why the run is not continued, if it is not."""
    record = start.record
    if record is None:
        return None
    earlier, refusal = record.newest, None
    if start.by_hand:
        run.numerics.ladder.reset()
    # Before it is written down how that one ended.
    spends = start.spends
    if start.died:
        _infer_death(run, start, earlier)
    if record.ending is ExitReason.GAVE_UP and not start.by_hand:
        refusal = gave_up(record)
    elif spends and not run.budget.spend(earlier.last_step):
        refusal = crash_loop(record, run.config.max_recovery_attempts)
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
    return refusal


def _infer_death(run: Run, start: Start, earlier: Attempt) -> None:
    """Opens the incident of a process that was killed, which only the next one can write down."""
    evidence = {"pid": earlier.pid, "host": earlier.host, "attempt": earlier.number, "resumed_from": start.checkpoint}
    with run.incident(earlier.last_step, "process_died", evidence) as opened:
        opened.diagnosed(FailureType.PROCESS_DIED, "killed, or crashed in native code")
        opened.incident.steps_repeated = start.steps_to_repeat
        opened.acted(Action.RESUME, checkpoint=start.checkpoint, from_step=start.step)
    earlier.ending, earlier.why = ExitReason.RESTART, "killed, or crashed in native code"


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


def go_on_from_disk(run: Run, checkpoint: str | None, why: StateUnusable) -> None:
    """Goes on from disk in place of a state in memory that does not fit the trainer, and counts what that costs."""
    attempts, step = run.part(Attempts), 0 if checkpoint is None else step_of(checkpoint, default=0)
    came_to = 0 if attempts.record is None else max(attempt.last_step for attempt in attempts.record.attempts[:-1])
    logger.warning(
        "The state in shared memory cannot be gone on from: %s. Going on from %s (step %d) instead.",
        why,
        checkpoint or "the beginning",
        step,
    )
    if checkpoint is not None and run.journal.rank == 0:
        note_checkpoint(run.journal, checkpoint, step)
    incident = next(iter(run.journal.incidents[-1:]), None)
    if incident is not None and incident.outcome == "open" and incident.steps_repeated < came_to - step:
        incident.steps_repeated = came_to - step
        run.journal.taken_up(incident, step, checkpoint)
    attempts.begin_from_older(checkpoint, step)


def _refuse(run: Run, start: Start, refused: Refusal) -> NoReturn:
    """Ends a run that is not tried once more; the postmortem speaks of all its attempts and all its processes."""
    journal, attempts = run.journal, run.part(Attempts)
    others = journal.errors_of_other_ranks(start.step) if refused.postmortem is None else []
    told = "".join(
        f"; rank {other['rank']} at step {other['step']}: {other['error']['type']}: {other['error']['message']}"
        for other in others
    )
    still_open = [incident for incident in journal.incidents if incident.outcome == "open"]
    if still_open:
        run.numerics.close_as_fatal(still_open[-1])
    if refused.postmortem is None and journal.rank > 0:
        # Its own stays what it is: the only place that names what this process ended with.
        refused.postmortem = str(run.directory / POSTMORTEM_FILE)
    elif refused.postmortem is None:
        known = {"advice": refused.advice, "older_checkpoint": start.checkpoint, "other_ranks": others}
        refused.postmortem = journal.write_postmortem(
            refused.verdict + told, FailureType.PROCESS_DIED, refused.step, None, [], None, **known
        )
    attempts.postmortem = refused.postmortem
    attempts.end(ExitReason.GAVE_UP, refused.why or refused.verdict + told)
    raise UnrecoverableTrainingError(
        f"Training is not started again: {refused.verdict}{told}. What to do: {refused.advice} "
        f"Postmortem: {refused.postmortem or 'could not be written'}.",
        failure=FailureType.PROCESS_DIED,
        postmortem=refused.postmortem,
    )


# ---- resumed bookkeeping ----


def continue_bookkeeping(run: Run, instrument: Instrument, resumed_from: str | None, step: int) -> None:
    """
    Takes over what was written down beside the checkpoint that was resumed from, and does first what is pending of it.
    """
    attempts = run.part(Attempts)
    point = attempts.resume_point
    if point is not None and point.path == resumed_from:
        instrument.reentry.continue_from(point, run.started_at)
    elif resumed_from is not None:
        marker = read_marker(Path(resumed_from))
        bookkeeping = marker["bookkeeping"] if marker is not None and marker.get("step") == step else None
        if bookkeeping is not None:
            instrument.ledger.take_over(bookkeeping)
            load_generated(instrument.trainer, Path(resumed_from))
        pending = Pending(**((bookkeeping or {}).get(PENDING) or {}))
        if not attempts.in_memory(resumed_from):
            # Where each rank has left its own in memory, what all of them take part in is the same.
            device = instrument.view.device
            pending = votes.from_first_rank("what is pending of the checkpoint", lambda: pending, device)
        if pending:
            # A process that had to leave, or was killed after an exception, had no time for it.
            instrument.reentry.continue_in_another_process(resumed_from, pending, run.started_at)
