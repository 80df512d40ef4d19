"""Acts on metric rules that fire for what the trainer logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..failures.recipes import Action, FailureType, Symptom
from ..healers.numerics.healer import RollbackClimb
from ..healers.numerics.state import NumericsState
from ..hf.step import Window
from ..journal.incident import Incident
from ..ranks import votes
from ..rollback.rollback import Rollback
from ..run.healer import HealingContext
from ..run.run import RunContext
from .healer import NumericsHealer


class RedFlagHealer(NumericsHealer):
    """Holds logs against the metric rules, and ends the run or goes back before the next step is applied."""

    def __init__(self, run: RunContext, numerics: NumericsState, rollback: Rollback, climb: RollbackClimb) -> None:
        super().__init__(run, numerics, rollback)
        self._climb = climb

    def read_logs(self, step: int, logs: Mapping[str, Any]) -> None:
        """Holds a log against the metric rules. A rule that ends the run does so before the next step is applied."""
        run, numerics = self.run, self.numerics
        evaluation = logs.get("eval_loss")
        if isinstance(evaluation, float):
            symptom = self.panel.observe_evaluation(step, evaluation)
            if symptom is not None:
                run.journal.noticed(symptom)
        if numerics.rules is None:
            return
        told: set[str] = set()
        for symptom in sorted(numerics.rules.observe(step, logs), key=_alerts_last):
            action, about = str(symptom.evidence.get("action")), str(symptom.evidence.get("about", ""))
            if symptom.severity == "info" or (action == "alert" and about in told):
                run.journal.noticed(symptom)
                continue
            told |= {about} - {""}
            opened = self.open(symptom, FailureType.RED_FLAG, symptom.name.removeprefix("rule:").replace("_", " "))
            acts = numerics.policy.acts_on(action)
            if acts and action == "stop" and run.stop.incident is None:
                run.stop.incident = opened.incident
            elif acts and action == "rollback" and numerics.roll_back_for is None:
                numerics.roll_back_for = opened.incident
            else:
                opened.close("reported")

    def stop(self, window: Window) -> None:
        """Ends the run before a step is applied."""
        run = self.run
        incident = self._known_to_all(run.stop.incident, window)
        run.stop.incident = None
        evidence = incident.evidence
        verdict = str(evidence.get("diagnosis", "a metric rule ended the run"))
        if incident.failure is FailureType.RED_FLAG:
            verdict += f" (rule {incident.cause})"
        if "seen_by_rank" in evidence:
            verdict += f" (seen by rank {evidence['seen_by_rank']})"
        context = HealingContext(incident, self.instrument, window, verdict=verdict)
        self.actions.apply((Action.EMERGENCY_CHECKPOINT, Action.STOP), context, self.args)

    def roll_back(self, window: Window) -> None:
        """Goes back instead of applying a step."""
        incident = self._known_to_all(self.numerics.roll_back_for, window)
        self.numerics.roll_back_for = None
        with self.run.dealing_with(incident) as opened:
            if self.instrument.view.can_reexecute and self.rollback.can_go_back():
                self._climb.take_rung(HealingContext(incident, self.instrument, window), FailureType.RED_FLAG)
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
            self.instrument.view.device,
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


def _alerts_last(symptom: Symptom) -> tuple[bool, bool]:
    return symptom.evidence.get("action") == "alert", symptom.severity != "error"
