"""Streaming detectors: step signals in, symptoms out. No torch, no transformers: they work in any training loop."""

from .nonfinite import NonFiniteDetector
from .symptom import Symptom


__all__ = ["NonFiniteDetector", "Symptom"]
