"""Gradient clipping that follows the run: ZClip."""

from .gradients import scale_gradients, total_gradient_norm
from .zclip import ClipResult, ZClip


__all__ = ["ClipResult", "ZClip", "scale_gradients", "total_gradient_norm"]
