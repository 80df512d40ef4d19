"""Collects the tensors that training changes, which a snapshot has to hold, and loads a checkpoint into them."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

from ..extents import Search, extent_of
from ..instrument.gradients import reshard
from .deepspeed import Partitioning, Zero, own_part, zero_of


@dataclass(frozen=True, slots=True)
class LiveState:
    """The tensors of one trainer, as they are now."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer | None
    scaler: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    loss_scaler: dict[str, Any] = field(default_factory=dict)
    partitioning: Partitioning | None = None

    @property
    def updated(self) -> list[Any]:
        """What the optimizer updates, in its order."""
        if self.partitioning is not None:
            # With ZeRO-3 its groups have parameters in its step alone.
            return list(self.partitioning.masters)
        groups = getattr(self.optimizer, "param_groups", ())
        return [parameter for group in groups for parameter in group["params"]]


def live_state_of(trainer: Any) -> LiveState:
    """Collects the tensors that training changes in a trainer. Between two computations, on all ranks alike."""
    reshard(trainer.model)
    optimizer, zero = innermost(trainer.optimizer), zero_of(trainer)
    optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    changing: dict[int, tuple[str, torch.Tensor]] = {}
    for name, parameter in _changing(trainer, optimizer, zero):
        changing.setdefault(id(parameter), (name, parameter))
    frozen = {
        name: local(parameter) if (part := own_part(parameter)) is None else part
        for name, parameter in trainer.model.named_parameters()
        if id(parameter) not in changing and not parameter.requires_grad and not parameter.is_meta
    }
    inside = {name: getattr(trainer.accelerator.scaler, name, None) for name in ("_scale", "_growth_tracker")}
    return LiveState(
        {name: local(parameter) for name, parameter in changing.values() if not parameter.is_meta},
        {name: local(buffer) for name, buffer in trainer.model.named_buffers() if not buffer.is_meta},
        optimizer,
        {name: value for name, value in inside.items() if isinstance(value, torch.Tensor)},
        frozen,
        {} if zero is None else zero.loss_scaler(),
        None if zero is None else zero.partitioning(),
    )


def _changing(
    trainer: Any, optimizer: torch.optim.Optimizer | None, zero: Zero | None
) -> Iterator[tuple[str, torch.Tensor]]:
    if zero is not None:
        # The parameters of the model are views of these, or are gathered from them.
        yield from zero.partitions().items()
        yield from _of_following_reference(trainer)
        return
    yield from trained_tensors(trainer)
    # A loss with parameters of its own is trained beside the model.
    for group, entry in enumerate(getattr(optimizer, "param_groups", ())):
        for index, parameter in enumerate(entry["params"]):
            yield f"group {group}, parameter {index}", parameter


