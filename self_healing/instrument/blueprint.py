"""What a trainer computes its steps with, written down in plain values: to compute one of them in another process."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from transformers import Trainer

from ..system import processes
from ..system.files import jsonable
from .objective import has_own_loss


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
