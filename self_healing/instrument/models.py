"""The models of a trainer, and what identifies what is trained where."""

from __future__ import annotations

from typing import Any

import torch


def models_of(trainer: Any) -> list[torch.nn.Module]:
    """
    The models a trainer calls: what it trains, its reference, teachers and reward models. Inside of what spreads them
    over processes, without parts of others among them, and without modules that are no models (losses).
    """
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
    """What has to be the same for a size that fitted in one process to fit in another."""
    parameters = list(trainer.model.parameters())
    device = trainer.accelerator.device
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "dtypes": sorted({str(parameter.dtype) for parameter in parameters}),
        "precision": str(trainer.accelerator.mixed_precision),
        "activation_checkpointing": bool(getattr(trainer.args, "gradient_checkpointing", False)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "memory": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        "processes": int(trainer.args.world_size),
    }
