"""Emergency checkpoints, and the marker (`healing.json`) of a checkpoint that is complete."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

from . import consensus
from .instrument import EMERGENCY_DIR, Instrument, ResumePoint


logger = logging.getLogger(__name__)

MARKER_FILE = "healing.json"
MARKER_SCHEMA = 1


def write_marker(checkpoint: Path, run: str, step: int, bookkeeping: dict[str, Any], emergency: bool) -> None:
    """
    Marks a checkpoint as complete, after everything else in it was written; the marker appears whole or not at all.

    Args:
        checkpoint (`Path`):
            The checkpoint directory.
        run (`str`):
            The run it belongs to.
        step (`int`):
            Optimizer steps finished.
        bookkeeping (`dict`):
            Running loss, metrics and token counts as of that step.
        emergency (`bool`):
            Whether it was written because of an exception.
    """
    content = {
        "schema": MARKER_SCHEMA,
        "time": time.time(),
        "run": run,
        "step": step,
        "emergency": emergency,
        "files": {str(file.relative_to(checkpoint)): file.stat().st_size for file in _files(checkpoint)},
        "bookkeeping": bookkeeping,
    }
    temporary = checkpoint / f"{MARKER_FILE}.tmp"
    temporary.write_text(json.dumps(content), encoding="utf-8")
    os.replace(temporary, checkpoint / MARKER_FILE)


def read_marker(checkpoint: Path) -> dict[str, Any] | None:
    """The marker of a checkpoint, or `None` if there is none that can be read and holds for the files there."""
    try:
        content = json.loads((checkpoint / MARKER_FILE).read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("schema") != MARKER_SCHEMA:
            return None
        whole = all((checkpoint / name).stat().st_size == size for name, size in content["files"].items())
    except (OSError, ValueError):
        return None
    return content if whole else None


def _files(checkpoint: Path) -> list[Path]:
    return sorted(file for file in checkpoint.rglob("*") if file.is_file() and not file.name.startswith(MARKER_FILE))


def save_emergency_checkpoint(instrument: Instrument, run: str) -> ResumePoint | None:
    """
    After an exception left `train()`: writes the state as of the last finished step, so that a resume, ours or the
    plain Trainer's, continues bit for bit.

    Returns:
        Where to resume, or `None` where no such state exists: the exception came out of `optimizer.step()` itself,
        the weights are not finite, or several processes train together (the others may not be able to save).
    """
    if consensus.world_size() > 1:
        return None
    settled = instrument.reentry.settle()
    if settled is None or instrument.nonfinite_tensors():
        return None
    bookkeeping, pending, leave = settled
    step = int(instrument.trainer.state.global_step)
    exported = instrument.ledger.export()
    path = instrument.reentry.checkpoint_path()
    try:
        instrument.reentry.save_checkpoint()
        write_marker(Path(path), run, step, exported, emergency=True)
    except Exception:
        # Half a checkpoint is worse than none: somebody may resume from it.
        shutil.rmtree(path, ignore_errors=True)
        raise
    return ResumePoint(step, path, bookkeeping, pending, leave)


def publish(emergency: str, output_dir: str) -> str:
    """
    Puts an emergency checkpoint among the regular ones, where `resume_from_checkpoint=True` finds it.

    Returns:
        Where it is now: a regular checkpoint of that step stays in its place, and the emergency one in its own.
    """
    regular = Path(output_dir) / Path(emergency).name
    if regular.exists():
        return emergency
    try:
        shutil.move(emergency, regular)
    except OSError:
        logger.warning("%s could not be moved to %s.", emergency, regular, exc_info=True)
        return emergency
    remove_emergency_checkpoints(output_dir)
    return str(regular)


def newest_checkpoint_of(run: str, output_dir: str) -> str | None:
    """The newest checkpoint that was completely written in this run; those of another run are not ours to take."""
    folders = [*Path(output_dir).glob("checkpoint-*"), *Path(output_dir, EMERGENCY_DIR).glob("checkpoint-*")]
    marked = [
        (marker["step"], str(folder))
        for folder in folders
        if (marker := read_marker(folder)) is not None and marker.get("run") == run
    ]
    return max(marked)[1] if marked else None


def step_of(checkpoint: str, default: int) -> int:
    """The step a checkpoint was written at, from its marker."""
    marker = read_marker(Path(checkpoint))
    return default if marker is None else int(marker["step"])


def remove_emergency_checkpoints(output_dir: str) -> None:
    """Removes the emergency checkpoints of a run that no longer needs them."""
    shutil.rmtree(Path(output_dir, EMERGENCY_DIR), ignore_errors=True)
