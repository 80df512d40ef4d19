"""`Attempts`: what earlier processes of a run have left, and what this one leaves to the next."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..failures.classify import describe_exception
from ..healers.restarts.shared_memory import MemoryStart
from ..hf.adapter import Instrument
from ..hf.trainer_state import ResumePoint
from ..journal.incident import Incident
from ..run.record import Ending, RunRecord, warn_about_parts
from ..run.run import RunContext
from ..run.status import RunState, StatusKeeper
from ..system.processes import launch_of


class HealedSteps(Protocol):
    """Holds what healing inside of steps has decided, for the next process, and what it has left open."""

    def recovery_state(self) -> dict[str, Any]:
        """Gives what the record keeps of it, as JSON."""

    def readable_recovery_state(self, recorded: Mapping[str, Any], odd: list[str]) -> dict[str, Any]:
        """Takes of a recorded state what can be read: a damaged part costs that part."""

    def load_recovery_state(self, recorded: Mapping[str, Any]) -> None:
        """Takes over the state of the process before this one, later than any checkpoint."""

    def reset_ladder(self) -> None:
        """Begins ladders at their first rung: the run was started again on purpose."""

    def trained_steps(self, finished: int) -> int:
        """Of the steps that are finished, how many are in the weights."""

    def close_outcomes(self, unfollowed: str | None = None) -> None:
        """Closes what waits for steps to come, because none will."""

    def close_as_fatal(self, incident: Incident) -> None:
        """Closes the incident the run ends with, and all that waits for steps to come."""


class Attempts:
    """
    Keeps what a run must not forget with the process it runs in, if there is a record of it, and counts how often
    `train()` was entered.
    """

    def __init__(self, run: RunContext, steps: HealedSteps) -> None:
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
        self.memory: MemoryStart | None = None
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
            journal.take_up(_incidents_in(record), [entry["incident"] for entry in record.incidents])
            odd: list[str] = []
            record.recovery_state = self.steps.readable_recovery_state(record.recovery_state, odd)
            warn_about_parts(odd)
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
        if run.attachment.instrument is not None:
            record.newest.last_step = max(record.newest.last_step, run.step)
        record.incidents = [incident.to_dict() for incident in run.journal.of_all_ranks]
        record.recovery_state = self.steps.recovery_state()
        record.write()

    def about_to_write(self, checkpoint: Path, bookkeeping: Mapping[str, Any]) -> None:
        """A checkpoint of any kind is about to be written, and its marker after it."""
        if self.record is not None and self._run.journal.rank == 0:
            self.record.about_to_save(os.path.relpath(checkpoint, self.record.directory), bookkeeping)

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
        attempt = self.record.begin_attempt(checkpoint, step, marks, launch.job, launch.rendezvous)
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


def _incidents_in(record: RunRecord) -> list[Incident]:
    incidents, odd = [], list[str]()
    for at, entry in enumerate(record.incidents):
        if not entry["incident"]:
            # Of which nothing could be read, which was told when it was.
            continue
        try:
            incidents.append(Incident.from_dict(entry))
        except Exception:
            odd.append(f"incidents.{at}")
    warn_about_parts(odd)
    return incidents
