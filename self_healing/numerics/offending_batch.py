"""The batch of a sick step, kept on disk so that the step can be computed again later (`self-healing replay`)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..failures.classify import classify_exception
from ..failures.recipes import FailureType
from ..hf.step import Window
from ..hf.view import blueprint_of, kept_weights
from ..journal.incident import Incident
from ..system.files import rank_in


logger = logging.getLogger("self_healing")

# Batches kept for replay in one run directory, of each rank: enough to see a pattern, too few to fill a disk.
KEPT_BATCHES = 20
# Of faults that passed: they leave room for those that did not.
KEPT_OF_TRANSIENT = 5
# Weights that are kept with each of them, in bytes: an adapter, or a small model. Others are in checkpoints.
KEPT_WEIGHTS = 1 << 26


def save_offending_batch(window: Window, directory: Path, incident: Incident) -> str | None:
    """
    Keeps the micro-batches and random states of a step, so that it can be replayed, with what its trainer computes it
    with; weights only if they are small.
    """
    path = directory / "incidents" / f"{incident.id}.pt"
    passed = incident.failure is FailureType.NONFINITE_TRANSIENT
    # Those of this rank: what the others keep at the same moment must not decide about it.
    own = [each for each in path.parent.glob("*.pt") if rank_in(each) == rank_in(path)]
    if len(own) >= (KEPT_OF_TRANSIENT if passed else KEPT_BATCHES):
        return None
    content = _contained(window.export, f"The batch of incident {incident.id} could not be kept.")
    if not content:
        return None
    trainer = window.engine.trainer
    content["time"] = time.time()
    content["blueprint"] = _contained(lambda: blueprint_of(trainer), "How its trainer computes is not kept with it.")
    content |= _contained(lambda: kept_weights(trainer, KEPT_WEIGHTS), "The weights are not kept with it.")

    def write() -> dict[str, Any]:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: a process that is killed meanwhile leaves nothing that a replay takes for a batch.
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            torch.save(content, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return {"path": str(path)}

    return _contained(write, f"The batch of incident {incident.id} could not be written.").get("path")


def _contained(what: Callable[[], dict[str, Any]], failed: str) -> dict[str, Any]:
    """The batch is a help for later: that it cannot be had harms nothing, unless the device is lost."""
    try:
        return what()
    except Exception as error:
        if classify_exception(error) is FailureType.DEVICE:
            raise
        logger.warning("%s", failed, exc_info=True)
        return {}
