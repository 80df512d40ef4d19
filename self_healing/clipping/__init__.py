"""Gradient clipping that follows the run: ZClip for the gradient as a whole, AdaGC for each tensor by itself."""

from .adagc import AdaGC, TensorClipResult
from .gradients import scale_gradients, total_gradient_norm
from .zclip import ClipResult, ZClip


__all__ = ["AdaGC", "ClipResult", "TensorClipResult", "ZClip", "scale_gradients", "total_gradient_norm"]
