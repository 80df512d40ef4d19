"""The open incident about a loss: from the spike that begins it to the loss being back, or to a divergence."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from ..config.healing_config import HealingConfig
from ..failures.recipes import FailureType, Symptom
from ..healers.numerics.detectors.panel import DetectorPanel
from ..journal.incident import Incident
from ..journal.journal import Journal
from ..run.incidents import Outcomes


logger = logging.getLogger("self_healing")

# A robust z of at most this counts as back.
_BACK = 2.0
# Losses from before and after that are compared in the end: the lower quartile of so many, because a rise may have
# begun among them, and the median of so many.
_BEFORE, _AFTER = 20, 5
# Times `divergence_patience`, for a loss that neither comes back nor settles: checkpoints of what there is are better
# than none.
_LONGEST = 3


class LossWatch:
    """Follows a loss that has left its baseline."""

    def __init__(self, config: HealingConfig, journal: Journal, outcomes: Outcomes) -> None:
        self.config = config
        self.journal = journal
        self._outcomes = outcomes
        self.incident: Incident | None = None
        self.opened = 0
        self.owed = False
        self._back = 0
        self._steps = 0
        self._last: deque[float] = deque(maxlen=_BEFORE)
        self._before: float | None = None

    @property
    def open(self) -> bool:
        """Whether the loss is away from its baseline, or it is not known yet whether it is back."""
        return self.incident is not None or self._outcomes.rollback_in_doubt

    def begin(self, symptom: Symptom, tell: Callable[[Incident, FailureType], None]) -> None:
        """Opens the incident, or takes in that a spike has widened into a divergence."""
        failure = FailureType(symptom.name)
        widened = self.incident is not None
        if self.incident is not None and (
            self.incident.failure is FailureType.DIVERGENCE or failure is FailureType.LOSS_SPIKE
        ):
            return
        if widened:
            symptom.evidence["widened_at"] = symptom.step
        if self.incident is None:
            self._before = sorted(self._last)[len(self._last) // 4] if self._last else None
            self.opened += 1
            self.incident = self.journal.open(symptom.step, symptom.name, symptom.evidence)
        self._back = self._steps = 0
        cause = "spike that widened" if widened else symptom.evidence.get("test", "one step")
        self.journal.diagnosed(self.incident, failure, cause, symptom.evidence)
        tell(self.incident, failure)

    def rises_further(self, symptom: Symptom) -> None:
        """Takes in that a loss that is away already has risen again: it belongs to the same incident."""
        self.journal.noticed(symptom)
        if self.incident is not None:
            self.incident.evidence["rose_again_at"] = symptom.step
            logger.warning(
                "Step %d: the loss has risen further; incident %s is still open.", symptom.step, self.incident.id
            )

    def hold(self, incident: Incident) -> None:
        """Checkpoints wait, on request, until the loss has been back for `outcome_steps`, unless they do already."""
        if self.incident is None:
            self._before = sorted(self._last)[len(self._last) // 4] if self._last else None
            self.incident = incident
            self._back = self._steps = 0

    def follow(self, panel: DetectorPanel) -> None:
        """Takes in a step: closes the incident once the loss is back, or has found another level."""
        if panel.loss_reading is not None:
            self._last.append(panel.loss_reading.value)
        if self.incident is None:
            return
        if panel.signed_loss:
            # It has lost its baseline: whether it is back cannot be told any more.
            self._close("unresolved", settled=False)
            return
        self._steps += 1
        if self._steps > _LONGEST * self.config.divergence_patience:
            self._close("unresolved", settled=False)
            return
        reading = panel.loss_reading
        if self.incident.failure is FailureType.DIVERGENCE:
            if panel.divergence.alarmed:
                return
            self._close_recovered(panel, settled=panel.relearned)
            return
        if reading is None or reading.level is None:
            return
        # What has no logarithm is zero.
        back = reading.value <= reading.level if reading.z is None else reading.z <= _BACK
        self._back = self._back + 1 if back else 0
        if self._back >= self.config.outcome_steps:
            self._close_recovered(panel)

    def _close_recovered(self, panel: DetectorPanel, settled: bool = False) -> None:
        """
        Back at the baseline, which lags behind a loss that falls: it has recovered only if it is back where it was
        just before, too.
        """
        after = median(list(self._last)[-_AFTER:])
        reach = math.exp(2 * panel.loss_trend.scale + 0.05)
        # A loss that is not positive any more is no higher than it was.
        worse = settled or (self._before is not None and after > max(self._before * reach, 0.0))
        self._close(
            "unresolved" if worse else "self_recovered", settled=worse, loss_before=self._before, loss_after=after
        )

    def end(self) -> None:
        """The run is over, and the loss is not back."""
        if self.incident is not None:
            self._close("unresolved")

    def forget(self) -> None:
        """The incident ends elsewhere."""
        self.incident = None

    def _close(self, outcome: str, **evidence: Any) -> None:
        assert self.incident is not None
        self.journal.closed(self.incident, outcome, **evidence)
        self.incident = None
