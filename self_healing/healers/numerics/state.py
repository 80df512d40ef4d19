"""What a run has learned about its numbers, and what is under way."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...config.healing_config import HealingConfig
from ...failures.recipes import FailureType, Symptom
from ...hf.adapter import Instrument
from ...hf.objective import StepSignals
from ...hf.step import Window
from ...journal.incident import Incident
from ...journal.journal import Journal
from ...run.incidents import OUTCOME_STEPS, Outcomes
from ...run.run import Run
from ...system import processes
from ...system.files import KeepsState, take_over_whole
from ...system.random_state import Repeatability
from .clipping import StepClipping
from .detectors.bounds import Bounds, bounds_of
from .detectors.panel import DetectorPanel
from .detectors.rules import MetricRule, MetricRules, rules_for
from .detectors.spikes import NonFiniteDetector
from .experiments import StepExperiments
from .ladder import UNHARMED, LadderRunner, StepLimits
from .learning_rate import LearningRateControl, ScheduleWatch


logger = logging.getLogger("self_healing")


# ---- state ----


class NumericsState:
    """
    Holds what the healers of steps share: detectors and their baselines, the incident about the loss that is open,
    limits, ladder and learning rate.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.config, self.outcomes, self.budget = run.config, run.outcomes, run.budget
        # Those of what is trained are made where training begins.
        self.panel = DetectorPanel(self.config)
        self.rules = MetricRules(())
        self.clipping: StepClipping | None = None
        # The norm that the Trainer clips gradients to.
        self.ceiling = math.inf
        self.ladder = LadderRunner(self.config, self.budget)
        self.learning_rate = LearningRateControl(self.config)
        self.rate_after_reduction: float | None = None
        self.repeatability = RepeatabilityCheck(run.journal)
        self.detector = NonFiniteDetector()
        self.limits = StepLimits(self.config)
        self.watch = LossWatch(self.config, run.journal, self.outcomes)
        # Incidents of this family, which all ranks open alike; a thread, or a service, opens others on one of them.
        self.opened = 0
        self.schedule = ScheduleWatch()
        self.missing = SkippedSteps()
        self.roll_back_for: Incident | None = None
        # The last step that was reported as not finite, and the last one that the detectors were shown.
        self.reported_step, self.observed_step = -2, -1
        # The last step that is applied, as it is applied.
        self.applied: StepSignals | None = None
        # Applied steps that are still to be shown to the detectors, and what lets the next ones wait with them.
        self.waiting: list[StepSignals] = []
        self.bounds: Bounds | None = None
        # Whether nothing was wrong with the loss after the step that was shown to them last.
        self.settled = False

    def begin_watching(self, instrument: Instrument, rules: Sequence[MetricRule]) -> None:
        """Sets up what depends on what is trained: detectors, metric rules, clipping."""
        objective = instrument.objective
        self.panel = DetectorPanel(self.config, objective.detectors, instrument.view.vocabulary)
        self.rules = MetricRules(rules_for(rules, objective.name), instrument.view.argument_limits())
        self.clipping = None if self.config.zclip_mode == "off" else StepClipping(self.config)
        self.ceiling = instrument.view.max_grad_norm or math.inf

    # ---- steps that are applied ----

    def feed(self) -> None:
        """Shows the detectors the steps that wait, before anybody reads what they know."""
        waiting, self.waiting, self.bounds = self.waiting, [], None
        panel, clipping, recent, losses = self.panel, self.clipping, self.limits.recent, self.detector.losses
        for signals in waiting:
            if clipping is not None:
                clipping.take_in(signals, self.ceiling)
            panel.observe(signals)
            if panel.loss_is_usual:
                losses.append(signals.loss)
            recent.append(UNHARMED)
        if waiting:
            self.limits.unhealed_in_a_row = self.detector.overflows = 0

    def look_ahead(self) -> None:
        """After a step with nothing wrong: which of the next may wait. None, while any of them may be acted on."""
        doubt = self.watch.incident is not None or bool(self.outcomes.rollback_in_doubt)
        self.settled = not doubt and not self.panel.divergence.suspicious
        if self.settled and (self.clipping is None or not self.clipping.acts):
            self.bounds = bounds_of(self.panel)

    @property
    def calm(self) -> bool:
        """Whether nothing is wrong with the loss: no open incident about it, and nothing that builds up to one."""
        if self.watch.incident is not None or self.outcomes.rollback_in_doubt:
            return False
        return self.bounds is not None or not self.panel.divergence.suspicious

    @property
    def warm(self) -> bool:
        """Whether the detectors have a baseline, from a checkpoint or from the steps there were."""
        return self.panel.loss_trend.ready

    def trend(self) -> tuple[float, float] | None:
        """Median and scale of the losses before now."""
        self.feed()
        return self.detector.trend()

    @property
    def early_limit(self) -> float:
        """The loss that is no worse than those the run began with."""
        return self.panel.divergence.early.limit

    def is_well(self, signals: StepSignals) -> bool:
        """Shows the detectors a step that is applied again; whether they find nothing wrong."""
        panel = self.panel
        if panel.alarming(signals) is not None:
            return False
        panel.observe(signals)
        if self.clipping is not None:
            self.clipping.take_in(signals)
        if panel.loss_is_usual:
            self.detector.losses.append(signals.loss)
        return panel.loss_is_usual

    # ---- together with the weights ----

    def detectors(self) -> dict[str, Any]:
        """Detectors and statistics there are, by the name of what they know in a checkpoint."""
        self.feed()
        parts: dict[str, Any] = {"detector": self.detector, "panel": self.panel, "rules": self.rules}
        return parts if self.clipping is None else {**parts, "clipping": self.clipping}

    def remember(self) -> dict[str, Any]:
        """What detectors and statistics know, to be put back together with the weights they speak of."""
        detectors = {name: part.state_dict() for name, part in self.detectors().items()}
        return {"detectors": detectors, "missing": self.missing.count}

    def recall(self, extras: Mapping[str, Any]) -> None:
        """Puts back what [`remember`] gave."""
        early = self.panel.divergence.early
        first = early.first
        for name, part in self.detectors().items():
            if name in extras.get("detectors", {}):
                part.load_state_dict(extras["detectors"][name])
        # Back before them, the losses the run began with still are what they were.
        early.first = max(early.first, first, key=len)
        self.panel.divergence.reset()

    def went_back(self, incident: Incident) -> None:
        """The run is in an earlier state because of an incident: what was going on in the later one is over."""
        self.outcomes.went_back(incident)
        self.bounds = None
        self.watch.incident = None
        self.limits.reset()

    def go_on_counting(self, step: int, state: Mapping[str, Any]) -> None:
        """Takes in the checkpoint that `train()` is entered again from: which of its steps are in the weights."""
        if "missing_steps" in state:
            take_over_whole(self.missing, state["missing_steps"])
        self.missing.goes_on_at(step)

    # ---- what outlives the process ----

    def recovery_state(self) -> dict[str, Any]:
        """Gives what the next process must not forget, as JSON: how often the run was brought back, and its rate."""
        return {
            "budget": self.budget.state_dict(),
            "ladder": self.ladder.state_dict(),
            "learning_rate": self.learning_rate.state_dict(),
            "rate_after_reduction": self.rate_after_reduction,
        }

    def load_recovery_state(self, recorded: Mapping[str, Any]) -> None:
        """Takes over budgets and learning rate as the process before this one left them, later than any checkpoint."""
        rate = LearningRateControl(self.config)
        parts: dict[str, Any] = {"budget": self.budget, "ladder": self.ladder, "learning_rate": rate}
        for name, part in parts.items():
            if name in recorded and not take_over_whole(part, recorded[name]):
                logger.warning("What the run record says of %s cannot be read, and counts as not known.", name)
        if rate.reductions > self.learning_rate.reductions:
            # What failed with the higher rate after the checkpoint was written would fail again.
            self.learning_rate.load_state_dict(rate.state_dict())
            self.rate_after_reduction = recorded.get("rate_after_reduction")

    # ---- no step comes after these ----

    def close_outcomes(self, unfollowed: str | None = None) -> None:
        """
        At the end of the run, or of this process's part in it: judges what is still open by the steps there were.
        """
        # No healthy step has come after them.
        self.repeatability.tell(self.run.step)
        self.outcomes.close(unfollowed)
        if self.watch.incident is not None:
            self.watch.close("unresolved")

    def close_as_fatal(self, incident: Incident) -> None:
        """Closes the incident the run ends with, and with it what was still waiting to be judged."""
        self.outcomes.ends_with(incident)
        if self.watch.incident is incident:
            self.watch.incident = None
        self.close_outcomes(unfollowed="unresolved")
        self.run.journal.closed(incident, "fatal")

    # ---- what is told of it ----

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


