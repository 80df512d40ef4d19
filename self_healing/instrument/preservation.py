"""Puts a trainer back as it was, after a dry run."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer

from ..hf.state import innermost
from ..hf.trainer_state import STORES
from ..system.random_state import RandomState
from .gradients import discard_gradients


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
    attributes = [_Attributes.of(holder) for holder in _holders(trainer)]
    held = (*model.parameters(), *model.buffers())
    # What is offloaded has no values here.
    tensors = [_Value.of(tensor) for tensor in held if not tensor.is_meta]
    stores = {name: copy.deepcopy(getattr(trainer, name)) for name in STORES if name in vars(trainer)}
    state, control = copy.deepcopy(trainer.state), copy.copy(trainer.control)
    moving_parts = [part for part in (trainer.optimizer, trainer.lr_scheduler, accelerator.scaler) if part is not None]
    saved = [(part, copy.deepcopy(part.state_dict())) for part in moving_parts]
    try:
        yield
    finally:
        discard_gradients(model)
        for each in attributes:
            each.put_back()
        for value in tensors:
            value.put_back()
        for part, content in saved:
            part.load_state_dict(content)
        for name, store in stores.items():
            setattr(trainer, name, store)
        trainer.state, trainer.control = state, control
        _forget_compiled_code(accelerator)
        rng.restore()


def _holders(trainer: Trainer) -> list[object]:
    """The objects that `train()` sets attributes of; each once."""
    accelerator = trainer.accelerator
    found: list[object] = [trainer, trainer.callback_handler, accelerator, accelerator.gradient_state]
    parts = (trainer.optimizer, innermost(trainer.optimizer), trainer.lr_scheduler, accelerator.scaler)
    found += [part for part in parts if part is not None]
    for network in vars(trainer).values():
        for module in network.modules() if isinstance(network, torch.nn.Module) else ():
            configs = (vars(module).get(name) for name in ("config", "generation_config"))
            found += [module, *(config for config in configs if hasattr(config, "__dict__"))]
    return list({id(holder): holder for holder in found}.values())


@dataclass(frozen=True, slots=True)
class _Attributes:
    """The attributes of one object, and what those of them that are containers hold (hooks, submodules, lists)."""

    holder: object
    attributes: dict[str, Any]
    contents: dict[str, Any]

    @classmethod
    def of(cls, holder: object) -> _Attributes:
        attributes = dict(vars(holder))
        plain = (dict, OrderedDict, defaultdict, list, set)
        contents = {name: copy.copy(value) for name, value in attributes.items() if type(value) in plain}
        return cls(holder, attributes, contents)

    def put_back(self) -> None:
        now = vars(self.holder)
        now.clear()
        now.update(self.attributes)
        for name, content in self.contents.items():
            container = self.attributes[name]
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)


@dataclass(frozen=True, slots=True)
class _Value:
    """What one tensor holds, and whether it is trained."""

    tensor: torch.Tensor
    content: torch.Tensor
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Value:
        return cls(tensor, tensor.detach().to("cpu", copy=True), tensor.requires_grad)

    def put_back(self) -> None:
        self.tensor.data.copy_(self.content)
        self.tensor.requires_grad_(self.requires_grad)


def _forget_compiled_code(accelerator: Any) -> None:
    """The shapes seen so far decide what is compiled next, and kernels for any shape may round differently."""
    if str(accelerator.state.dynamo_plugin.backend.value) != "NO":
        torch._dynamo.reset()
