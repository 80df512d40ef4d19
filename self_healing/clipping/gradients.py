"""Gradients of plain and sharded parameters: their total norm, and scaling them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


Parameters = nn.Module | Iterable[Tensor]


@torch.no_grad()
def total_gradient_norm(parameters: Parameters) -> Tensor:
    """
    Returns the 2-norm of all gradients together, as a tensor without dimensions on the device of the first gradient.
    """
    groups = by_mesh(_gradients(parameters))
    if not groups:
        return torch.tensor(0.0)
    norms = [whole(get_total_norm(group)) for group in groups]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms]))


@torch.no_grad()
def scale_gradients(parameters: Parameters, factor: float) -> None:
    """Multiplies all gradients by a number, in place."""
    if not 0 <= factor < math.inf:
        raise ValueError(f"Gradients cannot be scaled by {factor}. Please give a finite factor that is at least 0.")
    if factor == 1:
        return
    for group in by_mesh(_gradients(parameters)):
        torch._foreach_mul_(group, factor)


def tensors_of(parameters: Parameters) -> list[Tensor]:
    """Lists the tensors of a model, or of an iterable, each once."""
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    if isinstance(parameters, Tensor):
        # It would pass as an iterable: of its rows, which have no gradients.
        return [parameters]
    # Each once: a tied weight that is listed twice has one gradient, not two.
    return list(dict.fromkeys(parameters))


def _gradients(parameters: Parameters) -> list[Tensor]:
    return [tensor.grad for tensor in tensors_of(parameters) if tensor.grad is not None]


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups tensors by device mesh, plain ones apart, because one operation cannot take both."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor, for which all ranks have to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
