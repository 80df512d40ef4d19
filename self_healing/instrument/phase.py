"""`Phase`: the part of an optimizer step that the Trainer is in."""

from enum import Enum


class Phase(Enum):
    """The part of an optimizer step that the Trainer is in; verdicts quote the values."""

    IDLE = "before the first step"
    FETCHING = "while batches were fetched"
    COMPUTING = "in forward or backward"
    STEPPING = "inside optimizer.step"
    STEPPED = "after optimizer.step"
