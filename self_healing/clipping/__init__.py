"""Gradient clipping that follows the run: ZClip for the gradient as a whole, AdaGC for each tensor by itself."""

from .adagc import AdaGC, ClipResult, TensorClipResult, ZClip, scale_gradients, total_gradient_norm


__all__ = ["AdaGC", "ClipResult", "TensorClipResult", "ZClip", "scale_gradients", "total_gradient_norm"]
