"""Common to the healers of steps: rollback by the ladder, older checkpoints, the batch kept on disk."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ...checkpoints.choice import mark_suspect, older_checkpoints
from ...failures.classify import classify_exception
from ...failures.recipes import (
    FAILURE_RECIPES,
    Action,
    Cause,
    DamagedCheckpointError,
    FailureType,
    Symptom,
    TrainingFault,
)
from ...hf.adapter import Instrument
from ...hf.experiments import EarlierSteps
from ...hf.objective import StepSignals
from ...hf.step import Window
from ...hf.view import blueprint_of, kept_weights
from ...journal.incident import Incident
from ...ranks import votes
from ...rollback.rollback import Rollback, Target, WentBack
from ...run.healer import HealingContext
from ...run.incidents import OpenIncident
from ...run.run import Run
from ...system import processes
from ...system.files import rank_in
from .detectors.panel import DetectorPanel
from .learning_rate import try_rates
from .state import NumericsState


logger = logging.getLogger(__name__)


# ---- healer: common to the healers of steps: the run they belong to, and what several of them do ----


class NumericsHealer:
    """Heals one kind of failure of a step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.config = run.config
        self.actions = run.remedies
        self.numerics = run.part(NumericsState)
        self.rollback = run.rollback

    @property
    def instrument(self) -> Instrument:
        """Of the running `train()` call."""
        return self.run.instrument

    @property
    def panel(self) -> DetectorPanel:
        """Detectors of the run."""
        if self.numerics.panel is None:
            raise RuntimeError("the callback is not attached to a running trainer")
        return self.numerics.panel

    @property
    def args(self) -> Any:
        """Arguments of the trainer."""
        return self.instrument.trainer.args

    @property
    def acts(self) -> bool:
        """Whether anything is done about a step that is not finite."""
        return self.config.on_nonfinite != "warn" and self.instrument.view.can_reexecute

    def on_any_rank(self, question: str, flag: bool) -> bool:
        """Whether something is so on any rank. Every rank has to come."""
        return votes.any_rank(question, flag, self.instrument.view.device)

    def ranks_where(self, question: str, flag: bool) -> dict[str, list[int]]:
        """Evidence of the ranks on which something is so; none on one process. Every rank has to come."""
        found = votes.ranks_where(question, flag, self.instrument.view.device)
        return {"ranks": found} if found and processes.world_size() > 1 else {}

    def ranks_with(self, nonfinite: Sequence[str]) -> dict[str, list[int]]:
        """Evidence of the ranks whose state is not finite, and not only gathered from others. As [`ranks_where`]."""
        own = self.instrument.view.own_part_of(nonfinite)
        source = self.ranks_where("its own part of the state is not finite here", bool(own))
        return source or self.ranks_where("the state is not finite here", bool(nonfinite))

    def clip(self, window: Window, signals: StepSignals, clipped_to: float = math.inf) -> None:
        """Clips the gradient of a step that is about to be applied by what is usual, if that is asked for."""
        if self.numerics.clipping is not None:
            ceiling = min(self.instrument.view.max_grad_norm or math.inf, clipped_to)
            # A gradient that is clipped on some ranks and not on others makes other weights of each.
            with self.instrument.failsafe.together():
                self.numerics.clipping.apply(window, signals, ceiling, may_clip=self.instrument.view.can_reexecute)

    def incident(self, step: int, symptom: str, evidence: Mapping[str, Any], severity: Any = None) -> OpenIncident:
        """Opens an incident of this family ([`Run.incident`]): what is seen in a step, by all ranks alike."""
        self.numerics.opened += 1
        return self.run.incident(step, symptom, evidence, severity)

    def open(self, symptom: Symptom, failure: FailureType, cause: str) -> OpenIncident:
        """Opens an incident whose failure and cause are clear from what was seen."""
        opened = self.incident(symptom.step, symptom.name, symptom.evidence, symptom.severity)
        opened.diagnosed(failure, cause)
        return opened

    def keep_batch(self, window: Window, incident: Incident) -> None:
        """Keeps the batch of a step for replay."""
        # A batch is text in another alphabet.
        if self.config.quarantine_text:
            incident.evidence["batch_file"] = save_offending_batch(window, self.run.directory, incident)


# ---- offending batch ----


# Batches kept for replay in one run directory, of each rank: enough to see a pattern, too few to fill a disk.
KEPT_BATCHES = 20
# Of faults that passed: they leave room for those that did not.
KEPT_OF_TRANSIENT = 5
# Weights that are kept with each of them, in bytes: an adapter, or a small model. Others are in checkpoints.
KEPT_WEIGHTS = 1 << 26


