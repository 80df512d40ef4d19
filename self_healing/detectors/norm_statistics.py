"""The statistic behind ZClip: which gradient norms stand out from the recent ones, and the norm to clip them to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..config import ConfigurationError


# float32 ends at 3.4e38, so no real norm is larger. From 1e154 on the square of a norm is no finite double any more,
# and one such value would leave an infinite variance behind, in which nothing stands out again.
_LARGEST_NORM = 1e150


@dataclass(frozen=True, slots=True)
class ClipDecision:
    """
    Decision about one gradient norm.

    Args:
        limit (`float` or `None`):
            Norm that the gradient is to be clipped to; below the norm that was observed. `None` if it is left alone.
        z (`float` or `None`):
            How many standard deviations the norm lies above the mean. `None` during warm-up, for a norm that is no
            finite number, and while all norms so far were 0.
        mean (`float` or `None`):
            The mean that the norm was judged by, as it was before this norm. `None` during warm-up.
        std (`float` or `None`):
            The standard deviation that the norm was judged by, floored. `None` during warm-up.
    """

    limit: float | None = None
    z: float | None = None
    mean: float | None = None
    std: float | None = None


class ZClipStatistic:
    """
    Running mean and variance of the gradient norm, and the norm that an outlier is clipped to (ZClip).

    From the paper (Kumar et al., "ZClip: Adaptive Spike Mitigation for LLM Pre-Training", arXiv:2504.02507) and its
    code (github.com/bluorion-com/ZClip): the first `warmup_steps` norms are collected; their mean μ and population
    variance σ² start the statistic. After that, a norm g has z = (g − μ) / σ. If z is above `z_threshold`, the
    gradient is clipped to g* = μ + (z_threshold² / z) · σ (the further out, the closer to the mean it is put back),
    otherwise g* = g.

    What comes out enters the statistic, with α = `ema_decay`: first μ ← α μ + (1 − α) g*, then, around the new mean,
    σ² ← α σ² + (1 − α) (g* − μ)².

    Ours, and neither in the paper nor in its code: a norm that is NaN, infinite, negative or above 1e150 never enters
    and is never clipped (the published code takes it, and its mean is NaN for good); σ has a floor relative to μ (the
    published code adds 1e-6 to σ when it computes z, whatever the scale of the norms); after a warm-up of nothing but
    zeros, which is normal in GRPO, the first other norm is taken as it is instead of being clipped to 0; the state
    can be saved. Not taken over: the alternatives to this g* (μ, and μ + z_threshold · σ), and from the published code
    its `clip_factor` and `skip_update_on_spike`, off by default there.

    Args:
        z_threshold (`float`, *optional*, defaults to 2.5):
            Standard deviations above the mean from which a norm is clipped. Above 0. The paper's value; on
            healthy fine-tuning curves it clips 4 to 7 % of the steps.
        ema_decay (`float`, *optional*, defaults to 0.97):
            Weight of the past in the running mean and variance: 0.97 remembers about 33 steps. Above 0, below 1. The
            paper's value.
        warmup_steps (`int`, *optional*, defaults to 25):
            Norms that are collected before the first is judged. At least 2. The paper's value.
        std_floor (`float`, *optional*, defaults to 0.01):
            Smallest standard deviation that is believed, as a share of the mean. Above 0. With 0.01 and the default
            threshold, a norm within 2.5 % of the mean is never clipped, however constant the others were. On
            healthy fine-tuning curves the norms scatter by 9 % of the mean and more.

    Raises:
        `ConfigurationError`: if a value is out of range.

    Example:

    ```python
    >>> statistic = ZClipStatistic(warmup_steps=4)
    >>> for norm in (1.0, 1.2, 0.8, 1.0):
    ...     decision = statistic.observe(norm)
    >>> round(statistic.observe(5.0).limit, 4)
    1.0312

    ```
    """

    def __init__(
        self,
        z_threshold: float = 2.5,
        ema_decay: float = 0.97,
        warmup_steps: int = 25,
        std_floor: float = 0.01,
    ) -> None:
        _require(0 < z_threshold < math.inf, "z_threshold", z_threshold, "a finite number above 0", 2.5)
        _require(0 < ema_decay < 1, "ema_decay", ema_decay, "above 0 and below 1", 0.97)
        _require(warmup_steps >= 2, "warmup_steps", warmup_steps, "at least 2", 25)
        _require(0 < std_floor < math.inf, "std_floor", std_floor, "a finite number above 0", 0.01)
        self.z_threshold = z_threshold
        self.ema_decay = ema_decay
        self.warmup_steps = warmup_steps
        self.std_floor = std_floor
        self.mean: float | None = None
        self.variance: float | None = None
        self._norms: list[float] = []

    def observe(self, grad_norm: float) -> ClipDecision:
        """
        Judges one gradient norm and takes what remains of it into the statistic.

        Args:
            grad_norm (`float`):
                Total norm of the gradients before any clipping.
        """
        if not 0 <= grad_norm <= _LARGEST_NORM:  # false for NaN
            return ClipDecision(mean=self.mean, std=self.std)
        if self.mean is None or self.variance is None:
            self._collect(grad_norm)
            return ClipDecision()

        mean, std = self.mean, self._floored_std(self.mean, self.variance)
        if std == 0:
            # Only norms of 0 so far: no scale to judge by, and clipping to 0 would keep it that way for ever.
            z = limit = None
        else:
            z = (grad_norm - mean) / std
            limit = mean + self.z_threshold * self.z_threshold / z * std if z > self.z_threshold else None
        # The mean first, then the variance around the new mean.
        taken = grad_norm if limit is None else limit
        self.mean = self.ema_decay * mean + (1 - self.ema_decay) * taken
        deviation = taken - self.mean
        self.variance = self.ema_decay * self.variance + (1 - self.ema_decay) * deviation * deviation
        return ClipDecision(limit, z, mean, std)

    @property
    def std(self) -> float | None:
        """The standard deviation that the next norm will be judged by, floored; `None` during warm-up."""
        if self.mean is None or self.variance is None:
            return None
        return self._floored_std(self.mean, self.variance)

    def _floored_std(self, mean: float, variance: float) -> float:
        return max(math.sqrt(variance), self.std_floor * mean)

    def _collect(self, grad_norm: float) -> None:
        self._norms.append(grad_norm)
        if len(self._norms) >= self.warmup_steps:
            mean = fmean(self._norms)
            self.mean, self.variance = mean, fmean((norm - mean) * (norm - mean) for norm in self._norms)
            self._norms = []

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, ready for JSON, which gives back exactly the same numbers."""
        return {"norms": list(self._norms), "mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Takes up the state that [`ZClipStatistic.state_dict`] gave.

        Args:
            state (`dict`):
                The state. The settings are not in it: they are those this object was made with.
        """
        self._norms = list(state["norms"])
        self.mean, self.variance = state["mean"], state["variance"]


def _require(met: bool, name: str, value: object, allowed: str, default: object) -> None:
    if not met:
        raise ConfigurationError(
            f"`{name}` is {value!r}, but must be {allowed}. Please change it, or leave it out for the default, "
            f"{default!r}."
        )
