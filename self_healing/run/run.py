"""`Run`: what the parts of a run share, and the parts; its budget; what one rank has to tell the others."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

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
from ..rollback.rollback import Rollback
from ..system import processes
from ..system.files import KeepsState, jsonable
from .healer import Healers, Remedies
from .incidents import OpenIncident, Outcomes
from .status import StatusKeeper


Part = TypeVar("Part")


# ---- run ----


@dataclass(eq=False, slots=True, kw_only=True)
class Run:
    """One run, however often `train()` is entered: what its parts share, and the parts."""

    config: HealingConfig
    directory: Path
    run_id: str
    journal: Journal
    outcomes: Outcomes
    rollback: Rollback
    remedies: Remedies
    budget: RecoveryBudget
    ranks: OtherRanks
    heartbeat: Heartbeat
    # What heals numbers has learned, its `NumericsState`: other families do not import that.
    numerics: Any = None
    # Whether training was started by `SelfHealingTrainer.train()`.
    wrapped: bool = False
    # How the user wants waits between attempts to be done.
    own_sleep: Callable[[float], None] | None = None
    started_at: float = field(default_factory=time.time)
    checksums: ChecksumQueue = field(default_factory=ChecksumQueue)
    news: RankNotices = field(default_factory=lambda: RankNotices())
    # An incident that the run has to end for, before its next step is applied.
    stop_incident: Incident | None = None

    # The trainer that is healed, and what is attached to it for the time of one `train()` call.
    trainer: Any = None
    attached: Instrument | None = None
    # The same, once it was attached for the first time.
    instrument: Instrument = field(init=False)
    healers: Healers = field(default_factory=lambda: Healers(()))
    terminal: Terminal | None = None
    # Told to those who look into the output directory, by the first process.
    status: StatusKeeper | None = None
    # Code of ours has failed: training goes on without it.
    broken: bool = False
    device_lost: bool = False
    # The signal that has asked this process to leave.
    asked_to_leave: signal.Signals | None = None
    # What the end of the run says beside its incidents.
    verdict: str = ""
    doubtful: bool = False

    _parts: dict[type, Any] = field(default_factory=dict)

    def add(self, *parts: Any) -> None:
        self._parts.update({type(part): part for part in parts})

    def part(self, kind: type[Part]) -> Part:
        found: Part = self._parts[kind]
        return found

    @property
    def step(self) -> int:
        """Optimizer steps finished; 0 while no trainer is attached."""
        return 0 if self.attached is None else self.attached.view.step

    @property
    def may_enter_again(self) -> bool:
        """Whether an exception that leaves `train()` may be healed by entering it again."""
        return self.wrapped and processes.world_size() == 1

    def let_go(self) -> None:
        """Holds on to no model and no optimizer any more, once all is over."""
        self.attached, self.healers = None, Healers(())
        # As before it was attached for the first time.
        with contextlib.suppress(AttributeError):
            del self.instrument

    def sleep(self, seconds: float) -> None:
        """Waits on purpose, until this process is asked to leave."""
        ends = time.monotonic() + seconds
        with self.heartbeat.paused():
            if self.own_sleep is not None:
                self.own_sleep(seconds)
                return
            while self.asked_to_leave is None and (left := ends - time.monotonic()) > 0:
                time.sleep(min(left, 0.5))

    def incident(
        self, step: int, symptom: str, evidence: Mapping[str, Any], severity: Severity | None = None
    ) -> OpenIncident:
        """Opens an incident, for the `with` block that deals with it."""
        return OpenIncident(self.journal, self.outcomes, self.journal.open(step, symptom, evidence, severity))

    def dealing_with(self, incident: Incident) -> OpenIncident:
        """Goes on with an incident that was opened before."""
        return OpenIncident(self.journal, self.outcomes, incident)


# ---- budget: limits how often a run is brought back without progress ----


# Healthy steps beyond the last failure after which all attempts are there again.
REFUND_STEPS = 50


@dataclass
class RecoveryBudget(KeepsState):
    """
    Counts how often a run was brought back, in memory or by entering `train()` again, since it last made progress.
    """

    _state = ("used", "failed_at")

    config: HealingConfig
    used: int = 0
    failed_at: int = -1

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


# ---- news: what one rank of several learns by itself, and all of them have to know ----


# The vote in which it is told.
NEWS = "news of the ranks"

Record = Mapping[str, Any]


@dataclass(slots=True)
class RankNotices:
    """
    Tells all ranks what one of them has learned: rows and samples that are not to be used, sizes that do not fit,
    incidents of its own.
    """

    # Whether this rank has something to tell.
    waiting: bool = False
    _untold: list[tuple[str, Callable[[], Record]]] = field(default_factory=list)
    _takers: dict[str, Callable[[int, Record], None]] = field(default_factory=dict)

    def tell(self, subject: str, record: Callable[[], Record]) -> None:
        """Tells the other ranks, when all of them meet the next time. Does nothing in a job of one process."""
        if processes.world_size() > 1:
            self._untold.append((subject, record))
            self.waiting = True

    def on(self, subject: str, take: Callable[[int, Record], None]) -> None:
        """Has what other ranks tell taken in."""
        self._takers[subject] = take

    def exchange(self, device: torch.device) -> None:
        """Tells, and takes in what the others tell; every rank has to come."""
        if processes.world_size() == 1:
            return
        # In this order: told from other threads as well.
        self.waiting = False
        told = self._untold[:]
        content = json.dumps([[subject, jsonable(record())] for subject, record in told])
        of_all = votes.from_every_rank(NEWS, content, device)
        del self._untold[: len(told)]
        own = torch.distributed.get_rank()
        for rank, text in enumerate(of_all):
            for subject, record in json.loads(text) if rank != own else []:
                if subject in self._takers:
                    self._takers[subject](rank, record)
