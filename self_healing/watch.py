"""The open incident about a loss: from the spike that begins it to the loss being back, or to a divergence."""

from __future__ import annotations

from collections.abc import Callable

from .config import HealingConfig
from .detectors import DetectorPanel, Symptom
from .failures import FailureType
from .journal import Incident, Journal


# A robust z of at most this counts as back.
_BACK = 2.0
# Times `divergence_patience`, for a loss that neither comes back nor settles: checkpoints of what there is are better
# than none.
_LONGEST = 3


class LossWatch:
    """
    Follows a loss that has left its baseline. While it is [`open`], no checkpoint is written and no state is trusted.

    Narrow spikes end it by themselves; a loss that stays up becomes a divergence, in the same incident.

    Args:
        config ([`HealingConfig`]):
            `outcome_steps`: steps in a row the loss has to be back.
        journal ([`Journal`]):
            Where the outcome is written.
    """

    def __init__(self, config: HealingConfig, journal: Journal) -> None:
        self.config = config
        self.journal = journal
        self.incident: Incident | None = None
        self.owed = False
        self._back = 0
        self._steps = 0

    @property
    def open(self) -> bool:
        """Whether the loss is away from its baseline."""
        return self.incident is not None

    def begin(self, symptom: Symptom, tell: Callable[[Incident, FailureType], None]) -> None:
        """
        Opens the incident, or takes in that a spike has widened into a divergence.

        Args:
            symptom ([`Symptom`]):
                `"loss_spike"` or `"divergence"`.
            tell (`Callable[[Incident, FailureType], None]`):
                Acts on it and tells everybody.
        """
        failure = FailureType(symptom.name)
        widened = self.incident is not None
        if self.incident is not None and (
            self.incident.failure is FailureType.DIVERGENCE or failure is FailureType.LOSS_SPIKE
        ):
            return
        if self.incident is None:
            self.incident = self.journal.open(symptom.step, symptom.name, symptom.evidence)
        self._back = self._steps = 0
        cause = "spike that widened" if widened else symptom.evidence.get("test", "one step")
        self.journal.diagnosed(self.incident, failure, cause, symptom.evidence)
        tell(self.incident, failure)

    def follow(self, panel: DetectorPanel) -> None:
        """Takes in a step: closes the incident once the loss is back, or has found another level."""
        if self.incident is None:
            return
        self._steps += 1
        if self._steps > _LONGEST * self.config.divergence_patience:
            self._close("unresolved", settled=False)
            return
        reading = panel.loss_reading
        if self.incident.failure is FailureType.DIVERGENCE:
            if panel.divergence.alarmed:
                return
            self._close("unresolved" if panel.relearned else "self_recovered", settled=panel.relearned)
            return
        back = reading is not None and reading.z is not None and reading.z <= _BACK
        self._back = self._back + 1 if back else 0
        if self._back >= self.config.outcome_steps:
            self._close("self_recovered")

    def end(self) -> None:
        """The run is over, and the loss is not back."""
        if self.incident is not None:
            self._close("unresolved")

    def forget(self) -> None:
        """The incident ends elsewhere."""
        self.incident = None

    def _close(self, outcome: str, **evidence: bool) -> None:
        assert self.incident is not None
        self.journal.closed(self.incident, outcome, **evidence)
        self.incident = None
