"""Checkpoints of a run that are followed without it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from self_healing import HealingConfig
from self_healing.checkpoints.retention import RunCheckpoints


def following(output_dir: Path, generations: int = 2) -> RunCheckpoints:
    """What follows the checkpoints in a directory, as in a run that begins there."""
    journal: Any = SimpleNamespace(event=lambda *_, **__: None, run_id="run")
    checkpoints = RunCheckpoints(HealingConfig(keep_verified_checkpoints=generations), journal)
    args = SimpleNamespace(output_dir=str(output_dir), should_save=True, push_to_hub=False, device=torch.device("cpu"))
    checkpoints.begin(args, resumed_from=None, step=0, finite=True)
    return checkpoints
