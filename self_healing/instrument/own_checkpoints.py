"""Writes checkpoints beside those that the user has asked for, in the Trainer's own format."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy

from ..checkpoint_files import BESIDE_DIR, EMERGENCY_DIR, MARKER_FILE


# What is written again once what a step owed is done; all other files are those of the checkpoint before.
_WRITTEN_AGAIN = ("optimizer", "scheduler", "rng_state", TRAINER_STATE_NAME, "global_step", "latest")


def emergency_path(trainer: Any) -> Path:
    """The path of the emergency checkpoint of the current step, written or not."""
    return Path(trainer.args.output_dir, EMERGENCY_DIR, f"checkpoint-{trainer.state.global_step}")


def write_checkpoint(trainer: Any, folder: Path) -> None:
    """
    Writes a checkpoint of the trainer as it stands into a folder.

    It is complete whatever the user's checkpoints hold, goes to a folder of its own, so that it neither overwrites
    one of them nor rotates one out, and is not pushed to the Hub.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer.
        folder (`Path`):
            Takes the place of its `output_dir`.
    """
    args = trainer.args
    theirs = {name: getattr(args, name) for name in ("push_to_hub", "save_only_model", "save_strategy", "output_dir")}
    args.push_to_hub = args.save_only_model = False
    args.save_strategy = SaveStrategy.NO
    args.output_dir = str(folder)
    try:
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)
    finally:
        for name, value in theirs.items():
            setattr(args, name, value)


def write_beside(trainer: Any, checkpoint: Path) -> Path:
    """
    Writes a checkpoint once more as the trainer stands now, beside the one before: a process that is killed meanwhile
    leaves that one whole. What has not changed is shared with it.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer.
        checkpoint (`Path`):
            The one before.

    Returns:
        `Path`: where the new one is.
    """
    beside = Path(trainer.args.output_dir, BESIDE_DIR, checkpoint.name)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for file in checkpoint.rglob("*"):
        relative = file.relative_to(checkpoint)
        if file.is_file() and not relative.parts[0].startswith((*_WRITTEN_AGAIN, MARKER_FILE)):
            _link_or_copy(file, beside / relative)
    trainer._save_optimizer_and_scheduler(str(beside))
    trainer._save_rng_state(str(beside))
    trainer.state.save_to_json(str(beside / TRAINER_STATE_NAME))
    return beside


def _link_or_copy(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, target)
    except OSError:
        # The file system has no hard links.
        shutil.copy2(file, target)
