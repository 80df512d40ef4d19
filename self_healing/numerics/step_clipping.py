"""Adaptive clipping of a trainer's steps: the statistic of the run, what is done with it, and what is logged of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..clipping import AdaGC, TensorClipResult, ZClip
from ..config import ConfigurationError, HealingConfig
from ..instrument import Window
from ..signals import StepSignals


class StepClipping:
    """
    Clips the gradient of a step by what is usual in the run, after the Trainer's own clipping.

    The statistic sees the norm from before any clipping, as the Trainer has computed it; `max_grad_norm` stays in
    force as the ceiling. A step whose gradient is exactly 0 (GRPO with equal rewards) says nothing about the usual.

    Args:
        config ([`HealingConfig`]):
            Mode, algorithm and thresholds.
        model (`nn.Module`):
            The model that is trained.
        in_partitions (`bool`, *optional*, defaults to `False`):
            Whether gradients lie in partitions, and in no parameter, as under DeepSpeed.

    Raises:
        `ConfigurationError`: if AdaGC is asked for, and the model is a LoRA model, or has its gradients in partitions.
    """

    def __init__(self, config: HealingConfig, model: nn.Module, in_partitions: bool = False) -> None:
        self.config = config
        self._model = model
        self._zclip: ZClip | None = None
        self._adagc: AdaGC | None = None
        self._largest_z: float | None = None
        self._clipped = self._would_clip = 0
        # A step that is done again, after an exception before its update, has the limit it had.
        self._step = -1
        self._limit: float | None = None
        self._last: TensorClipResult | None = None
        if config.zclip_mode == "off":
            return
        if config.clip_algorithm == "adagc":
            if in_partitions:
                raise ConfigurationError(
                    "clip_algorithm is 'adagc', which clips the gradient of each parameter, and DeepSpeed has them in "
                    "partitions. Please use clip_algorithm='zclip', or zclip_mode='off'."
                )
            AdaGC.refuse_lora(model)
            self._adagc = AdaGC()
        else:
            self._zclip = self._new_zclip()

    def _new_zclip(self) -> ZClip:
        config = self.config
        return ZClip(config.zclip_z, config.zclip_decay, config.zclip_warmup_steps, variant=config.zclip_variant)

    def reset(self) -> None:
        """Forgets what norm was usual: that of other parameters. AdaGC has a norm for each tensor."""
        if self._zclip is not None:
            self._zclip = self._new_zclip()

    def apply(self, window: Window, signals: StepSignals, ceiling: float, may_clip: bool = True) -> None:
        """
        Takes in a step that is about to be applied, and clips its gradient in mode `"clip"`.

        Args:
            window ([`Window`]):
                The step.
            signals ([`StepSignals`]):
                What it looks like.
            ceiling (`float`):
                What the gradient has been clipped to already; infinite if it has not.
            may_clip (`bool`, *optional*, defaults to `True`):
                Whether the gradients are there to be clipped: DeepSpeed and the like keep theirs.
        """
        if self._adagc is not None and may_clip:
            self._last = self._adagc.update_and_clip(self._model)
            window.cannot_be_repeated()
        if self._zclip is None or not signals.grad_norm:
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
        if self._zclip is not None and signals.grad_norm and signals.step != self._step:
            self._step, self._limit = signals.step, self._take_in(self._zclip, signals.grad_norm)

    def _take_in(self, zclip: ZClip, grad_norm: float) -> float | None:
        result = zclip.decide(grad_norm)
        if result.z is not None:
            self._largest_z = result.z if self._largest_z is None else max(self._largest_z, result.z)
        return result.limit

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
        if self._last is not None:
            found["healing/adagc_clipped_tensors"] = float((self._last.factors < 1).sum())
        self._largest_z, self._last = None, None
        self._clipped = self._would_clip = 0
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "zclip": None if self._zclip is None else self._zclip.state_dict(),
            "adagc": None if self._adagc is None else self._adagc.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._zclip is not None and state["zclip"] is not None:
            self._zclip.load_state_dict(state["zclip"])
        if self._adagc is not None and state["adagc"] is not None:
            self._adagc.load_state_dict(state["adagc"])