# ---- missing steps: how many of a run's steps are not in its weights ----


class SkippedSteps(KeepsState):
    """
    Counts the steps that are not in the weights: those that were left out, and those that went with a state the run
    went back from.
    """

    _state = ("count", "_newest")

    def __init__(self) -> None:
        self.count = 0
        # Steps finished when `train()` was entered first, and how many of them were in the weights.
        self.entry_step = self.trained_at_entry = 0
        self._newest = -1

    def begin(self, step: int) -> None:
        """Takes in where the run is when `train()` is entered for the first time."""
        self.goes_on_at(step)
        self.entry_step, self.trained_at_entry = step, self.trained(step)

    def trained(self, step: int) -> int:
        """How many of the first `step` steps are in the weights."""
        return step - self.count

    def left_out(self, step: int) -> None:
        if step > self._newest:
            self.count += 1
            self._newest = step

    def went_back(self, finished: int, trained: int) -> None:
        """The weights are those of an earlier state."""
        self.count = finished - trained
        self._newest = finished - 1

    def goes_on_at(self, step: int) -> None:
        """
        The run goes on from so many finished steps; one that was left out and not finished is decided about again.
        """
        if self._newest >= step:
            self.count -= 1
            self._newest = step - 1


# ---- loss watch ----


# A robust z of at most this counts as back.
_BACK = 2.0
# Times `divergence_patience`, for a loss that neither comes back nor settles: checkpoints of what there is are better
# than none.
_LONGEST = 3


