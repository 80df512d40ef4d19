"""`Attempts`: what earlier processes of a run have left, and what this one leaves to the next."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .budget import RecoveryBudget
from .config import HealingConfig
from .incident import Incident
from .ladder import RollbackLadder
from .launcher import launch_of
from .learning_rate import LearningRateControl
from .numerics_state import NumericsState
from .run.context import RunContext
from .run_record import Ending, RunRecord, warn_about_parts
from .run_status import StatusKeeper
from .saved_state import Stateful, take_over


class Attempts:
    """
    Keeps what a run must not forget with the process it runs in, if there is a record of it, and counts how often
    `train()` was entered. Only the first process writes.

    Args:
        run ([`RunContext`]):
            The run.
        numerics ([`NumericsState`]):
            Whose ladder and learning rate belong to what must not be forgotten.
    """

    def __init__(self, run: RunContext, numerics: NumericsState) -> None:
        self._run = run
        self._numerics = numerics
        self.record: RunRecord | None = None
        # Whether earlier processes wrote it: their incidents and budgets are this one's, too.
        self.taken_up = False
        # How often `train()` was entered, in this process and before.
        self.entries = self.entries_before = 0
        # What the first entry of this process resumed from.
        self.first_resume: str | None = None
        self.postmortem: str | None = None

    def enter(self) -> None:
        """Takes in that `train()` was entered."""
        self.entries += 1
        self._run.journal.attempt = self.entries_before + self.entries

    # ---- the record ----

    def keep(self, record: RunRecord, taken_up: bool) -> None:
        """
        From here on what must not be forgotten with this process is in the run directory.

        Args:
            record ([`RunRecord`]):
                Of this run.
            taken_up (`bool`):
                Whether earlier processes wrote it.
        """
        self.record, self.taken_up = record, taken_up
        journal = self._run.journal
        if taken_up:
            journal.incidents = _incidents_in(record)
            record.memory = _readable(record.memory, self._run.config)
            self.recall()
            for incident in journal.incidents:
                if incident.outcome == "open":
                    self._run.outcomes.wait_for(incident)
        journal.changed = self.write
        journal.attempts = record.describe_attempts

    def recall(self) -> None:
        """Takes in budgets and learning rate as the process before this one left them, later than any checkpoint."""
        if self.record is None or not self.taken_up:
            return
        memory = self.record.memory
        for name, part in (("budget", self._run.budget), ("ladder", self._numerics.ladder)):
            if name in memory:
                part.load_state_dict(memory[name])
        rate = memory.get("learning_rate")
        if rate is not None and rate["reductions"] > self._numerics.learning_rate.reductions:
            # What failed with the higher rate after the checkpoint was written would fail again.
            self._numerics.learning_rate.load_state_dict(rate)
            self._numerics.rate_after_reduction = memory.get("rate_after_reduction")

    def write(self) -> None:
        """Writes down what must not be forgotten."""
        record, run, numerics = self.record, self._run, self._numerics
        if record is None or run.journal.rank != 0:
            return
        if run.attachment.instrument is not None:
            record.newest.last_step = max(record.newest.last_step, run.step)
        record.incidents = [incident.to_dict() for incident in run.journal.incidents]
        record.memory = {
            "budget": run.budget.state_dict(),
            "ladder": numerics.ladder.state_dict(),
            "learning_rate": numerics.learning_rate.state_dict(),
            "rate_after_reduction": numerics.rate_after_reduction,
        }
        record.write()

    def about_to_write(self, checkpoint: Path, bookkeeping: Mapping[str, Any]) -> None:
        """A checkpoint of any kind is about to be written, and its marker after it."""
        if self.record is not None and self._run.journal.rank == 0:
            self.record.about_to_save(os.path.relpath(checkpoint, self.record.directory), bookkeeping)

    # ---- this process's part ----

    def begin(self, checkpoint: str | None, step: int) -> None:
        """
        This process begins its part in the run.

        Args:
            checkpoint (`str`, *optional*), step (`int`):
                What it resumes from, and where that is.
        """
        if self.record is None:
            return
        marks = self._run.journal.rank == 0
        attempt = self.record.begin_attempt(checkpoint, step, marks, job=launch_of().job)
        self.entries_before = attempt.number - 1
        self.write()

    def begin_from_older(self, checkpoint: str, step: int) -> None:
        """
        The checkpoint that was resumed from is damaged: the next entry goes on from an older one, as a new process.

        Args:
            checkpoint (`str`), step (`int`):
                The older one, and where it is.
        """
        self.entries_before, self.entries = self.entries_before + self.entries, 0
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

    def end(self, ending: Ending, why: str = "", status: StatusKeeper | None = None) -> None:
        """
        Writes down how this process's part in the run ends; what was written first counts.

        Args:
            ending ([`Ending`]), why (`str`, *optional*):
                How, and what ended it.
            status ([`StatusKeeper`], *optional*):
                Is told as well.
        """
        record = self.record
        if record is None or self.ended:
            return
        if ending is Ending.FINISHED and self.taken_up:
            # What an earlier process died of is not what became of the run.
            self._run.journal.set_aside_postmortem()
        record.end_attempt(ending, why, record.newest.last_step)
        if status is not None:
            status.end_attempt(ending, record.newest.last_step, why)
        record.postmortem = self.postmortem
        self.write()
        record.close()


def _incidents_in(record: RunRecord) -> list[Incident]:
    incidents, odd = [], list[str]()
    for at, entry in enumerate(record.incidents):
        try:
            incidents.append(Incident.from_dict(entry))
        except Exception:
            odd.append(f"incidents.{at}")
    warn_about_parts(odd)
    return incidents


def _readable(memory: Mapping[str, Any], config: HealingConfig) -> dict[str, Any]:
    """What can be read of what an earlier process has left: a damaged part costs that part."""
    budget, rate = RecoveryBudget(config), LearningRateControl(config)
    parts: dict[str, Stateful] = {
        "budget": budget,
        "ladder": RollbackLadder(config, budget),
        "learning_rate": rate,
    }
    odd: list[str] = []
    for name, part in parts.items():
        take_over(part, memory.get(name), f"memory.{name}", odd)
    if "memory.learning_rate.reductions" in odd and rate.touched:
        # How often it was reduced is not known, and that it was is.
        rate.reductions = max(rate.reductions, 1)
    warn_about_parts(odd)
    reduced = memory.get("rate_after_reduction")
    readable = {name: part.state_dict() for name, part in parts.items()}
    return readable | {"rate_after_reduction": reduced if isinstance(reduced, float) else None}
