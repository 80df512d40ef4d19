"""Common to the healers of steps: rollback by the ladder, older checkpoints, the batch kept on disk."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import Trainer

from ...failures.classify import classify_exception
from ...failures.recipes import (
    FAILURE_RECIPES,
    THE_END,
    Action,
    Cause,
    FailureType,
    Given,
    Rung,
    Symptom,
    Target,
    TrainingFault,
)
from ...hf.objective import StepSignals, has_own_loss
from ...hf.step import Window, nbytes_of
from ...journal.incident import Incident
from ...ranks import votes
from ...rollback.rollback import RollbackRecord
from ...run.healer import HealingContext
from ...run.incidents import OpenIncident
from ...run.run import Run
from ...system import processes
from ...system.files import jsonable, rank_in
from ...system.processes import contained
from .learning_rate import LEAST_TRIAL_STEPS, MARGIN_ADAPTIVE, MARGIN_PLAIN, RateTrial
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
    def climb(self) -> RollbackEscalation:
        """What goes back to a trusted state."""
        return self.run.part(RollbackEscalation)

    @property
    def args(self) -> Any:
        return self.run.instrument.trainer.args

    @property
    def acts(self) -> bool:
        """Whether anything is done about a step that is not finite."""
        return self.config.on_nonfinite != "watch" and self.run.instrument.view.can_recompute

    def ranks_where(self, question: str, flag: bool) -> dict[str, list[int]]:
        """Evidence of the ranks on which something is so; none on one process. Every rank has to come."""
        if processes.world_size() == 1:
            return {}
        found = votes.ranks_where(question, flag, self.run.instrument.view.device)
        return {"ranks": found} if found else {}

    def ranks_with(self, nonfinite: Sequence[str]) -> dict[str, list[int]]:
        """Evidence of the ranks whose state is not finite, and not only gathered from others. As [`ranks_where`]."""
        own = self.run.instrument.view.own_part_of(nonfinite)
        source = self.ranks_where("its own part of the state is not finite here", bool(own))
        return source or self.ranks_where("the state is not finite here", bool(nonfinite))

    def clip(self, window: Window, signals: StepSignals, clipped_to: float = math.inf) -> None:
        """Clips the gradient of a step that is about to be applied by what is usual, if that is asked for."""
        clipping = self.numerics.clipping
        if clipping is None:
            return
        factor = clipping.take_in(signals, min(self.run.instrument.view.max_grad_norm or math.inf, clipped_to))
        if factor < 1 and clipping.acts and self.run.instrument.view.can_recompute:
            # A gradient that is clipped on some ranks and not on others makes other weights of each.
            with self.run.instrument.failsafe.together():
                clipping.clipped += 1
                clipping.total += 1
                window.scale_gradients(factor)

    def incident(self, step: int, symptom: str, evidence: Mapping[str, Any], severity: Any = None) -> OpenIncident:
        """Opens an incident of this family ([`Run.incident`]): what is seen in a step, by all ranks alike."""
        self.numerics.feed()
        self.numerics.opened += 1
        return self.run.incident(step, symptom, evidence, severity)

    def open(self, symptom: Symptom, failure: FailureType, cause: str) -> OpenIncident:
        """Opens an incident whose failure and cause are clear from what was seen."""
        opened = self.incident(symptom.step, symptom.name, symptom.evidence, symptom.severity)
        opened.diagnosed(failure, cause)
        return opened

    def end(self, context: HealingContext, verdict: str) -> None:
        """Ends the run: too much was left out, or there is nothing left to try."""
        context.verdict = verdict
        self.numerics.limits.reset()
        self.actions.apply(THE_END, context, self.args)


# ---- offending batch ----


# Batches kept for replay in one run directory, of each rank: enough to see a pattern, too few to fill a disk.
KEPT_BATCHES = 20
# Weights that are kept with each of them, in bytes: an adapter, or a small model. Others are in checkpoints.
KEPT_WEIGHTS = 1 << 26


def keep_batch(run: Run, window: Window, incident: Incident) -> None:
    """
    Keeps the micro-batches and random states of a step, so that it can be replayed, with what its trainer computes it
    with; weights only if they are small.
    """
    if not run.config.quarantine_text:
        # Token ids can be decoded to text of the training data.
        return
    incident.evidence["batch_file"] = None
    path = run.directory / "incidents" / f"{incident.id}.pt"
    # Those of this rank: what the others keep at the same moment must not decide about it.
    own = [each for each in path.parent.glob("*.pt") if rank_in(each) == rank_in(path)]
    if len(own) >= KEPT_BATCHES:
        return
    content = _contained(window.export, f"The batch of incident {incident.id} could not be kept.")
    if not content:
        return
    trainer = window.engine.trainer
    content["time"] = time.time()
    content["blueprint"] = _contained(partial(blueprint_of, trainer), "How its trainer computes is not kept with it.")
    content |= _contained(partial(kept_weights, trainer), "The weights are not kept with it.")

    with contained(logger, f"The batch of incident {incident.id} could not be written.", logging.WARNING):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: a process that is killed meanwhile leaves nothing that a replay takes for a batch.
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            torch.save(content, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        incident.evidence["batch_file"] = str(path)


def _contained(what: Callable[[], dict[str, Any]], failed: str) -> dict[str, Any]:
    """The batch is a help for later: that it cannot be had harms nothing, unless the device is lost."""
    try:
        return what()
    except Exception as error:
        if classify_exception(error) is FailureType.DEVICE:
            raise
        logger.warning("%s", failed, exc_info=True)
        return {}


def blueprint_of(trainer: Any) -> dict[str, Any]:
    """What another process needs to compute a step: the trainer's classes, arguments, model and precision."""
    accelerator, args = trainer.accelerator, trainer.args
    reference = getattr(trainer, "ref_model", None)
    written = {
        "classes": [_name_of(cls) for cls in type(trainer).__mro__ if issubclass(cls, Trainer)],
        # A method may be replaced on this one trainer.
        "own_loss": has_own_loss(trainer) or "compute_loss" in vars(trainer),
        "arguments_class": _name_of(type(args)),
        # Tokens are not among them: `to_dict` writes their names in their place.
        "arguments": args.to_dict(),
        "model": _model_blueprint(accelerator.unwrap_model(trainer.model, keep_torch_compile=False)),
        "reference": {**_model_blueprint(reference), "training": reference.training} if reference else None,
        "precision": str(accelerator.mixed_precision),
        "autocast": bool(accelerator.native_amp),
        "device": accelerator.device.type,
        "processes": processes.world_size(),
        "directory": os.getcwd(),
    }
    # Enumerations, and other subclasses of str and int, become what they are based on.
    plain: dict[str, Any] = json.loads(json.dumps(jsonable(written)))
    return plain


