"""`StepSignals`: loss, gradient norm and duration of one optimizer step, as plain floats."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSignals:
    """
    One optimizer step, read between the backward of its last micro-batch and `optimizer.step()`.

    Args:
        step (`int`):
            Number of optimizer steps finished before this one (the Trainer's `global_step`).
        loss (`float`):
            Sum of the micro-batch losses as the Trainer adds them up, in nats for language models.
        grad_norm (`float`, *optional*):
            Total gradient norm before clipping. `None` where the trainer computes none.
        seconds (`float`, *optional*, defaults to 0.0):
            Time from the first forward of the step to now.
    """

    step: int
    loss: float
    grad_norm: float | None = None
    seconds: float = 0.0

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and (self.grad_norm is None or math.isfinite(self.grad_norm))
