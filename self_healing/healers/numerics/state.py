"""What a run has learned about its loss, gradients and learning rate, and what is under way because of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...config.healing_config import HealingConfig
from ...detectors.nonfinite import NonFiniteDetector
from ...detectors.rules.rule import MetricRule, rules_for
from ...hf.adapter import Instrument
from ...hf.objective import StepSignals
from ...journal.incident import Incident
from ...journal.journal import Journal
from ...numerics.ladder import RollbackLadder
from ...numerics.loss_watch import LossWatch
from ...numerics.missing_steps import MissingSteps
from ...numerics.repeatability_check import RepeatabilityCheck
from ...numerics.step_clipping import StepClipping
from ...run.incidents import Outcomes
from ...run.run import RecoveryBudget
from ...system.files import Stateful, take_over, take_over_whole
from .detectors.panel import DetectorPanel
from .detectors.rules import MetricRules
from .ladder import StepPolicy
from .learning_rate import LearningRateControl, ScheduleWatch


class NumericsState:
    """
    Holds what the healers of steps share: detectors and their baselines, the incident about the loss that is open,
    policy, ladder and learning rate.
    """

    def __init__(
        self,
        config: HealingConfig,
        journal: Journal,
        budget: RecoveryBudget,
        outcomes: Outcomes,
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        self._step = step
        self.config = config
        self.journal = journal
        self.outcomes = outcomes
        self.panel: DetectorPanel | None = None
        self.rules: MetricRules | None = None
        self.clipping: StepClipping | None = None
        self.budget = budget
        self.ladder = RollbackLadder(config, budget)
        self.learning_rate = LearningRateControl(config)
        self.rate_after_reduction: float | None = None
        self.repeatability = RepeatabilityCheck(journal)
        # Whether the checkpoint that was resumed from has still to show that it is good.
        self.on_trial = False
        self.resumed_from: str | None = None
        self.forget()

    def forget(self) -> None:
        """Forgets what was learned from a checkpoint that is damaged: the run begins from an older one."""
        config = self.config
        self.detector = NonFiniteDetector(scaler_patience=config.scaler_patience)
        self.policy = StepPolicy(config)
        self.watch = LossWatch(config, self.journal, self.outcomes)
        # Incidents of this family, which all ranks open alike; a thread, or a service, opens others on one of them.
        self.opened = 0
        self.schedule = ScheduleWatch()
        self.missing = MissingSteps()
        self.roll_back_for: Incident | None = None
        # The last step that was reported as not finite, and the last one that the detectors were shown.
        self.reported_step, self.observed_step = -2, -1
        # The last step that is applied, as it is applied.
        self.applied: StepSignals | None = None

    def begin_watching(self, instrument: Instrument, rules: Sequence[MetricRule]) -> None:
        """Sets up what depends on what is trained: detectors, metric rules, clipping."""
        objective = instrument.objective
        self.panel = DetectorPanel(self.config, objective.detectors, instrument.view.vocabulary)
        self.rules = MetricRules(rules_for(rules, objective.name), instrument.view.argument_limits())
        self.clipping = None if self.config.zclip_mode == "off" else StepClipping(self.config)

    @property
    def calm(self) -> bool:
        """Whether nothing is wrong with the loss: no open incident about it, and nothing that builds up to one."""
        return not self.watch.open and (self.panel is None or not self.panel.divergence.suspicious)

    @property
    def warm(self) -> bool:
        """Whether the detectors have a baseline, from a checkpoint or from the steps there were."""
        return self.panel is not None and self.panel.loss_trend.ready

    @property
    def early_limit(self) -> float:
        """The loss that is no worse than those the run began with."""
        return math.inf if self.panel is None else self.panel.divergence.early.limit

    def is_well(self, signals: StepSignals) -> bool:
        """Shows the detectors a step that is applied again; whether they find nothing wrong."""
        panel = self.panel
        if panel is None or panel.alarming(signals) is not None:
            return False
        panel.observe(signals)
        if self.clipping is not None:
            self.clipping.take_in(signals)
        if panel.loss_is_usual:
            self.detector.accept(signals.loss)
        return panel.loss_is_usual

    # ---- together with the weights ----

    def detectors(self) -> dict[str, Any]:
        """Detectors and statistics there are, by the name of what they know in a checkpoint."""
        parts = {"detector": self.detector, "panel": self.panel, "rules": self.rules, "clipping": self.clipping}
        return {name: part for name, part in parts.items() if part is not None}

    def remember(self) -> dict[str, Any]:
        """What detectors and statistics know, to be put back together with the weights they speak of."""
        detectors = {name: part.state_dict() for name, part in self.detectors().items()}
        return {"detectors": detectors, "missing": self.missing.count}

    def recall(self, extras: Mapping[str, Any]) -> None:
        """Puts back what [`remember`] gave."""
        for name, part in self.detectors().items():
            if name in extras.get("detectors", {}):
                first = self.panel.divergence.early.first if self.panel is not None else []
                part.load_state_dict(extras["detectors"][name])
                if part is self.panel:
                    # Back before them, the losses the run began with still are what they were.
                    self.panel.divergence.early.keep_first(first)
        if self.panel is not None:
            self.panel.divergence.reset()

    def went_back(self, incident: Incident) -> None:
        """The run is in an earlier state because of an incident: what was going on in the later one is over."""
        self.outcomes.went_back(incident)
        self.watch.forget()
        self.policy.reset()

    def go_on_counting(self, step: int, state: Mapping[str, Any]) -> None:
        """Takes in the checkpoint that `train()` is entered again from: which of its steps are in the weights."""
        if "missing_steps" in state:
            take_over_whole(self.missing, state["missing_steps"])
        self.missing.goes_on_at(step)

    # ---- what outlives the process ----

    def recovery_state(self) -> dict[str, Any]:
        """Gives what the next process must not forget, as JSON: how often the run was brought back, and its rate."""
        return {name: part.state_dict() for name, part in self._outlives_process().items()} | {
            "rate_after_reduction": self.rate_after_reduction
        }

    def readable_recovery_state(self, recorded: Mapping[str, Any], odd: list[str]) -> dict[str, Any]:
        """Takes of a recorded state what can be read: a damaged part costs that part."""
        budget, rate = RecoveryBudget(self.config), LearningRateControl(self.config)
        parts: dict[str, Stateful] = {
            "budget": budget,
            "ladder": RollbackLadder(self.config, budget),
            "learning_rate": rate,
        }
        for name, part in parts.items():
            take_over(part, recorded.get(name), f"memory.{name}", odd)
        if "memory.learning_rate.reductions" in odd and rate.touched:
            # How often it was reduced is not known, and that it was is.
            rate.reductions = max(rate.reductions, 1)
        reduced = recorded.get("rate_after_reduction")
        readable = {name: part.state_dict() for name, part in parts.items()}
        return readable | {"rate_after_reduction": reduced if isinstance(reduced, float) else None}

    def load_recovery_state(self, recorded: Mapping[str, Any]) -> None:
        """Takes over budgets and learning rate as the process before this one left them, later than any checkpoint."""
        for name, part in (("budget", self.budget), ("ladder", self.ladder)):
            if name in recorded:
                part.load_state_dict(recorded[name])
        rate = recorded.get("learning_rate")
        if rate is not None and rate["reductions"] > self.learning_rate.reductions:
            # What failed with the higher rate after the checkpoint was written would fail again.
            self.learning_rate.load_state_dict(rate)
            self.rate_after_reduction = recorded.get("rate_after_reduction")

    def reset_ladder(self) -> None:
        """Begins the ladder at its first rung: the run was started again on purpose."""
        self.ladder.reset()

    def trained_steps(self, finished: int) -> int:
        """Of the steps that are finished, how many are in the weights."""
        return self.missing.trained(finished)

    # ---- no step comes after these ----

    def close_outcomes(self, unfollowed: str | None = None) -> None:
        """
        At the end of the run, or of this process's part in it: judges what is still open by the steps there were.
        """
        # No healthy step has come after them.
        self.repeatability.tell(self._step())
        self.outcomes.close(unfollowed)
        self.watch.end()

    def close_as_fatal(self, incident: Incident) -> None:
        """Closes the incident the run ends with, and with it what was still waiting to be judged."""
        self.outcomes.ends_with(incident)
        if self.watch.incident is incident:
            self.watch.forget()
        self.close_outcomes(unfollowed="unresolved")
        self.journal.closed(incident, "fatal")

    def _outlives_process(self) -> dict[str, Stateful]:
        return {"budget": self.budget, "ladder": self.ladder, "learning_rate": self.learning_rate}

    # ---- what is told of it ----

    def note_rate(self, learning_rate: float) -> None:
        """Takes in the rate that is in force after a reduction, for the report."""
        self.rate_after_reduction = learning_rate

    def rate_in_force(self) -> dict[str, Any]:
        """What became of the learning rate; nothing if it was never reduced."""
        if self.rate_after_reduction is None:
            return {}
        step = self.observed_step + 1
        return {
            "lr_reductions": self.learning_rate.reductions,
            "learning_rate_scale": self.learning_rate.scale(step),
            "learning_rate": self.rate_after_reduction,
        }

    def metrics(self, step: int | None, training: bool) -> dict[str, float]:
        """What is added to the trainer's logs."""
        found: dict[str, float] = {}
        if step is not None and self.config.healing_metrics and self.learning_rate.touched:
            found["healing/lr_scale"] = self.learning_rate.scale(step)
        return found | self.clipping.metrics() if training and self.clipping is not None else found
