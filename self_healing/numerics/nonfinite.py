"""Heals steps whose loss or gradient is not finite."""

from __future__ import annotations

import math
from typing import NoReturn

from ..failures.recipes import FAILURE_RECIPES, Action, Cause, FailureType, Symptom
from ..healers.numerics.diagnosis import diagnose, diagnose_start
from ..healers.numerics.healer import RollbackClimb
from ..healers.numerics.state import NumericsState
from ..hf.step import Window
from ..rollback.rollback import Rollback
from ..run.healer import HealingContext
from ..run.incidents import Diagnosis, OpenIncident
from ..run.run import RunContext
from .damaged_checkpoint import DamagedCheckpointHealer
from .healer import NumericsHealer
from .observer import StepObserver


# What is to blame where weights that were never changed give numbers that are not finite.
_NOT_THE_RATE = {
    Cause.MODEL: "the model or the precision it computes in",
    Cause.PRECISION: "the precision it computes in",
    Cause.DATA: "the data",
    Cause.LOSS_OR_LABELS: "the loss or the labels",
    Cause.GRADIENT: "the model, the loss or the precision they are computed in",
    Cause.MODEL_PRECISION_OR_DATA: "the model, the precision it computes in, or the data",
}


class NonfiniteHealer(NumericsHealer):
    """
    Finds out by experiment what made a step not finite, and applies it, leaves rows or all of it out, goes back to a
    trusted state, or ends the run.
    """

    def __init__(
        self,
        run: RunContext,
        numerics: NumericsState,
        rollback: Rollback,
        observer: StepObserver,
        damaged: DamagedCheckpointHealer,
        climb: RollbackClimb,
    ) -> None:
        super().__init__(run, numerics, rollback)
        self._observer, self._damaged, self._climb = observer, damaged, climb

    def heal(self, window: Window, symptom: Symptom) -> None:
        """Diagnoses a step that is not finite, and acts on it."""
        if not self.acts and self.numerics.reported_step == symptom.step - 1:
            # Nothing is done about it, so it stays that way: one incident for all of it.
            self.numerics.reported_step = symptom.step
            return
        self.numerics.reported_step = symptom.step
        with self.incident(symptom.step, symptom.name, symptom.evidence) as opened:
            self._heal(opened, window)

    def _heal(self, opened: OpenIncident, window: Window) -> None:
        run, incident = self.run, opened.incident
        # Before it is computed again. The gradient has been summed over ranks, and says no more whose it was.
        losses_are_finite = all(math.isfinite(float(loss)) for loss in window.losses)
        diagnosis = self._diagnose(window)
        if diagnosis.failure is FailureType.CORRUPTED_STATE:
            ranks = self.ranks_with(diagnosis.evidence["tensors"])
        else:
            poisoned = diagnosis.failure is FailureType.NONFINITE_POISON_ROWS
            if poisoned:
                window.share_samples()
            here = bool(diagnosis.poison) if poisoned else not losses_are_finite
            ranks = self.ranks_where("it is not finite here", here)
        opened.diagnosed(diagnosis.failure, diagnosis.cause, {**diagnosis.evidence, **ranks})
        context = HealingContext(incident, self.instrument, window, diagnosis)
        if diagnosis.failure is FailureType.CORRUPTED_STATE:
            self._climb.take_rung(context, diagnosis.failure)
            return
        if diagnosis.everywhere and not self.instrument.optimizer_step.weights_moved:
            self._stop_at_the_start(opened, context)
        decision = self.numerics.policy.decide(diagnosis, acts=self.acts)
        self.keep_batch(window, incident)
        context.verdict = decision.verdict
        self.actions.apply(decision.actions, context, self.args)
        if not window.skipped and decision.actions:
            # What the healed step shows has incidents of its own.
            opened.stop_clock()
            healed = window.signals()
            run.outcomes.take_in(healed.loss, self.instrument.view.step)
            self._observer.observe(window, healed)
        opened.wait()
        stop = self.numerics.policy.note(
            window.skipped,
            explained=diagnosis.failure is FailureType.NONFINITE_POISON_ROWS,
            rows=diagnosis.rows,
            dropped=diagnosis.poison_rows,
        )
        if stop is None:
            return
        if diagnosis.failure is FailureType.NONFINITE_NUMERICAL and self.numerics.policy.out_of_patience:
            if not self.instrument.optimizer_step.weights_moved:
                self._stop_at_the_start(opened, context)
            self._climb.take_rung(context, diagnosis.failure, verdict=stop)
            opened.wait()
            return
        context.verdict = stop
        self.numerics.policy.reset()
        self.actions.apply((Action.EMERGENCY_CHECKPOINT, Action.STOP), context, self.args)

    def _stop_at_the_start(self, opened: OpenIncident, context: HealingContext) -> NoReturn:
        """
        Ends a run whose weights no update has changed: they are what they were given as, and no state to go back to
        and no lower rate makes them others.
        """
        incident, window = opened.incident, context.window
        if window is None:
            raise ValueError("ending a run at its start needs `context.window`")
        self._damaged.suspect(context)
        self.keep_batch(window, incident)
        found = diagnose_start(window, str(incident.evidence.get("why", "")))
        opened.diagnosed(found.failure, found.cause, found.evidence)
        incident.evidence.pop("why", None)
        window.skip(None)
        context.verdict = (
            "loss or gradient is not finite, and no update has changed the weights yet, so it is neither the learning "
            f"rate nor the optimizer, but {_NOT_THE_RATE[found.cause]}. {found.evidence['diagnosis']}"
        )
        incident.steps_lost = max(incident.steps_lost, 1)
        opened.stop_clock()
        self.numerics.policy.reset()
        self.actions.apply(FAILURE_RECIPES[found.failure].ladder, context, self.args)
        raise AssertionError("the last of these actions raises")

    def _diagnose(self, window: Window) -> Diagnosis:
        if self.config.on_nonfinite != "heal" or not self.acts:
            return Diagnosis(
                FailureType.NONFINITE_UNDIAGNOSED, Cause.NOT_LOOKED_FOR, {"on_nonfinite": self.config.on_nonfinite}
            )
        return diagnose(window, self.instrument, self.config, self.rollback.batches.healthy_inputs)
