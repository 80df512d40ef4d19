"""Real training steps that leave no trace, and what another process needs to compute one."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DefaultFlowCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..hf.objective import has_own_loss
from ..hf.trainer_state import preserved
from ..system import processes
from ..system.files import jsonable
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


# ---- what another process needs to compute a step ----


def blueprint_of(trainer: Any) -> dict[str, Any]:
    """Writes down the classes, arguments, model and precision of a trainer, in types that JSON has."""
    accelerator, args = trainer.accelerator, trainer.args
    reference = getattr(trainer, "ref_model", None)
    # Enumerations, and other subclasses of str and int, become what they are based on.
    written: dict[str, Any] = _plain(
        {
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
    )
    return written


def kept_weights(trainer: Any, at_most: int) -> dict[str, Any]:
    """
    Copies the weights of a trainer's model to host memory: all of them, or those that are trained, as far as they are
    small enough.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    names = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    held = [*model.parameters(), *(buffer for buffer in model.buffers() if id(buffer) in names)]
    # Of what FSDP2 or ZeRO-3 shards, this rank has a part.
    if any(hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id") or tensor.is_meta for tensor in held):
        return {}
    trained = [tensor for tensor in held if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)]
    for chosen in (held, trained):
        if sum(tensor.nbytes for tensor in chosen) <= at_most:
            weights = {names[id(tensor)]: tensor.detach().to("cpu", copy=True) for tensor in chosen}
            return {"weights": weights, "all_weights": chosen is held}
    return {}


def _model_blueprint(model: Any) -> dict[str, Any]:
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    config: Any = getattr(base, "config", None)
    parameters = dict(model.named_parameters())
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    return {
        "class": _name_of(type(base)),
        "config": config.to_dict() if hasattr(config, "to_dict") else None,
        "name_or_path": getattr(config, "_name_or_path", None) or None,
        "attention": getattr(config, "_attn_implementation", None),
        "dtype": _most_common_dtype(base.parameters()),
        "trained_dtype": _most_common_dtype(trained),
        "adapters": {name: each.to_dict() for name, each in getattr(model, "peft_config", {}).items()},
        # An adapter says itself what is trained.
        "frozen": []
        if hasattr(model, "peft_config")
        else [name for name, parameter in parameters.items() if not parameter.requires_grad],
    }


def _most_common_dtype(tensors: Iterable[torch.Tensor]) -> str | None:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.is_floating_point():
            sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return sizes.most_common(1)[0][0] if sizes else None


def _name_of(cls: type) -> list[str]:
    return [cls.__module__, cls.__qualname__]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(jsonable(value)))
