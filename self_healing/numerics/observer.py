"""Shows the detectors every step that is applied, and hands on what they see."""

from __future__ import annotations

import logging
import math

from ..failures.recipes import FailureType
from ..healers.numerics.healer import RollbackClimb
from ..healers.numerics.loss import DivergenceHealer
from ..healers.numerics.state import NumericsState
from ..hf.objective import StepSignals
from ..hf.step import Window
from ..rollback.rollback import Rollback
from ..run.run import RunContext
from .healer import NumericsHealer


logger = logging.getLogger("self_healing")

# What the panel sees, and the failure it is a sign of; anything else is worth a note and no more.
_FAILURES = {
    "vanishing_gradient": FailureType.VANISHING_GRADIENT,
    "dead_loss": FailureType.DEAD_LOSS,
    "never_learned": FailureType.NEVER_LEARNED,
    "plateau": FailureType.PLATEAU,
    "slow_rise": FailureType.SLOW_RISE,
}
# Steps in which other parameters may be trained without anybody having looked: fewer than a baseline is learned in.
_LOOK_EVERY = 10


class StepObserver(NumericsHealer):
    """Takes in steps that are applied, and clips their gradients by what is usual."""

    def __init__(
        self,
        run: RunContext,
        numerics: NumericsState,
        rollback: Rollback,
        divergence: DivergenceHealer,
        climb: RollbackClimb,
    ) -> None:
        super().__init__(run, numerics, rollback)
        self._divergence, self._climb = divergence, climb
        self._trained: list[bool] = []

    def step_begins(self, signals: StepSignals) -> None:
        """Takes in what schedule and trained parameters a step has, before it is judged."""
        self.numerics.schedule.observe(signals.step, self.instrument.view.scheduled_rate)
        self._note_what_is_trained(signals)

    def _note_what_is_trained(self, signals: StepSignals) -> None:
        """With other parameters the gradient has another norm (gradual unfreezing): no spike, but a new usual."""
        if self._trained and signals.step % _LOOK_EVERY and self.panel.gradient_is_usual(signals):
            return
        # Whether they may have a gradient, not whether they have one: experts that no token went to have none.
        groups = getattr(self.instrument.trainer.optimizer, "param_groups", ())
        trained = [parameter.requires_grad for group in groups for parameter in group["params"]]
        if self._trained and trained != self._trained:
            logger.info(
                "Step %d: other parameters are trained; the usual gradient norm is learned again.", signals.step
            )
            self.panel.reset_gradient_baseline()
            if self.numerics.clipping is not None:
                self.numerics.clipping.reset()
        self._trained = trained

    def remember_spike(self, signals: StepSignals) -> None:
        """Takes in how far a gradient strays, so that one learns what is usual; a step that is done again, once."""
        if signals.step > self.numerics.observed_step:
            self.panel.remember_spike(signals)

    def take_in(self, window: Window, signals: StepSignals, clipped_to: float = math.inf) -> None:
        """Takes in a step with nothing wrong, as it will be applied."""
        run = self.run
        self.rollback.batches.note_healthy(window)
        run.outcomes.take_in(signals.loss, self.instrument.view.step)
        self.numerics.policy.note(skipped=False, explained=True)
        self.observe(window, signals, clipped_to)

    def observe(self, window: Window, signals: StepSignals, clipped_to: float = math.inf) -> None:
        """Shows the detectors a step that will be applied, and clips its gradient."""
        run, panel = self.run, self.panel
        self.numerics.applied = signals
        self.clip(window, signals, clipped_to)
        if signals.step <= self.numerics.observed_step:
            # An exception came between this and the update: it is the same step again.
            return
        self.numerics.observed_step = signals.step
        for symptom in panel.observe(signals):
            if self._climb.went_back_in == window.step:
                # What was seen belongs to the state that was left.
                return
            if symptom.name in ("loss_spike", "divergence"):
                self.numerics.watch.begin(
                    symptom,
                    lambda incident, failure: self._divergence.heal(run.dealing_with(incident), failure, window),
                )
            elif symptom.name == "second_rise":
                self.numerics.watch.rises_further(symptom)
            elif symptom.name in _FAILURES and (symptom.name != "plateau" or self.config.lr_increase_factor > 1):
                failure = _FAILURES[symptom.name]
                self._divergence.heal(self.open(symptom, failure, symptom.name.replace("_", " ")), failure, window)
            else:
                run.journal.noticed(symptom)
        if self._climb.went_back_in == window.step:
            return
        if panel.loss_is_usual:
            self.numerics.detector.accept(signals.loss)
        self.numerics.watch.follow(panel)
