"""Heals steps whose gradient is far outside of what is usual."""

from __future__ import annotations

import math

from ..failures.recipes import Action, Cause, FailureType, Symptom
from ..healers.numerics.healer import RollbackClimb
from ..healers.numerics.loss import DivergenceHealer
from ..healers.numerics.state import NumericsState
from ..hf.objective import StepSignals
from ..hf.step import Window
from ..rollback.rollback import Rollback
from ..run.healer import HealingContext
from ..run.incidents import OpenIncident
from ..run.run import RunContext
from .healer import NumericsHealer
from .observer import StepObserver


class SpikeHealer(NumericsHealer):
    """Computes the step again, clips its gradient, leaves it out, or goes back to a trusted state."""

    def __init__(
        self,
        run: RunContext,
        numerics: NumericsState,
        rollback: Rollback,
        observer: StepObserver,
        divergence: DivergenceHealer,
        climb: RollbackClimb,
    ) -> None:
        super().__init__(run, numerics, rollback)
        self._observer, self._divergence, self._climb = observer, divergence, climb

    @property
    def heals(self) -> bool:
        """Whether anything is done about a spike before it is applied."""
        return self.config.on_spike == "heal" and self.instrument.view.can_reexecute

    def heal(self, window: Window, symptom: Symptom) -> None:
        """Computes the step again before anything is decided about it."""
        with self.incident(symptom.step, symptom.name, symptom.evidence, symptom.severity) as opened:
            self._heal(opened, window, symptom)

    def _heal(self, opened: OpenIncident, window: Window, symptom: Symptom) -> None:
        incident, again = opened.incident, window.compute_again()
        transient = again.finite and self.panel.spike(again) is None
        if again.finite:
            # As it is without the passing fault: faults that come again and again are not what is usual.
            self._observer.remember_spike(again)
        failure = FailureType.SPIKE_TRANSIENT if transient else FailureType.GRADIENT_SPIKE
        cause = Cause.TRANSIENT if transient else Cause.SAME_AGAIN if again.finite else Cause.NOT_FINITE_AGAIN
        evidence = {"again": {"loss": again.loss, "grad_norm": again.grad_norm}}
        opened.diagnosed(failure, cause, evidence)
        if not transient:
            self.keep_batch(window, incident)
        if not transient and again.finite and self._weights_spike(opened, window, symptom, again):
            self._climb.take_rung(HealingContext(incident, self.instrument, window), FailureType.DIVERGENCE)
            return
        usual = self.panel.gradient_level
        decision = self.numerics.policy.decide_spike(symptom, transient, again.finite, may_clip=usual is not None)
        context = HealingContext(incident, self.instrument, window, clip_to=usual)
        self.actions.apply(decision.actions, context, self.args)
        opened.wait()
        if window.skipped:
            context.verdict = self.numerics.policy.note(skipped=True, explained=True) or ""
            if context.verdict:
                self.numerics.policy.reset()
                self.actions.apply((Action.EMERGENCY_CHECKPOINT, Action.STOP), context, self.args)
        else:
            clipped = Action.CLIP_GRADIENT in decision.actions and usual is not None
            self._observer.take_in(window, again, usual if clipped and usual is not None else math.inf)

    def report(self, symptom: Symptom) -> None:
        """Journals a spike that nothing is done about."""
        if symptom.name == "co_spike":
            # The loss spike in the same step is an incident already.
            self.run.journal.noticed(symptom)
            return
        self.open(symptom, FailureType.GRADIENT_SPIKE, Cause.NOT_LOOKED_FOR).close("reported")

    def _weights_spike(self, opened: OpenIncident, window: Window, symptom: Symptom, again: StepSignals) -> bool:
        """Whether it is the weights: a batch that is left out does not come back in the next step."""
        in_a_row = symptom.name == "co_spike" and window.step - 1 in self.numerics.policy.spike_skips
        if not in_a_row or not self._divergence.may_go_back(window.step):
            return False
        found = self._divergence.diagnose_rise(window, again.loss)
        if found.cause == Cause.WEIGHTS:
            opened.diagnosed(found.failure, found.cause, found.evidence)
        return found.cause == Cause.WEIGHTS
