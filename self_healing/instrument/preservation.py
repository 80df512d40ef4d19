"""A trainer put back as it was, for dry runs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer
from transformers.integrations.neftune import deactivate_neftune

from .bookkeeping import STORES
from .gradients import discard_gradients
from .random_state import RandomState


@contextlib.contextmanager
def preserved(trainer: Trainer) -> Iterator[None]:
    """
    Puts a trainer back as it was, whatever happens inside: weights, buffers, optimizer, schedule, scaler, random
    states, counters, metrics, callbacks and what accelerate holds on to.
    """
    model: Any = trainer.model
    accelerator: Any = trainer.accelerator
    rng = RandomState.capture(accelerator.device)
    training = {name: module.training for name, module in model.named_modules()}
    gradients = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    tensors = {name: value.detach().to("cpu", copy=True) for name, value in _all_tensors(model)}
    attributes = dict(vars(trainer))
    stores = {name: copy.deepcopy(attributes[name]) for name in STORES if name in attributes}
    state, control = copy.deepcopy(trainer.state), copy.copy(trainer.control)
    handler = dict(vars(trainer.callback_handler))
    held = {
        name: list(getattr(accelerator, name)) for name in ("_models", "_optimizers", "_schedulers", "_dataloaders")
    }
    accelerator_step = accelerator.step
    moving_parts = [part for part in (trainer.optimizer, trainer.lr_scheduler, accelerator.scaler) if part is not None]
    saved = [(part, copy.deepcopy(part.state_dict())) for part in moving_parts]
    forward = model.forward if "forward" in vars(model) else None
    try:
        yield
    finally:
        handle = getattr(trainer, "neftune_hook_handle", None)
        if trainer.is_in_train and trainer.neftune_noise_alpha is not None and handle is not None:
            deactivate_neftune(model, handle, accelerator)
        for name, value in _all_tensors(model):
            if name in tensors:
                value.data.copy_(tensors[name])
        discard_gradients(model)
        for part, content in saved:
            part.load_state_dict(content)
        for name, module in model.named_modules():
            module.training = training.get(name, module.training)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(gradients.get(name, parameter.requires_grad))
        if forward is None:
            vars(model).pop("forward", None)
        else:
            model.forward = forward
        vars(trainer).clear()
        vars(trainer).update(attributes)
        for name, store in stores.items():
            setattr(trainer, name, store)
        trainer.state, trainer.control = state, control
        vars(trainer.callback_handler).clear()
        vars(trainer.callback_handler).update(handler)
        for name, items in held.items():
            setattr(accelerator, name, items)
        accelerator.step = accelerator_step
        rng.restore()


def _all_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
