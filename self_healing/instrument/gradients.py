"""Finds the gradients of a computation while its step is judged, and discards all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def gradients_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """
    Collects the gradients a model holds, also those that FSDP2 keeps beside the parameters until they are reduced:
    under `no_sync`, that is all of them.
    """
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for sharded in _sharded_parameters(model):
        held = (sharded.unsharded_accumulated_grad, getattr(_unsharded(sharded), "grad", None))
        found.extend(gradient for gradient in held if gradient is not None)
    return found


def discard_gradients(model: torch.nn.Module) -> None:
    """
    Drops all gradients of a computation that is thrown away, finished or not. None of them reaches a later update.

    Args:
        model (`torch.nn.Module`):
            The model that is trained.
    """
    model.zero_grad()
    for parameter in model.parameters():
        # Even where a model's own `zero_grad` only fills with zeros: with those AdamW would still move the weights.
        parameter.grad = None
    for root in _fsdp2_roots(model):
        # Puts the parameters back that a forward which raised has left gathered.
        root.reset_iter_state()
    # Neither `zero_grad` nor `reset_iter_state` (torch 2.13) drops what was accumulated under `no_sync`: without this
    # the next backward adds it to its own.
    for sharded in _sharded_parameters(model):
        sharded.unsharded_accumulated_grad = None
        unsharded = _unsharded(sharded)
        if unsharded is not None:
            unsharded.grad = None


def _unsharded(sharded: Any) -> torch.Tensor | None:
    """The gathered parameter, which exists from the first forward on."""
    unsharded: torch.Tensor | None = getattr(sharded, "_unsharded_param", None)
    return unsharded


def _sharded_parameters(model: torch.nn.Module) -> Iterator[Any]:
    """FSDP2's own records of the parameters: torch has no public way to the gradients they hold."""
    for module in _fsdp2_modules(model):
        state = module._get_fsdp_state()
        # Several groups per module from torch 2.13 on, one or none before.
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in groups:
            yield from () if group is None else group.fsdp_params


def _fsdp2_roots(model: torch.nn.Module) -> list[Any]:
    """The sharded modules that a forward has begun at, where torch (from 2.13 on) can have them begin again."""
    return [
        module
        for module in _fsdp2_modules(model)
        if hasattr(module, "reset_iter_state") and module._get_fsdp_state()._is_root
    ]


def _fsdp2_modules(model: torch.nn.Module) -> list[Any]:
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