@dataclass
class LossWatch:
    """Follows a loss that has left its baseline."""

    config: HealingConfig
    journal: Journal
    _outcomes: Outcomes
    incident: Incident | None = None
    opened: int = 0
    # A checkpoint has to be written as soon as the loss is back.
    owed: bool = False
    _back: int = 0
    _steps: int = 0

    @property
    def open(self) -> bool:
        """Whether the loss is away from its baseline, or it is not known yet whether it is back."""
        return self.incident is not None or bool(self._outcomes.rollback_in_doubt)

    def begin(self, symptom: Symptom) -> Incident | None:
        """Opens the incident, or takes in that a spike has widened into a divergence; `None` if that is known."""
        failure = FailureType(symptom.name)
        widened = self.incident is not None
        if self.incident is not None and (
            self.incident.failure is FailureType.DIVERGENCE or failure is FailureType.LOSS_SPIKE
        ):
            return None
        if widened:
            symptom.evidence["widened_at"] = symptom.step
        if self.incident is None:
            self.opened += 1
            self.hold(self.journal.open(symptom.step, symptom.name, symptom.evidence))
        assert self.incident is not None
        self._back = self._steps = 0
        cause = "spike that widened" if widened else symptom.evidence.get("test", "one step")
        self.journal.diagnosed(self.incident, failure, cause, symptom.evidence)
        return self.incident

    def hold(self, incident: Incident) -> None:
        """Checkpoints wait, on request, until the loss has been back for `OUTCOME_STEPS`, unless they do already."""
        if self.incident is None:
            self.incident = incident
            self._back = self._steps = 0

    def follow(self, panel: DetectorPanel) -> None:
        """Takes in a step: closes the incident once the loss is back, or has found another level."""
        if self.incident is None:
            return
        self._steps += 1
        # Without a baseline it cannot be told any more whether it is back.
        if panel.signed_loss or self._steps > _LONGEST * self.config.divergence_patience:
            self.close("unresolved", settled=False)
            return
        if self.incident.failure is FailureType.DIVERGENCE:
            if not panel.divergence.alarmed:
                self.close("unresolved" if panel.relearned else "self_recovered", settled=panel.relearned)
            return
        loss, z, level = panel.loss
        if level is None:
            return
        # What has no logarithm is zero.
        back = loss <= level if z is None else z <= _BACK
        self._back = self._back + 1 if back else 0
        if self._back >= OUTCOME_STEPS:
            self.close("self_recovered")

    def close(self, outcome: str, **evidence: Any) -> None:
        assert self.incident is not None
        self.journal.closed(self.incident, outcome, **evidence)
        self.incident = None


# ---- repeatability check ----


_KEEPS_A_STATE = (
    "Step %d was computed twice from the same weights, and its gradients differ by %.2g (relative), more than kernel "
    "noise explains: something keeps state that is not restored before a step is recomputed (a counter or a running "
    "mean in a plain attribute, a random generator of its own). The recomputed step was applied, but is not exactly "
    "what it would have been. Buffers of the model (`register_buffer`) are restored."
)


@dataclass
class RepeatabilityCheck:
    """Journals of each incident that was healed by computing a step again whether that repeats bitwise."""

    journal: Journal
    found: Repeatability | None = None
    # Incidents of which it is not journaled yet, and how far steps applied again were from what they had been.
    owed: list[tuple[Incident, float | None]] = field(default_factory=list)
    _measured: bool = False

    def owe(self, incident: Incident, apart: float | None = None) -> None:
        """Takes in that an incident was healed by computing a step again, or several, and how far these were apart."""
        if apart != 0:
            self.owed.append((incident, apart))

    def measure(self, window: Window) -> None:
        """Measures it with a healthy step, unless that was done, and journals it."""
        if not self._measured and processes.world_size() == 1:
            # On several processes, one on which it failed would leave the others waiting.
            self._measured = True
            self.found = StepExperiments(window).repeatability()
            if self.found is not None and self.found.beyond_noise:
                logger.warning(_KEEPS_A_STATE, window.step, self.found.gradient)
        self.tell(window.step)

    def tell(self, step: int) -> None:
        """Journals what is known, measured or not."""
        measured = {} if self.found is None else {"loss": self.found.loss, "gradient": self.found.gradient}
        for incident, apart in self.owed:
            repeats = "not measured" if self.found is None else str(self.found)
            self.journal.event("repeats", step, incident=incident.id, repeats=repeats, **measured)
            if apart and repeats != "within noise" and processes.world_size() == 1:
                self.journal.doubt = f"applied again, losses are {apart:.1g} off; a step computed twice: {repeats}"
                self.journal.dealt_with(incident)
        self.owed.clear()
