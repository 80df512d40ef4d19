"""Real training steps that leave no trace."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import logging
import math
import tempfile
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DefaultFlowCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import OptimizerNames

from ..failures.classify import add_note, match_known_error
from ..hf.batches import preparing, trained_tokens
from ..hf.memory import memory_figures
from ..hf.objective import objective_of, what_is_trained
from ..hf.state import discard_gradients, unwrap_optimizer
from ..hf.trainer_state import STORES, scored_completions
from ..journal.incident import counted
from ..system.processes import contained
from ..system.random_state import RandomState
from .inspection import Inspection, check_data_quality, check_model_init, vocabulary_of
from .numerics.detectors.rules import load_rules, rules_for, too_seldom_logged


logger = logging.getLogger(__name__)

# Characters of a row or a completion that are shown.
_SHOWN = 400


@dataclass(frozen=True, slots=True)
class RewardGiven:
    """
    What one reward function gave the completions that were generated last.

    Args:
        name (`str`):
            The function, as the trainer logs it.
        mean (`float`):
            Of the rewards that are numbers; NaN if none is.
        std (`float`):
            Of the same.
        missing (`float`):
            Share of rewards that are `None` or NaN, which is the same to the trainer.
        equal_groups (`float`):
            Share of prompts whose completions all got the same.
        completion (`str`):
            The completion it liked best.
        reward (`float`):
            And what it gave for it.
    """

    name: str
    mean: float
    std: float
    missing: float
    equal_groups: float
    completion: str
    reward: float

    def __str__(self) -> str:
        shares = f"None or NaN {100 * self.missing:.0f} %, groups of equal ones {100 * self.equal_groups:.0f} %"
        text = f"reward {self.name}: mean {self.mean:.4g}, std {self.std:.4g}, {shares}"
        return f"{text}; most, {self.reward:.4g}, for {self.completion!r}"


@dataclass(slots=True)
class DryRunReport:
    """
    Loss, norm, time and memory of the steps of a dry run.

    Args:
        steps (`int`):
            Optimizer steps run.
        losses (`list[float]`):
            Loss of each.
        grad_norms (`list[float]`):
            Gradient norm of each, before clipping.
        seconds_per_step (`float`):
            Mean time of a step after the first, or of the first if there is only one.
        peak_memory_bytes (`int` or `None`):
            Most device memory allocated; `None` on the CPU.
        data ([`Inspection`] or `None`):
            What is wrong with the training rows; `None` if they could not be looked at.
        model ([`Inspection`] or `None`):
            What is wrong with the weights as they were before the steps; `None` if they could not be looked at.
        batch (`str`):
            How many rows an optimizer step has, and what they are made of.
        rows (`list[str]`):
            Two rows as the model got them, decoded, with `[[ ]]` around what counts in the loss.
        trained_share (`float` or `None`):
            Share of the tokens of the first micro-batch that count in the loss; `None` if it does not say.
        rewards (`list[RewardGiven]`):
            Of GRPO and RLOO: what each reward function gave.
        logits_bytes (`int` or `None`):
            Of the logits of one micro-batch with rows as long as they may be, in float32; `None` where they are never
            there as a whole.
        advice (`list[str]`):
            What to look at before a long run.
    """

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    seconds_per_step: float = 0.0
    peak_memory_bytes: int | None = None
    data: Inspection | None = None
    model: Inspection | None = None
    batch: str = ""
    rows: list[str] = field(default_factory=list)
    trained_share: float | None = None
    rewards: list[RewardGiven] = field(default_factory=list)
    logits_bytes: int | None = None
    advice: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        losses = ", ".join(f"{loss:.4g}" for loss in self.losses)
        lines = [f"{counted(self.steps, 'step')}, {self.seconds_per_step:.2f} s each; loss {losses}", self.batch]
        lines += [] if self.logits_bytes is None else [f"logits: up to {self.logits_bytes / 1e6:,.1f} MB"]
        lines += [str(given) for given in self.rewards]
        if self.trained_share is not None:
            lines.append(f"{100 * self.trained_share:.0f} % of the tokens are trained, those in [[ ]]:")
        found = [str(each) for each in (self.data, self.model) if each is not None and not each.clean]
        return "\n".join(filter(None, [*lines, *self.rows, *found, *(f"advice: {each}" for each in self.advice)]))

    @property
    def finite(self) -> bool:
        """Whether steps were run, and every loss and gradient norm was a finite number."""
        return self.steps > 0 and all(map(math.isfinite, (*self.losses, *self.grad_norms)))


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.times.append(time.perf_counter())


def dry_run(trainer: Trainer, num_steps: int = 2, rules_file: str | None = None) -> DryRunReport:
    """
    Runs real training steps of a trainer and leaves model, optimizer, schedule, random states, counters and files as
    they were. `rules_file` is that of the run that is to come.
    """
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(f"num_steps is {num_steps!r}; please give the number of optimizer steps to run, at least 1.")
    if refusal := _why_not(trainer):
        raise ValueError(
            f"A dry run cannot {refusal}. Please train a few steps of a trainer of their own instead: max_steps=2 and "
            "another output_dir."
        )
    report, clock = DryRunReport(), _Clock()
    _inspect(trainer, report)
    look = _Look(trainer, report, rules_file)
    # At once: a reward function that lacks a column raises in the first step.
    look.advise("reward functions", look.lacking_columns)
    look.advise("training data", look.stream_read_once)
    device = trainer.accelerator.device
    on_device = torch.get_device_module(device) if device.type != "cpu" else None
    with tempfile.TemporaryDirectory() as scratch, preserved(trainer):
        trainer.args = quiet_arguments(trainer.args, num_steps, scratch)
        trainer.callback_handler.callbacks = [DefaultFlowCallback(), clock]
        if on_device is not None:
            on_device.reset_peak_memory_stats()
        began = time.perf_counter()
        try:
            with preparing(trainer, look.at_batch), look.at_logits():
                trainer.train()
        except Exception as error:
            with contained(logger, "What is known of the error could not be added to it."):
                _note(error, trainer, len(clock.times) + 1, num_steps, report.advice)
            raise
        report.peak_memory_bytes = None if on_device is None else int(on_device.max_memory_allocated())
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        look.after(num_steps)
    marks = [began, *clock.times]
    spans = [after - before for before, after in itertools.pairwise(marks)]
    steady = spans[1:] or spans
    report.steps = len(clock.times)
    report.losses = [float(entry["loss"]) for entry in history]
    report.grad_norms = [float(entry["grad_norm"]) for entry in history if "grad_norm" in entry]
    report.seconds_per_step = sum(steady) / len(steady) if steady else 0.0
    return report


def _why_not(trainer: Trainer) -> str:
    """Says what of a trainer could not be put back as it was; empty if all of it can be."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return "put back a model that FSDP or DeepSpeed has sharded"
    optimizer = str(OptimizerNames(trainer.args.optim).value)
    if "layerwise" in optimizer or "lomo" in optimizer:
        return f"undo what {optimizer} updates in the backward pass"
    held = {id(each) for group in getattr(trainer.optimizer, "param_groups", ()) for each in group["params"]}
    model: Any = trainer.model
    if held and held.isdisjoint(id(each) for each in model.parameters() if each.requires_grad):
        return "undo what an optimizer updates in hooks of its own, in which there is no trainable weight"
    return ""