def trained_tensors(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of the model that are trained, and of a reference model that follows it; whole, if sharded."""
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad and not parameter.is_meta:
            yield name, parameter
    yield from _of_following_reference(trainer)


def _of_following_reference(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    reference = getattr(trainer, "ref_model", None)
    if isinstance(reference, torch.nn.Module) and getattr(trainer.args, "sync_ref_model", False):
        # It follows the model, so what went into the model went into it.
        yield from ((f"ref_model.{name}", parameter) for name, parameter in reference.named_parameters())


def offloaded_tensors(model: torch.nn.Module) -> list[str]:
    """
    Names parameters and buffers that lie on no device while nothing is computed: accelerate keeps what they hold
    elsewhere, and brings it for each call. They can be neither searched nor kept.
    """
    return [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]


def nonfinite_tensors(
    model: torch.nn.Module, optimizer: Any, partitions: Mapping[str, torch.Tensor] | None = None
) -> list[str]:
    """Names what is not finite in all that a checkpoint holds of a model and its optimizer."""
    search = Search()
    for name, partition in (partitions or {}).items():
        search.add(name, partition, inf=True)
    for name, parameter in model.named_parameters():
        search.add(name, parameter, inf=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        # A causal mask kept as a buffer or a frozen parameter holds -inf on purpose: there only NaN is wrong.
        search.add(name, buffer, inf=False)
    names = {id(each): name for name, each in (*model.named_parameters(), *(partitions or {}).items())}
    for index, group in enumerate(getattr(optimizer, "param_groups", ())):
        for number, parameter in enumerate(group["params"]):
            # A loss with parameters of its own is trained beside the model.
            name = names.setdefault(id(parameter), f"group {index}, parameter {number}")
            if name.startswith("group "):
                search.add(name, parameter, inf=True)
        settings = {name: value for name, value in group.items() if name != "params"}
        _search_in(search, f"optimizer:group {index}", settings, inf=False)
    for parameter, state in getattr(optimizer, "state", {}).items():
        _search_in(search, f"optimizer:{names.get(id(parameter), '?')}", state, inf=True)
    return search.nonfinite()


def _search_in(search: Search, name: str, value: Any, inf: bool) -> None:
    """Looks for NaN and Inf in nested values."""
    if isinstance(value, (torch.Tensor, float)):
        search.add(name, value, inf)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _search_in(search, f"{name}.{key}", inner, inf)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _search_in(search, f"{name}[{index}]", inner, inf)


def nonfinite_copies(trainer: Any) -> dict[str, dict[str, int]]:
    """Finds copies of the weights beside the model that are not finite: by who keeps them as what, with numbers."""
    callbacks, model = trainer.callback_handler.callbacks, trainer.model
    own = [*model.parameters(), *model.buffers(), *(each for _, each in _of_following_reference(trainer))]
    flat = torch.Size([sum(each.numel() for each in own if each.requires_grad)])
    shapes, found = {flat: True}, dict[str, dict[str, int]]()
    for each in sorted(own, key=lambda each: each.requires_grad):
        alike = (each.shape, local(each).shape, getattr(each, "ds_shape", each.shape))
        shapes |= dict.fromkeys(alike, each.requires_grad)
    apart = (trainer, model, trainer.model_wrapped, innermost(trainer.optimizer), *own, *callbacks)
    seen = {id(each): each for each in apart}
    for keeper, name in [(each, name) for each in (*callbacks, trainer) for name in vars(each)]:
        # Whatever it is, it may refuse to be looked at.
        with contextlib.suppress(Exception):
            kept, search = [each for each in _tensors_in(vars(keeper)[name], seen) if each.shape in shapes], Search()
            # Vectors alone may be anything: a history that is filled by and by.
            if any(each.dim() > 1 or each.shape == flat for each in kept):
                for number, each in enumerate(kept):
                    search.add(str(number), each, inf=shapes[each.shape])
            extents = [extent_of(kept[int(number)]) for number in search.nonfinite()]
            # Inf is meant in a mask, which has nothing above 0, and where there is one value only.
            if bad := [each for each in extents if each and not (each.high <= 0 or each.low == each.high)]:
                found[f"NaN/Inf in {type(keeper).__name__}.{name}"] = {"copied": len(kept), "not_finite": len(bad)}
    return found


def _tensors_in(value: Any, seen: dict[int, Any], most: int = 100_000) -> Iterator[torch.Tensor]:
    """Yields the tensors among so many values nested in one, of whatever kind, the nearest first; runs none's code."""
    found = [value]
    for each in found:
        if id(each) not in seen and not isinstance(each, (type, ModuleType, FunctionType, FrameType)):
            seen[id(each)] = each
            if isinstance(each, torch.Tensor):
                yield each
            elif type(each).__module__.split(".")[0] not in ("self_healing", "accelerate", "datasets"):
                found += gc.get_referents(each)[: most - len(found)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Gives this rank's part of a sharded tensor; any other one detached."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor.detach()


def innermost(optimizer: Any) -> Any:
    """The torch optimizer inside accelerate's wrapper, and DeepSpeed's."""
    while hasattr(getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = optimizer.optimizer
    return optimizer


def beta2_of(optimizer: Any) -> float | None:
    """Decay of the second moments; `None` for an optimizer without."""
    groups = getattr(innermost(optimizer), "param_groups", [])
    betas = groups[0].get("betas") if groups else None
    return float(betas[1]) if isinstance(betas, (tuple, list)) and len(betas) > 1 else None


def optimizer_in_training_mode(trainer: Any) -> None:
    """Switches a schedule-free optimizer, which keeps other weights for evaluation, to those that are trained."""
    switch = getattr(trainer.optimizer, "train", None)
    if switch is not None:
        switch()


def reset_moments(trainer: Any) -> bool:
    """Clears the optimizer's state, so that it begins as in the first step."""
    optimizer = innermost(trainer.optimizer)
    known = type(optimizer).__module__.split(".")[0] in ("torch", "transformers", "bitsandbytes", "torchao")
    if not known or isinstance(optimizer, torch.optim.Adagrad):
        return False
    optimizer.state.clear()
    return True


def reload_checkpoint(trainer: Any, checkpoint: str) -> None:
    """Puts weights, optimizer state and scaler of a checkpoint into a trainer in the middle of a run."""
    schedule = copy.deepcopy(trainer.lr_scheduler.state_dict())
    groups = trainer.optimizer.param_groups
    rates = [{name: group[name] for name in ("lr", "initial_lr") if name in group} for group in groups]
    reshard(trainer.model)
    zero = zero_of(trainer)
    if zero is None:
        trainer._load_from_checkpoint(checkpoint, model=trainer.model)
    else:
        zero.load(checkpoint, strict=not hasattr(trainer.model, "peft_config"))
    trainer._load_optimizer_and_scheduler(checkpoint)
    if trainer.accelerator.scaler is not None:
        trainer._load_scaler(checkpoint)
    trainer.lr_scheduler.load_state_dict(schedule)
    for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
        group.update(rate)
