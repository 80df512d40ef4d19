"""`RunContext`: what all families of failures know of the run they heal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoints.marker import ChecksumQueue
from ..config.healing_config import HealingConfig
from ..failures.recipes import Severity
from ..hf.adapter import Instrument
from ..hf.sections import Heartbeat
from ..journal.incident import Incident
from ..journal.journal import Journal
from ..journal.terminal import Terminal
from ..ranks.session import OtherRanks
from .budget import RecoveryBudget
from .dispatch import Remedies
from .healer import Healers
from .incidents import OpenIncident
from .news import News
from .outcomes import Outcomes


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
