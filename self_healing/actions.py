"""HealingActions: remedies by name, for code that decides itself what is to be done, during a run or without one."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import TrainingArguments

from .checkpoints.choice import find_trusted_checkpoint
from .config.healing_config import HealingConfig, as_config
from .failures.recipes import Action
from .failures.retry import RetryPolicy
from .healers.inspection import check_data_quality, check_model_init, vocabulary_of
from .healers.numerics.remedies import USUAL_MAX_GRAD_NORM
from .hf.memory import BatchPlan, change_batch, free_memory
from .hf.patching import find_trainer
from .run.healer import HealingContext
from .run.run import Run
from .system.files import jsonable


logger = logging.getLogger("self_healing")

# What an action of the engine works on, where a run alone does not tell.
_NEEDS = {
    Action.SPLIT_BATCH: ("shape", "memory that runs out in a run has the model run over fewer rows by itself"),
    Action.REDUCE_BATCH_SIZE: ("batch", "the batch of a `train()` that runs stays: please change it before"),
    Action.CLIP_GRADIENT: ("clip_to", "it has to know what norm is usual"),
    Action.QUARANTINE_ROWS: ("diagnosis", "it has to know the rows at fault"),
    Action.DROP_ROWS: ("diagnosis", "it has to know the rows at fault"),
}


class HealingActions:
    """
    Carries out actions, for code of your own that decides what is to be done.

    During a run of the callback it is the engine that heals by itself that carries them out, on the trainer. Without
    one, the training arguments are changed, for the trainer that is built with them next, or for that of
    `SelfHealingTrainer.actions_engine`. What `roll_back` finds is in `args.resume_from_checkpoint`, which a script
    hands to `train()`. The learning rate of an optimizer that exists is changed where the trainer is known: by
    `SelfHealingTrainer.actions_engine`; a checkpoint that `train()` resumes from brings rates of its own.

    Args:
        config ([`HealingConfig`] or `dict`, *optional*):
            Factors and limits. Defaults to `HealingConfig()`.
        callback ([`SelfHealingCallback`], *optional*):
            Asked at each call for the run it is attached to.

    Attributes:
        results (`list[dict]`):
            A line for each action that was asked for, oldest first: `action`, `happened`, `why` if it did not, and
            what it gave; of the training arguments, `{name: [before, after]}`.
    """

    def __init__(self, config: HealingConfig | Mapping[str, Any] | None = None, callback: Any = None) -> None:
        self.config = as_config(config)
        self.callback = callback
        self.results: list[dict[str, Any]] = []
        # Built already, where a wrapper knows it: it has taken sizes from its arguments.
        self.trainer: Any = None
        # Of those without a run: reductions of the learning rate less increases, and waits.
        self._reductions = self._waits = 0

    def apply(
        self,
        actions: Iterable[Action | str] | Action | str,
        context: HealingContext | Mapping[str, Any] | None,
        training_args: TrainingArguments,
    ) -> TrainingArguments:
        """
        Carries out actions in order; each that cannot be carried out says so in its line of `results` and in the log.

        Args:
            actions (`Iterable[Action | str]` or `str`):
                What to do, such as `["rollback_checkpoint", "halve_learning_rate"]`.
            context ([`HealingContext`] or `Mapping`, *optional*):
                Where to do it, or what is known of the failure: of a mapping, `symptom` names the incident it is
                journaled as, `model` and `train_dataset` are what the checks look at without a run, and the rest is
                evidence.
            training_args (`TrainingArguments`):
                The arguments of the run, or of the one that is to begin. They are changed in place.

        Returns:
            [`~transformers.TrainingArguments`]: The same object.

        Raises:
            UnrecoverableTrainingError: For `STOP`, during a run.
            ValueError: For an action that is not known; nothing is done then.
        """
        asked, given = _actions_in(actions), context if isinstance(context, Mapping) else {}
        run: Run | None = None if self.callback is None else self.callback.run
        if run is not None and isinstance(context, HealingContext):
            context.instrument = context.instrument or run.attached
            self._in_run(run, asked, context, training_args)
        elif run is not None and run.attached is not None:
            evidence = {name: jsonable(value) for name, value in given.items() if name not in _LOOKED_AT}
            with run.incident(run.step, str(evidence.pop("symptom", "by hand")), evidence) as opened:
                self._in_run(run, asked, HealingContext(opened.incident, run.attached), training_args)
        elif self.callback and find_trainer(self.callback) is not None:
            why = "healing begins later in on_train_begin: please ask for it from the first step on"
            for action in asked:
                self._note(action, {"why": why})
        else:
            for action in asked:
                self._note(action, self._on_arguments(action, given, training_args))
        return training_args

    def _note(self, action: Action, result: Mapping[str, Any]) -> None:
        line = {"action": action.value, "happened": "why" not in result, **result}
        self.results.append(line)
        if "why" in result:
            logger.warning("%s: nothing was done: %s.", action.value, result["why"])
        else:
            changes = ", ".join(f"{name} {value}" for name, value in result.items())
            logger.info("%s: done%s.", action.value, changes and f": {changes}")

    # ---- during a run ----

    def _in_run(self, run: Run, asked: Iterable[Action], context: HealingContext, args: TrainingArguments) -> None:
        for action in asked:
            lacks, why = _NEEDS.get(action, ("incident", ""))
            if getattr(context, lacks) is None:
                result: dict[str, Any] = {"why": why}
            elif action is Action.ROLL_BACK and not run.budget.spend(run.step):
                result = {"why": f"`max_recovery_attempts` ({run.config.max_recovery_attempts}) without progress"}
            else:
                try:
                    result = run.remedies.apply(action, context, args)
                except ValueError as error:
                    result = {"why": str(error)}
            if action is Action.CHECKPOINT_ACTIVATIONS and "why" not in result:
                _set(args, **_checkpointing_in(args))
            self._note(action, result)

    # ---- without a run ----

    def _on_arguments(self, action: Action, given: Mapping[str, Any], args: TrainingArguments) -> dict[str, Any]:
        factor = self.config.lr_reduce_factor
        match action:
            case Action.REDUCE_LEARNING_RATE:
                most = self.config.max_lr_reductions
                if self._reductions >= most:
                    return {"why": f"`max_lr_reductions` allows {most}, and as many are in force"}
                self._reductions += 1
                return self._scale_rate(args, factor)
            case Action.INCREASE_LEARNING_RATE:
                if self._reductions <= -self.config.max_lr_reductions:
                    return {"why": "`max_lr_reductions` bounds increases as well"}
                self._reductions -= 1
                return self._scale_rate(args, 1 / factor)
            case Action.REDUCE_BATCH_SIZE:
                return self._smaller_batch(args)
            case Action.CHECKPOINT_ACTIVATIONS:
                return _set(args, **_checkpointing_in(args))
            case Action.ENABLE_GRAD_CLIP:
                return _set(args, max_grad_norm=args.max_grad_norm or USUAL_MAX_GRAD_NORM)
            case Action.FREE_MEMORY:
                free_memory(args.device)
                return {}
            case Action.ROLL_BACK:
                newest = find_trusted_checkpoint(str(args.output_dir))
                if newest is None:
                    return {"why": f"there is no checkpoint in {args.output_dir} that can be resumed from"}
                return _set(args, resume_from_checkpoint=newest)
            case Action.WAIT_AND_RESUME:
                return self._wait()
            case Action.CHECK_MODEL_INIT | Action.CHECK_DATA_QUALITY:
                return _inspect(action, given, args)
        return {"why": "it needs a run, which the callback is not attached to"}

    def _scale_rate(self, args: TrainingArguments, factor: float) -> dict[str, Any]:
        if self.trainer is not None and self.trainer.args is args and self.trainer.optimizer is not None:
            # It has taken its rates already; a schedule made for it has taken them from it.
            for group in self.trainer.optimizer.param_groups:
                group.update({name: group[name] * factor for name in ("lr", "initial_lr") if name in group})
            schedule = getattr(self.trainer.lr_scheduler, "scheduler", self.trainer.lr_scheduler)
            if hasattr(schedule, "base_lrs"):
                schedule.base_lrs = [rate * factor for rate in schedule.base_lrs]
        return _set(args, learning_rate=args.learning_rate * factor)

    def _smaller_batch(self, args: TrainingArguments) -> dict[str, Any]:
        rows = args.per_device_train_batch_size
        divisor = next((each for each in range(2, rows + 1) if rows % each == 0), None)
        if divisor is None or not self.config.oom_reduce_batch:
            limit = "`per_device_train_batch_size` is 1" if divisor is None else "`oom_reduce_batch` is false"
            return {"why": limit}
        accumulation = args.gradient_accumulation_steps
        plan = BatchPlan(rows // divisor, accumulation * divisor, rows, accumulation)
        if self.trainer is not None and self.trainer.args is args:
            change_batch(self.trainer, plan)
        return _set(args, per_device_train_batch_size=plan.rows, gradient_accumulation_steps=plan.accumulation)

    def _wait(self) -> dict[str, Any]:
        if self._waits >= self.config.api_retry_attempts:
            return {"why": f"`api_retry_attempts` ({self.config.api_retry_attempts}) are spent"}
        self._waits += 1
        seconds = RetryPolicy.of(self.config).draw_wait(self._waits)
        time.sleep(seconds)
        return {"waited_seconds": round(seconds, 3)}


_LOOKED_AT = ("model", "train_dataset")


def _actions_in(actions: Iterable[Action | str] | Action | str) -> list[Action]:
    named, found = [actions] if isinstance(actions, str) else list(actions), []
    for each in named:
        try:
            found.append(Action(each))
        except ValueError:
            raise ValueError(f"{str(each)!r} is no action; the actions are: {', '.join(Action)}") from None
    return found


def _checkpointing_in(args: TrainingArguments) -> dict[str, bool]:
    """Switches it on by the name that the Trainer reads, and by the one from before transformers 5.2x."""
    return {name: True for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(args, name)}


def _set(args: TrainingArguments, **values: Any) -> dict[str, Any]:
    before = {name: getattr(args, name) for name in values}
    for name, value in values.items():
        setattr(args, name, value)
    return {name: [before[name], value] for name, value in values.items()}


def _inspect(action: Action, given: Mapping[str, Any], args: TrainingArguments) -> dict[str, Any]:
    model, dataset = (given.get(name) for name in _LOOKED_AT)
    if action is Action.CHECK_MODEL_INIT:
        return {"why": "it needs `model` in the context"} if model is None else check_model_init(model).to_dict()
    if dataset is None:
        return {"why": "it needs `train_dataset` in the context"}
    vocabulary = None if model is None else vocabulary_of(model)
    return check_data_quality(dataset, vocabulary, max_length=getattr(args, "max_length", None)).to_dict()