def save_offending_batch(window: Window, directory: Path, incident: Incident) -> str | None:
    """
    Keeps the micro-batches and random states of a step, so that it can be replayed, with what its trainer computes it
    with; weights only if they are small.
    """
    path = directory / "incidents" / f"{incident.id}.pt"
    passed = incident.failure is FailureType.NONFINITE_TRANSIENT
    # Those of this rank: what the others keep at the same moment must not decide about it.
    own = [each for each in path.parent.glob("*.pt") if rank_in(each) == rank_in(path)]
    if len(own) >= (KEPT_OF_TRANSIENT if passed else KEPT_BATCHES):
        return None
    content = _contained(window.export, f"The batch of incident {incident.id} could not be kept.")
    if not content:
        return None
    trainer = window.engine.trainer
    content["time"] = time.time()
    content["blueprint"] = _contained(lambda: blueprint_of(trainer), "How its trainer computes is not kept with it.")
    content |= _contained(lambda: kept_weights(trainer, KEPT_WEIGHTS), "The weights are not kept with it.")

    def write() -> dict[str, Any]:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: a process that is killed meanwhile leaves nothing that a replay takes for a batch.
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            torch.save(content, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return {"path": str(path)}

    return _contained(write, f"The batch of incident {incident.id} could not be written.").get("path")


def _contained(what: Callable[[], dict[str, Any]], failed: str) -> dict[str, Any]:
    """The batch is a help for later: that it cannot be had harms nothing, unless the device is lost."""
    try:
        return what()
    except Exception as error:
        if classify_exception(error) is FailureType.DEVICE:
            raise
        logger.warning("%s", failed, exc_info=True)
        return {}


# ---- climb: takes the rungs of the rollback ladder: back to a trusted state, with what has to change, or the end ----


# What a damaged checkpoint looks like at first.
_OF_A_DAMAGED_CHECKPOINT = frozenset(
    {FailureType.NONFINITE_NUMERICAL, FailureType.CORRUPTED_STATE, FailureType.DIVERGENCE}
)
# With fewer steps to try learning rates on, the ladder is climbed rung by rung.
_LEAST_TRIAL_STEPS = 3


class RollbackClimb(NumericsHealer):
    """Goes back to a trusted state in the middle of a step, for any failure that this may cure."""

    def __init__(self, run: Run, damaged: DamagedCheckpointHealer) -> None:
        super().__init__(run)
        self._damaged = damaged
        # The last step in which the run went back.
        self.went_back_in = -1

    def take_rung(self, context: HealingContext, failure: FailureType, verdict: str = "") -> None:
        """Takes the next rung of the ladder: back to a trusted state, with what has to change, or the end."""
        run, instrument, incident, window = self.run, self.instrument, context.incident, context.window
        if window is None:
            raise ValueError("going back in the middle of a run needs `context.window`")
        if failure in _OF_A_DAMAGED_CHECKPOINT:
            self._damaged.suspect(context)
        if not self.rollback.can_go_back():
            why = verdict or FAILURE_RECIPES[failure].diagnosis.rstrip(".")
            context.verdict = f"{why}; there is no trusted state to go back to, neither in memory nor on disk"
            self.numerics.policy.reset()
            saving = failure is FailureType.NONFINITE_NUMERICAL
            self.actions.apply(
                (Action.EMERGENCY_CHECKPOINT, Action.STOP) if saving else (Action.STOP,), context, self.args
            )
            return
        step = instrument.view.step
        control = self.numerics.learning_rate
        decision = self.numerics.ladder.next(
            failure,
            step,
            early=self.rollback.states.early(step),
            may_reduce=instrument.view.can_scale_rate and not control.exhausted,
            rate=f"{instrument.view.learning_rate:.3g}, after {_times(control.reductions)}",
        )
        # The last one that was applied; those since then were left out.
        context.blamed_step = max(step - self.numerics.policy.unhealed_in_a_row, 0)
        incident.evidence["rung"] = decision.rung
        context.verdict = "; ".join(each for each in (verdict, decision.verdict) if each)
        context.target = decision.target or context.target
        if decision.failure is not None:
            run.journal.diagnosed(incident, decision.failure, incident.cause, {})
        if decision.stops:
            self.numerics.policy.reset()
            self.numerics.ladder.reset()
            if incident.cause == Cause.COMPUTATION:
                context.verdict += (
                    "; trusted weights give the same loss, so it is neither they nor the rate, but what is computed. "
                    "If its definition changes on purpose, set on_divergence='warn'"
                )
        if decision.target is Target.INITIAL and Action.REDUCE_LEARNING_RATE in decision.actions:
            context.rate_scale = self._try_rates(context)
        self.actions.apply(decision.actions, context, self.args)
        self.went_back_in = window.step
        self.owe_checkpoint(context.went_back)
        if context.went_back is None and not decision.stops:
            found = ", ".join(instrument.view.nonfinite_tensors()[:5])
            frozen = f" (not finite still: {found}; what is frozen is in no snapshot)" if found else ""
            context.verdict = (
                f"{FAILURE_RECIPES[failure].diagnosis.rstrip('.')}, and no state tried was any better{frozen}"
            )
            self.actions.apply((Action.STOP,), context, self.args)
        if not window.skipped:
            self.clip(window, window.signals())

    def _try_rates(self, context: HealingContext) -> float | None:
        """A run that fails in its first steps: the factor with which it learns, if there is one within reach."""
        instrument, panel = self.instrument, self.panel
        start, kept = self.rollback.ring.initial, self.rollback.batches.first_steps
        if start is None or context.window is None:
            return None
        on_all_ranks = votes.smallest("first steps that are kept", len(kept), instrument.view.device)
        steps = kept[: round(on_all_ranks)]
        if len(steps) < _LEAST_TRIAL_STEPS:
            return None
        step = instrument.view.step
        control = self.numerics.learning_rate
        try:
            trial = try_rates(
                context.window,
                self.rollback,
                start,
                steps,
                now=control.scale(step),
                lowest=control.lowest(step),
                limit=panel.divergence.early.limit,
                adaptive=instrument.view.beta2 is not None,
            )
        except TrainingFault as fault:
            logger.warning("Learning rates could not be tried out.", exc_info=fault.error)
            return None
        finally:
            # No vote: an experiment may have been left by one that has raised.
            self.rollback.put(start)
        found = {f"{scale:.4g}": loss for scale, loss in trial.losses.items()}
        context.incident.evidence["loss_by_rate_scale"] = found
        return trial.scale

    def owe_checkpoint(self, went: WentBack | None) -> None:
        """Checkpoints that are suspect now have to be replaced as soon as the loss is back."""
        suspects = went is not None and bool(went.suspects)
        if votes.from_first_rank("checkpoints are suspect", lambda: suspects, self.instrument.view.device):
            self.numerics.watch.owed = True


def _times(reductions: int) -> str:
    return "one reduction" if reductions == 1 else f"{reductions} reductions"


# ---- damaged checkpoint: finds out whether it is the checkpoint a run was resumed from that makes it fail ----


# How far, in logarithms, a loss has to be above that of an older checkpoint at least, and where nothing is known of
# what is usual.
_LEAST_RISE, _CLEARLY_WORSE = 0.1, 1.0
# Older checkpoints that are tried: what is wrong with three of them is wrong with something else.
_OLDER_CHECKPOINTS = 3


class DamagedCheckpointHealer(NumericsHealer):
    """Tries older checkpoints where a run has not been well since it was resumed."""

    def end_trial(self) -> None:
        """Takes the checkpoint for a good one once enough healthy steps have followed the resume."""
        if self.numerics.on_trial and self._stands_the_test():
            self.numerics.on_trial = False

    def _stands_the_test(self) -> bool:
        """Whether enough healthy steps have followed a resume; without a gradient a step shows nothing."""
        return self.rollback.states.streak >= self.config.snapshot_verify_steps and not self.panel.vanishing.below

    def suspect(self, context: HealingContext) -> None:
        """
        A run that has not been well since it was resumed: before anything else is blamed, older checkpoints are tried
        on the same batch. Where it is the checkpoint, the run goes on from the older one, or ends.
        """
        run, instrument, window = self.run, self.instrument, context.window
        resumed, incident = self.numerics.resumed_from, context.incident
        if not self.numerics.on_trial or resumed is None or window is None or not instrument.view.can_reexecute:
            return
        moved = instrument.optimizer_step.weights_moved
        trial = try_older_checkpoints(
            window,
            self.rollback,
            resumed,
            self._older_than(resumed),
            scale=self.numerics.learning_rate.scale(window.step),
            rise=self._half_of_the_rise(window.signals().loss),
            unmoved=self.numerics.missing.trained(window.step) <= self.numerics.missing.trained_at_entry,
        )
        # The updates of the experiment are none of the run's.
        instrument.optimizer_step.weights_moved = moved
        if trial.tried:
            incident.evidence["with_checkpoints"] = trial.tried
            self._compute_anew(window)
        if trial.sound is None:
            return
        self.numerics.on_trial = False
        cause = "the checkpoint it was resumed from"
        run.journal.diagnosed(incident, FailureType.DAMAGED_CHECKPOINT, cause, {"damaged": trial.damaged})
        if processes.is_first_rank() and self.args.should_save:
            for damaged in trial.damaged:
                mark_suspect(damaged, str(self.args.output_dir), incident.id)
        if run.may_enter_again and run.budget.spend(instrument.view.step):
            raise DamagedCheckpointError(incident, trial.sound)
        context.resume_from = trial.sound
        context.verdict = (
            f"the run has failed since it was resumed from {resumed}; the same batch is fine with {trial.sound}"
        )
        self.actions.apply((Action.STOP,), context, self.args)

    def _half_of_the_rise(self, loss: float) -> float:
        """Half of how far a loss is above what was usual, in logarithms: the other half may be the batch."""
        level, scale = self.panel.loss_level, self.panel.loss_trend.scale
        if level is None or not math.isfinite(loss) or not min(level, loss) > 0:
            return _CLEARLY_WORSE
        return max(0.5 * math.log(loss / level), 2 * scale, _LEAST_RISE)

    def _older_than(self, checkpoint: str) -> Iterator[str]:
        """Older checkpoints, as the first rank sees them."""
        output_dir = str(self.args.output_dir)
        found, device = older_checkpoints(checkpoint, output_dir), self.instrument.view.device
        for _ in range(_OLDER_CHECKPOINTS):
            older = votes.looked_up_by_first_rank("an older checkpoint", lambda: next(found, None), device)
            if older is None:
                return
            yield older

    def _compute_anew(self, window: Window) -> None:
        """After an experiment: the step is what it was before it."""
        if window.skipped:
            window.skip(self.numerics.detector.last_loss)
            return
        window.reexecute()
        window.accept()


# ---- resume trial: is it the checkpoint a run was resumed from that makes it fail? ----


# A batch that is trained on in the experiment must not be generated anew, and is there anyway.
_ANY_SIZE = 2**63
# A gradient that is so much larger with other weights was not small because everything is learned ...
_DEAD_RATIO = 1000.0
# ... nor is one that is no larger than this.
_LEAST_GRADIENT = 1e-4


@dataclass(slots=True)
class ResumeTrial:
    """What was found out."""

    sound: str | None = None
    damaged: list[str] = field(default_factory=list)
    tried: dict[str, Any] = field(default_factory=dict)


def try_older_checkpoints(
    window: Window,
    rollback: Rollback,
    resumed: str,
    older: Iterable[str],
    scale: float,
    rise: float,
    unmoved: bool,
) -> ResumeTrial:
    """
    Computes the step with the checkpoint the run was resumed from, takes one optimizer step on it, and computes it
    once more; then the same with older ones.
    """
    trial = ResumeTrial()
    candidates = iter(older)
    first = next(candidates, None)
    if first is None or not (rollback.states.set_aside(window.step) or unmoved):
        return trial
    try:
        try:
            with window.experiment():
                suspects = {resumed: _trained_with(window, rollback, resumed, scale, trial)}
                # It was there and finite when it was resumed from; since then rotation may have removed it.
                for checkpoint in chain([first], candidates) if suspects[resumed] is not None else ():
                    found = _trained_with(window, rollback, checkpoint, scale, trial)
                    if all(_is_clearly_worse(suspect, found, rise, window) for suspect in suspects.values()):
                        trial.sound, trial.damaged = checkpoint, list(suspects)
                        break
                    suspects[checkpoint] = found
        finally:
            rollback.end_trial(resumed)
            window.begin_from_here()
    except TrainingFault as fault:
        logger.info("The step could not be computed with older checkpoints.", exc_info=fault.error)
    return trial


def _trained_with(
    window: Window, rollback: Rollback, checkpoint: str, scale: float, trial: ResumeTrial
) -> list[StepSignals] | None:
    """The step before and after an update on it; `None` for a checkpoint that cannot be put in place."""
    if not rollback.try_checkpoint(checkpoint):
        trial.tried[checkpoint] = "could not be loaded"
        return None
    window.begin_from_here()
    window.reexecute()
    found = [window.signals()]
    control = window.control(found[0].loss, _ANY_SIZE)
    if control is not None and found[0].finite:
        EarlierSteps(window).train_on(control, scale)
        window.reexecute()
        found.append(window.signals())
    trial.tried[checkpoint] = [{"loss": each.loss, "grad_norm": each.grad_norm} for each in found]
    return found


def _is_clearly_worse(
    suspect: list[StepSignals] | None, other: list[StepSignals] | None, rise: float, window: Window
) -> bool:
    if other is None or not all(each.finite for each in other):
        return False
    if suspect is None or not all(each.finite for each in suspect):
        return True
    if window.objective.online:
        # A loss around 0 with a sign says nothing about the weights.
        return False
    before, now = max(each.loss for each in other), max(each.loss for each in suspect)
    if not min(before, now) > 0:
        return False
    apart = math.log(now / before)
    gradient, theirs = suspect[0].grad_norm or 0.0, other[0].grad_norm or 0.0
    dead = theirs >= max(_DEAD_RATIO * gradient, _LEAST_GRADIENT) and apart > 0
    return dead or apart >= rise
