"""ZClip on a trainer's steps: the statistic of the run, what is done with it, and what is logged of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.healing_config import HealingConfig
from ..healers.numerics.clipping import ZClip
from ..hf.objective import StepSignals
from ..hf.step import Window


class StepClipping:
    """Clips the gradient of a step by what is usual in the run, after the Trainer's own clipping."""

    def __init__(self, config: HealingConfig) -> None:
        self.config = config
        self._largest_z: float | None = None
        self._clipped = self._would_clip = 0
        # A step that is done again, after an exception before its update, has the limit it had.
        self._step = -1
        self._limit: float | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets what norm was usual: that of other parameters."""
        config = self.config
        self._zclip = ZClip(config.zclip_z, config.zclip_decay, config.zclip_warmup_steps)

    def apply(self, window: Window, signals: StepSignals, ceiling: float, may_clip: bool = True) -> None:
        """Takes in a step that is about to be applied, and clips its gradient in mode `"clip"`."""
        if not signals.grad_norm:
            return
        self.take_in(signals)
        norm = min(signals.grad_norm, ceiling)
        if self._limit is not None and self._limit < norm:
            self._would_clip += 1
            if self.config.zclip_mode == "clip" and may_clip:
                self._clipped += 1
                window.scale_gradients(self._limit / norm)

    def take_in(self, signals: StepSignals) -> None:
        """Shows the statistic a step; one that it has seen already has the limit it had."""
        if not signals.grad_norm or signals.step == self._step:
            return
        result = self._zclip.decide(signals.grad_norm)
        self._step, self._limit = signals.step, result.limit
        if result.z is not None:
            self._largest_z = result.z if self._largest_z is None else max(self._largest_z, result.z)

    def metrics(self) -> dict[str, float]:
        """What was seen since it was last asked for: largest z, and how many steps were clipped, and would be."""
        if not self.config.healing_metrics:
            return {}
        found: dict[str, float] = {}
        if self._largest_z is not None:
            found = {
                "healing/zclip_z": self._largest_z,
                "healing/zclip_clipped": float(self._clipped),
                "healing/zclip_would_clip": float(self._would_clip),
            }
        self._largest_z = None
        self._clipped = self._would_clip = 0
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"zclip": self._zclip.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._zclip.load_state_dict(state["zclip"])
