"""ZClip (https://arxiv.org/abs/2504.02507): clips a gradient by the norms usual in the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, overload

from torch import Tensor, nn

from ...config.healing_config import HealingConfig
from ...config.schema import ConfigurationError
from ...hf.objective import StepSignals
from ...hf.state import Parameters, scale_gradients, tensors_of, total_gradient_norm, whole
from ...system.files import KeepsState


# ---- zclip: a gradient whose norm stands out from the last ones is clipped as a whole ----


# float32 ends at 3.4e38, so no real norm is larger. From 1e154 on the square of a norm is no finite double any more,
# and one such value would leave an infinite variance behind, in which nothing stands out again.
_LARGEST_NORM = 1e150
# Least standard deviation, as a share of the mean.
_STD_FLOOR = 0.01
# First steps, which only fill the statistic (section 3 of the paper).
WARMUP_STEPS = 25


@dataclass(frozen=True, slots=True)
class ClipResult:
    """Result of [`ZClip`] for one step."""

    norm: float
    factor: float
    limit: float | None
    z: float | None
    mean: float | None
    std: float | None


class ZClip(KeepsState):
    """
    Clips a gradient whose norm stands out from those of the last steps (arXiv:2504.02507), in a training loop of your
    own.

    A norm whose z is above the threshold t is clipped to mean + t² / z standard deviations, and counts as that. Where
    nothing is clipped, no operation touches the gradients. A norm that is NaN or infinite leaves gradients and
    statistic as they are: the caller decides whether the step may be applied.

    Under DDP and FSDP every rank keeps its own statistic, and they stay equal, because every rank sees the norm of the
    whole gradient.

    Args:
        z_threshold (`float`, *optional*, defaults to 2.5):
            Standard deviations above the mean from which a norm is clipped.
        ema_decay (`float`, *optional*, defaults to 0.97):
            Weight of the past in the running mean and variance.
        warmup_steps (`int`, *optional*, defaults to 25):
            Steps that only fill the statistic.
        max_grad_norm (`float`, *optional*):
            Ceiling for the norm, also during warm-up. As in the published code, the statistic takes the norm from
            before the ceiling: the ceiling limits what is applied, not what counts as usual.

    Example:

    ```python
    zclip = ZClip(max_grad_norm=1.0)
    for batch in loader:
        model(**batch).loss.backward()
        zclip.update_and_clip(model)
        optimizer.step()
        optimizer.zero_grad()
    ```
    """

    _state = ("_norms", "mean", "variance", "clip_count")

    def __init__(
        self,
        z_threshold: float = 2.5,
        ema_decay: float = 0.97,
        warmup_steps: int = WARMUP_STEPS,
        max_grad_norm: float | None = None,
    ) -> None:
        _require(0 < z_threshold < math.inf, "z_threshold", z_threshold, "a finite number above 0")
        _require(0 < ema_decay < 1, "ema_decay", ema_decay, "above 0 and below 1")
        _require(warmup_steps >= 2, "warmup_steps", warmup_steps, "at least 2")
        if max_grad_norm is not None:
            _require(0 < max_grad_norm < math.inf, "max_grad_norm", max_grad_norm, "a finite number above 0")
        self.z_threshold = z_threshold
        self.ema_decay = ema_decay
        self.warmup_steps = warmup_steps
        self.max_grad_norm = max_grad_norm
        self.mean: float | None = None
        self.variance: float | None = None
        # Norms that stood out so far.
        self.clip_count = 0
        self._norms: list[float] = []

    def decide(self, grad_norm: float) -> ClipResult:
        """
        Takes the norm into the statistic and returns the factor for the gradients. Touches no gradient.

        Args:
            grad_norm (`float`):
                Total norm of the gradients before any clipping.
        """
        mean, std = self.mean, self.std
        z, limit = self.take_in(grad_norm)
        ceiling = self.max_grad_norm
        if ceiling is not None and ceiling < grad_norm < math.inf:
            limit = ceiling if limit is None else min(limit, ceiling)
        factor = 1.0 if limit is None else limit / grad_norm
        return ClipResult(grad_norm, factor, limit, z, mean, std)

    @property
    def std(self) -> float | None:
        """The standard deviation that the next norm will be judged by, floored; `None` during warm-up."""
        if self.mean is None or self.variance is None:
            return None
        return max(math.sqrt(self.variance), _STD_FLOOR * self.mean)

    def take_in(self, grad_norm: float) -> tuple[float | None, float | None]:
        """Takes what remains of a norm into the statistic; its z, and the limit if it is above."""
        mean, variance, z, limit = self.mean, self.variance, None, None
        if not 0 <= grad_norm <= _LARGEST_NORM:  # false for NaN
            return None, None
        if mean is None or variance is None:
            self._norms.append(grad_norm)
            if len(self._norms) >= self.warmup_steps:
                self.mean = mean = fmean(self._norms)
                self.variance = fmean((norm - mean) * (norm - mean) for norm in self._norms)
                self._norms = []
            return None, None
        std = max(math.sqrt(variance), _STD_FLOOR * mean)
        # Only norms of 0 so far: no scale to judge by, and clipping to 0 would keep it that way for ever.
        if std > 0:
            z = (grad_norm - mean) / std
            limit = mean + self.z_threshold * self.z_threshold / z * std if z > self.z_threshold else None
            self.clip_count += limit is not None
        # The mean first, then the variance around the new mean.
        taken = grad_norm if limit is None else limit
        self.mean = mean = self.ema_decay * mean + (1 - self.ema_decay) * taken
        self.variance = self.ema_decay * variance + (1 - self.ema_decay) * (taken - mean) * (taken - mean)
        return z, limit

    @overload
    def update_and_clip(self, parameters: float) -> float: ...
    @overload
    def update_and_clip(self, parameters: Parameters, grad_norm: float | Tensor | None = None) -> ClipResult: ...
    def update_and_clip(
        self, parameters: Parameters | float, grad_norm: float | Tensor | None = None
    ) -> ClipResult | float:
        """
        Takes the norm into the statistic and clips the gradients in place. Call it between `backward()` and `step()`.

        Args:
            parameters (`nn.Module`, iterable of `Tensor` or `float`):
                The parameters that are trained; of a norm by itself, no gradient is touched, and the norm to clip to
                is returned.
            grad_norm (`float` or `Tensor`, *optional*):
                Total norm of their gradients before any clipping, if it is known already. It is computed if left out.
                Either way it is read on the host, which waits for the device.
        """
        # A tensor without dimensions and without a gradient is what `clip_grad_norm_` returns.
        is_norm = isinstance(parameters, Tensor) and parameters.dim() == 0 and parameters.grad is None
        if is_norm or not isinstance(parameters, nn.Module | Iterable):
            decided = self.decide(float(parameters))  # type: ignore[arg-type]
            return decided.norm * decided.factor
        if grad_norm is None:
            if not isinstance(parameters, nn.Module):
                parameters = tensors_of(parameters)  # an iterator can be read only once
            grad_norm = total_gradient_norm(parameters)
        if isinstance(grad_norm, Tensor):
            grad_norm = float(whole(grad_norm))
        result = self.decide(grad_norm)
        scale_gradients(parameters, result.factor)
        return result

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Older states have no count.
        super().load_state_dict({"clip_count": 0, **state})


def _require(met: bool, name: str, value: object, allowed: str) -> None:
    if not met:
        raise ConfigurationError(
            f"`{name}` is {value!r}, but must be {allowed}. Please change it, or leave it out for the default."
        )


# ---- step clipping ----


class StepClipping(KeepsState):
    """Clips the gradient of a step by what is usual in the run, after the Trainer's own clipping."""

    _state = ("zclip",)

    def __init__(self, config: HealingConfig) -> None:
        self.config = config
        # In mode `"observe"` it is a statistic, and a step may be shown to it later.
        self.acts = config.zclip_mode == "clip"
        self._largest_z: float | None = None
        # Steps that were clipped, and would be, since it was last asked for; and that were, in all.
        self.clipped = self._would_clip = self.total = 0
        # A step that is done again, after an exception before its update, has the limit it had.
        self._step = -1
        self._limit: float | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets what norm was usual: that of other parameters."""
        self.zclip = ZClip(self.config.zclip_z_threshold, self.config.zclip_ema_decay)

    def take_in(self, signals: StepSignals, ceiling: float = math.inf) -> float:
        """
        Shows the statistic a step that is applied; the factor that clips its gradient, which the Trainer has clipped
        to the ceiling. One that it has seen already has the limit it had.
        """
        if not signals.grad_norm:
            return 1.0
        if signals.step != self._step:
            z, self._limit = self.zclip.take_in(signals.grad_norm)
            self._step = signals.step
            if z is not None:
                self._largest_z = z if self._largest_z is None else max(self._largest_z, z)
        norm = min(signals.grad_norm, ceiling)
        if self._limit is None or self._limit >= norm:
            return 1.0
        self._would_clip += 1
        return self._limit / norm

    def metrics(self) -> dict[str, float]:
        """
        What was seen since it was last asked for, where a step was clipped or would be: largest z, and how many steps.
        """
        found: dict[str, float] = {}
        if self._largest_z is not None and self._would_clip:
            found = {
                "healing/zclip_z": self._largest_z,
                "healing/zclip_clipped": float(self.clipped),
                "healing/zclip_would_clip": float(self._would_clip),
            }
        self._largest_z = None
        self.clipped = self._would_clip = 0
        return found
