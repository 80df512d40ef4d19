"""Simulates kernels that are not bitwise repeatable: what atomic sums and changing tile shapes do on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class KernelNoise:
    """
    Multiplies what it is given by `1 + eps * noise`, drawn from a generator of its own: neither seeding nor restoring
    the random states of torch makes it repeat.

    Args:
        eps: The relative standard deviation of one element.
        seed: Of the generator.
    """

    def __init__(self, eps: float, seed: int = 0) -> None:
        self.eps = eps
        self.forwards = 0
        self.backwards = 0
        self._generator = torch.Generator().manual_seed(seed)

    def disturb(self, values: torch.Tensor) -> torch.Tensor:
        # As a kernel accumulates: in single precision at least, and rounded to what it gives back.
        precise = torch.promote_types(values.dtype, torch.float32)
        noise = torch.randn(values.shape, generator=self._generator, dtype=precise)
        return (values * noise.mul_(self.eps).add_(1).to(values.device)).to(values.dtype)

    def hook(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        # `apply` is not typed in torch.
        disturbed: torch.Tensor = _Disturbed.apply(output, self)  # type: ignore[no-untyped-call]
        return disturbed


class _Disturbed(torch.autograd.Function):
    """Saves nothing for the backward, so that gradient checkpointing recomputes the same set of tensors."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, noise: KernelNoise) -> torch.Tensor:
        ctx.noise = noise
        return noise.disturb(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.noise.backwards += 1
        return ctx.noise.disturb(gradients[0]), None


@contextmanager
def kernel_noise(model: nn.Module, eps: float, seed: int = 0) -> Iterator[KernelNoise]:
    """
    Makes one model's MLPs unrepeatable, forward and backward, for the time of the block.

    Args:
        model: Any model whose MLP modules are called `mlp`; adapters around it may be in place already.
        eps: The relative standard deviation of one element. A `bfloat16` keeps what exceeds half of its last place,
            2e-3 to 4e-3 of a value: with an eps of 1e-3 one element in a hundred changes.
        seed: Of the noise.

    Yields:
        The noise, which counts how often it was applied.
    """
    layers = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "mlp"]
    assert layers, f"no module of {type(model).__name__} is called mlp"
    noise = KernelNoise(eps, seed)
    handles = [layer.register_forward_hook(noise.hook) for layer in layers]
    try:
        yield noise
    finally:
        for handle in handles:
            handle.remove()
