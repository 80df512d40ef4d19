"""Lets snapshots outlive this process where another one goes on with the run; where none does, removes them."""

from __future__ import annotations

import logging
import os
from typing import Any

from ..healers.restarts.shared_memory import remove_other_states
from ..hf.trainer_state import loads_more
from ..rollback.rollback import Rollback
from ..rollback.shared_memory import ROOT, SharedStates, remove_rank
from ..run.record import Ending
from ..run.run import RunContext
from ..system.processes import restarts_on_exit
from .attempts import Attempts


logger = logging.getLogger("self_healing")

# After which another process goes on with the run, if a launcher starts one.
_GOES_ON = frozenset({Ending.RUNNING, Ending.RESTART, Ending.FAILED})


def let_snapshots_outlive(run: RunContext, attempts: Attempts, rollback: Rollback, trainer: Any) -> None:
    """Has snapshots taken in shared memory, where a launcher will start the job again."""
    args = trainer.args
    record, config, memory = attempts.record, run.config, attempts.memory
    if record is None or not record.kept:
        # Another process trains into the same directory: what lies there is that one's.
        return
    place = args.output_dir, run.run_id, args.process_index, args.world_size
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        remove_other_states(args.output_dir, run.run_id, args.world_size)
    if memory is None:
        remove_rank(*place)
    else:
        memory.remove_others()
    outlives = config.resume_from_memory and config.snapshots and restarts_on_exit(config) and ROOT.is_dir()
    more = loads_more(trainer)
    if outlives and more is not None:
        logger.info(
            "Snapshots do not outlive this process: %s may read what only checkpoints have. A restart goes on from "
            "disk.",
            more,
        )
        outlives = False
    if memory is not None and not outlives:
        # Open in this process, and none comes after it.
        memory.remove(files_alone=True)
    shared = SharedStates(*place) if outlives else None
    rollback.go_on_from_memory(
        shared,
        own_is_trusted=lambda: None if memory is None else memory.remove(),
        inherited=lambda live: None if memory is None else memory.snapshot_in(live),
    )


def leave_snapshots(run: RunContext, attempts: Attempts, rollback: Rollback, args: Any) -> None:
    """Leaves them to the next process, or removes them if there will be none."""
    record = attempts.record
    if record is None or not record.kept:
        return
    # What one rank gives up may be tried once more: that is for the first one to decide, in the record.
    alone = args.process_index > 0 and record.ending is Ending.GAVE_UP and attempts.entered
    goes_on = bool(record.attempts) and (record.ending in _GOES_ON or alone)
    if goes_on and restarts_on_exit(run.config):
        if rollback.shared is not None:
            rollback.shared.keep()
        return
    if rollback.shared is not None:
        rollback.shared.close()
    remove_rank(args.output_dir, run.run_id, args.process_index, args.world_size)
