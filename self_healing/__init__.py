"""Keeps Hugging Face Trainer and TRL runs alive and correct."""

from .actions import HealingActions, HealingContext
from .callback import SelfHealingCallback
from .clipping import AdaGC, ZClip
from .config import ConfigurationError, HealingConfig
from .dry_run import DryRunReport
from .failures import FAILURE_RECIPES, Action, FailureType, Recipe, UnrecoverableTrainingError, classify_exception
from .journal import Incident
from .report import HealingReport
from .signals import StepSignals
from .trainer import SelfHealingTrainer


__version__ = "0.1.0"

__all__ = [
    "FAILURE_RECIPES",
    "Action",
    "AdaGC",
    "ConfigurationError",
    "DryRunReport",
    "FailureType",
    "HealingActions",
    "HealingConfig",
    "HealingContext",
    "HealingReport",
    "Incident",
    "Recipe",
    "SelfHealingCallback",
    "SelfHealingTrainer",
    "StepSignals",
    "UnrecoverableTrainingError",
    "ZClip",
    "classify_exception",
]
