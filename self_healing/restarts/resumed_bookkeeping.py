"""Goes on with the Trainer's running loss, metrics and counters where a checkpoint was written."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.marker import read_marker
from ..healers.restarts.emergency import owed_in, write_again
from ..healers.restarts.start import bookkeeping_of
from ..hf.adapter import Instrument
from ..hf.trainer_state import Leave, Pending, load_generated
from ..ranks import votes
from ..run.run import RunContext
from ..system import processes
from .attempts import Attempts


logger = logging.getLogger("self_healing")


def continue_bookkeeping(
    run: RunContext, attempts: Attempts, instrument: Instrument, resumed_from: str | None, step: int
) -> None:
    """
    Takes over what was written down beside the checkpoint that was resumed from, and does first what is owed of it.
    """
    point = attempts.resume_point
    if point is not None and point.path == resumed_from:
        owed = point.pending, point.bookkeeping
        paid = instrument.reentry.continue_from(point, run.started_at)
        if paid and not write_again(instrument, Path(point.path), run.run_id, point.leave, later=run.checksums):
            point.pending, point.bookkeeping = owed
    elif resumed_from is not None:
        marker = read_marker(Path(resumed_from))
        bookkeeping = bookkeeping_of(attempts.record, Path(resumed_from))
        if marker is not None and marker.get("step") == step:
            bookkeeping = marker["bookkeeping"]
        if bookkeeping is not None:
            _take_over(instrument, bookkeeping)
            load_generated(instrument.trainer, Path(resumed_from))

        def owed_there() -> tuple[Pending, Leave] | None:
            return None if bookkeeping is None else owed_in(bookkeeping)

        if attempts.in_memory(resumed_from):
            # Each rank has left its own; what all of them take part in is the same.
            owes = owed_there()
        else:
            owes = votes.from_first_rank("what is owed to the checkpoint", owed_there, instrument.view.device)
        if owes is not None:
            # A process that had to leave, or was killed after an exception, had no time for it.
            leave = instrument.reentry.deliver_pending(resumed_from, *owes, run.started_at)
            # What several ranks have written together stays as it is, and owes it again if it is resumed from again.
            if processes.world_size() == 1 and not attempts.in_memory(resumed_from):
                write_again(instrument, Path(resumed_from), run.run_id, leave, later=run.checksums)


def _take_over(instrument: Instrument, bookkeeping: Mapping[str, Any]) -> None:
    try:
        instrument.ledger.take_over(bookkeeping)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        logger.warning(
            "Running loss and metrics of the checkpoint cannot be taken over (%s: %s): the next log and the "
            "totals count from here; training itself is not affected.",
            type(error).__name__,
            error,
        )
