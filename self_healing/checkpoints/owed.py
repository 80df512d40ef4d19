"""Bookkeeping in a marker: running losses, metrics, and what is still to be done for its step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..instrument import Instrument, Leave, Pending
from .marker import change_marker


# In the bookkeeping of a marker: the evaluation of the step has not been done.
_OWES_EVALUATION = "owes_evaluation"
# And whatever else its process still owed that step.
_OWES = "owes"


def bookkeeping_now(instrument: Instrument) -> dict[str, Any]:
    """Collects running losses, metrics, and what is still to be done for the step, for a marker."""
    return instrument.ledger.export() | {_OWES_EVALUATION: instrument.leaving.owes_evaluation}


def owe_evaluation(checkpoint: Path) -> None:
    """Notes that the evaluation of its step is still to be done; a checkpoint without a marker is left as it is."""

    def change(content: dict[str, Any]) -> None:
        content["bookkeeping"][_OWES_EVALUATION] = True

    change_marker(checkpoint, change)


def owed_in(bookkeeping: Mapping[str, Any]) -> tuple[Pending, Leave] | None:
    """Reads from a marker what is still to be done for the step of its checkpoint; `None` if it is nothing."""
    try:
        entry = bookkeeping.get(_OWES) or {}
        pending = Pending.from_dict(entry.get("pending", {}))
        pending.evaluate = pending.evaluate or bool(bookkeeping.get(_OWES_EVALUATION))
        leave = Leave(None, bool(entry.get("stop")), bool(entry.get("epoch_ended")))
    except (AttributeError, TypeError):
        # Written by another version, or damaged.
        return None
    return (pending, leave) if pending or leave.stop else None


def owing(pending: Pending, leave: Leave) -> dict[str, Any]:
    """Builds the entries of a marker that [`owed_in`] reads."""
    entry = {"pending": pending.to_dict(), "stop": leave.stop, "epoch_ended": leave.epoch_ended}
    return {_OWES_EVALUATION: pending.evaluate, _OWES: entry}
