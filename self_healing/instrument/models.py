"""Finds the models of a trainer, and identifies what is trained on which device."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..checkpoints.deepspeed import ZeroJob


logger = logging.getLogger(__name__)


def models_of(trainer: Any) -> list[torch.nn.Module]:
    """Finds the models a trainer calls: what it trains, its reference, teachers and reward models."""
    wrapped = _inside(getattr(trainer, "model_wrapped", trainer.model))
    held: list[Any] = [wrapped if type(wrapped).__name__ == "OptimizedModule" else trainer.model]
    for name, value in vars(trainer).items():
        if name != "model_wrapped":
            several = value if isinstance(value, (list, tuple)) else [value]
            held.extend(each for each in several if hasattr(each, "config"))
    found: list[torch.nn.Module] = []
    inner: set[int] = set()
    for value in held:
        if isinstance(value, torch.nn.Module) and id(_inside(value)) not in inner:
            found.append(_inside(value))
            inner.update(id(module) for module in _inside(value).modules())
    return found


def _inside(module: torch.nn.Module) -> torch.nn.Module:
    inner = getattr(module, "module", None)
    return _inside(inner) if isinstance(inner, torch.nn.Module) else module


def fingerprint(trainer: Any) -> dict[str, Any]:
    """Gives facts that have to be the same for a size that fitted in one process to fit in another."""
    parameters = list(trainer.model.parameters())
    device = trainer.accelerator.device
    return {
        "parameters": sum(map(_size_of, parameters)),
        "trained": sum(_size_of(parameter) for parameter in parameters if parameter.requires_grad),
        "dtypes": sorted({str(parameter.dtype) for parameter in parameters}),
        "precision": str(trainer.accelerator.mixed_precision),
        "activation_checkpointing": bool(getattr(trainer.args, "gradient_checkpointing", False)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "memory": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        "processes": int(trainer.args.world_size),
    }


def _size_of(parameter: torch.Tensor) -> int:
    # Under ZeRO-3 there are elements only while they are gathered.
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def autocast_dtype(trainer: Any) -> torch.dtype | None:
    """The dtype that calls of a trainer's models are cast to; accelerate does it inside of their forward."""
    precision = str(trainer.accelerator.mixed_precision)
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}.get(precision)


def zero_job_of(trainer: Any) -> ZeroJob | None:
    """Tells how the trainer uses DeepSpeed, before there is an engine; `None` if it does not."""
    if not getattr(trainer, "is_deepspeed_enabled", False):
        return None
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    bf16 = config.get_value("bf16.enabled", False)
    tensor_parallel = config.get_value("tensor_parallel.autotp_size", 0) or 1
    return ZeroJob(
        int(trainer.args.world_size) // int(tensor_parallel),
        # Without a word of ZeRO it is -1 (accelerate 1.15).
        max(int(config.get_value("zero_optimization.stage", 0)), 0),
        bool(trainer.args.bf16 if bf16 == "auto" else bf16),
        bool(config.get_value("checkpoint.load_universal", False)),
    )
