"""`HealingActions`: carries out what the policy decided, on model, optimizer, data and the run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainingArguments

from . import consensus
from .checkpoints import newest_checkpoint_of, publish, save_emergency_checkpoint, step_of
from .config import HealingConfig
from .diagnosis import Diagnosis
from .failures import (
    FAILURE_RECIPES,
    IN_PLACE,
    Action,
    FailureType,
    UnrecoverableTrainingError,
    classify_exception,
    describe_exception,
)
from .inspection import check_data_quality, check_model_init
from .instrument import BatchPlan, Instrument, Window, change_batch, free_memory
from .journal import Incident, where_to_go_on
from .microbatch import CallShape
from .retry import RetryPolicy
from .rollback import Target, WentBack
from .session import Session, quarantined_rows


if TYPE_CHECKING:
    from .callback import SelfHealingCallback

logger = logging.getLogger("self_healing")

# Batches kept for replay in one run directory: enough to see a pattern, too few to fill a disk.
KEPT_BATCHES = 20


@dataclass(slots=True)
class HealingContext:
    """
    What an action needs to know.

    Args:
        incident ([`Incident`]):
            The incident it belongs to.
        instrument ([`Instrument`], *optional*):
            Of the trainer, for what is done while it is attached.
        window ([`Window`], *optional*):
            The step, for what is healed inside it.
        diagnosis ([`Diagnosis`], *optional*):
            Its diagnosis.
        error (`BaseException`, *optional*):
            The exception, for what left `train()`.
        verdict (`str`, *optional*):
            Why the run ends, for `STOP`.
        clip_to (`float`, *optional*):
            Usual norm of the gradient, for `CLIP_GRADIENT`.
        target ([`Target`], *optional*, defaults to `Target.NEWEST`):
            Which state to go back to, for `ROLL_BACK`.
        rate_scale (`float`, *optional*):
            Factor on the schedule's learning rate that an experiment has found, for `REDUCE_LEARNING_RATE`.
        blamed_step (`int`, *optional*):
            The step whose learning rate did the damage, if not the one that is judged, for `REDUCE_LEARNING_RATE`.
        shape ([`CallShape`], *optional*):
            Size of the model call that did not fit, for `SPLIT_BATCH`.
        batch ([`BatchPlan`], *optional*):
            Sizes to go on with, for `REDUCE_BATCH_SIZE`.
        resume_from (`str`, *optional*):
            For `STOP`: the checkpoint to go on from, if it is not the newest of the run.
        went_back ([`WentBack`], *optional*):
            Set by `ROLL_BACK`: what it did.
        attempted (`list[str]`):
            Set by [`HealingActions.apply`]: what has been tried so far.
    """

    incident: Incident
    instrument: Instrument | None = None
    window: Window | None = None
    diagnosis: Diagnosis | None = None
    error: BaseException | None = None
    verdict: str = ""
    clip_to: float | None = None
    target: Target = Target.NEWEST
    rate_scale: float | None = None
    blamed_step: int | None = None
    shape: CallShape | None = None
    batch: BatchPlan | None = None
    resume_from: str | None = None
    went_back: WentBack | None = None
    attempted: list[str] = field(default_factory=list)


class HealingActions:
    """
    Carries out actions.

    Args:
        config ([`HealingConfig`]):
            Waits and what to keep.
        callback ([`SelfHealingCallback`]):
            Whose session is written to.
    """

    def __init__(self, config: HealingConfig, callback: SelfHealingCallback) -> None:
        self.config = config
        self._callback = callback
        self._carry_out: dict[Action, Callable[[HealingContext, TrainingArguments], dict[str, Any]]] = {
            Action.USE_REEXECUTED_STEP: self._use_reexecuted_step,
            Action.QUARANTINE_ROWS: self._quarantine_rows,
            Action.DROP_ROWS: self._drop_rows,
            Action.SKIP_STEP: self._skip_step,
            Action.CLIP_GRADIENT: self._clip_gradient,
            Action.HOLD_CHECKPOINTS: self._hold_checkpoints,
            Action.ROLL_BACK: self._roll_back,
            Action.REPLAY_STEPS: self._replay_steps,
            Action.REDUCE_LEARNING_RATE: self._reduce_learning_rate,
            Action.INCREASE_LEARNING_RATE: self._increase_learning_rate,
            Action.RESET_MOMENTS: self._reset_moments,
            Action.CHECK_DATA_QUALITY: self._check_data_quality,
            Action.CHECK_MODEL_INIT: self._check_model_init,
            Action.FREE_MEMORY: self._free_memory,
            Action.SPLIT_BATCH: self._split_batch,
            Action.CHECKPOINT_ACTIVATIONS: self._checkpoint_activations,
            Action.REDUCE_BATCH_SIZE: self._reduce_batch_size,
            Action.EMERGENCY_CHECKPOINT: self._emergency_checkpoint,
            Action.WAIT_AND_RESUME: self._wait,
            Action.STOP: self._stop,
        }

    @property
    def session(self) -> Session:
        session = self._callback.session
        if session is None:
            raise RuntimeError("the callback is not attached to a running trainer")
        return session

    def apply(
        self,
        actions: Iterable[Action | str] | Action | str,
        context: HealingContext,
        training_args: TrainingArguments,
    ) -> dict[str, Any]:
        """
        Carries out actions in order and journals each.

        Args:
            actions (`Iterable[Action | str]` or `str`):
                What to do.
            context ([`HealingContext`]):
                Where to do it; without an instrument, in the run the callback is attached to.
            training_args (`TrainingArguments`):
                The arguments of the run.

        Returns:
            `dict`: what the actions gave, merged.

        Raises:
            UnrecoverableTrainingError: For `STOP`.
            ValueError: For an action that is not known.
        """
        results: dict[str, Any] = {}
        if context.instrument is None:
            context.instrument = self.session.instrument
        actions = [actions] if isinstance(actions, str) else actions
        for action in [_known(action) for action in actions]:
            context.attempted.append(action.value)
            result = self._carry_out[action](context, training_args)
            # Where a remedy turned into the next rung of its ladder, that is what was done.
            done = Action.SKIP_STEP if result.get("skipped") else action
            happened = result.pop("happened", True)
            self.session.journal.acted(context.incident, done.value, happened=happened, **result)
            results.update(result)
        return results

    # ---- inside the step ----

    def _use_reexecuted_step(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        _window(context).accept()
        self.session.numerics.repeatability.owe(context.incident)
        return {}

    def _quarantine_rows(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        window, diagnosis, trainer = _window(context), context.diagnosis, _instrument(context).trainer
        if diagnosis is None:
            raise ValueError("quarantine_rows needs the diagnosis that names the rows")
        keep_text = self.config.quarantine_text
        rows = quarantined_rows(window, diagnosis.poison, trainer.processing_class, keep_text)
        self.session.quarantine.add(rows, window.step, window.epoch, context.incident.id)
        context.incident.evidence["rows"] = [
            {"dataset_index": row.dataset_index, "content_hash": row.content_hash, "prompt": row.prompt}
            for row in rows
        ]
        return {"rows": context.incident.evidence["rows"], "file": str(self.session.quarantine.path)}

    def _drop_rows(self, context: HealingContext, args: TrainingArguments) -> dict[str, Any]:
        window, diagnosis = _window(context), context.diagnosis
        if diagnosis is None:
            raise ValueError("drop_rows needs the diagnosis that names the rows")
        keep: dict[int, list[int]] = {}
        for index, bad in diagnosis.poison.items():
            layout = window.layout(index)
            if layout is not None:
                keep[index] = [row for row in range(layout.rows) if row not in set(bad)]
        remaining = diagnosis.rows - diagnosis.poison_rows
        if not _instrument(context).view.may_empty_micro_batches(keep) or remaining == 0:
            return self._skip_step(context, args) | {"dropped": diagnosis.poison_rows, "kept": remaining}
        if not window.compute_again(keep).finite:
            # The rows were not the whole story: one rung up.
            return self._skip_step(context, args) | {"dropped": diagnosis.poison_rows, "kept": remaining}
        window.accept()
        return {"dropped": diagnosis.poison_rows, "kept": remaining}

    def _skip_step(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        gone_back, before = context.went_back is not None, _window(context).skipped
        self.session.numerics.missing.left_out(_window(context).step)
        _window(context).skip(self.session.numerics.detector.last_loss, keep_buffers=gone_back)
        if gone_back:
            # It is one of the steps that going back has lost.
            self.session.rollback.settled(_window(context).step)
        elif not before:
            context.incident.steps_lost += 1
        return {"skipped": True}

    def _clip_gradient(self, context: HealingContext, args: TrainingArguments) -> dict[str, Any]:
        window, usual = _window(context), context.clip_to
        if usual is None:
            raise ValueError("clip_gradient needs the norm to clip to")
        window.accept()
        norm = min(window.signals().grad_norm or 0.0, args.max_grad_norm or math.inf)
        if usual < norm:
            window.scale_gradients(usual / norm, always=False)
        return {"norm": norm, "clipped_to": min(usual, norm)}

    def _hold_checkpoints(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        # The open watch is what the instrument asks before it lets a checkpoint be written.
        self.session.numerics.watch.hold(context.incident)
        return {}

    # ---- another state, another rate ----

    def _roll_back(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        instrument, incident = _instrument(context), context.incident
        step = instrument.view.step
        went = context.went_back = self.session.rollback.go_back(context.target, step, incident.id)
        if went is None:
            return {"why": "there is no trusted state, neither in memory nor on disk", "happened": False}
        self.session.numerics.went_back(incident)
        # Asked for between two steps, no step is left out for it.
        self.session.numerics.missing.went_back(step + (context.window is not None), went.trained)
        # One that was left out before is among them.
        incident.steps_lost = max(incident.steps_lost, went.steps_lost)
        incident.figures.append(f"back to the state of step {went.step}")
        return went.to_dict()

    def _replay_steps(self, context: HealingContext, args: TrainingArguments) -> dict[str, Any]:
        window, session = _window(context), self.session
        if context.went_back is None:
            return {"why": "the run has not gone back to any state", "happened": False}
        of_the_state = context.incident.failure in (FailureType.CORRUPTED_STATE, FailureType.OUT_OF_MEMORY)
        replayed = session.rollback.replay(window, session.numerics.is_well, loss_in_question=not of_the_state)
        if replayed.steps is None:
            session.journal.acted(context.incident, Action.REPLAY_STEPS.value, happened=False, why=replayed.why)
            context.incident.figures.append(f"the steps since then were not kept: {replayed.why}")
            return self._skip_step(context, args)
        window.accept()
        session.numerics.missing.applied_again(replayed.steps + 1)
        session.numerics.ladder.healed(context.incident.failure)
        if context.incident.failure is FailureType.CORRUPTED_STATE:
            context.went_back = session.rollback.reinstate(context.went_back)
        context.incident.steps_lost = 0
        context.incident.figures.append(f"{replayed.steps} steps since then applied again")
        session.outcomes.nothing_lost_since(context.went_back.step)
        return replayed.to_dict()

    def _reduce_learning_rate(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        instrument = _instrument(context)
        before = instrument.view.learning_rate
        self.session.numerics.learning_rate.reduce(instrument.view.step, context.rate_scale, context.blamed_step)
        self.session.numerics.note_rate(instrument.view.learning_rate)
        context.incident.figures.append(f"learning rate from {before:.3g} to {instrument.view.learning_rate:.3g}")
        control = self.session.numerics.learning_rate
        return self._rate(instrument) | {"from": before, "hold_steps": control.hold, "ramp_steps": control.ramp}

    def _increase_learning_rate(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        instrument = _instrument(context)
        step = instrument.view.step
        before = self.session.numerics.learning_rate.scale(step)
        if self.config.lr_increase_factor <= 1:
            return {"why": "lr_increase_factor=1: it was not asked for", "happened": False}
        after = self.session.numerics.learning_rate.increase(step)
        return self._rate(instrument) | {"happened": after != before}

    def _rate(self, instrument: Instrument) -> dict[str, Any]:
        control = self.session.numerics.learning_rate
        scale = control.scale(instrument.view.step)
        return {"scale": scale, "learning_rate": instrument.view.learning_rate, "reductions": control.reductions}

    def _reset_moments(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        instrument = _instrument(context)
        if not instrument.reset_moments():
            why = "this optimizer is not known to make its state anew, and was left as it is"
            return {"why": why, "happened": False}
        steps = self.session.numerics.learning_rate.warm_up_again(instrument.view.step)
        return {"warmup_steps": steps}

    # ---- looking for a cause ----

    def _check_data_quality(self, context: HealingContext, args: TrainingArguments) -> dict[str, Any]:
        trainer = _instrument(context).trainer
        embeddings = trainer.model.get_input_embeddings()
        found = check_data_quality(
            trainer.train_dataset,
            vocabulary=getattr(embeddings, "num_embeddings", None),
            max_length=getattr(args, "max_length", None),
        )
        return self._note_findings(context, "data", found.to_dict())

    def _check_model_init(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        return self._note_findings(context, "model", check_model_init(_instrument(context).trainer.model).to_dict())

    def _note_findings(self, context: HealingContext, what: str, found: dict[str, Any]) -> dict[str, Any]:
        context.incident.evidence[f"check_{what}"] = found
        return {f"check_{what}": found}

    # ---- memory ----

    def _free_memory(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        free_memory(_instrument(context).trainer.accelerator.device)
        return {}

    def _split_batch(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        shape, sizes = context.shape, self.session.sizes
        if shape is None:
            raise ValueError("split_batch needs the size of the call that did not fit")
        sizes.failed(shape, with_gradients=context.window is not None)
        at_a_time = sizes.known_rows(shape)
        return {"call": shape.kind, "did_not_fit": [shape.rows, shape.length], "at_a_time": at_a_time}

    def _checkpoint_activations(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        done = _instrument(context).checkpoint_activations()
        if not done:
            return {"checkpointing": False, "happened": False, "why": "it is on already, or the model cannot do it"}
        self.session.checkpointing_activations = True
        self.session.sizes.more_room()
        context.incident.figures.append("activation checkpointing is on from here on")
        return {"checkpointing": True}

    def _reduce_batch_size(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        plan = context.batch
        if plan is None:
            raise ValueError("reduce_batch_size needs the sizes to go on with")
        change_batch(_instrument(context).trainer, plan)
        context.incident.figures.append(
            f"per_device_train_batch_size from {plan.rows_before} to {plan.rows}, gradient_accumulation_steps from "
            f"{plan.accumulation_before} to {plan.accumulation}"
        )
        if _instrument(context).objective.name not in ("sft", "dpo", "reward", "generic"):
            context.incident.figures.append("a loss that looks at the whole micro-batch sees fewer rows from here on")
        return plan.to_dict()

    # ---- outside of train() ----

    def _not_worth_saving(self, context: HealingContext) -> str:
        """Why a checkpoint of the state gone back to would mislead: there is none, or one that got further."""
        if Action.ROLL_BACK.value not in context.attempted:
            return ""
        if context.went_back is None:
            return "there is no trusted state to save"
        trainer = _instrument(context).trainer
        trained = self.session.numerics.missing.trained(int(trainer.state.global_step) + 1)
        if trained <= 0 or context.went_back.target is Target.INITIAL:
            return "it would hold the state the run began with"
        newest = newest_checkpoint_of(self.session.run_id, str(trainer.args.output_dir))
        if newest is not None and step_of(newest, default=0) >= trained:
            return f"{newest} holds more training"
        return ""

    def _emergency_checkpoint(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        if not self.config.emergency_checkpoint:
            return {"checkpoint": None, "why": "emergency_checkpoint=False", "happened": False}
        why = self._not_worth_saving(context)
        if why:
            return {"checkpoint": None, "why": why, "happened": False}
        try:
            rollback = self.session.rollback
            rollback.leave_room()
            point = save_emergency_checkpoint(
                _instrument(context),
                self.session.run_id,
                give_way=lambda: bool(rollback.give_way()),
                about_to_write=self.session.about_to_write,
                heals=context.error is not None,
            )
        except Exception as error:
            if classify_exception(error) is FailureType.DEVICE:
                raise
            logger.warning(
                "The emergency checkpoint could not be written (%s); falling back on the newest regular one.",
                describe_exception(error),
                exc_info=True,
            )
            return {"checkpoint": None, "why": describe_exception(error), "happened": False}
        if point is None:
            return {"checkpoint": None, "why": _why_there_is_none(_instrument(context)), "happened": False}
        self.session.resume_point = point
        return {"checkpoint": point.path}

    def _wait(self, _: HealingContext, __: TrainingArguments) -> dict[str, Any]:
        seconds = RetryPolicy.of(self.config).draw_wait(max(self.session.budget.used, 1))
        self.session.sleep(seconds)
        return {"waited_seconds": round(seconds, 3)}

    def _stop(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        incident, trainer = context.incident, _instrument(context).trainer
        failure = incident.failure or FailureType.USER_CODE
        session = self.session
        session.journal.acted(incident, Action.STOP.value)
        session.close_as_fatal(incident)
        session.journal.dealt_with(incident)
        step = int(trainer.state.global_step)
        point = session.resume_point
        checkpoint = None
        if point is not None and point.step == step:
            checkpoint = point.path = publish(point.path, str(trainer.args.output_dir))
        # Of a run that came to nothing the newest checkpoint is no better than its end.
        verified = failure is FailureType.NOT_TRAINED
        older = context.resume_from
        if checkpoint is None and older is None:
            older = newest_checkpoint_of(session.run_id, str(trainer.args.output_dir), verified=verified)
        session.rollback.release()
        advice = str(incident.evidence.get("remedy") or FAILURE_RECIPES[failure].advice)
        advice += f" {where_to_go_on(checkpoint or older)}"
        verdict = context.verdict or "it was asked to stop"
        path = session.journal.write_postmortem(
            verdict,
            failure,
            step,
            context.error,
            trainer.state.log_history,
            checkpoint,
            advice=advice,
            older_checkpoint=older,
        )
        raise UnrecoverableTrainingError(
            f"Training stopped at step {step}: {verdict.rstrip('.')}. What to do: {advice} "
            f"Postmortem: {path or 'could not be written, see the log'}.",
            failure=failure,
            postmortem=path,
        )


def save_offending_batch(window: Window, directory: Path, incident: Incident) -> str | None:
    """Keeps the micro-batches and random states of a step, so that it can be replayed; `None` if that failed."""
    path = directory / "incidents" / f"{incident.id}.pt"
    if not window.prepared or len(list(path.parent.glob("*.pt"))) >= KEPT_BATCHES:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(window.record(), path)
    except Exception as error:
        if classify_exception(error) is FailureType.DEVICE:
            raise
        logger.warning("The batch of incident %s could not be kept.", incident.id, exc_info=True)
        return None
    return str(path)


def _why_there_is_none(instrument: Instrument) -> str:
    """Why an emergency checkpoint was not even begun."""
    if consensus.world_size() > 1:
        return "several processes train together, and the others may not be able to save"
    return f"the weights cannot be trusted: it happened {instrument.reentry.phase.value}"


def _known(action: Action | str) -> Action:
    known = ", ".join(member.value for member in Action if member not in IN_PLACE)
    try:
        found = Action(action)
    except ValueError:
        raise ValueError(f"unknown action {action!r}; the actions are: {known}") from None
    if found in IN_PLACE:
        raise ValueError(
            f"{found.value} is done where its failure is noticed and cannot be asked for; the actions are: {known}"
        )
    return found


def _instrument(context: HealingContext) -> Instrument:
    if context.instrument is None:
        raise ValueError("this action works on a running trainer and needs `context.instrument`")
    return context.instrument


def _window(context: HealingContext) -> Window:
    if context.window is None:
        raise ValueError("this action heals inside a step and needs `context.window`")
    return context.window