def _note(error: Exception, trainer: Trainer, step: int, num_steps: int, advice: list[str]) -> None:
    """Adds to an exception where the dry run was, and what is known of it, as a postmortem has it."""
    known = match_known_error(error, trained=what_is_trained(trainer, error))
    text = f"self_healing: raised in step {step} of {num_steps} of a dry run; the trainer is as it was before it."
    if known is not None:
        text += f" Known error {known.name}: {known.cause} What to do: {known.fix}"
    add_note(error, " ".join([text, *advice]))


# ---- advice: what a person would look at before a long run ----


# The usual learning rates by objective: of full training, and of LoRA, for which
# https://thinkingmachines.ai/blog/lora has found ten times as much.
# SFT: 1e-5 to 5e-5, LoRA 1e-4 to 3e-4 (axolotl, docs/training_stability.qmd); the default of TRL 1.16 is 2e-5.
# DPO, KTO, GRPO, RLOO: the default of TRL 1.16 is 1e-6, of the alignment handbook 5e-7 to 5e-6; with LoRA 1e-5 to 5e-5
# for GRPO (https://huggingface.co/docs/trl/lora_without_regret). Reward models have a new head: TRL's default is 1e-4.
_RATES = {
    "sft": ((1e-5, 5e-5), (1e-4, 5e-4)),
    **dict.fromkeys(("dpo", "kto", "grpo", "rloo"), ((5e-7, 5e-6), (5e-6, 5e-5))),
    "reward": ((1e-5, 1e-4), (1e-4, 1e-3)),
}
# Share of the steps: "5--10% of total steps" (axolotl, docs/training_stability.qmd); the default of transformers is 0.
_WARM_UP = 0.1
# "Default 0.01 is usually fine. Values above 0.1 can suppress learning in LoRA" (the same page).
_WEIGHT_DECAY = 0.1
# What TRL 1.16 passes to a reward function beside the columns of the data (grpo_trainer.py, rloo_trainer.py).
_PASSED = ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"]


