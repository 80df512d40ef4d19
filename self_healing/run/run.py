"""What the parts of a run share: its config, its journal, its budget, what one rank has to tell."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.marker import ChecksumQueue
from ..config.healing_config import HealingConfig
from ..failures.recipes import Severity
from ..hf.adapter import Instrument
from ..hf.sections import Heartbeat
from ..journal.incident import Incident
from ..journal.journal import Journal
from ..journal.terminal import Terminal
from ..ranks import votes
from ..ranks.session import OtherRanks
from ..system import processes
from ..system.files import jsonable
from .healer import Healers, Remedies
from .incidents import OpenIncident, Outcomes


# ---- context: what all families of failures know of the run they heal ----


@dataclass(slots=True)
class Attachment:
    """The trainer that is healed, for the time of one `train()` call."""

    instrument: Instrument | None = None
    healers: Healers = field(default_factory=lambda: Healers(()))
    trainer: Any = None
    broken: bool = False
    device_lost: bool = False
    terminal: Terminal | None = None
    verdict: str = ""
    doubtful: bool = False


@dataclass(slots=True)
class StopRequest:
    """A run that has to end, before its next step is applied."""

    incident: Incident | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """One run, however often `train()` is entered."""

    config: HealingConfig
    directory: Path
    run_id: str
    started_at: float
    may_enter_again: bool
    journal: Journal
    outcomes: Outcomes
    remedies: Remedies
    checksums: ChecksumQueue
    budget: RecoveryBudget
    heartbeat: Heartbeat
    ranks: OtherRanks
    news: News
    sleep: Callable[[float], None]
    leave_asked: Callable[[], int]
    attachment: Attachment = field(default_factory=Attachment)
    stop: StopRequest = field(default_factory=StopRequest)

    @property
    def step(self) -> int:
        """Optimizer steps finished; 0 while no trainer is attached."""
        instrument = self.attachment.instrument
        return 0 if instrument is None else instrument.view.step

    @property
    def instrument(self) -> Instrument:
        """The instrument of the trainer that is attached."""
        if self.attachment.instrument is None:
            raise RuntimeError("the callback is not attached to a running trainer")
        return self.attachment.instrument

    def incident(
        self, step: int, symptom: str, evidence: Mapping[str, Any], severity: Severity | None = None
    ) -> OpenIncident:
        """Opens an incident, for the `with` block that deals with it."""
        return self.dealing_with(self.journal.open(step, symptom, evidence, severity))

    def dealing_with(self, incident: Incident) -> OpenIncident:
        """Goes on with an incident that was opened before."""
        return OpenIncident(self.journal, self.outcomes, incident)


# ---- budget: limits how often a run is brought back without progress ----


# Healthy steps beyond the last failure after which all attempts are there again.
REFUND_STEPS = 50


class RecoveryBudget:
    """
    Counts how often a run was brought back, in memory or by entering `train()` again, since it last made progress.
    """

    def __init__(self, config: HealingConfig) -> None:
        self.config = config
        self.used = 0
        self.failed_at = -1

    def refunds(self, step: int) -> bool:
        """Whether the run has got far enough beyond the last failure for its attempts to be given back."""
        return self.failed_at >= 0 and step >= self.failed_at + REFUND_STEPS

    def spend(self, step: int) -> bool:
        """Takes one attempt for a failure at a step; `False` if none is left."""
        if self.refunds(step):
            self.used = 0
        self.failed_at = max(step, self.failed_at)
        if self.used >= self.config.max_recovery_attempts:
            return False
        self.used += 1
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used, "failed_at": self.failed_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.used, self.failed_at = int(state["used"]), int(state["failed_at"])


# ---- news: what one rank of several learns by itself, and all of them have to know ----


# The vote in which it is told.
NEWS = "news of the ranks"

Record = Mapping[str, Any]


class News:
    """
    Tells all ranks what one of them has learned: rows and samples that are not to be used, sizes that do not fit,
    incidents of its own.
    """

    def __init__(self) -> None:
        self._untold: list[tuple[str, Callable[[], Record]]] = []
        self._takers: dict[str, Callable[[int, Record], None]] = {}

    @property
    def waiting(self) -> bool:
        """Whether this rank has something to tell."""
        return bool(self._untold)

    def tell(self, subject: str, record: Callable[[], Record]) -> None:
        """Tells the other ranks, when all of them meet the next time. Does nothing in a job of one process."""
        if processes.world_size() > 1:
            self._untold.append((subject, record))

    def on(self, subject: str, take: Callable[[int, Record], None]) -> None:
        """Has what other ranks tell taken in."""
        self._takers[subject] = take

    def exchange(self, device: torch.device) -> None:
        """Tells, and takes in what the others tell; every rank has to come."""
        if processes.world_size() == 1:
            return
        # Told from other threads as well.
        told = self._untold[:]
        content = json.dumps([[subject, jsonable(record())] for subject, record in told])
        of_all = votes.from_every_rank(NEWS, content, device)
        del self._untold[: len(told)]
        own = torch.distributed.get_rank()
        for rank, text in enumerate(of_all):
            for subject, record in json.loads(text) if rank != own else []:
                if subject in self._takers:
                    self._takers[subject](rank, record)
