"""ZClip: a gradient whose norm stands out from the last ones is clipped as a whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...config.schema import ConfigurationError
from ...detectors.norm_statistics import ZClipStatistic
from ...hf.state import Parameters, scale_gradients, tensors_of, total_gradient_norm, whole


@dataclass(frozen=True, slots=True)
class ClipResult:
    """Result of [`ZClip`] for one step."""

    norm: float
    factor: float
    limit: float | None
    z: float | None
    mean: float | None
    std: float | None


class ZClip:
    """
    Clips a gradient whose norm stands out from those of the last steps (arXiv:2504.02507), in a training loop of your
    own.

    [`ZClipStatistic`] says which norms stand out, what they are clipped to, and how much of this is the paper's. Where
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

    def __init__(
        self,
        z_threshold: float = 2.5,
        ema_decay: float = 0.97,
        warmup_steps: int = 25,
        max_grad_norm: float | None = None,
    ) -> None:
        if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
            raise ConfigurationError(
                f"`max_grad_norm` is {max_grad_norm!r}, but must be a finite number above 0. Please change it, or "
                "leave it out for no ceiling."
            )
        self.statistic = ZClipStatistic(z_threshold, ema_decay, warmup_steps)
        self.max_grad_norm = max_grad_norm

    def decide(self, grad_norm: float) -> ClipResult:
        """
        Takes the norm into the statistic and returns the factor for the gradients. Touches no gradient.

        Args:
            grad_norm (`float`):
                Total norm of the gradients before any clipping.
        """
        decision = self.statistic.observe(grad_norm)
        limit, ceiling = decision.limit, self.max_grad_norm
        if ceiling is not None and ceiling < grad_norm < math.inf:
            limit = ceiling if limit is None else min(limit, ceiling)
        factor = 1.0 if limit is None else limit / grad_norm
        return ClipResult(grad_norm, factor, limit, decision.z, decision.mean, decision.std)

    def update_and_clip(self, parameters: Parameters, grad_norm: float | Tensor | None = None) -> ClipResult:
        """
        Takes the norm into the statistic and clips the gradients in place. Call it between `backward()` and `step()`.

        Args:
            parameters (`nn.Module` or iterable of `Tensor`):
                The parameters that are trained.
            grad_norm (`float` or `Tensor`, *optional*):
                Total norm of their gradients before any clipping, if it is known already. It is computed if left out.
                Either way it is read on the host, which waits for the device.
        """
        if grad_norm is None:
            if not isinstance(parameters, nn.Module):
                parameters = tensors_of(parameters)  # an iterator can be read only once
            grad_norm = total_gradient_norm(parameters)
        if isinstance(grad_norm, Tensor):
            grad_norm = float(whole(grad_norm))
        result = self.decide(grad_norm)
        scale_gradients(parameters, result.factor)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the statistic, ready for JSON."""
        return self.statistic.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Takes up the state that [`ZClip.state_dict`] gave.

        Args:
            state (`dict`):
                The state. The settings are not in it: they are those this object was made with.
        """
        self.statistic.load_state_dict(state)
