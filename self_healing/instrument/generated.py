"""Saves and loads rows that a trainer has generated and not yet trained on, in a checkpoint within a cycle."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from ..system import processes
from ..system.files import GENERATED_FILE


logger = logging.getLogger(__name__)


def save_generated(trainer: Any, checkpoint: Path) -> None:
    """Saves what is left of a generation cycle (GRPO, RLOO) with a checkpoint; at the end of a cycle nothing is."""
    if processes.world_size() > 1:
        return
    rows = generated_rows(trainer)
    if rows is not None:
        checkpoint.mkdir(parents=True, exist_ok=True)
        torch.save(rows, checkpoint / GENERATED_FILE)


def generated_rows(trainer: Any) -> Any:
    """Gives what is left of a generation cycle on this rank; `None` at the end of a cycle, and where there is none."""
    rows = vars(trainer).get("_buffered_inputs")
    if rows is None:
        return None
    cycle = trainer.args.steps_per_generation * trainer.num_iterations
    return rows if trainer._step % cycle != 0 else None


def load_generated(trainer: Any, checkpoint: Path) -> None:
    """Goes on with the generation cycle within which a checkpoint was written."""
    path = checkpoint / GENERATED_FILE
    if "_buffered_inputs" not in vars(trainer) or not path.is_file():
        return
    try:
        device = trainer.accelerator.device
        # In a process group it is called "cpu:0", which torch.load does not know.
        location = torch.device("cpu") if device.type == "cpu" else device
        trainer._buffered_inputs = torch.load(path, map_location=location, weights_only=True)
    except Exception:
        logger.warning("%s cannot be read: the rows of this cycle are generated anew.", path, exc_info=True)
