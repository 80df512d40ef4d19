"""Spikes, divergence, a loss or a metric that alarms."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from ...failures.recipes import FAILURE_RECIPES, INSPECTIONS, THE_END, Action, Cause, FailureType, Given, Symptom
from ...hf.objective import StepSignals
from ...hf.step import Window
from ...journal.incident import Incident
from ...ranks import votes
from ...run.healer import HealingContext
from ...run.incidents import Diagnosis, OpenIncident
from ...run.run import Run
from .detectors.progress import PRACTICALLY_ZERO
from .diagnosis import diagnose_rise, diagnose_stillness
from .healer import NumericsHealer, keep_batch
from .ladder import MAX_SPIKE_SKIPS, SKIP_WINDOW, UNHARMED


logger = logging.getLogger("self_healing")


# ---- applied steps: shown to the detectors; heals a loss that rises and stays up, and a gradient that is gone ----


# Causes of a divergence that going back may cure, or has to end.
_MAY_GO_BACK = frozenset({Cause.WEIGHTS, Cause.COMPUTATION})
# What the panel sees, and the failure it is a sign of; anything else is worth a note and no more.
_FAILURES = {
    "vanishing_gradient": FailureType.VANISHING_GRADIENT,
    "dead_loss": FailureType.DEAD_LOSS,
    "never_learned": FailureType.NEVER_LEARNED,
    "slow_rise": FailureType.SLOW_RISE,
}
# Steps in which other parameters may be trained without anybody having looked: fewer than a baseline is learned in.
LOOK_EVERY = 10
# Steps after which some weight has moved, if any does.
_STEPS_TO_MOVE = 20
_UNMOVED = {
    "diagnosis": "There is a gradient and a learning rate, and no trained weight that was looked at has changed",
    "remedy": "Look at what stands between them: an optimizer whose step() does nothing or holds copies of the "
    "weights, a callback that clears gradients or puts weights back, updates that are rounded away (weights in bf16 "
    "or fp16 with a rate this low: train in fp32, or raise it).",
}


class AppliedSteps(NumericsHealer):
    """
    Takes in steps that are applied, and clips their gradients by what is usual. Finds out what made the loss rise or
    the gradient vanish, and goes back to a trusted state if it is the weights; anything else that detectors see is
    watched, reported, or ends the run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._trained: list[bool] = []
        # Of some weights: the step before which they were copied, its rate, the steps missing by then, and the copies.
        self._weights: tuple[int, float, int, torch.Tensor] | None = None
        self._have_moved = False

    def look_at_parameters(self, step: int) -> bool:
        """
        Learns the usual gradient norm anew where other parameters are trained than before (gradual unfreezing), and
        says whether they are.
        """
        # Whether they may have a gradient, not whether they have one: experts that no token went to have none.
        groups = getattr(self.run.instrument.trainer.optimizer, "param_groups", ())
        before, self._trained = self._trained, [each.requires_grad for group in groups for each in group["params"]]
        if not before or before == self._trained:
            return False
        logger.info("Step %d: the set of trained parameters has changed; the gradient norm is learned again.", step)
        self.numerics.feed()
        self.numerics.panel.reset_gradient_baseline()
        if self.numerics.clipping is not None:
            self.numerics.clipping.reset()
        return True

    def look_at_weights(self, signals: StepSignals) -> None:
        """Reports weights that 20 steps with a gradient and a rate have not moved; once some have, looks no more."""
        view, (before, self._weights) = self.run.instrument.view, (self._weights, None)
        if self._have_moved:
            return
        rate, missing = view.scheduled_rate, self.numerics.missing.count
        if rate <= 0 or not (signals.grad_norm or 0.0) > PRACTICALLY_ZERO:
            return
        if before is not None and signals.step < before[0] + _STEPS_TO_MOVE:
            self._weights = before
            return
        now = signals.step, rate, missing, view.some_weights()
        self._have_moved = before is not None and not torch.equal(before[3], now[3])
        if before is None or (not self._have_moved and (rate > before[1] or missing != before[2])):
            # Not of a rate that still rises, nor where steps were left out.
            self._weights = now
        elif not self._have_moved and len(now[3]):
            self._have_moved = True
            evidence = {"metric": "learning rate", "value": rate, "steps": signals.step - before[0], **_UNMOVED}
            with self.run.incident(signals.step, "weights_unmoved", evidence, "error") as opened:
                opened.diagnosed(FailureType.RED_FLAG, "weights unmoved")
                opened.close("reported")

    def take_in(self, window: Window, signals: StepSignals, clipped_to: float = math.inf) -> None:
        """Takes in a step with nothing wrong, as it will be applied."""
        self.run.outcomes.take_in(signals.loss, window.step)
        self.numerics.limits.recent.append(UNHARMED)
        self.numerics.limits.unhealed_in_a_row = 0
        self.observe(window, signals, clipped_to)

    def observe(self, window: Window, signals: StepSignals, clipped_to: float = math.inf) -> None:
        """Shows the detectors a step that will be applied, and clips its gradient."""
        numerics, panel, clipping = self.numerics, self.numerics.panel, self.numerics.clipping
        numerics.applied = signals
        if clipping is not None and (clipping.acts or clipped_to < math.inf):
            self.clip(window, signals, clipped_to)
        elif clipping is not None:
            clipping.take_in(signals, numerics.ceiling)
        if signals.step <= numerics.observed_step:
            # An exception came between this and the update: it is the same step again.
            return
        numerics.observed_step = signals.step
        for symptom in panel.observe(signals):
            self._act_on(symptom, window)
            if self.climb.went_back_in == window.step:
                # What was seen belongs to the state that was left.
                return
        if panel.loss_is_usual:
            numerics.detector.losses.append(signals.loss)
        if numerics.watch.incident is not None:
            numerics.watch.follow(panel)
        numerics.look_ahead()

    def _act_on(self, symptom: Symptom, window: Window) -> None:
        if symptom.name in ("loss_spike", "divergence"):
            incident = self.numerics.watch.begin(symptom)
            if incident is not None:
                self.heal(self.run.dealing_with(incident), FailureType(symptom.name), window)
        elif symptom.name in _FAILURES:
            failure = _FAILURES[symptom.name]
            self.heal(self.open(symptom, failure, symptom.name.replace("_", " ")), failure, window)
        else:
            self.run.journal.noticed(symptom)

    # ---- what the detectors see ----

    def heal(self, opened: OpenIncident, failure: FailureType, window: Window) -> None:
        """Acts on what was seen in applied steps, by its failure."""
        with self.run.instrument.failsafe.together(), opened:
            if self.numerics.watch.incident is opened.incident:
                opened.leave_open()
            dealt_with = False
            if failure is FailureType.DIVERGENCE:
                dealt_with = self._heal_divergence(opened, window)
            elif failure is FailureType.VANISHING_GRADIENT and self.may_go_back(window.step):
                dealt_with = self._heal_stillness(opened, window)
            if not dealt_with:
                self._act(opened, failure, window)

    def _act(self, opened: OpenIncident, failure: FailureType, window: Window) -> None:
        """Does what can be done without knowing the cause."""
        incident = opened.incident
        if self.numerics.schedule.raised_lately(incident.step, self.config.divergence_patience):
            incident.evidence["why"] = "The schedule has just raised the learning rate again: it may well pass"
        actions, verdict = self._actions_against(failure), FAILURE_RECIPES[failure].diagnosis
        if Action.STOP in actions:
            self.numerics.watch.incident = None
        if failure is FailureType.DIVERGENCE and incident.cause != Cause.WEIGHTS:
            # The recipe blames the weights.
            verdict = f"The loss has risen and stays up; the weights are not proven to be the cause ({incident.cause})"
        self.actions.apply(actions, HealingContext(incident, self.run.instrument, window, verdict=verdict), self.args)
        if set(actions) <= set(INSPECTIONS):
            opened.close("reported")

    def _actions_against(self, failure: FailureType) -> tuple[Action, ...]:
        if failure is FailureType.DIVERGENCE and self.config.on_divergence == "stop":
            # The weights are what is wrong: nothing is saved of them.
            return (Action.STOP,)
        if failure is FailureType.DEAD_LOSS and self.config.on_red_flag == "warn":
            return ()
        return self.numerics.ladder.next(failure, {Given.CAUSE_UNKNOWN}).actions

    def _heal_divergence(self, opened: OpenIncident, window: Window) -> bool:
        """
        Finds out what made the loss rise, whatever is done about it; back to a trusted state if it was the weights.
        """
        tries = self.run.instrument.view.can_recompute and self.rollback.can_go_back()
        if not (self.may_go_back(window.step) if self.config.on_divergence == "heal" else tries):
            return False
        incident = opened.incident
        found = self.diagnose_rise(window, window.signals().loss)
        if self.config.on_divergence != "warn" or found.failure is FailureType.HARDER_DATA:
            opened.diagnosed(found.failure, found.cause, found.evidence)
        if found.cause in _MAY_GO_BACK and self.config.on_divergence == "heal":
            self.climb.take_rung(HealingContext(incident, self.run.instrument, window, found), FailureType.DIVERGENCE)
            opened.wait()
            return True
        # Computed again for the experiment, its gradient is as it came out of the backward.
        self.clip(window, window.signals())
        opened.stop_clock()
        if found.failure is not FailureType.HARDER_DATA:
            # What is not known is no reason to change a run: it is watched.
            return False
        self.numerics.panel.divergence.prove_harmless()
        self.numerics.watch.incident = None
        opened.close("reported")
        return True

    def _heal_stillness(self, opened: OpenIncident, window: Window) -> bool:
        """Weights that were driven where there is no gradient are a divergence, however slow the loss shows it."""
        panel, still = self.numerics.panel, window.signals()
        first = median(panel.divergence.early.first or [math.nan])
        found = diagnose_stillness(window, self.rollback, still, first, panel.loss_trend.scale)
        if found.cause != Cause.WEIGHTS:
            opened.stop_clock()
            return False
        opened.diagnosed(found.failure, found.cause, found.evidence)
        context = HealingContext(opened.incident, self.run.instrument, window, found)
        self.climb.take_rung(context, FailureType.DIVERGENCE)
        opened.wait()
        return True

    def may_go_back(self, step: int) -> bool:
        """Without a state to go back to, a run that goes on may still recover; one that was stopped cannot."""
        if self.config.on_divergence != "heal" or not self.run.instrument.view.can_recompute:
            return False
        if self.numerics.schedule.raised_lately(step, self.config.divergence_patience):
            return False
        return self.rollback.can_go_back()

    def diagnose_rise(self, window: Window, loss: float) -> Diagnosis:
        """Finds out why a loss has risen over its baseline, or over the losses the run began with."""
        panel = self.numerics.panel
        level = panel.loss_trend.level if panel.loss_trend.ready else None
        if level is None:
            level = median(panel.divergence.early.first or [math.nan])
        return diagnose_rise(window, self.rollback, loss, level, panel.loss_trend.scale)


