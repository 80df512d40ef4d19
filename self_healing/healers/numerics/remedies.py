"""The actions of this family: on the step in hand, on weights and optimizer state, and on the learning rate."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainingArguments

from ...failures.recipes import Action, FailureType
from ...hf.state import reset_moments
from ...rollback.rollback import CLEARLY
from ...run.healer import CarryOut, HealingContext
from ...run.run import Run
from ..inspection import check_data_quality, check_model_init, vocabulary_of
from .experiments import StepExperiments
from .state import NumericsState


# What transformers clips to where nothing is set.
USUAL_MAX_GRAD_NORM = 1.0


class NumericsRemedies:
    """Heals steps inside of them, goes back to trusted states, and changes the learning rate."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._numerics = run.part(NumericsState)
        self._rollback = run.rollback

    def table(self) -> dict[Action, CarryOut]:
        return {
            Action.USE_REEXECUTED_STEP: self._use_reexecuted_step,
            Action.DROP_ROWS: self._drop_rows,
            Action.SKIP_STEP: self._skip_step,
            Action.CLIP_GRADIENT: self._clip_gradient,
            Action.HOLD_CHECKPOINTS: self._hold_checkpoints,
            Action.ROLL_BACK: self._roll_back,
            Action.REPLAY_STEPS: self._replay_steps,
            Action.REDUCE_LEARNING_RATE: self._reduce_learning_rate,
            Action.INCREASE_LEARNING_RATE: self._increase_learning_rate,
            Action.RESET_MOMENTS: self._reset_moments,
            Action.ENABLE_GRAD_CLIP: self._enable_grad_clip,
            Action.CHECK_DATA_QUALITY: self._check_data_quality,
            Action.CHECK_MODEL_INIT: self._check_model_init,
        }

    # ---- inside the step ----

    def _use_reexecuted_step(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        context.step_in_hand.accept()
        self._numerics.repeatability.owe(context.incident)
        return {}

    def _drop_rows(self, context: HealingContext, args: TrainingArguments) -> dict[str, Any]:
        window, diagnosis = context.step_in_hand, context.diagnosis
        assert diagnosis is not None, "it names the rows"
        keep = StepExperiments(window).rows_without(diagnosis.poison)
        remaining = diagnosis.rows - diagnosis.poison_rows
        dropped = {"dropped": diagnosis.poison_rows, "kept": remaining}
        if remaining == 0 or not (window.kept == keep or window.recompute_with_retry(keep).finite):
            # The rows were not the whole story: one rung up.
            return self._skip_step(context, args) | dropped
        window.accept()
        return dropped

    def _skip_step(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        window, losses = context.step_in_hand, self._numerics.detector.losses
        gone_back, before = context.went_back is not None, window.skipped
        self._numerics.missing.left_out(window.step)
        window.skip(losses[-1] if losses else None, keep_buffers=gone_back)
        if gone_back:
            # It is one of the steps that going back has lost.
            self._rollback.give_up_steps(window.step)
        elif not before:
            context.incident.steps_lost += 1
        return {"skipped": True}

    def _clip_gradient(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        window, usual = context.step_in_hand, context.clip_to
        assert usual is not None, "it is what is clipped to"
        window.accept()
        norm = min(window.signals().grad_norm or 0.0, self._run.instrument.view.max_grad_norm or math.inf)
        if usual < norm:
            window.scale_gradients(usual / norm, always=False)
        return {"norm": norm, "clipped_to": min(usual, norm)}

    def _hold_checkpoints(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        # The open watch is what the instrument asks before it lets a checkpoint be written.
        self._numerics.watch.hold(context.incident)
        return {}

    # ---- another state, another rate ----

    def _roll_back(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        instrument, incident = context.running, context.incident
        step, missing = instrument.view.step, self._numerics.missing
        before = missing.count
        went = context.went_back = self._rollback.go_back(context.target, step - context.finished, incident.id)
        if went is None:
            return {"why": "there is no trusted state, neither in memory nor on disk", "happened": False}
        # The one that is judged, or one that a callback has asked in right after its update.
        in_step = (context.window is not None and not context.finished) or instrument.reentry.uncounted
        if not context.finished:
            self._numerics.went_back(incident)
        # Between two steps, none is left out for it.
        missing.went_back(step + in_step, went.trained)
        # Steps since that state which were missing before are lost already, in this incident or an earlier one.
        incident.steps_lost += max(missing.count - before, 0)
        incident.figures.append(f"back to the state of step {went.step}")
        return went.to_dict()

    def _replay_steps(self, context: HealingContext, args: TrainingArguments) -> dict[str, Any]:
        window, numerics = context.step_in_hand, self._numerics
        if context.went_back is None:
            return {"why": "the run has not gone back to any state", "happened": False}
        of_the_state = context.incident.failure in (
            FailureType.CORRUPTED_STATE,
            FailureType.REPLICAS_DIFFER,
            FailureType.OUT_OF_MEMORY,
        )
        trend = numerics.panel.loss_trend
        replayed = self._rollback.replay(
            window,
            numerics.is_well,
            finished=context.finished,
            loss_in_question=not of_the_state,
            unlike_from=context.unlike_from,
            # Where the loss is what was noticed, it has risen by more than that.
            clearly=CLEARLY if of_the_state or not trend.ready else min(CLEARLY, 0.5 * trend.scale),
        )
        if replayed.steps is None:
            context.incident.figures.append(f"the steps since then were not kept: {replayed.why}")
            if context.finished:
                self._rollback.give_up_steps(context.running.view.step - 1)
                return {"why": replayed.why, "happened": False}
            self._run.journal.acted(context.incident, Action.REPLAY_STEPS.value, happened=False, why=replayed.why)
            return self._skip_step(context, args)
        if context.finished:
            numerics.missing.count -= replayed.steps
        else:
            window.accept()
            numerics.missing.count -= replayed.steps + 1
            numerics.ladder.healed(context.incident.failure)
        if context.incident.failure is FailureType.CORRUPTED_STATE:
            context.went_back = self._rollback.reinstate(context.went_back)
        context.incident.steps_lost = 0
        context.incident.figures.append(f"{replayed.steps} steps since then applied again")
        numerics.repeatability.owe(context.incident, replayed.apart)
        for awaited in self._run.outcomes.awaited:
            if awaited.incident.step >= context.went_back.step:
                # Left out then, and applied after all.
                awaited.incident.steps_lost = 0
        return replayed.to_dict()

    def _reduce_learning_rate(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        instrument = context.running
        if self._numerics.learning_rate.exhausted:
            most = self._run.config.max_lr_reductions
            return {"why": f"`max_lr_reductions` allows {most}, and as many are in force", "happened": False}
        before = instrument.view.learning_rate
        self._numerics.learning_rate.reduce(instrument.view.step, context.rate_scale, context.blamed_step)
        self._numerics.rate_after_reduction = instrument.view.learning_rate
        context.incident.figures.append(f"learning rate from {before:.3g} to {instrument.view.learning_rate:.3g}")
        control = self._numerics.learning_rate
        return {
            "scale": control.scale(instrument.view.step),
            "learning_rate": instrument.view.learning_rate,
            "reductions": control.reductions,
            "from": before,
            "hold_steps": control.hold,
            "ramp_steps": control.ramp,
        }

    def _increase_learning_rate(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        view = context.running.view
        before = view.learning_rate
        if not self._numerics.learning_rate.increase(view.step):
            return {"why": "`max_lr_reductions` bounds increases above the schedule as well", "happened": False}
        context.incident.figures.append(f"learning rate from {before:.3g} to {view.learning_rate:.3g}")
        return {"learning_rate": view.learning_rate, "from": before}

    def _enable_grad_clip(self, context: HealingContext, args: TrainingArguments) -> dict[str, Any]:
        view = context.running.view
        if view.max_grad_norm:
            return {"why": f"gradients are clipped to {view.max_grad_norm:g} already", "happened": False}
        if view.under_deepspeed:
            return {"why": "DeepSpeed clips by its own configuration", "happened": False}
        args.max_grad_norm = view.max_grad_norm = self._numerics.ceiling = USUAL_MAX_GRAD_NORM
        return {"max_grad_norm": USUAL_MAX_GRAD_NORM}

    def _reset_moments(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        instrument = context.running
        if not reset_moments(instrument.trainer):
            why = "it is not known whether this optimizer can recreate its state, which was left unchanged"
            return {"why": why, "happened": False}
        steps = self._numerics.learning_rate.warm_up_again(instrument.view.step)
        return {"warmup_steps": steps}

    # ---- looking for a cause ----

    def _check_data_quality(self, context: HealingContext, args: TrainingArguments) -> dict[str, Any]:
        trainer = context.running.trainer
        longest = getattr(args, "max_length", None)
        found = check_data_quality(trainer.train_dataset, vocabulary_of(trainer.model), max_length=longest).to_dict()
        context.incident.evidence["check_data"] = found
        return {"check_data": found}

    def _check_model_init(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        found = check_model_init(context.running.trainer.model).to_dict()
        context.incident.evidence["check_model"] = found
        return {"check_model": found}