def _model_blueprint(model: Any) -> dict[str, Any]:
    adapters = getattr(model, "peft_config", {})
    base = model.get_base_model() if adapters else model
    config: Any = getattr(base, "config", None)
    return {
        "class": _name_of(type(base)),
        "config": config.to_dict() if hasattr(config, "to_dict") else None,
        "name_or_path": getattr(config, "_name_or_path", None) or None,
        "attention": getattr(config, "_attn_implementation", None),
        "dtype": _dtype_of(base.parameters(), trained=False),
        "trained_dtype": _dtype_of(model.parameters(), trained=True),
        "adapters": {name: each.to_dict() for name, each in adapters.items()},
        # An adapter says itself what is trained.
        "frozen": [] if adapters else [name for name, each in model.named_parameters() if not each.requires_grad],
    }


def _dtype_of(parameters: Iterable[torch.Tensor], trained: bool) -> str | None:
    for each in parameters:
        if each.is_floating_point() and (each.requires_grad or not trained):
            return str(each.dtype).removeprefix("torch.")
    return None


def _name_of(cls: type) -> list[str]:
    return [cls.__module__, cls.__qualname__]


def kept_weights(trainer: Any) -> dict[str, Any]:
    """
    Copies the weights of a trainer's model to host memory: all of them, or those that are trained, as far as they are
    small enough.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    held, trained, known = dict[str, torch.Tensor](), dict[str, torch.Tensor](), set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in known or not isinstance(tensor, torch.Tensor):
            # Of several names of one tensor the first.
            continue
        if hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id") or tensor.is_meta:
            # Of what FSDP2 or ZeRO-3 shards, this rank has a part.
            return {}
        known.add(id(tensor))
        held[name] = tensor
        if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter):
            trained[name] = tensor
    for chosen in (held, trained):
        if nbytes_of(chosen) <= KEPT_WEIGHTS:
            weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in chosen.items()}
            return {"weights": weights, "all_weights": chosen is held}
    return {}


# ---- climb: takes the rungs of the rollback ladders: back to a trusted state with what has to change, or the end ----


class RollbackEscalation(NumericsHealer):
    """Goes back to a trusted state in the middle of a step, for any failure that this may cure."""

    # The last step in which the run went back.
    went_back_in = -1

    def take_rung(self, context: HealingContext, failure: FailureType, verdict: str = "") -> None:
        """Takes the next rung of the ladder: back to a trusted state, with what has to change, or the end."""
        incident, window, numerics = context.incident, context.step_in_hand, self.numerics
        numerics.feed()
        step, diagnosis = self.run.instrument.view.step, FAILURE_RECIPES[failure].diagnosis.rstrip(".")
        if not self.rollback.can_go_back():
            context.verdict = (
                f"{verdict or diagnosis}; there is no trusted state to go back to, neither in memory nor on disk"
            )
            numerics.limits.reset()
            # Where the numbers overflow, the steps were left out, and the weights are as good as they were.
            overflows = failure is FailureType.NONFINITE_NUMERICAL
            self.actions.apply(THE_END if overflows else Action.STOP, context, self.args)
        # The last step that was applied; those since then were left out.
        context.blamed_step = max(step - numerics.limits.unhealed_in_a_row, 0)
        rung, spent = numerics.ladder.climb(failure, step, self._given(step))
        if Action.STOP in rung.actions:
            why = f"{diagnosis}; {spent}" if spent else self._why_it_ends(failure, rung, incident)
            context.verdict = "; ".join(each for each in (verdict, why) if each)
            numerics.limits.reset()
            numerics.ladder.reset()
        context.target = rung.target
        if rung.target is Target.INITIAL:
            context.rate_scale = self._try_rates(context)
        self.actions.apply(rung.actions, context, self.args)
        self.went_back_in = window.step
        self.owe_checkpoint(context.went_back)
        if context.went_back is None:
            found = ", ".join(self.run.instrument.view.nonfinite_tensors()[:5])
            frozen = f" (still not finite: {found}; frozen parameters are in no snapshot)" if found else ""
            context.verdict = f"{diagnosis}, and no state tried was any better{frozen}"
            self.actions.apply(Action.STOP, context, self.args)
        if not window.skipped:
            self.clip(window, window.signals())

    def _given(self, step: int) -> frozenset[Given]:
        rate_fixed, control = self.config.max_lr_reductions == 0, self.numerics.learning_rate
        given = {Given.EARLY if self.rollback.states.early(step) else Given.LATE}
        given |= {Given.RATE_FIXED} if rate_fixed else set()
        given |= {Given.RATE_LEFT} if self.run.instrument.view.can_scale_rate and not control.exhausted else set()
        return frozenset(given)

    def _why_it_ends(self, failure: FailureType, rung: Rung, incident: Incident) -> str:
        """What is told where the ladder is climbed to its end."""
        if rung.failure is None:
            rollbacks = len(FAILURE_RECIPES[failure].rungs) - 1
            return f"the weights turned NaN or Inf again after each of {rollbacks} rollbacks"
        self.run.journal.diagnosed(incident, rung.failure, incident.cause, {})
        reductions = self.numerics.learning_rate.reductions
        times = "one reduction" if reductions == 1 else f"{reductions} reductions"
        why = f"training still fails at a learning rate of {self.run.instrument.view.learning_rate:.3g}, after {times}"
        if incident.cause == Cause.COMPUTATION:
            why += (
                "; trusted weights give the same loss, so neither the weights nor the rate are at fault, but the "
                "computation itself. If the loss changes on purpose, set on_divergence='warn'"
            )
        return why

    def _try_rates(self, context: HealingContext) -> float | None:
        """A run that fails in its first steps: the factor with which it learns, if there is one within reach."""
        view, rollback = self.run.instrument.view, self.rollback
        start, kept = rollback.ring.initial, rollback.batches.first_steps
        steps = kept[: round(votes.smallest("first steps that are kept", len(kept), view.device))]
        if start is None or len(steps) < LEAST_TRIAL_STEPS:
            return None
        control, limit = self.numerics.learning_rate, self.numerics.panel.divergence.early.limit
        trial = RateTrial(context.step_in_hand, rollback, start, steps, limit)
        try:
            margin = MARGIN_PLAIN if view.beta2 is None else MARGIN_ADAPTIVE
            scale = trial.find(control.scale(view.step), control.lowest(view.step), margin)
        except TrainingFault as fault:
            logger.warning("Learning rates could not be tried out.", exc_info=fault.error)
            return None
        finally:
            # No vote: an experiment may have been left by one that has raised.
            rollback.put(start)
        found = {f"{scale:.4g}": loss for scale, loss in trial.losses.items()}
        context.incident.evidence["loss_by_rate_scale"] = found
        return scale

    def owe_checkpoint(self, went: RollbackRecord | None) -> None:
        """Checkpoints that are suspect now have to be replaced as soon as the loss is back."""
        suspects = went is not None and bool(went.suspects)
        if votes.from_first_rank("checkpoints are suspect", lambda: suspects, self.run.instrument.view.device):
            self.numerics.watch.owed = True