class _Look:
    """Looks at settings, batches and rewards of a dry run. Nothing that fails in it is a matter of the run."""

    def __init__(self, trainer: Any, report: DryRunReport, rules_file: str | None) -> None:
        self._trainer, self._args, self._objective = trainer, trainer.args, objective_of(trainer)
        self._report, self._rules_file = report, rules_file
        self._logits: tuple[int, ...] = (0,)

    def advise(self, what: str, look: Callable[[], Iterator[str]]) -> None:
        """Adds what a look finds to the advice, and says it."""
        with contained(logger, f"The {what} could not be looked at; the dry run goes on."):
            for text in look():
                self._report.advice.append(text)
                if self._trainer.is_world_process_zero():
                    logger.warning("Before the run: %s", text)

    def after(self, num_steps: int) -> None:
        """Looks at what the steps have left, before it is put back."""
        epoch, steps = self._trainer.state.epoch, int(self._args.max_steps)
        if steps <= 0:
            steps = math.ceil(num_steps / (epoch or math.inf) * self._args.num_train_epochs)
        if not self._trainer.state.global_step:
            self.advise("steps", lambda: iter(["No step was run: the training data gave no batch."]))
        self.advise("rewards", self._rewards)
        self.advise("logits", self._memory)
        self.advise("settings", lambda: self._settings(steps))
        self.advise("metric rules", lambda: self._rules(steps))

    # ---- batches ----

    def at_batch(self, batch: Any) -> Any:
        with contained(logger, "The first batch could not be looked at; the dry run goes on."):
            decodes = hasattr(self._trainer.processing_class, "decode")
            if decodes and (tokens := trained_tokens(batch)) is not None:
                ids, trained, present = (each.tolist() for each in tokens)
                self._report.trained_share = sum(map(sum, trained)) / max(sum(map(sum, present)), 1)
                # Of pairs the chosen one and the rejected.
                second = len(ids) // 2 if self._objective.paired else 1
                some = [at for at in (0, second) if at < len(ids)]
                self._report.rows = [self._marked(ids[at], trained[at], present[at]) for at in some]
        return batch

    def _marked(self, ids: list[int], trained: list[bool], present: list[bool]) -> str:
        tokens = [(trains, token) for token, trains, there in zip(ids, trained, present, strict=True) if there]
        text = ""
        for trains, run in itertools.groupby(tokens, key=lambda token: token[0]):
            part = self._trainer.processing_class.decode([token for _, token in run])
            text += f"[[{part}]]" if trains else part
        return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"

    @contextlib.contextmanager
    def at_logits(self) -> Iterator[None]:
        """Notes the largest output of the last layer in training; a loss that goes without it has no whole logits."""

        def note(_module: Any, _inputs: Any, output: Any) -> None:
            if output.requires_grad and output.numel() > math.prod(self._logits):
                self._logits = tuple(output.shape)

        layer = getattr(self._trainer.model, "get_output_embeddings", lambda: None)()
        with contextlib.nullcontext() if layer is None else layer.register_forward_hook(note):
            yield

    def _memory(self) -> Iterator[str]:
        if len(self._logits) != 3:
            return
        rows, length, vocabulary = self._logits
        length = max(length, getattr(self._args, "max_completion_length", None) or _cut_off_at(self._args) or 0)
        self._report.logits_bytes = size = 4 * rows * length * vocabulary
        figures = memory_figures(self._trainer.accelerator.device)
        free = figures["host_available"]
        if "free" in figures:
            free = figures["free"] + figures["reserved"] - figures["allocated"]
        # Their gradient is as large.
        if 2 * size > free:
            yield (
                f"The logits of the longest rows may take {size / 1e9:.2f} GB ({rows} rows x {length:,} tokens "
                f"x {vocabulary:,} words x 4 bytes), their gradient as much, and {free / 1e9:.2f} GB are free. Lower "
                "per_device_train_batch_size or the length, or take a loss that needs no whole logits (TRL 1.16)."
            )

    # ---- settings ----

    def _settings(self, steps: int) -> Iterator[str]:
        args, name = self._args, self._objective.name
        rows, ranks, accumulated = args.train_batch_size, args.world_size, args.gradient_accumulation_steps
        total, size = rows * ranks * accumulated, getattr(args, "num_generations", None)
        groups = f", {counted(int(total / size), 'prompt')} x {size} completions" if size else ""
        self._report.batch = (
            f"{counted(total, 'row')} in an optimizer step: {rows} per device x {accumulated} accumulated x "
            f"{counted(ranks, 'rank')}{groups}"
        )
        lora = getattr(self._trainer.model, "peft_config", None) is not None
        what = "LoRA" if lora else "full training"
        low, high = _RATES.get(name, ((0.0, math.inf),) * 2)[lora]
        if not low <= args.learning_rate <= high:
            usual = f"{low:.0e} to {high:.0e}".replace("e-0", "e-")
            yield f"learning_rate={args.learning_rate:g}: usual for {name} with {what} is {usual}."
        share = args.get_warmup_steps(steps) / max(steps, 1)
        if share > _WARM_UP:
            yield f"The warm-up is {100 * share:.0f} % of {steps} steps: usual is 5 to 10 % (warmup_steps=0.05)."
        if args.weight_decay > _WEIGHT_DECAY:
            yield f"weight_decay={args.weight_decay:g}: usual is 0 to 0.01; above 0.1 it suppresses what is learned."
        if not self._objective.online and (self._trainer.eval_dataset is None or args.eval_strategy == "no"):
            yield (
                "Nothing is evaluated, so overfitting will not show. Keep 5 % of the rows back "
                '(dataset.train_test_split(0.05)), as eval_dataset with eval_strategy="steps".'
            )

    def _rules(self, steps: int) -> Iterator[str]:
        name, epochs = self._objective.name, self._args.num_train_epochs
        rules = rules_for(load_rules(self._rules_file), name)
        if steps and (text := too_seldom_logged(rules, name, self._args, steps, epochs)):
            yield text

    # ---- rewards ----

    def lacking_columns(self) -> Iterator[str]:
        """What a reward function asks for and is not given: it raises, or takes None for it."""
        trainer, cut = self._trainer, self._args.remove_unused_columns
        columns = list(getattr(trainer.train_dataset, "column_names", None) or ())
        functions = getattr(trainer, "reward_funcs", ()) if self._objective.online and columns else ()
        given = {*_PASSED, *(() if cut else {*columns} - {"prompt", "completion"})}
        there = f"{', '.join(columns)}{', of which remove_unused_columns=True leaves the prompt' if cut else ''}"
        for at, function in enumerate(functions):
            model = isinstance(function, torch.nn.Module)
            for each in () if model else inspect.signature(function).parameters.values():
                named = each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
                if named and each.name not in given and each.default in (each.empty, None):
                    gets = "gets None" if each.default is None else "raises"
                    who = trainer.reward_func_names[at]
                    yield f"Reward {who} asks for {each.name!r} and {gets}: the columns of the data are {there}."

    def stream_read_once(self) -> Iterator[str]:
        """What a stream that goes on where it was has lost by these steps."""
        if _keeps_position(self._trainer.train_dataset):
            yield (
                "The training data are a stream of torch. If it keeps its own position, the rows that these steps "
                "read are gone: please make it anew before train()."
            )

    def _rewards(self) -> Iterator[str]:
        completions, rewards = scored_completions(self._trainer)
        remedies = {rule.name: rule.remedy for rule in load_rules()}
        for name, given in rewards.items():
            groups = torch.tensor(given, dtype=torch.float64).view(-1, self._args.num_generations)
            known = groups[~groups.isnan()]
            lowest, highest = groups.nan_to_num(math.inf).amin(1), groups.nan_to_num(-math.inf).amax(1)
            best = int(groups.flatten().nan_to_num(-math.inf).argmax())
            equal = float((highest - lowest < 1e-6).double().mean())
            mean, std = (float(known.mean()), float(known.std(correction=0))) if len(known) else (math.nan, math.nan)
            missing, text = 1 - len(known) / len(given), _text_of(completions[best])
            self._report.rewards.append(RewardGiven(name, mean, std, missing, equal, text, given[best]))
            if known.isinf().any():
                yield f"Reward {name} is infinite for some completions: their group learns nothing, or NaN."
            elif missing == 1:
                yield f"Reward {name} is None or NaN for every completion. {remedies['rewards_missing']}"
            elif std == 0:
                yield f"Reward {name} is {mean:g} for every completion. {remedies['reward_stuck_at_zero']}"
        if rewards and all(each.equal_groups == 1 for each in self._report.rewards):
            yield f"All completions of a prompt get one reward: nothing is learned. {remedies['no_group_has_signal']}"


