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
    from .config.healing_config import HealingConfig as HealingConfig
    from .config.schema import ConfigurationError as ConfigurationError
    from .failures.classify import classify_exception as classify_exception
    from .failures.recipes import FAILURE_RECIPES as FAILURE_RECIPES
    from .failures.recipes import Action as Action
    from .failures.recipes import FailureType as FailureType
    from .failures.recipes import Recipe as Recipe
    from .failures.recipes import Target as Target
    from .failures.recipes import UnrecoverableTrainingError as UnrecoverableTrainingError
    from .healers.dry_run import DryRunReport as DryRunReport
    from .healers.inspection import Finding as Finding
    from .healers.inspection import Inspection as Inspection
    from .healers.inspection import check_data_quality as check_data_quality
    from .healers.inspection import check_model_init as check_model_init
    from .healers.numerics.clipping import ZClip as ZClip
    from .healers.numerics.nan_detector import NaNDetector as NaNDetector
    from .hf.objective import StepSignals as StepSignals
    from .journal.incident import Incident as Incident
    from .report.healing_report import HealingReport as HealingReport
    from .rollback.ring import SnapshotRing as SnapshotRing
    from .rollback.snapshots import Snapshot as Snapshot
    from .run.healer import HealingContext as HealingContext
    from .tools.judge import Judgement as Judgement
    from .tools.judge import judge_log as judge_log
    from .tools.replay import ReplayReport as ReplayReport
    from .tools.replay import replay as replay
    from .tools.replay_model import ReplayError as ReplayError
    from .trainer import SelfHealingTrainer as SelfHealingTrainer


__version__ = "0.2.0"

# The same names, by the module that they are imported from.
_NAMES_IN = {
    "actions": ("HealingActions",),
    "callback": ("SelfHealingCallback",),
    "checkpoints.choice": ("CheckpointError", "find_trusted_checkpoint"),
    "config.healing_config": ("HealingConfig",),
    "config.schema": ("ConfigurationError",),
    "failures.classify": ("classify_exception",),
    "failures.recipes": ("FAILURE_RECIPES", "Action", "FailureType", "Recipe", "Target", "UnrecoverableTrainingError"),
    "healers.dry_run": ("DryRunReport",),
    "healers.inspection": ("Finding", "Inspection", "check_data_quality", "check_model_init"),
    "healers.numerics.clipping": ("ZClip",),
    "healers.numerics.nan_detector": ("NaNDetector",),
    "hf.objective": ("StepSignals",),
    "journal.incident": ("Incident",),
    "report.healing_report": ("HealingReport",),
    "rollback.ring": ("SnapshotRing",),
    "rollback.snapshots": ("Snapshot",),
    "run.healer": ("HealingContext",),
    "tools.judge": ("Judgement", "judge_log"),
    "tools.replay": ("ReplayReport", "replay"),
    "tools.replay_model": ("ReplayError",),
    "trainer": ("SelfHealingTrainer",),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}

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
