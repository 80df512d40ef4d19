"""AdaGC: the gradient of each tensor is clipped by its own recent norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config import ConfigurationError
from .gradients import Parameters, by_mesh, tensors_of, whole


@dataclass(frozen=True, slots=True)
class TensorClipResult:
    """
    Result of [`AdaGC`] for one step; on the device, so that nothing waits for it.

    Args:
        names (`Sequence[str]`):
            The parameters, in the order of the tensors below; their positions if they came without names.
        norms (`Tensor`):
            Norm of the gradient of each before clipping, 0 where there is none. Of shape `(len(names),)`.
        factors (`Tensor`):
            Factor the gradient of each was multiplied by; 1 if it was left as it is. Of shape `(len(names),)`.
    """

    names: Sequence[str]
    norms: Tensor
    factors: Tensor


@dataclass(slots=True)
class _Tracked:
    """The state of [`AdaGC`] for the parameters of the last step, on the device."""

    names: list[str]
    gamma: Tensor  # (n,), infinite where no norm was seen yet
    floor: Tensor  # (n,)
    steps: Tensor  # (), a tensor because only the device knows which steps were finite


class AdaGC:
    """
    Clips the gradient of each parameter tensor to a multiple of its own recent norm (arXiv:2502.11034), in a training
    loop of your own.

    From the paper (Wang et al., "AdaGC: Enhancing LLM Pretraining Stability via Adaptive Gradient Clipping", ICML
    2026), for the gradient g of tensor i at step t. Checked against the authors' README (PaddlePaddle/PaddleFleet,
    Research/AdaGC), and for the minimum of the warm-up and for all constants, which the README does not give, against
    the implementation of pytorch-optimizer (kozistr/pytorch_optimizer):

    - in the first `warmup_steps` steps, all gradients are clipped together: h = min(1, λ_abs / ‖g_t‖), with the norm
      over all tensors, and γ_{t,i} = min(γ_{t-1,i}, ‖h g_{t,i}‖) keeps the smallest clipped norm seen;
    - after that, each by itself: h_i = min(1, λ_rel γ_{t-1,i} / ‖g_{t,i}‖), and
      γ_{t,i} = β γ_{t-1,i} + (1 − β) ‖h_i g_{t,i}‖.

    γ takes in what comes out, so that it grows by (1 − β)(λ_rel − 1) a step at most: 0.1 % with the defaults,
    e-fold in 1,000 steps. A γ that has become too small therefore stays so, and our additions are against that:

    - A gradient of exactly 0 says nothing about the usual norm and does not enter γ (an expert without tokens, a
      parameter that is not used yet). A tensor whose gradients were 0 all through the warm-up is held to λ_abs by its
      first other one, which then starts γ.
    - γ is never below `gamma_floor` · λ_abs · √(share of the tensor in all elements), that is, `gamma_floor` times the
      norm it would have if a gradient of norm λ_abs were spread evenly over all parameters.
    - A step whose total norm is NaN or infinite leaves gradients, γ and the count of the warm-up as they are.

    All of it is done on the device without a branch: the host waits for nothing, and the state is one tensor.

    Not for LoRA: B starts at 0, so the gradients of A are exactly 0 in the first step and small for many after it,
    while AdaGC takes the smallest for the usual one and holds A down. Please use [`ZClip`] there.

    Args:
        beta (`float`, *optional*, defaults to 0.98):
            β, the weight of the past in γ. At least 0, below 1. As in pytorch-optimizer.
        relative_threshold (`float`, *optional*, defaults to 1.05):
            λ_rel, the multiple of γ that a gradient's norm is clipped to. At least 1. As in
            pytorch-optimizer.
        absolute_threshold (`float`, *optional*, defaults to 1.0):
            λ_abs, the total norm that is clipped to during warm-up. Above 0. As in pytorch-optimizer.
        warmup_steps (`int`, *optional*, defaults to 100):
            Steps with global clipping, at least 1. As in pytorch-optimizer, which has one less.
        gamma_floor (`float`, *optional*, defaults to 1e-4):
            Smallest γ, as a share of the even one. Above 0. Ours: in the model of `benchmarks/zclip.py` the smallest γ
            is 150 times as large.
    """

    def __init__(
        self,
        beta: float = 0.98,
        relative_threshold: float = 1.05,
        absolute_threshold: float = 1.0,
        warmup_steps: int = 100,
        gamma_floor: float = 1e-4,
    ) -> None:
        for met, name, value, allowed in (
            (0 <= beta < 1, "beta", beta, "at least 0 and below 1"),
            (1 <= relative_threshold < math.inf, "relative_threshold", relative_threshold, "finite and at least 1"),
            (0 < absolute_threshold < math.inf, "absolute_threshold", absolute_threshold, "finite and above 0"),
            (warmup_steps >= 1, "warmup_steps", warmup_steps, "at least 1"),
            (0 < gamma_floor < math.inf, "gamma_floor", gamma_floor, "finite and above 0"),
        ):
            if not met:
                raise ConfigurationError(
                    f"`{name}` is {value!r}, but must be {allowed}. Please change it, or leave it out for the default."
                )
        self.beta = beta
        self.relative_threshold = relative_threshold
        self.absolute_threshold = absolute_threshold
        self.warmup_steps = warmup_steps
        self.gamma_floor = gamma_floor
        self._tracked: _Tracked | None = None
        self._loaded: dict[str, Any] = {"steps": 0, "gamma": {}}  # until the parameters are there

    @staticmethod
    def refuse_lora(parameters: Parameters) -> None:
        """
        Raises an error for a model that trains LoRA weights; call it before a run to fail early.

        Args:
            parameters (`nn.Module` or iterable of `Tensor`):
                The model. Tensors alone have no names to tell by, and always pass.

        Raises:
            `ConfigurationError`: if a parameter that is trained has `lora_` in its name.
        """
        for name in _named(parameters):
            if "lora_" in name:
                raise ConfigurationError(
                    f"AdaGC cannot clip a LoRA model (it trains `{name}`): LoRA's B starts at 0, so the gradients of "
                    "A are 0 at the first step, and AdaGC would hold A down for thousands of steps. Please use ZClip."
                )

    @torch.no_grad()
    def update_and_clip(self, parameters: Parameters) -> TensorClipResult:
        """
        Clips the gradients in place and updates γ. Call it between `backward()` and `step()`.

        Args:
            parameters (`nn.Module` or iterable of `Tensor`):
                The parameters that are trained: the same, or a model with the same names, at every step.

        Raises:
            `ConfigurationError`: if it is a LoRA model, see [`AdaGC.refuse_lora`].
        """
        named = _named(parameters)
        if self._tracked is None or list(named) != self._tracked.names:
            self.refuse_lora(parameters)
            self._tracked = self._track(named)
        tracked = self._tracked
        gradients = [tensor.grad for tensor in named.values()]
        norms = _norms(gradients, tracked.gamma)  # (n,)

        total = torch.linalg.vector_norm(norms)
        counts = total.isfinite() & (norms > 0)
        warming = tracked.steps < self.warmup_steps
        seen = tracked.gamma.isfinite()
        limits = torch.where(seen, self.relative_threshold * tracked.gamma, self.absolute_threshold)
        factors = torch.where(warming, self.absolute_threshold / total, limits / norms).clamp(max=1)
        factors = torch.where(counts, factors, 1)

        clipped = norms * factors
        smallest = torch.minimum(tracked.gamma, clipped)
        average = torch.where(seen, self.beta * tracked.gamma + (1 - self.beta) * clipped, clipped)
        gamma = torch.maximum(torch.where(warming, smallest, average), tracked.floor)
        tracked.gamma = torch.where(counts, gamma, tracked.gamma)
        tracked.steps = tracked.steps + total.isfinite()

        for gradient, factor in zip(gradients, factors.unbind(), strict=True):
            if gradient is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local.mul_(factor.to(local.device))
        return TensorClipResult(tracked.names, norms, factors)

    def _track(self, named: dict[str, Tensor]) -> _Tracked:
        """Makes the state for these parameters; those it has not seen before start without a γ."""
        state = self.state_dict()
        tensors = list(named.values())
        # Norms of half-precision gradients are taken in float32.
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        device = tensors[0].device if tensors else torch.device("cpu")
        known = {name: gamma for name, gamma in state["gamma"].items() if gamma is not None}
        elements = max(1, sum(tensor.numel() for tensor in tensors))
        lowest = [
            self.gamma_floor * self.absolute_threshold * math.sqrt(tensor.numel() / elements) for tensor in tensors
        ]
        return _Tracked(
            names=list(named),
            gamma=torch.tensor([known.get(name, math.inf) for name in named], dtype=dtype, device=device),
            floor=torch.tensor(lowest, dtype=dtype, device=device),
            steps=torch.tensor(state["steps"], device=device),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, ready for JSON: the steps so far, and γ by name. Waits for the device."""
        if self._tracked is None:
            return self._loaded
        gamma = [value if math.isfinite(value) else None for value in self._tracked.gamma.tolist()]
        return {"steps": int(self._tracked.steps), "gamma": dict(zip(self._tracked.names, gamma, strict=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Takes up the state that [`AdaGC.state_dict`] gave.

        Args:
            state (`dict`):
                The state. The settings are not in it: they are those this object was made with. Parameters are found
                by name, or by position if they came without names.
        """
        self._loaded = {"steps": state["steps"], "gamma": dict(state["gamma"])}
        self._tracked = None


def _named(parameters: Parameters) -> dict[str, Tensor]:
    """Returns the tensors that are trained by name, or by position where they have none."""
    if isinstance(parameters, nn.Module):
        return {name: tensor for name, tensor in parameters.named_parameters() if tensor.requires_grad}
    return {str(position): tensor for position, tensor in enumerate(tensors_of(parameters))}


def _norms(gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Computes the norm of each gradient, 0 where there is none, in the type and on the device of `like`."""
    norms = [like.new_zeros(())] * len(gradients)
    positions = {id(gradient): position for position, gradient in enumerate(gradients)}
    for group in by_mesh(gradient for gradient in gradients if gradient is not None):
        # Stacked first: for sharded gradients that is one collective for all of them instead of one for each.
        stacked = whole(torch.stack([norm.to(like) for norm in torch._foreach_norm(group, 2, like.dtype)]))
        for gradient, norm in zip(group, stacked.unbind(), strict=True):
            norms[positions[id(gradient)]] = norm
    return torch.stack(norms) if norms else like.new_zeros(0)
