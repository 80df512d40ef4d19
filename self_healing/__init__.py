"""Keeps Hugging Face Trainer and TRL runs alive and correct."""

from .actions import HealingActions
from .callback import SelfHealingCallback
from .checkpoints import CheckpointError, find_trusted_checkpoint
from .classify import classify_exception
from .clipping import AdaGC, ZClip
from .config import HealingConfig
from .dry_run import DryRunReport
from .failures import FAILURE_RECIPES, Action, FailureType, Recipe, UnrecoverableTrainingError
from .incident import Incident
from .inspection import Finding, Inspection, check_data_quality, check_model_init
from .report import HealingReport
from .run.remedies import HealingContext
from .setting import ConfigurationError
from .signals import StepSignals
from .snapshots import Snapshot, SnapshotRing
from .trainer import SelfHealingTrainer
from .went_back import Target


__version__ = "0.1.0"

__all__ = [
    "FAILURE_RECIPES",
    "Action",
    "AdaGC",
    "CheckpointError",
    "ConfigurationError",
    "DryRunReport",
    "FailureType",
    "Finding",
    "HealingActions",
    "HealingConfig",
    "HealingContext",
    "HealingReport",
    "Incident",
    "Inspection",
    "Recipe",
    "SelfHealingCallback",
    "SelfHealingTrainer",
    "Snapshot",
    "SnapshotRing",
    "StepSignals",
    "Target",
    "UnrecoverableTrainingError",
    "ZClip",
    "check_data_quality",
    "check_model_init",
    "classify_exception",
    "find_trusted_checkpoint",
]
