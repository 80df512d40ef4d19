"""What can fail and what is done: failures, actions, the recipe of each failure, and the exceptions that carry one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Self


def text_of(error: BaseException) -> str:
    """Returns the message of an exception, also of one whose `__str__` raises."""
    try:
        return str(error)
    except Exception as failed:
        return f"(no message: its __str__ raises {type(failed).__name__})"


class Stranded(Exception):
    """
    Ends the process of a rank whose training code or disk has failed where the others may wait for it in a collective:
    they learn from its end that it is gone.
    """


# ---- failures: kinds of failure, actions against them, causes that experiments show, and the recipe of each kind ----


class _Named(StrEnum):
    """Members are found by their other names as well."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        return cls.__members__.get(str(value).upper())


class FailureType(_Named):
    """A kind of failure, the key of [`FAILURE_RECIPES`]."""

    NONFINITE_TRANSIENT = "nonfinite_transient"
    NONFINITE_POISON_ROWS = "nonfinite_poison_rows"
    NONFINITE_NUMERICAL = "nonfinite_numerical"
    NONFINITE_UNDIAGNOSED = "nonfinite_undiagnosed"
    NONFINITE_FROM_THE_START = "nonfinite_from_the_start"
    CORRUPTED_STATE = "corrupted_state"
    CORRUPTED_COPY = "corrupted_copy"
    REPLICAS_DIFFER = "replicas_differ"
    SPIKE_TRANSIENT = "spike_transient"
    GRADIENT_SPIKE = "gradient_spike"
    LOSS_SPIKE = "loss_spike"
    DIVERGENCE = "divergence"
    HARDER_DATA = "harder_data"
    LEARNING_RATE = "learning_rate"
    SLOW_RISE = "slow_rise"
    NOT_TRAINED = "not_trained"
    VANISHING_GRADIENT = "vanishing_gradient"
    DEAD_LOSS = "dead_loss"
    NEVER_LEARNED = "never_learned"
    RED_FLAG = "red_flag"
    OUT_OF_MEMORY = "out_of_memory"
    BAD_DATA = "bad_data"
    NETWORK = "network"
    NONFINITE_REWARD = "nonfinite_reward"
    REPORTING = "reporting"
    DISK = "disk"
    HANG = "hang"
    PROCESS_DIED = "process_died"
    WRONG_RESULTS = "wrong_results"
    PREEMPTED = "preempted"
    DEVICE = "device"
    INTERRUPTED = "interrupted"
    USER_CODE = "user_code"

    # The broader kinds, each as the member it is nearest to.
    NAN_LOSS = NONFINITE_UNDIAGNOSED
    GRADIENT_EXPLOSION = GRADIENT_SPIKE
    GRADIENT_VANISHING = VANISHING_GRADIENT
    SLOW_CONVERGENCE = NEVER_LEARNED
    OOM = OUT_OF_MEMORY
    DATA_ERROR = BAD_DATA
    API_ERROR = NETWORK
    UNKNOWN = USER_CODE


class Action(_Named):
    """A remedy, carried out by [`HealingActions`]."""

    USE_REEXECUTED_STEP = "use_reexecuted_step"
    QUARANTINE_ROWS = "quarantine_rows"
    DROP_ROWS = "drop_rows"
    SKIP_STEP = "skip_step"
    CLIP_GRADIENT = "clip_gradient"
    HOLD_CHECKPOINTS = "hold_checkpoints"
    ROLL_BACK = "roll_back"
    REPLAY_STEPS = "replay_steps"
    REDUCE_LEARNING_RATE = "reduce_learning_rate"
    RESET_MOMENTS = "reset_moments"
    CHECK_DATA_QUALITY = "check_data_quality"
    CHECK_MODEL_INIT = "check_model_init"
    FREE_MEMORY = "free_memory"
    SPLIT_BATCH = "split_batch"
    CHECKPOINT_ACTIVATIONS = "checkpoint_activations"
    REDUCE_BATCH_SIZE = "reduce_batch_size"
    MOVE_PREDICTIONS_TO_HOST = "move_predictions_to_host"
    RETRY_CALL = "retry_call"
    QUARANTINE_SAMPLE = "quarantine_sample"
    REPLACE_SAMPLE = "replace_sample"
    GO_ON_WITHOUT = "go_on_without"
    REMOVE_PARTIAL_CHECKPOINT = "remove_partial_checkpoint"
    MAKE_ROOM = "make_room"
    WRITE_STACKS = "write_stacks"
    INTERRUPT = "interrupt"
    EMERGENCY_CHECKPOINT = "emergency_checkpoint"
    WAIT_AND_RESUME = "wait_and_resume"
    RESUME = "resume"
    SAVE_AND_LEAVE = "save_and_leave"
    EXIT_FOR_RESTART = "exit_for_restart"
    STOP = "stop"
    # On no ladder: only for those who ask for them.
    INCREASE_LEARNING_RATE = "increase_learning_rate"
    ENABLE_GRAD_CLIP = "enable_grad_clip"

    # Other names of the same.
    ROLLBACK_CHECKPOINT = ROLL_BACK
    HALVE_LEARNING_RATE = REDUCE_LEARNING_RATE
    HALVE_BATCH_SIZE = REDUCE_BATCH_SIZE
    ENABLE_GRADIENT_CHECKPOINTING = CHECKPOINT_ACTIVATIONS
    CLEAR_CACHE = FREE_MEMORY
    ZCLIP_GRADIENT = CLIP_GRADIENT
    SAVE_EMERGENCY_CHECKPOINT = EMERGENCY_CHECKPOINT
    SKIP_BATCH = SKIP_STEP
    LOG_BAD_SAMPLE = QUARANTINE_ROWS
    EXPONENTIAL_BACKOFF = WAIT_AND_RESUME


