"""Finds the gradients of a computation while its step is judged, and discards all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def gradients_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """
    Collects the gradients a model holds, also those that FSDP2 keeps beside the parameters until they are reduced:
    under `no_sync`, that is all of them.
    """
    return [gradient for _, gradient in named_gradients_of(model)]


def named_gradients_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, each with the name of its parameter."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        if parameter.grad is not None:
            yield name, parameter.grad
    for sharded in _sharded_parameters(model):
        unsharded = _unsharded(sharded)
        name = names.get(id(sharded.sharded_param)) or names.get(id(unsharded), "?")
        for gradient in (sharded.unsharded_accumulated_grad, getattr(unsharded, "grad", None)):
            if gradient is not None:
                yield name, gradient


def discard_gradients(model: torch.nn.Module) -> None:
    """Drops all gradients of a computation that is thrown away, finished or not."""
    model.zero_grad()
    for parameter in model.parameters():
        # Even where a model's own `zero_grad` only fills with zeros: with those AdamW would still move the weights.
        parameter.grad = None
    for root in _fsdp2_roots(model):
        # Puts the parameters back that a forward which raised has left gathered.
        root.reset_iter_state()
    # Neither `zero_grad` nor `reset_iter_state` (torch 2.13) drops what was accumulated under `no_sync`: without this
    # the next backward adds it to its own.
    for group in _parameter_groups(model):
        # Of HSDP, reduced within a replica and not yet across them.
        group._partial_reduce_output = None
    for sharded in _sharded_parameters(model):
        sharded.unsharded_accumulated_grad = None
        unsharded = _unsharded(sharded)
        if unsharded is not None:
            unsharded.grad = None


@contextlib.contextmanager
def without_reduction(model: torch.nn.Module) -> Iterator[None]:
    """Has each rank keep the gradients of an FSDP2 model that it computes to itself."""
    modules = _fsdp2_modules(model)
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


def is_sharded(model: torch.nn.Module) -> bool:
    """
    Whether weights of a model are spread over ranks (FSDP2, ZeRO-3, or while it was loaded), all of which then take
    part in each call of it.
    """
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    # What ZeRO-3 spreads has a number of DeepSpeed's.
    return any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters())


def is_fsdp2(model: torch.nn.Module) -> bool:
    """Whether it is FSDP2 that spreads them."""
    return bool(_fsdp2_modules(model))


def _unsharded(sharded: Any) -> torch.Tensor | None:
    """The gathered parameter, which exists from the first forward on."""
    unsharded: torch.Tensor | None = getattr(sharded, "_unsharded_param", None)
    return unsharded


def _sharded_parameters(model: torch.nn.Module) -> Iterator[Any]:
    """FSDP2's own records of the parameters: torch has no public way to the gradients they hold."""
    for group in _parameter_groups(model):
        yield from group.fsdp_params


def _parameter_groups(model: torch.nn.Module) -> Iterator[Any]:
    for module in _fsdp2_modules(model):
        state = module._get_fsdp_state()
        # Several groups per module from torch 2.13 on, one or none before.
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        yield from (group for group in groups if group is not None)


def _fsdp2_roots(model: torch.nn.Module) -> list[Any]:
    """The sharded modules that a forward has begun at, where torch (from 2.13 on) can have them begin again."""
    return [
        module
        for module in _fsdp2_modules(model)
        if hasattr(module, "reset_iter_state") and module._get_fsdp_state()._is_root
    ]


def reshard(model: torch.nn.Module) -> None:
    """
    Gives back weights that a forward without a backward (an evaluation) has left gathered under FSDP2: accelerate
    (1.15) has norm and head stay so.
    """
    for module in _fsdp2_modules(model):
        module.reshard()


def _fsdp2_modules(model: torch.nn.Module) -> list[Any]:
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