# ---- spikes: heals steps whose gradient is far outside of what is usual ----


class SpikeHealer(NumericsHealer):
    """Computes the step again, clips its gradient, leaves it out, or goes back to a trusted state."""

    @property
    def heals(self) -> bool:
        """Whether anything is done about a spike before it is applied."""
        return self.config.on_spike == "heal" and self.run.instrument.view.can_recompute

    def heal(self, window: Window, symptom: Symptom) -> None:
        """Computes the step again before anything is decided about it."""
        with self.incident(symptom.step, symptom.name, symptom.evidence, symptom.severity) as opened:
            again = window.recompute_with_retry()
            transient = again.finite and self.numerics.panel.spike(again) is None
            if again.finite and symptom.step > self.numerics.observed_step:
                # As it is without the passing fault: faults that come again and again are not what is usual.
                self.numerics.panel.remember_spike(again)
            failure = FailureType.SPIKE_TRANSIENT if transient else FailureType.GRADIENT_SPIKE
            cause = Cause.TRANSIENT if transient else Cause.SAME_AGAIN if again.finite else Cause.NOT_FINITE_AGAIN
            opened.diagnosed(failure, cause, {"again": {"loss": again.loss, "grad_norm": again.grad_norm}})
            if not transient:
                keep_batch(self.run, window, opened.incident)
            if not transient and again.finite and self._weights_spike(opened, window, symptom, again):
                context = HealingContext(opened.incident, self.run.instrument, window)
                self.climb.take_rung(context, FailureType.DIVERGENCE)
                return
            self._act(opened, window, symptom, again, failure)

    def _act(
        self, opened: OpenIncident, window: Window, symptom: Symptom, again: StepSignals, failure: FailureType
    ) -> None:
        usual, limits = self.numerics.panel.gradient_level, self.numerics.limits
        skipped = sum(skip > symptom.step - SKIP_WINDOW for skip in limits.spike_skips)
        holds = {
            Given.NOT_FINITE_AGAIN: not again.finite,
            Given.LOSS_USUAL: symptom.name == "gradient_spike",
            Given.NORM_KNOWN: usual is not None,
            Given.SKIPS_LEFT: skipped < MAX_SPIKE_SKIPS,
        }
        actions = self.numerics.ladder.next(failure, {given for given, so in holds.items() if so}).actions
        context = HealingContext(opened.incident, self.run.instrument, window, clip_to=usual)
        self.actions.apply(actions, context, self.args)
        opened.wait()
        if not window.skipped:
            clipped = Action.CLIP_GRADIENT in actions and usual is not None
            self.run.part(AppliedSteps).take_in(window, again, usual if clipped and usual is not None else math.inf)
            return
        if again.finite:
            limits.spike_skips.append(symptom.step)
        if stop := limits.note(skipped=True, explained=True):
            self.end(context, stop)

    def report(self, symptom: Symptom) -> None:
        """Journals a spike that nothing is done about."""
        if symptom.name == "co_spike":
            # The loss spike in the same step is an incident already.
            self.run.journal.noticed(symptom)
            return
        self.open(symptom, FailureType.GRADIENT_SPIKE, Cause.NOT_LOOKED_FOR).close("reported")

    def _weights_spike(self, opened: OpenIncident, window: Window, symptom: Symptom, again: StepSignals) -> bool:
        """Whether it is the weights: a batch that is left out does not come back in the next step."""
        in_a_row = symptom.name == "co_spike" and window.step - 1 in self.numerics.limits.spike_skips
        applied = self.run.part(AppliedSteps)
        if not in_a_row or not applied.may_go_back(window.step):
            return False
        found = applied.diagnose_rise(window, again.loss)
        if found.cause == Cause.WEIGHTS:
            opened.diagnosed(found.failure, found.cause, found.evidence)
        return found.cause == Cause.WEIGHTS