class Cause(StrEnum):
    """What an experiment has shown to be behind a failure, where that decides how it is healed."""

    UNKNOWN = "unknown"
    NOT_LOOKED_FOR = "not looked for"
    # Of a step that is not finite, or has a spike.
    TRANSIENT = "transient"
    SAME_AGAIN = "the same again"
    NOT_FINITE_AGAIN = "not finite when computed again"
    POISON_ROWS = "poison rows"
    NUMERICAL = "numerical"
    CORRUPTED_STATE = "corrupted state"
    # Of one that is not finite with weights that no update has changed.
    PRECISION = "precision"
    DATA = "data"
    MODEL = "model"
    LOSS_OR_LABELS = "loss or labels"
    GRADIENT = "gradient"
    MODEL_PRECISION_OR_DATA = "model, precision or data"
    # Of a loss that has risen and stays up, or a gradient that is gone.
    WEIGHTS = "weights"
    UNCLEAR = "unclear"
    COMPUTATION = "the computation, not the weights"
    HARDER_DATA = "harder data"


# A resume takes the learning rate from the checkpoint, and would fail as this run did.
ASKS_FOR_A_NEW_RUN = frozenset({FailureType.LEARNING_RATE, FailureType.DIVERGENCE, FailureType.NONFINITE_NUMERICAL})


class Target(StrEnum):
    """The states that a run can go back to."""

    NEWEST = "newest"
    OLDER = "older"
    INITIAL = "initial"
    DISK = "disk"


class Given(StrEnum):
    """What has to hold for a rung to be tried."""

    # Something was seen in steps that are applied, and what has caused it is not known.
    CAUSE_UNKNOWN = "cause unknown"
    # Fewer steps in a row were left out without an explanation than `nan_patience`.
    PATIENCE_LEFT = "patience left"
    # Of a step that was computed again because of its gradient.
    NOT_FINITE_AGAIN = "not finite again"
    LOSS_USUAL = "loss usual"
    NORM_KNOWN = "usual norm known"
    SKIPS_LEFT = "skips left"
    # The run has only just begun, or it has not.
    EARLY = "early"
    LATE = "late"
    # Another reduction of the learning rate is allowed; or the configuration allows none.
    RATE_LEFT = "rate left"
    RATE_FIXED = "rate fixed"


