"""Where in the optimizer step the Trainer is."""

from enum import Enum


class Phase(Enum):
    """Where in the optimizer step the Trainer is."""

    IDLE = "before the first step"
    FETCHING = "while batches were fetched"
    COMPUTING = "in forward or backward"
    STEPPING = "inside optimizer.step"
    STEPPED = "after optimizer.step"
