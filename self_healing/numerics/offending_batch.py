"""The batch of a sick step, kept on disk so that the step can be computed again later."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ..classify import classify_exception
from ..failures import FailureType
from ..instrument import Window
from ..journal.incident import Incident


logger = logging.getLogger("self_healing")

# Batches kept for replay in one run directory: enough to see a pattern, too few to fill a disk.
KEPT_BATCHES = 20


def save_offending_batch(window: Window, directory: Path, incident: Incident) -> str | None:
    """Keeps the micro-batches and random states of a step, so that it can be replayed; `None` if that failed."""
    path = directory / "incidents" / f"{incident.id}.pt"
    if not window.prepared or len(list(path.parent.glob("*.pt"))) >= KEPT_BATCHES:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(window.export(), path)
    except Exception as error:
        if classify_exception(error) is FailureType.DEVICE:
            raise
        logger.warning("The batch of incident %s could not be kept.", incident.id, exc_info=True)
        return None
    return str(path)
