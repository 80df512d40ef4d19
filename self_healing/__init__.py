"""Keeps Hugging Face Trainer and TRL runs alive and correct."""

from .actions import HealingActions
from .callback import SelfHealingCallback
from .checkpoints import CheckpointError, find_trusted_checkpoint
from .classify import classify_exception
from .clipping import AdaGC, ZClip
from .config import ConfigurationError, HealingConfig
from .dry_run import DryRunReport
from .exceptions import UnrecoverableTrainingError
from .failures import FAILURE_RECIPES, Action, FailureType, Recipe
from .inspection import Finding, Inspection, check_data_quality, check_model_init
from .journal.incident import Incident
from .report import HealingReport
from .rollback.ring import SnapshotRing
from .rollback.snapshots import Snapshot
from .run.dispatch import HealingContext
from .run.went_back import Target
from .signals import StepSignals
from .trainer import SelfHealingTrainer


__version__ = "0.2.0"

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