# ---- red flags: acts on metric rules that fire for what the trainer logs ----


class RedFlagHealer(NumericsHealer):
    """Holds logs against the metric rules, and ends the run or goes back before the next step is applied."""

    def read_logs(self, step: int, logs: Mapping[str, Any]) -> None:
        """Holds a log against the metric rules. A rule that ends the run does so before the next step is applied."""
        run, numerics = self.run, self.numerics
        told: set[str] = set()
        found = numerics.rules.observe(step, logs)
        # Alerts last, and of those the most severe first.
        found.sort(key=lambda each: (each.evidence.get("action") == "alert", each.severity != "error"))
        for symptom in found:
            action, about = str(symptom.evidence.get("action")), str(symptom.evidence.get("about", ""))
            if symptom.severity == "info" or (action == "alert" and about in told):
                run.journal.noticed(symptom)
                continue
            told |= {about} - {""}
            opened = self.open(symptom, FailureType.RED_FLAG, symptom.name.removeprefix("rule:").replace("_", " "))
            acts = self.config.on_red_flag == "act"
            if acts and action == "stop" and run.stop_incident is None:
                run.stop_incident = opened.incident
            elif acts and action == "rollback" and numerics.roll_back_for is None:
                numerics.roll_back_for = opened.incident
            else:
                opened.close("reported")

    def stop(self, window: Window) -> None:
        """Ends the run before a step is applied."""
        run = self.run
        incident = self._known_to_all(run.stop_incident, window)
        run.stop_incident = None
        evidence = incident.evidence
        verdict = str(evidence.get("diagnosis", "a metric rule ended the run"))
        if incident.failure is FailureType.RED_FLAG:
            verdict += f" (rule {incident.cause})"
        if "seen_by_rank" in evidence:
            verdict += f" (seen by rank {evidence['seen_by_rank']})"
        context = HealingContext(incident, self.run.instrument, window, verdict=verdict)
        self.actions.apply(THE_END, context, self.args)

    def roll_back(self, window: Window) -> None:
        """Goes back instead of applying a step."""
        incident = self._known_to_all(self.numerics.roll_back_for, window)
        self.numerics.roll_back_for = None
        with self.run.dealing_with(incident) as opened:
            if self.run.instrument.view.can_recompute and self.rollback.can_go_back():
                self.climb.take_rung(HealingContext(incident, self.run.instrument, window), FailureType.RED_FLAG)
                return
            incident.evidence["why"] = "Its action is to roll back, and there is no trusted state to go back to"
            opened.close("reported")

    def _known_to_all(self, own: Incident | None, window: Window) -> Incident:
        """
        Gives the incident for which all ranks do the same: a red flag in a metric that is not the same everywhere, or
        what ends the run on one of them, is known to the others with its rule and its remedy. Collective.
        """
        told = votes.from_first_rank_with(
            "what was seen",
            None if own is None else (self.run.journal.rank, own.to_dict()),
            self.run.instrument.view.device,
        )
        if own is not None:
            return own
        assert told is not None, "one rank at least has asked for it"
        rank, seen = told
        incident = Incident.from_dict(seen)
        evidence = incident.evidence | {"seen_by_rank": rank}
        opened = self.incident(window.step, incident.symptom, evidence, incident.severity)
        opened.diagnosed(incident.failure or FailureType.RED_FLAG, incident.cause)
        return opened.incident
