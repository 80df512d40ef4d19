"""Heals a loss that rises and stays up, and a gradient that is gone."""

from __future__ import annotations

import math
from statistics import median

from ...failures.recipes import INSPECTIONS, Action, Cause, FailureType
from ...hf.step import Window
from ...numerics.damaged_checkpoint import DamagedCheckpointHealer
from ...numerics.healer import NumericsHealer
from ...rollback.rollback import Rollback
from ...run.healer import HealingContext
from ...run.incidents import Diagnosis, OpenIncident
from ...run.run import RunContext
from .diagnosis import diagnose_rise, diagnose_stillness
from .healer import RollbackClimb
from .state import NumericsState


# Causes of a divergence that going back may cure, or has to end.
_MAY_GO_BACK = frozenset({Cause.WEIGHTS, Cause.COMPUTATION})


class DivergenceHealer(NumericsHealer):
    """
    Finds out what made the loss rise or the gradient vanish, and goes back to a trusted state if it is the weights;
    anything else that detectors see in applied steps is watched, reported, or ends the run.
    """

    def __init__(
        self,
        run: RunContext,
        numerics: NumericsState,
        rollback: Rollback,
        damaged: DamagedCheckpointHealer,
        climb: RollbackClimb,
    ) -> None:
        super().__init__(run, numerics, rollback)
        self._damaged, self._climb = damaged, climb

    def heal(self, opened: OpenIncident, failure: FailureType, window: Window) -> None:
        """Acts on what was seen in applied steps, by its failure."""
        with self.instrument.failsafe.together(), opened:
            if self.numerics.watch.incident is opened.incident:
                opened.leave_open()
            if not self._heal_told(opened, failure, window):
                self._act(opened, failure, window)

    def _act(self, opened: OpenIncident, failure: FailureType, window: Window) -> None:
        """Does what can be done without knowing the cause."""
        incident = opened.incident
        if self.numerics.schedule.raised_lately(incident.step, self.config.divergence_patience):
            incident.evidence["why"] = "The schedule has just raised the learning rate again: it may well pass"
        decision = self.numerics.policy.decide_watched(failure)
        if Action.STOP in decision.actions:
            self.numerics.watch.forget()
        verdict = decision.verdict
        if verdict and failure is FailureType.DIVERGENCE and incident.cause != Cause.WEIGHTS:
            # The recipe blames the weights.
            verdict = f"The loss has risen and stays up; the weights are not proven to be the cause ({incident.cause})"
        context = HealingContext(incident, self.instrument, window, verdict=verdict)
        self.actions.apply(decision.actions, context, self.args)
        if INSPECTIONS.issuperset(decision.actions):
            opened.close("reported")

    def _heal_told(self, opened: OpenIncident, failure: FailureType, window: Window) -> bool:
        """Heals what going back can cure; whether the incident is dealt with."""
        if failure is FailureType.DIVERGENCE:
            return self._heal_divergence(opened, window)
        if failure is FailureType.VANISHING_GRADIENT and self.may_go_back(window.step):
            return self._heal_stillness(opened, window)
        return False

    def _heal_divergence(self, opened: OpenIncident, window: Window) -> bool:
        """
        Finds out what made the loss rise, whatever is done about it; back to a trusted state if it was the weights.
        """
        if not self._may_try_trusted_weights(window.step):
            return False
        incident = opened.incident
        if self.config.on_divergence == "heal":
            self._damaged.suspect(HealingContext(incident, self.instrument, window))
        found = self.diagnose_rise(window, window.signals().loss)
        if self.config.on_divergence != "warn" or found.failure is FailureType.HARDER_DATA:
            opened.diagnosed(found.failure, found.cause, found.evidence)
        if found.cause in _MAY_GO_BACK and self.config.on_divergence == "heal":
            self._climb.take_rung(HealingContext(incident, self.instrument, window, found), FailureType.DIVERGENCE)
            opened.wait()
            return True
        # Computed again for the experiment, its gradient is as it came out of the backward.
        self.clip(window, window.signals())
        opened.stop_clock()
        if found.failure is not FailureType.HARDER_DATA:
            # What is not known is no reason to change a run: it is watched.
            return False
        self.panel.divergence.prove_harmless()
        self.numerics.watch.forget()
        opened.close("reported")
        return True

    def _heal_stillness(self, opened: OpenIncident, window: Window) -> bool:
        """Weights that were driven where there is no gradient are a divergence, however slow the loss shows it."""
        self._damaged.suspect(HealingContext(opened.incident, self.instrument, window))
        panel, still = self.panel, window.signals()
        first = median(panel.divergence.early.first or [math.nan])
        found = diagnose_stillness(window, self.rollback.trials, still, first, panel.loss_trend.scale)
        if found.cause != Cause.WEIGHTS:
            opened.stop_clock()
            return False
        opened.diagnosed(found.failure, found.cause, found.evidence)
        context = HealingContext(opened.incident, self.instrument, window, found)
        self._climb.take_rung(context, FailureType.DIVERGENCE)
        opened.wait()
        return True

    def may_go_back(self, step: int) -> bool:
        """Without a state to go back to, a run that goes on may still recover; one that was stopped cannot."""
        if self.config.on_divergence != "heal" or not self.instrument.view.can_reexecute:
            return False
        if self.numerics.schedule.raised_lately(step, self.config.divergence_patience):
            return False
        return self.rollback.can_go_back()

    def _may_try_trusted_weights(self, step: int) -> bool:
        """Before a verdict, whatever is done about it; where the run might go back, only if it may."""
        if self.config.on_divergence == "heal":
            return self.may_go_back(step)
        return self.instrument.view.can_reexecute and self.rollback.can_go_back()

    def diagnose_rise(self, window: Window, loss: float) -> Diagnosis:
        """Finds out why a loss has risen over its baseline, or over the losses the run began with."""
        panel = self.panel
        level = panel.loss_level if panel.loss_trend.ready else None
        if level is None:
            level = median(panel.divergence.early.first or [math.nan])
        return diagnose_rise(window, self.rollback.trials, loss, level, panel.loss_trend.scale)
