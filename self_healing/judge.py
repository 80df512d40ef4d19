"""One optimizer step from top to bottom: is it fit to be applied, and if not, what becomes of it?"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from .actions import HealingActions, HealingContext, save_offending_batch
from .config import HealingConfig
from .detectors import DetectorPanel, Symptom
from .diagnosis import Diagnosis, diagnose
from .failures import Action, FailureType
from .instrument import Instrument, Window
from .journal import Incident
from .session import Session
from .signals import StepSignals


# What the panel sees, and the failure it is a sign of; anything else is worth a note and no more.
_FAILURES = {
    "vanishing_gradient": FailureType.VANISHING_GRADIENT,
    "dead_loss": FailureType.DEAD_LOSS,
}


class StepJudge:
    """
    Judges the steps of a run, with gradients computed and nothing applied yet, and heals them.

    Args:
        config ([`HealingConfig`]):
            What to do about what.
        session ([`Session`]):
            The memory of the run.
        actions ([`HealingActions`]):
            Carries out what is decided.
    """

    def __init__(self, config: HealingConfig, session: Session, actions: HealingActions) -> None:
        self.config = config
        self.session = session
        self.actions = actions

    def judge(self, window: Window) -> None:
        """One step. It is left as it is, healed in place, or left out; or the run ends."""
        session = self.session
        signals = window.signals(stop=session.stop_for is not None)
        if window.stop_wanted:
            self._stop_for_red_flag(window)
        symptom = session.detector.judge(signals, window.scaler_active)
        if symptom is not None:
            self._heal_nonfinite(window, symptom)
        elif signals.finite:
            self._judge_finite(window, signals)

    # ---- not finite ----

    def _heal_nonfinite(self, window: Window, symptom: Symptom) -> None:
        session = self.session
        began = time.perf_counter()
        if not self._acts and session.reported_step == symptom.step - 1:
            # Nothing is done about it, so it stays that way: one incident for all of it.
            session.reported_step = symptom.step
            return
        session.reported_step = symptom.step
        incident = session.journal.open(symptom.step, symptom.name, symptom.evidence)
        diagnosis = self._diagnose(window)
        session.journal.diagnosed(incident, diagnosis.failure, diagnosis.cause, diagnosis.evidence)
        context = HealingContext(incident, self._instrument, window, diagnosis)
        decision = session.policy.decide(diagnosis, acts=self._acts)
        if diagnosis.failure is not FailureType.NONFINITE_TRANSIENT and self.config.save_offending_batch:
            incident.evidence["batch_file"] = save_offending_batch(window, session.directory, incident)
        context.verdict = decision.verdict
        self.actions.apply(decision.actions, context, self._args)
        incident.seconds_lost = time.perf_counter() - began
        if not window.skipped and decision.actions:
            healed = window.signals()
            session.judge_outcomes(healed.loss)
            self._observe(window, healed)
        session.await_outcome(incident)
        stop = session.policy.note(
            window.skipped,
            explained=diagnosis.failure is FailureType.NONFINITE_POISON_ROWS,
            rows=diagnosis.rows,
            dropped=diagnosis.poison_rows,
        )
        if stop is not None:
            context.verdict = stop
            session.policy.start_anew()
            self.actions.apply((Action.EMERGENCY_CHECKPOINT, Action.STOP), context, self._args)
        session.journal.dealt_with(incident)

    @property
    def _acts(self) -> bool:
        """Whether anything is done about a step that is not finite."""
        return self.config.on_nonfinite != "warn" and self._instrument.can_reexecute

    def _diagnose(self, window: Window) -> Diagnosis:
        if self.config.on_nonfinite != "heal" or not self._acts:
            return Diagnosis(
                FailureType.NONFINITE_UNDIAGNOSED, "not looked for", {"on_nonfinite": self.config.on_nonfinite}
            )
        return diagnose(window, self._instrument, self.config, self.session.healthy_inputs)

    # ---- finite, and wrong all the same ----

    def _judge_finite(self, window: Window, signals: StepSignals) -> None:
        panel = self._panel
        symptom = panel.alarming(signals)
        if signals.step > self.session.observed_step:
            panel.remember_spike(signals)
        if symptom is None:
            self._take_in(window, signals)
        elif self.config.on_spike == "heal" and self._instrument.can_reexecute:
            self._heal_spike(window, symptom)
        else:
            self._report_spike(symptom)
            self._take_in(window, signals)

    def _heal_spike(self, window: Window, symptom: Symptom) -> None:
        session = self.session
        began = time.perf_counter()
        incident = session.journal.open(symptom.step, symptom.name, symptom.evidence, symptom.severity)
        window.reexecute()
        again = window.signals()
        transient = again.finite and self._panel.spike(again) is None
        failure = FailureType.SPIKE_TRANSIENT if transient else FailureType.GRADIENT_SPIKE
        cause = "transient" if transient else "the same again" if again.finite else "not finite when computed again"
        evidence = {"again": {"loss": again.loss, "grad_norm": again.grad_norm}}
        session.journal.diagnosed(incident, failure, cause, evidence)
        if not transient and self.config.save_offending_batch:
            incident.evidence["batch_file"] = save_offending_batch(window, session.directory, incident)
        usual = self._panel.gradient_level
        decision = session.policy.decide_spike(symptom, transient, again.finite, may_clip=usual is not None)
        context = HealingContext(incident, self._instrument, window, clip_to=usual)
        self.actions.apply(decision.actions, context, self._args)
        incident.seconds_lost = time.perf_counter() - began
        session.await_outcome(incident)
        if window.skipped:
            context.verdict = session.policy.note(skipped=True, explained=True) or ""
            if context.verdict:
                session.policy.start_anew()
                self.actions.apply((Action.EMERGENCY_CHECKPOINT, Action.STOP), context, self._args)
        else:
            clipped = Action.CLIP_GRADIENT in decision.actions and usual is not None
            self._take_in(window, again, usual if clipped and usual is not None else math.inf)
        session.journal.dealt_with(incident)

    def _report_spike(self, symptom: Symptom) -> None:
        if symptom.name == "co_spike":
            # The loss spike in the same step is an incident already.
            self.session.journal.noticed(symptom)
            return
        incident = self._open(symptom, FailureType.GRADIENT_SPIKE, "not looked for")
        self.session.journal.dealt_with(incident)
        self.session.journal.closed(incident, "reported")

    def _take_in(self, window: Window, signals: StepSignals, clipped_to: float = math.inf) -> None:
        self.session.healthy_step(window, signals)
        self._observe(window, signals, clipped_to)

    def _observe(self, window: Window, signals: StepSignals, clipped_to: float = math.inf) -> None:
        """Shows the detectors a step that will be applied, and clips its gradient."""
        session, panel = self.session, self._panel
        if session.clipping is not None:
            ceiling = min(self._instrument.max_grad_norm or math.inf, clipped_to)
            session.clipping.apply(window, signals, ceiling, may_clip=self._instrument.can_reexecute)
        if signals.step <= session.observed_step:
            # An exception came between this and the update: it is the same step again.
            return
        session.observed_step = signals.step
        for symptom in panel.observe(signals):
            if symptom.name in ("loss_spike", "divergence"):
                session.watch.begin(symptom, lambda incident, failure: self._tell(incident, failure, window))
            elif symptom.name in _FAILURES:
                failure = _FAILURES[symptom.name]
                self._tell(self._open(symptom, failure, symptom.name.replace("_", " ")), failure, window)
            else:
                session.journal.noticed(symptom)
        if panel.loss_is_usual:
            session.detector.accept(signals.loss)
        session.watch.follow(panel)

    def _open(self, symptom: Symptom, failure: FailureType, cause: str) -> Incident:
        incident = self.session.journal.open(symptom.step, symptom.name, symptom.evidence, symptom.severity)
        self.session.journal.diagnosed(incident, failure, cause, {})
        return incident

    def _tell(self, incident: Incident, failure: FailureType, window: Window | None) -> None:
        decision = self.session.policy.decide_watched(failure)
        if Action.STOP in decision.actions:
            self.session.watch.forget()
        context = HealingContext(incident, self._instrument, window, verdict=decision.verdict)
        self.actions.apply(decision.actions, context, self._args)
        self.session.journal.dealt_with(incident)
        if not decision.actions:
            self.session.journal.closed(incident, "reported")

    # ---- what the trainer logs ----

    def read_logs(self, step: int, logs: Mapping[str, Any]) -> None:
        """Holds a log against the metric rules. A rule that ends the run does so before the next step is applied."""
        session = self.session
        evaluation = logs.get("eval_loss")
        if isinstance(evaluation, float):
            symptom = self._panel.observe_evaluation(step, evaluation)
            if symptom is not None:
                session.journal.noticed(symptom)
        if session.rules is None:
            return
        for symptom in session.rules.observe(step, logs):
            if symptom.severity == "info":
                session.journal.noticed(symptom)
                continue
            incident = self._open(symptom, FailureType.RED_FLAG, symptom.name.removeprefix("rule:").replace("_", " "))
            action = str(symptom.evidence.get("action"))
            if action == "rollback":
                incident.evidence["why"] = "Its action is to roll back, which this version cannot do yet"
            if session.policy.stops_for(action) and session.stop_for is None:
                session.stop_for = incident
            else:
                session.journal.dealt_with(incident)
                session.journal.closed(incident, "reported")

    def _stop_for_red_flag(self, window: Window) -> None:
        session = self.session
        incident = session.stop_for
        if incident is None:
            # Another rank has seen it, in a metric that is not the same everywhere.
            incident = session.journal.open(window.step, "red_flag_on_another_rank", {})
            session.journal.diagnosed(incident, FailureType.RED_FLAG, "seen by another rank", {})
        session.stop_for = None
        evidence = incident.evidence
        verdict = f"{evidence.get('diagnosis', 'a metric rule ended the run')} (rule {incident.cause})"
        context = HealingContext(incident, self._instrument, window, verdict=verdict)
        self.actions.apply((Action.EMERGENCY_CHECKPOINT, Action.STOP), context, self._args)

    # ---- the run it belongs to ----

    @property
    def _instrument(self) -> Instrument:
        if self.session.instrument is None:
            raise RuntimeError("the callback is not attached to a running trainer")
        return self.session.instrument

    @property
    def _panel(self) -> DetectorPanel:
        if self.session.panel is None:
            raise RuntimeError("the callback is not attached to a running trainer")
        return self.session.panel

    @property
    def _args(self) -> Any:
        return self._instrument.trainer.args
