"""`RunContext`: what all families of failures know of the run they heal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoints.marker import ChecksumQueue
from ..config import HealingConfig
from ..detectors.symptom import Severity
from ..instrument import Instrument
from ..instrument.sections import Heartbeat
from ..journal.incident import Incident
from ..journal.journal import Journal
from ..journal.terminal import Terminal
from ..ranks import OtherRanks
from .budget import RecoveryBudget
from .dispatch import Remedies
from .healer import Healers
from .incidents import OpenIncident
from .news import News
from .outcomes import Outcomes


@dataclass(slots=True)
class Attachment:
    """
    The trainer that is healed, for the time of one `train()` call.

    Args:
        instrument ([`Instrument`], *optional*):
            Attached to it; `None` before the first call, and between two.
        healers ([`Healers`], *optional*):
            What heals it.
        trainer ([`~transformers.Trainer`], *optional*):
            The trainer itself, from the first of its `train()` calls on, or from where the wrapper's begins.
        broken (`bool`, *optional*, defaults to `False`):
            Whether code of ours has failed: training goes on without it.
        device_lost (`bool`, *optional*, defaults to `False`):
            Whether what lies on the device is neither touched nor freed any more.
        terminal ([`Terminal`], *optional*):
            Speaks for the time of this call; `None` where one does that for several of them.
        verdict (`str`), doubtful (`bool`):
            On the weights, once the run has ended; whether they are to be looked at first.
    """

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
    """
    A run that has to end, before its next step is applied.

    Args:
        incident ([`Incident`], *optional*):
            Why; `None` for a run that goes on.
    """

    incident: Incident | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """
    One run, however often `train()` is entered. Families call it `run`; above them, `run` is the whole [`Run`] and
    this its `context`.

    Args:
        config ([`HealingConfig`]):
            The configuration in force.
        directory (`Path`):
            Where journal, quarantine and postmortem go.
        run_id (`str`):
            Names the run, in each of its processes.
        started_at (`float`):
            When this process began its part in it, in seconds since the epoch.
        may_enter_again (`bool`):
            Whether an exception may leave `train()` to be healed outside, where it is entered again.
        journal ([`Journal`]), outcomes ([`Outcomes`]), remedies ([`Remedies`]):
            Where incidents are written down, what becomes of them, and how they are healed.
        checksums ([`ChecksumQueue`]):
            Those of checkpoints that are still to be computed.
        budget ([`RecoveryBudget`]):
            How often the run may be brought back.
        heartbeat ([`Heartbeat`]):
            Signs of life of the training thread.
        ranks ([`OtherRanks`]):
            What the ranks of the job tell each other beside its collectives.
        news ([`News`]):
            What they learn one by one and all have to know, told in the votes of a step.
        sleep (`Callable[[float], None]`):
            How waiting is done, in seconds.
        leave_asked (`Callable[[], int]`):
            What this process says in the vote of a step of a signal by which it was asked to leave; 0 if it was not.
    """

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
        """
        The instrument of the trainer that is attached.

        Raises:
            RuntimeError: If there is none.
        """
        if self.attachment.instrument is None:
            raise RuntimeError("the callback is not attached to a running trainer")
        return self.attachment.instrument

    def incident(
        self, step: int, symptom: str, evidence: Mapping[str, Any], severity: Severity | None = None
    ) -> OpenIncident:
        """
        Opens an incident, for the `with` block that deals with it.

        Args:
            step (`int`), symptom (`str`), evidence (`Mapping[str, Any]`), severity (`str`, *optional*):
                As of [`Incident`].
        """
        return self.dealing_with(self.journal.open(step, symptom, evidence, severity))

    def dealing_with(self, incident: Incident) -> OpenIncident:
        """
        Goes on with an incident that was opened before.

        Args:
            incident ([`Incident`]):
                It is open.
        """
        return OpenIncident(self.journal, self.outcomes, incident)