@dataclass(frozen=True, slots=True)
class Rung:
    """
    Remedies that are tried together.

    Args:
        actions (`tuple[Action, ...]`):
            The remedies, in their order.
        target ([`Target`], *optional*, defaults to `Target.NEWEST`):
            Which state to go back to, for `ROLL_BACK`.
        given (`tuple[Given, ...]`, *optional*):
            The rung is passed over where one of these does not hold.
        once (`bool`, *optional*, defaults to `False`):
            Whether the same failure takes a later rung when it comes again.
        failure ([`FailureType`], *optional*):
            What the failure turns out to be where this rung is reached.
    """

    actions: tuple[Action, ...]
    target: Target = Target.NEWEST
    given: tuple[Given, ...] = ()
    once: bool = False
    failure: FailureType | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """
    What is known about one kind of failure.

    Args:
        diagnosis (`str`):
            What it means, for a person.
        ladder (`tuple[Action | Rung, ...]`):
            Remedies in the order they are tried; an action stands for a rung of its own. Not every one is for every
            run: which there are depends on the settings, and on what can be done at the time.
        advice (`str`):
            What to do when the ladder is spent.
        severity (`str`):
            `"info"` (undone without loss), `"warning"` (something was left out) or `"error"` (the run stops).
        references (`tuple[str, ...]`):
            Where to read more.
        rungs (`tuple[Rung, ...]`):
            The ladder, each remedy in a rung.
    """

    diagnosis: str
    ladder: tuple[Action | Rung, ...]
    advice: str
    severity: str
    references: tuple[str, ...]
    rungs: tuple[Rung, ...] = field(init=False)
    # The remedies on the ladder, in the order in which they are first tried.
    actions: tuple[Action, ...] = field(init=False)

    def __post_init__(self) -> None:
        rungs = tuple(each if isinstance(each, Rung) else Rung((each,)) for each in self.ladder)
        object.__setattr__(self, "rungs", rungs)
        object.__setattr__(self, "actions", tuple(dict.fromkeys(each for rung in rungs for each in rung.actions)))

    @property
    def reentry(self) -> Action | None:
        """The rung that enters `train()` again after an exception; `None` for a failure that ends the run."""
        return next((action for action in self.actions if action in (Action.WAIT_AND_RESUME, Action.RESUME)), None)

    def __getitem__(self, key: str) -> Any:
        """Gives a field by its name, as `recipe["diagnosis"]`."""
        if key not in (*self.__dataclass_fields__, "reentry"):
            raise KeyError(f"{key!r}; a recipe has: {', '.join(self.__dataclass_fields__)}")
        return getattr(self, key)


# ---- ladders of rollbacks ----


# Back to a trusted state; the current step is lost with those since that state.
_BACK = (Action.ROLL_BACK, Action.SKIP_STEP)
# If the steps since then can be applied again and all is well, none is lost.
_BACK_AND_AGAIN = (Action.ROLL_BACK, Action.REPLAY_STEPS)
_LOWER = (*_BACK, Action.REDUCE_LEARNING_RATE)
# They look at a run, and leave it as it is: when nothing helps, the data or the model were often wrong from the start.
INSPECTIONS = (Action.CHECK_MODEL_INIT, Action.CHECK_DATA_QUALITY)
# Ends a run: what it has is saved, to be resumed once somebody knows better.
THE_END = (Action.EMERGENCY_CHECKPOINT, Action.STOP)

_FURTHER_BACK = (
    Rung(_BACK_AND_AGAIN, once=True),
    Rung(_BACK, Target.OLDER, once=True),
    Rung(_BACK, Target.DISK, once=True),
)
_FURTHER_BACK_AT_ONE_RATE = tuple(replace(rung, given=(Given.RATE_FIXED,)) for rung in _FURTHER_BACK)
_FROM_THE_BEGINNING = Rung(_LOWER, Target.INITIAL, given=(Given.EARLY, Given.RATE_LEFT))
_LOWER_RATES = (
    _FROM_THE_BEGINNING,
    Rung(_LOWER, given=(Given.RATE_LEFT,), once=True),
    Rung(_LOWER, Target.OLDER, given=(Given.RATE_LEFT,), once=True),
    Rung(_LOWER, given=(Given.RATE_LEFT,)),
)
# What the run has is saved, and `train()` is entered again: in this process, or in the next one.
_ENTERED_AGAIN = (Action.EMERGENCY_CHECKPOINT, Action.RESUME, Action.EXIT_FOR_RESTART, Action.STOP)
_END_AFTER_REDUCTIONS = Rung((*_BACK, *INSPECTIONS, *THE_END), failure=FailureType.LEARNING_RATE)


# ---- recipes ----


# As a dry run has them, which says where they are from.
_USUAL_RATES = (
    "Usual rates: SFT 1e-5 to 5e-5, DPO, KTO, GRPO and RLOO 5e-7 to 5e-6; ten times as much with LoRA. A usual "
    "warm-up: 5 to 10 % of the steps."
)


