"""
Keeps Hugging Face Trainer and TRL runs alive and correct.

What is named here is imported when it is first used, so that a command that only reads files does not wait for torch.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .actions import HealingActions as HealingActions
    from .callback import SelfHealingCallback as SelfHealingCallback
    from .checkpoints.choice import CheckpointError as CheckpointError
    from .checkpoints.choice import find_trusted_checkpoint as find_trusted_checkpoint
    from .classify import classify_exception as classify_exception
    from .clipping import ZClip as ZClip
    from .config import ConfigurationError as ConfigurationError
    from .config import HealingConfig as HealingConfig
    from .dry_run import DryRunReport as DryRunReport
    from .exceptions import UnrecoverableTrainingError as UnrecoverableTrainingError
    from .failures import FAILURE_RECIPES as FAILURE_RECIPES
    from .failures import Action as Action
    from .failures import FailureType as FailureType
    from .failures import Recipe as Recipe
    from .inspection import Finding as Finding
    from .inspection import Inspection as Inspection
    from .inspection import check_data_quality as check_data_quality
    from .inspection import check_model_init as check_model_init
    from .journal.incident import Incident as Incident
    from .replaying.incidents import ReplayError as ReplayError
    from .replaying.replay import ReplayReport as ReplayReport
    from .replaying.replay import replay as replay
    from .report.healing_report import HealingReport as HealingReport
    from .rollback.ring import SnapshotRing as SnapshotRing
    from .rollback.snapshots import Snapshot as Snapshot
    from .run.dispatch import HealingContext as HealingContext
    from .run.went_back import Target as Target
    from .signals import StepSignals as StepSignals
    from .trainer import SelfHealingTrainer as SelfHealingTrainer


__version__ = "0.2.0"

# The same names, by the module that each is imported from.
_MODULE_OF = {
    "FAILURE_RECIPES": "failures",
    "Action": "failures",
    "CheckpointError": "checkpoints.choice",
    "ConfigurationError": "config",
    "DryRunReport": "dry_run",
    "FailureType": "failures",
    "Finding": "inspection",
    "HealingActions": "actions",
    "HealingConfig": "config",
    "HealingContext": "run.dispatch",
    "HealingReport": "report.healing_report",
    "Incident": "journal.incident",
    "Inspection": "inspection",
    "Recipe": "failures",
    "ReplayError": "replaying.incidents",
    "ReplayReport": "replaying.replay",
    "SelfHealingCallback": "callback",
    "SelfHealingTrainer": "trainer",
    "Snapshot": "rollback.snapshots",
    "SnapshotRing": "rollback.ring",
    "StepSignals": "signals",
    "Target": "run.went_back",
    "UnrecoverableTrainingError": "exceptions",
    "ZClip": "clipping",
    "check_data_quality": "inspection",
    "check_model_init": "inspection",
    "classify_exception": "classify",
    "find_trusted_checkpoint": "checkpoints.choice",
    "replay": "replaying.replay",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Imports what is asked for (PEP 562): a public name, or a module of the package."""
    if name in _MODULE_OF:
        found = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    elif not name.startswith("__") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        found = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
