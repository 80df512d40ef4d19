"""The statistic behind ZClip: which gradient norms stand out from the recent ones, and the norm to clip them to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..config.schema import ConfigurationError


# float32 ends at 3.4e38, so no real norm is larger. From 1e154 on the square of a norm is no finite double any more,
# and one such value would leave an infinite variance behind, in which nothing stands out again.
_LARGEST_NORM = 1e150


@dataclass(frozen=True, slots=True)
class ClipDecision:
    """Decision about one gradient norm."""

    limit: float | None = None
    z: float | None = None
    mean: float | None = None
    std: float | None = None


class ZClipStatistic:
    """Running mean and variance of the gradient norm, and the norm that an outlier is clipped to (ZClip)."""

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
        """Judges one gradient norm and takes what remains of it into the statistic."""
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
        """Takes up the state that [`ZClipStatistic.state_dict`] gave."""
        self._norms = list(state["norms"])
        self.mean, self.variance = state["mean"], state["variance"]


def _require(met: bool, name: str, value: object, allowed: str, default: object) -> None:
    if not met:
        raise ConfigurationError(
            f"`{name}` is {value!r}, but must be {allowed}. Please change it, or leave it out for the default, "
            f"{default!r}."
        )