def _text_of(completion: Any) -> str:
    text = completion if isinstance(completion, str) else " ".join(str(turn.get("content")) for turn in completion)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _inspect(trainer: Trainer, report: DryRunReport) -> None:
    network: Any = trainer.model
    with contained(logger, "The training data could not be looked at; the steps of the dry run go on."):
        if trainer.train_dataset is not None and not _keeps_position(trainer.train_dataset):
            longest = _cut_off_at(trainer.args)
            report.data = check_data_quality(trainer.train_dataset, vocabulary_of(network), longest)
    with contained(logger, "The model could not be looked at; the steps of the dry run go on."):
        report.model = check_model_init(network)
    for what, found in (("training data", report.data), ("model", report.model)):
        if found is not None and not found.clean and trainer.is_world_process_zero():
            logger.warning("Before the dry run, in the %s: %s", what, found)


def _keeps_position(dataset: Any) -> bool:
    """Whether what is read of a stream may be gone; those of `datasets` begin anew each time."""
    return isinstance(dataset, torch.utils.data.IterableDataset) and not hasattr(dataset, "take")


def _cut_off_at(args: Any) -> int | None:
    """The length at which the collator cuts rows off at the end, if it does that."""
    # Rows that come prepared are taken as they are; of those cut off at the front the labels remain.
    as_they_are = (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset", False)
    if as_they_are or getattr(args, "truncation_mode", "keep_start") != "keep_start":
        return None
    length = getattr(args, "max_length", None)
    return length if isinstance(length, int) and length > 0 else None


def quiet_arguments(args: TrainingArguments, num_steps: int, scratch: str) -> TrainingArguments:
    """Gives the arguments for a few steps that are neither saved, evaluated, nor reported to anyone."""
    quiet = copy.copy(args)
    quiet.max_steps = num_steps
    quiet.output_dir = scratch
    quiet.logging_strategy = IntervalStrategy.STEPS
    quiet.logging_steps = 1
    # Otherwise a NaN would be shown as the average of the steps before.
    quiet.logging_nan_inf_filter = False
    quiet.save_strategy = SaveStrategy.NO
    quiet.eval_strategy = IntervalStrategy.NO
    quiet.eval_on_start = False
    quiet.load_best_model_at_end = False
    quiet.push_to_hub = False
    quiet.report_to = []
    quiet.auto_find_batch_size = False
    return quiet


# ---- preservation: puts a trainer back as it was, after a dry run ----


@contextlib.contextmanager
def preserved(trainer: Trainer) -> Iterator[None]:
    """
    Puts a trainer back as it was, whatever happens inside: weights, buffers, optimizer, schedule, scaler, random
    states, counters, metrics, callbacks, and every attribute and hook that `train()` and `accelerator.prepare` leave
    on the model, so that the next `train()` prepares it as the first one.
    """
    model: Any = trainer.model
    accelerator: Any = trainer.accelerator
    rng = RandomState.capture(accelerator.device)
    attributes = [_noted(holder) for holder in _holders(trainer)]
    # What is offloaded has no values here.
    tensors = [
        (tensor, tensor.detach().to("cpu", copy=True), tensor.requires_grad)
        for tensor in (*model.parameters(), *model.buffers())
        if not tensor.is_meta
    ]
    stores = {name: copy.deepcopy(getattr(trainer, name)) for name in STORES if name in vars(trainer)}
    state, control = copy.deepcopy(trainer.state), copy.copy(trainer.control)
    moving_parts = [part for part in (trainer.optimizer, trainer.lr_scheduler, accelerator.scaler) if part is not None]
    saved = [(part, copy.deepcopy(part.state_dict())) for part in moving_parts]
    try:
        yield
    finally:
        discard_gradients(model)
        for put_back in attributes:
            put_back()
        for tensor, content, requires_grad in tensors:
            tensor.data.copy_(content)
            tensor.requires_grad_(requires_grad)
        for part, kept in saved:
            part.load_state_dict(kept)
        for name, store in stores.items():
            setattr(trainer, name, store)
        trainer.state, trainer.control = state, control
        if str(accelerator.state.dynamo_plugin.backend.value) != "NO":
            # The shapes seen so far decide what is compiled next, and kernels for any shape may round differently.
            torch._dynamo.reset()
        rng.restore()


def _holders(trainer: Trainer) -> list[object]:
    """The objects that `train()` sets attributes of; each once."""
    accelerator = trainer.accelerator
    found: list[object] = [trainer, trainer.callback_handler, accelerator, accelerator.gradient_state]
    parts = (trainer.optimizer, unwrap_optimizer(trainer.optimizer), trainer.lr_scheduler, accelerator.scaler)
    found += [part for part in parts if part is not None]
    for network in vars(trainer).values():
        for module in network.modules() if isinstance(network, torch.nn.Module) else ():
            configs = (vars(module).get(name) for name in ("config", "generation_config"))
            found += [module, *(config for config in configs if hasattr(config, "__dict__"))]
    return list({id(holder): holder for holder in found}.values())


def _noted(holder: object) -> Callable[[], None]:
    """
    Notes the attributes of an object, and what those of them that are containers hold (hooks, submodules, lists); the
    function it returns puts that back.
    """
    attributes = dict(vars(holder))
    plain = (dict, OrderedDict, defaultdict, list, set)
    contents = {name: copy.copy(value) for name, value in attributes.items() if type(value) in plain}

    def put_back() -> None:
        now = vars(holder)
        now.clear()
        now.update(attributes)
        for name, content in contents.items():
            container = attributes[name]
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)

    return put_back