# One table, not one for each family: journal, postmortem and claims lie below the families and read it, so that it
# would have to be filled from above by the order of imports, and many a recipe is climbed by more than one of them.
FAILURE_RECIPES: dict[FailureType, Recipe] = {
    FailureType.NONFINITE_TRANSIENT: Recipe(
        diagnosis="The same micro-batches gave finite numbers when they were computed again from the same random "
        "states: a transient fault of hardware, driver or a race, not of the data or the model.",
        ladder=(Action.USE_REEXECUTED_STEP,),
        advice="If it comes back, test the device (dcgmi diag, memory test) and look for races in custom kernels.",
        severity="info",
        references=("https://arxiv.org/abs/2407.21783",),
    ),
    FailureType.NONFINITE_POISON_ROWS: Recipe(
        diagnosis="These rows make the loss or the gradient non-finite on their own, every time; the others do not.",
        ladder=(
            Rung((Action.QUARANTINE_ROWS, Action.DROP_ROWS)),
            Action.SKIP_STEP,
            Rung(THE_END),
        ),
        advice="Look at the rows in quarantine.jsonl: masked labels, broken characters, extreme lengths or values.",
        severity="warning",
        references=("https://arxiv.org/abs/2204.02311",),
    ),
    FailureType.NONFINITE_NUMERICAL: Recipe(
        diagnosis="Computing the step again did not cure it, weights and optimizer state are finite, and the data do "
        "not explain it: the computation overflows.",
        ladder=(
            Rung((Action.SKIP_STEP,), given=(Given.PATIENCE_LEFT,)),
            *_FURTHER_BACK_AT_ONE_RATE,
            # Of the weights on disk in the end, and not of the newest.
            *_LOWER_RATES[:-1],
            Rung(_LOWER, Target.DISK, given=(Given.RATE_LEFT,)),
            # The steps were left out, so the weights are as good as they were.
            Rung((*INSPECTIONS, *THE_END), failure=FailureType.LEARNING_RATE),
        ),
        advice="Begin a new run from the weights of a checkpoint well before it (`from_pretrained`; a resume would "
        "take the rate from the checkpoint) with half the learning rate or less, or in bf16 or fp32 instead of "
        "fp16; check custom losses for log(0) or division by zero.",
        severity="warning",
        references=("https://arxiv.org/abs/1710.03740",),
    ),
    FailureType.NONFINITE_FROM_THE_START: Recipe(
        diagnosis="The computation is not finite, and no update has changed the weights yet. So the cause is the "
        "model, the precision it computes in, or the data, and neither the learning rate nor the optimizer.",
        ladder=(Rung((*INSPECTIONS, Action.STOP)),),
        advice="Look at the place named as the first that is not finite: weights converted to a type with too small a "
        "range (fp16 ends at 65504: load the model in bf16 or fp32), a layer or a loss with log(0) or a division by "
        "zero, features that are NaN, labels that are all masked. Another learning rate does not help.",
        severity="error",
        references=("https://arxiv.org/abs/1710.03740",),
    ),
    FailureType.NONFINITE_UNDIAGNOSED: Recipe(
        diagnosis="Loss or gradient norm is not finite; the cause was not looked for.",
        ladder=(Action.SKIP_STEP, Rung(THE_END)),
        advice="Set on_nonfinite='heal' to have the cause found.",
        severity="warning",
        references=("https://arxiv.org/abs/1710.03740",),
    ),
    FailureType.CORRUPTED_STATE: Recipe(
        diagnosis="Weights, buffers or optimizer state hold NaN or Inf: every further step would be lost.",
        ladder=(*_FURTHER_BACK, Rung((*_BACK, *THE_END))),
        advice="Resume from the newest checkpoint that `self-healing check` finds good. If it comes back, test the "
        "device (dcgmi diag, memory test) and look for code that writes into the weights.",
        severity="warning",
        references=("https://arxiv.org/abs/2102.11245",),
    ),
    FailureType.CORRUPTED_COPY: Recipe(
        diagnosis="A copy of the weights beside the model is not finite: what heals the model does not reach it.",
        ladder=(),
        advice="Do not use this copy, nor what was saved of it. Make it anew: an average from the checkpoints of the "
        "run that `self-healing check` finds good, any other copy from the weights of the run.",
        severity="warning",
        references=("https://docs.pytorch.org/docs/stable/optim.html",),
    ),
    FailureType.REPLICAS_DIFFER: Recipe(
        diagnosis="The ranks no longer hold the same weights, although all applied the same updates: those of one "
        "rank were changed from outside, by a memory fault or by code.",
        ladder=(Rung(_BACK_AND_AGAIN), Action.STOP),
        advice="Test the device of the rank that is named (dcgmi diag, memory test, ECC counters), and take it out if "
        "it is named again; look for code that writes into the weights on some ranks only.",
        severity="warning",
        references=("https://arxiv.org/abs/2102.11245",),
    ),
    FailureType.SPIKE_TRANSIENT: Recipe(
        diagnosis="The gradient was far above normal, and normal when the same micro-batches were computed again from "
        "the same random states: a transient fault of hardware, driver or a race.",
        ladder=(Action.USE_REEXECUTED_STEP,),
        advice="If it comes back, test the device (dcgmi diag, memory test) and look for races in custom kernels.",
        severity="info",
        references=("https://arxiv.org/abs/2407.21783",),
    ),
    FailureType.GRADIENT_SPIKE: Recipe(
        diagnosis="The gradient norm was far above what is normal in this run: because of the batch, or of where the "
        "weights are now.",
        ladder=(
            Rung((Action.SKIP_STEP,), given=(Given.NOT_FINITE_AGAIN,)),
            # A spike of the gradient alone is cut to size. With the loss, the batch had better be left out, but not
            # often: where such batches come again and again, they are part of the data.
            Rung((Action.CLIP_GRADIENT,), given=(Given.LOSS_USUAL, Given.NORM_KNOWN)),
            Rung((Action.SKIP_STEP,), given=(Given.SKIPS_LEFT,)),
            Rung((Action.CLIP_GRADIENT,), given=(Given.NORM_KNOWN,)),
            Action.USE_REEXECUTED_STEP,
            Rung(THE_END),
        ),
        advice="One spike is nothing to worry about. If they come often, set zclip_mode='clip', lower the learning "
        "rate by a factor of 2 to 5, set max_grad_norm to 1.0 or less, and look at the batches in incidents/.",
        severity="warning",
        references=("https://arxiv.org/abs/2204.02311", "https://arxiv.org/abs/2504.02507"),
    ),
    FailureType.LOSS_SPIKE: Recipe(
        diagnosis="The loss was far above what is normal in this run. Most spikes pass by themselves; no checkpoint "
        "is written until the loss is back.",
        ladder=(Action.HOLD_CHECKPOINTS,),
        advice="Nothing, if it passes. If they come often, look at the batches, lower the learning rate by a factor "
        "of 2 to 5, and warm up over 5 to 10 % of the steps.",
        severity="warning",
        references=("https://arxiv.org/abs/2204.02311",),
    ),
    FailureType.DIVERGENCE: Recipe(
        diagnosis="The loss has risen and stays up: the weights are getting worse.",
        ladder=(
            Rung((Action.HOLD_CHECKPOINTS,), given=(Given.CAUSE_UNKNOWN,)),
            Rung(_BACK_AND_AGAIN, given=(Given.LATE,), once=True),
            *_LOWER_RATES,
            Rung((*_BACK, Action.RESET_MOMENTS), given=(Given.LATE,), once=True),
            _END_AFTER_REDUCTIONS,
        ),
        advice="Begin a new run from the weights of a checkpoint well before it (`from_pretrained`), with half the "
        f"learning rate or a longer warm-up; a resume would take the rate from the checkpoint. {_USUAL_RATES}",
        severity="error",
        references=("https://doi.org/10.1093/biomet/41.1-2.100", "https://arxiv.org/abs/2204.02311"),
    ),
    FailureType.HARDER_DATA: Recipe(
        diagnosis="The loss has risen and stays up, but weights from before the rise do no better on the same batch, "
        "and as well as before on an earlier one: the data have changed or become harder.",
        ladder=(),
        advice="Nothing, if the data are ordered on purpose (a curriculum, one source after the other); else shuffle "
        "them.",
        severity="info",
        references=("https://doi.org/10.1145/1553374.1553380",),
    ),
    FailureType.SLOW_RISE: Recipe(
        diagnosis="The loss has risen 20 % above its lowest level, too slowly for any single step to stand out.",
        ladder=(),
        advice="Nothing, if the data have become harder on purpose (a curriculum, another source). Else compare the "
        "evaluation loss of a checkpoint from before the rise with the newest one: if it has risen as well, lower the "
        "learning rate by a factor of 2, or end the run and keep the earlier checkpoint.",
        severity="warning",
        references=("https://arxiv.org/abs/2309.14322",),
    ),
    FailureType.LEARNING_RATE: Recipe(
        diagnosis="The loss diverged again after every reduction of the learning rate that is allowed.",
        ladder=(_END_AFTER_REDUCTIONS,),
        advice="Begin a new run with a learning rate well below the last one that was tried, or a longer warm-up (a "
        "resume would take the rate from the checkpoint). If that one "
        "was already low for a model like this, it is not the rate: look at what the checks of data and model say, "
        f"and at custom losses. {_USUAL_RATES}",
        severity="error",
        references=("https://arxiv.org/abs/2309.14322",),
    ),
    FailureType.NOT_TRAINED: Recipe(
        diagnosis="Most of the steps of the run, or all since it was resumed, were skipped or lost to rollbacks: the "
        "result is not the model you asked for.",
        ladder=(Action.STOP,),
        advice="See what the incidents have in common (`self-healing report`): the first one names the cause. Remove "
        "it before you start the run again.",
        severity="error",
        references=("https://arxiv.org/abs/2205.01068",),
    ),
    FailureType.VANISHING_GRADIENT: Recipe(
        diagnosis="The gradient norm has been practically zero for many steps: nothing is learned.",
        ladder=(Rung(INSPECTIONS),),
        advice="Check that the loss depends on parameters that are trained (requires_grad, adapters, frozen layers), "
        "that labels are not all masked, and that the learning rate has not decayed to zero. A loss as low as it can "
        "be (0 for a hinge loss) has no gradient either: then everything is learned, and you can end the run.",
        severity="warning",
        references=("https://arxiv.org/abs/1211.5063",),
    ),
    FailureType.DEAD_LOSS: Recipe(
        diagnosis="The loss has been exactly 0.0 for many steps: no token counts in it. That is a wiring bug; a model "
        "that has learned everything has a small loss that is never the same.",
        ladder=(Rung((Action.CHECK_DATA_QUALITY, Action.STOP)),),
        advice="Look at one batch: are all labels -100 (a chat template without generation markers, "
        "completion_only_loss on data without completions, a response template that is never found, prompts longer "
        "than max_length)? Set on_red_flag='warn' if 0.0 is right for your loss.",
        severity="error",
        references=("https://huggingface.co/docs/trl/sft_trainer",),
    ),
    FailureType.NEVER_LEARNED: Recipe(
        diagnosis="The loss has never been clearly better than that of guessing every token, and has stopped falling: "
        "nothing has been learned. The run goes on, because only you know what it is meant to learn.",
        ladder=(Rung(INSPECTIONS),),
        advice="Look at one batch, decoded, with its labels: do they belong to the inputs (shifted twice, shuffled, "
        "of another tokenizer)? Check that the parameters you mean to train have requires_grad and are in the "
        "optimizer, and that the learning rate is neither near 0 (a warm-up of thousands of steps) nor so high that "
        f"the loss went up first. {_USUAL_RATES} If the data are random on purpose, nothing is wrong.",
        severity="error",
        references=("https://karpathy.github.io/2019/04/25/recipe/",),
    ),
    FailureType.RED_FLAG: Recipe(
        diagnosis="A metric is outside of its healthy range, and has been for long enough to mean something.",
        ladder=(
            *_FURTHER_BACK_AT_ONE_RATE,
            *_LOWER_RATES,
            _END_AFTER_REDUCTIONS,
        ),
        advice="Follow the remedy of the rule (`self-healing rules` prints them all); change or switch off a "
        "rule that does not fit your run in a TOML file of your own (rules_file).",
        severity="warning",
        references=("https://huggingface.co/docs/trl/logging",),
    ),
    FailureType.OUT_OF_MEMORY: Recipe(
        diagnosis="Memory ran out, on the device or on the host.",
        ladder=(
            Action.FREE_MEMORY,
            Action.SPLIT_BATCH,
            Action.CHECKPOINT_ACTIVATIONS,
            Action.ROLL_BACK,
            Action.REPLAY_STEPS,
            Action.SKIP_STEP,
            Action.EMERGENCY_CHECKPOINT,
            Action.REDUCE_BATCH_SIZE,
            Action.MOVE_PREDICTIONS_TO_HOST,
            Action.STOP,
        ),
        advice="(1) Shorten max_length (or max_completion_length), which decides what a single row costs: half of it "
        "is half of the logits and, without attn_implementation='flash_attention_2', a quarter of the attention. (2) "
        "Shrink what is always in memory: LoRA (r=16 to 32) on a base in bf16, or in 4-bit (QLoRA), which takes a "
        "quarter of that; an 8-bit or paged optimizer; weights and optimizer sharded over more devices, or offloaded "
        "to the host (DeepSpeed ZeRO, FSDP). (3) Look for other processes on the device, and for tensors kept by "
        "mistake (nvidia-smi).",
        severity="warning",
        references=("https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",),
    ),
    FailureType.BAD_DATA: Recipe(
        diagnosis="A sample cannot be used: it raises while it is loaded or collated, in the model or for a reward "
        "function.",
        ladder=(
            Action.RETRY_CALL,
            Action.QUARANTINE_SAMPLE,
            Action.REPLACE_SAMPLE,
            # One that raises in the model has been collated by then.
            Action.QUARANTINE_ROWS,
            Action.DROP_ROWS,
            Action.SKIP_STEP,
            Action.EMERGENCY_CHECKPOINT,
            Action.STOP,
        ),
        advice="Repair or remove the samples that are named, here and in quarantine.jsonl. If almost nothing can be "
        "loaded, the code or the storage is at fault, not the samples.",
        severity="warning",
        references=("https://docs.pytorch.org/docs/stable/data.html",),
    ),
    FailureType.NETWORK: Recipe(
        diagnosis="A service or the network did not answer, or refused temporarily.",
        ladder=(Action.RETRY_CALL, Action.EMERGENCY_CHECKPOINT, Action.WAIT_AND_RESUME, Action.STOP),
        advice="Check the service and the credentials, then resume.",
        severity="warning",
        references=("https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/",),
    ),
    FailureType.NONFINITE_REWARD: Recipe(
        diagnosis="A reward function returned NaN or Inf. The trainer treats NaN as `None`, a reward that does not "
        "apply: the completion would silently be trained on without it, or not at all.",
        ladder=(Action.RETRY_CALL, Action.GO_ON_WITHOUT, Action.EMERGENCY_CHECKPOINT, Action.STOP),
        advice="Look at the completions for which the reward function has no number: log(0), a division by zero, a "
        "judge's answer that was not understood. If a reward does not apply, return None.",
        severity="warning",
        references=("https://huggingface.co/docs/trl/grpo_trainer",),
    ),
    FailureType.REPORTING: Recipe(
        diagnosis="A tracker or the Hub could not be reached. Training does not depend on it.",
        ladder=(Action.RETRY_CALL, Action.GO_ON_WITHOUT),
        advice="Check the service and the credentials. What was logged is in trainer_state.json; a checkpoint that "
        "was not pushed is on disk.",
        severity="warning",
        references=("https://huggingface.co/docs/transformers/main_classes/callback",),
    ),
    FailureType.DISK: Recipe(
        diagnosis="A file could not be written: the disk is full, a quota is spent, permission is denied, or the "
        "device failed.",
        ladder=(Action.REMOVE_PARTIAL_CHECKPOINT, Action.MAKE_ROOM, Action.GO_ON_WITHOUT, Action.STOP),
        advice="Free space or set another output_dir. As long as the run goes on, it tries again at its next save; a "
        "restart would resume from the newest complete checkpoint.",
        severity="error",
        references=("https://huggingface.co/docs/transformers/trainer",),
    ),
    FailureType.HANG: Recipe(
        diagnosis="This part of a step has made no progress for much longer than it ever took.",
        ladder=(Action.WRITE_STACKS, Action.INTERRUPT, *_ENTERED_AGAIN),
        advice="The stacks of all threads below hangs/ show the line that waits: a lock, a queue, a file system or a "
        "service without a timeout, a collective that another process never entered.",
        severity="error",
        references=("https://docs.pytorch.org/docs/stable/distributed.html",),
    ),
    FailureType.PROCESS_DIED: Recipe(
        diagnosis="A process ended: the one before this, one of its data loader workers, or another one of the job. "
        "If an exception ended it, its own output says why. Otherwise it was killed (SIGKILL or exit code -9: "
        "usually the host's memory was full, or the scheduler or somebody killed it), crashed in native code (a bus "
        "error or -7: shared memory was full), or the machine went down.",
        ladder=(Action.WRITE_STACKS, *_ENTERED_AGAIN),
        advice="Look at the end of its output, at the exit code (-9 or 137: killed, most often for host memory; -11 "
        "or 139: a crash in native code; -7 or 135: shared memory is full) and at the kernel's log (dmesg).",
        severity="warning",
        references=("https://docs.pytorch.org/docs/stable/elastic/run.html",),
    ),
    FailureType.WRONG_RESULTS: Recipe(
        diagnosis="The device of a rank, or the network that joins it to the others, gave a wrong result for a "
        "computation that is exact on every device.",
        ladder=(Action.STOP,),
        advice="Take the machine or the device out, and test it (dcgmi diag -r 3, memory test, ECC counters, NCCL "
        "tests).",
        severity="error",
        references=("https://arxiv.org/abs/2102.11245",),
    ),
    FailureType.PREEMPTED: Recipe(
        diagnosis="Preemption: the process was told to stop (SIGTERM or SIGUSR1).",
        ladder=(Action.SAVE_AND_LEAVE,),
        advice="Start the job again; it goes on from the checkpoint that was written.",
        severity="info",
        references=("https://slurm.schedmd.com/preempt.html",),
    ),
    FailureType.DEVICE: Recipe(
        diagnosis="The accelerator, or this process's context on it, is broken: this process can compute nothing "
        "more, and nothing on the device can be saved.",
        ladder=(Action.EXIT_FOR_RESTART, Action.STOP),
        advice="Start the process again (torchrun --max-restarts does it) and resume from the newest checkpoint. "
        "If it happens again on the same device, look for Xid in dmesg and run dcgmi diag; if it happens again at the "
        "same step on any device, the code is at fault: CUDA_LAUNCH_BLOCKING=1 shows the line.",
        severity="error",
        references=("https://docs.nvidia.com/deploy/xid-errors/",),
    ),
    FailureType.INTERRUPTED: Recipe(
        diagnosis="The run was interrupted from outside (Ctrl-C or sys.exit).",
        ladder=(Action.STOP,),
        advice="Resume from the newest checkpoint.",
        severity="info",
        references=("https://docs.python.org/3/library/signal.html",),
    ),
    FailureType.USER_CODE: Recipe(
        diagnosis="An exception that this library cannot heal, usually from the model, the data or a callback.",
        ladder=(Action.EMERGENCY_CHECKPOINT, Action.STOP),
        advice="Fix the cause named in the traceback, then resume.",
        severity="error",
        references=("https://docs.python.org/3/library/traceback.html",),
    ),
}


