"""Real training steps that leave no trace."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
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

from ..hf.state import discard_gradients, unwrap_optimizer
from ..hf.trainer_state import STORES
from ..system.random_state import RandomState
from .inspection import Inspection, check_data_quality, check_model_init, vocabulary_of


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
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
    """

    steps: int
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    seconds_per_step: float = 0.0
    peak_memory_bytes: int | None = None
    data: Inspection | None = None
    model: Inspection | None = None

    @property
    def finite(self) -> bool:
        """Whether every loss and gradient norm was a finite number."""
        values = torch.tensor([*self.losses, *self.grad_norms])
        return bool(torch.isfinite(values).all())


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.times.append(time.perf_counter())


def dry_run(trainer: Trainer, num_steps: int = 2) -> DryRunReport:
    """
    Runs real training steps of a trainer and leaves model, optimizer, schedule, random states, counters and files as
    they were.
    """
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(f"num_steps is {num_steps!r}; please give the number of optimizer steps to run, at least 1.")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "A dry run cannot put back a model that FSDP or DeepSpeed has sharded. Please train a few steps of a "
            "trainer of their own instead: max_steps=2 and another output_dir."
        )
    optimizer = str(OptimizerNames(trainer.args.optim).value)
    if "layerwise" in optimizer or "lomo" in optimizer:
        raise ValueError(
            f"A dry run cannot undo what {optimizer} updates in the backward pass. Please train a few steps "
            "of a trainer of its own instead: max_steps=2 and another output_dir."
        )
    held = {id(each) for group in getattr(trainer.optimizer, "param_groups", ()) for each in group["params"]}
    model: Any = trainer.model
    if held and held.isdisjoint(id(each) for each in model.parameters() if each.requires_grad):
        raise ValueError(
            "A dry run cannot undo what an optimizer updates in hooks of its own: no trainable weight is in that of "
            "the trainer. Please train a few steps of another trainer instead: max_steps=2 and another output_dir."
        )
    data, model = _inspected(trainer)
    clock = _Clock()
    device = trainer.accelerator.device
    on_device = torch.get_device_module(device) if device.type != "cpu" else None
    with tempfile.TemporaryDirectory() as scratch, preserved(trainer):
        trainer.args = quiet_arguments(trainer.args, num_steps, scratch)
        trainer.callback_handler.callbacks = [DefaultFlowCallback(), clock]
        if on_device is not None:
            on_device.reset_peak_memory_stats()
        began = time.perf_counter()
        trainer.train()
        peak = None if on_device is None else int(on_device.max_memory_allocated())
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
    marks = [began, *clock.times]
    spans = [after - before for before, after in itertools.pairwise(marks)]
    steady = spans[1:] or spans
    return DryRunReport(
        steps=len(clock.times),
        losses=[float(entry["loss"]) for entry in history],
        grad_norms=[float(entry["grad_norm"]) for entry in history if "grad_norm" in entry],
        seconds_per_step=sum(steady) / len(steady) if steady else 0.0,
        peak_memory_bytes=peak,
        data=data,
        model=model,
    )


def _inspected(trainer: Trainer) -> tuple[Inspection | None, Inspection | None]:
    network: Any = trainer.model
    data = None
    if trainer.train_dataset is not None:
        rows, length = trainer.train_dataset, _cut_off_at(trainer.args)
        data = _attempted(trainer, "training data", lambda: check_data_quality(rows, vocabulary_of(network), length))
    model = _attempted(trainer, "model", lambda: check_model_init(network))
    return data, model


def _attempted(trainer: Trainer, what: str, look: Callable[[], Inspection]) -> Inspection | None:
    try:
        found = look()
    except Exception:
        logger.warning("The %s could not be looked at; the steps of the dry run go on.", what, exc_info=True)
        return None
    if trainer.is_world_process_zero() and not found.clean:
        logger.warning("Before the dry run, in the %s: %s", what, found)
    return found


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
