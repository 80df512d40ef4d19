"""
Streaming detectors: step signals in, symptoms out.

No torch, no transformers: they work in any training loop. Nothing here acts on what is seen.
"""

from .divergence import DivergenceDetector
from .nonfinite import NonFiniteDetector
from .norm_statistics import ClipDecision, ZClipStatistic
from .panel import DetectorPanel
from .progress import OverfittingDetector, PlateauDetector, SlowRiseDetector
from .rules import MetricRule, MetricRules, RuleError, load_rules, rules_for
from .spikes import CoSpikeDetector, GradientSpikeDetector, LossSpikeDetector
from .stillness import DeadLossDetector, NeverLearnedDetector, VanishingGradientDetector
from .symptom import Symptom
from .trend import LogTrend, Reading


__all__ = [
    "ClipDecision",
    "CoSpikeDetector",
    "DeadLossDetector",
    "DetectorPanel",
    "DivergenceDetector",
    "GradientSpikeDetector",
    "LogTrend",
    "LossSpikeDetector",
    "MetricRule",
    "MetricRules",
    "NeverLearnedDetector",
    "NonFiniteDetector",
    "OverfittingDetector",
    "PlateauDetector",
    "Reading",
    "RuleError",
    "SlowRiseDetector",
    "Symptom",
    "VanishingGradientDetector",
    "ZClipStatistic",
    "load_rules",
    "rules_for",
]