# ---- exceptions: the exceptions of this library that carry a failure through `train()` ----


class Interruption(BaseException):
    """Interrupts the main thread from a thread that watches it."""

    def __init__(self, message: str, failure: FailureType) -> None:
        super().__init__(message)
        self.failure = failure


class UnrecoverableTrainingError(RuntimeError):
    """
    Ends a run that cannot be healed; the message names the postmortem.

    Args:
        message (`str`):
            The failure, its step, the actions that were tried, and advice.
        failure (`FailureType`, *optional*):
            The kind of failure that ended the run.
        postmortem (`str`, *optional*):
            Path of `postmortem.json`.
    """

    def __init__(self, message: str, failure: FailureType | None = None, postmortem: str | None = None) -> None:
        super().__init__(message)
        self.failure = failure
        self.postmortem = postmortem


class HealingFailed(RuntimeError):
    """Ends a job on several ranks in which code of this library has failed where they meet."""

    remedy = "The bug is ours, not yours. The next start trains without healing, and says how to switch it on again."

    @classmethod
    def on_rank(cls, rank: int, step: int, error: BaseException) -> HealingFailed:
        what = f"{type(error).__name__}: {error}"
        return cls(f"self_healing failed on rank {rank} at step {step} ({what}). {cls.remedy}")


class NonFiniteReward(Exception):
    """Reports rewards that are NaN or infinite; `None`, for a reward that does not apply, is neither."""

    def __init__(self, answer: Any, places: Sequence[int], of: int) -> None:
        named = ", ".join(map(str, places[:10])) + (", ..." if len(places) > 10 else "")
        super().__init__(f"{len(places)} of {of} rewards are NaN or infinite (completions {named})")
        self.answer = answer
        self.places = list(places)
        self.of = of

    @property
    def all_of_them(self) -> bool:
        """Whether every reward is NaN or infinite, and none is one that does not apply."""
        return len(self.places) == self.of


# ---- training fault: an exception of the user's training code, on its way out of this library ----


class TrainingFault(Exception):
    """Carries an exception of the user's training code out of this library, so that it is not taken for our bug."""

    def __init__(self, error: Exception, others_wait: bool = False, others_know: bool = False) -> None:
        super().__init__(text_of(error))
        self.error = error
        self.others_wait = others_wait
        self.others_know = others_know


# ---- symptom: one finding of a detector ----


Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Symptom:
    """One finding of a detector."""

    name: str
    step: int
    evidence: dict[str, Any]
    severity: Severity = "warning"
