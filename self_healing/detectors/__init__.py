"""Streaming detectors: step signals in, symptoms out. No torch, no transformers: they work in any training loop."""

from .divergence import DivergenceDetector
from .nonfinite import NonFiniteDetector
from .panel import DetectorPanel
from .progress import OverfittingDetector, PlateauDetector
from .spikes import CoSpikeDetector, GradientSpikeDetector, LossSpikeDetector
from .stillness import DeadLossDetector, VanishingGradientDetector
from .symptom import Symptom
from .trend import LogTrend, Reading


__all__ = [
    "CoSpikeDetector",
    "DeadLossDetector",
    "DetectorPanel",
    "DivergenceDetector",
    "GradientSpikeDetector",
    "LogTrend",
    "LossSpikeDetector",
    "NonFiniteDetector",
    "OverfittingDetector",
    "PlateauDetector",
    "Reading",
    "Symptom",
    "VanishingGradientDetector",
]
