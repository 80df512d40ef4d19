"""Decides where a process begins: which run it continues, and from which checkpoint."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...checkpoints.choice import (
    CheckpointError,
    find_trusted_checkpoint,
    newest_verdict_of,
    refuse_unwritable,
    resolve_checkpoint,
)
from ...checkpoints.deepspeed import why_of_another_job
from ...checkpoints.marker import checkpoints_in, number_of, numbered, read_marker, standing_of
from ...checkpoints.vetting import Verdict
from ...config.healing_config import HealingConfig
from ...hf.deepspeed import zero_job_of
from ...hf.trainer_state import loads_more
from ...journal.journal import Journal
from ...journal.terminal import speaking_of
from ...ranks import votes
from ...rollback.shared_memory import SharedStep, StoredState, directory_of
from ...run.record import ExitReason, RunRecord, UnreadableRecordError, first_call
from ...run.status import RunState, read_status
from ...system import processes
from ...system.files import OFF_FILE, STATE_FILE
from ...system.processes import Launch, State, launch_of, of_all_ranks, state_of
from .shared_memory import newest_beyond, open_in_memory, steps_in_memory


logger = logging.getLogger("self_healing")

# Endings after which a person looks at the run before it is started by hand, and not a launcher.
_LOOKED_AT = frozenset({ExitReason.FAILED, ExitReason.GAVE_UP, ExitReason.INTERRUPTED})


@dataclass(frozen=True, slots=True)
class Start:
    """The beginning of a process: checkpoint, step, and the run it continues."""

    checkpoint: str | None
    step: int = 0
    record: RunRecord | None = None
    by_hand: bool = False
    by_agent: bool = False
    passed_over: tuple[Verdict, ...] = ()
    shared: SharedStep | None = None
    memory: StoredState | None = None

    @property
    def run(self) -> str | None:
        """The run that is continued; `None` for a new one."""
        return None if self.record is None else self.record.run

    @property
    def died(self) -> bool:
        """Whether the process before this one ended without saying so."""
        return self.record is not None and self.record.ending is ExitReason.RUNNING

    @property
    def spends(self) -> bool:
        """Whether it is one more attempt without progress: the one before began at the same step, or later."""
        record = self.record
        if record is None or self.by_hand or record.ending is ExitReason.FINISHED:
            return False
        if record.ending is ExitReason.PREEMPTED and not self.by_agent:
            # A machine that is taken away again and again is no fault of the run. Where the launcher was not taken
            # away with it, the signal came from the launcher, because another process had failed.
            return False
        if self.shared is not None:
            # It begins where the one before ended. Did that one come further than those before it?
            return self.step <= max((attempt.last_step for attempt in record.attempts[:-1]), default=-1)
        return self.step <= record.newest.first_step

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return "memory" if self.memory is not None else self.checkpoint or "the beginning"

    @property
    def steps_to_repeat(self) -> int:
        """Steps that the process before this one had finished, and that are in no checkpoint."""
        return 0 if self.record is None else max(self.record.newest.last_step - self.step, 0)


def find_start(trainer: Any, config: HealingConfig, requested: str | os.PathLike[str] | bool | None) -> Start:
    """Finds where a run begins."""
    args = trainer.args
    refuse_unwritable(args)
    of_ranks = votes.from_every_rank("how the job was started", (launch_of(), loads_more(trainer)), args.device)
    launch = of_all_ranks([each for each, _ in of_ranks])
    restarted = config.resume_after_restart and launch.started_again
    whole = restarted and all(more is None for _, more in of_ranks)
    in_memory = steps_in_memory(args.output_dir, args.process_index, args.device) if whole else []
    look = partial(_look_for_start, trainer, requested, launch, restarted)
    start = _found_by_first_rank(partial(look, in_memory), args.device)
    if start.shared is None:
        return start
    opened = open_in_memory(args.output_dir, start.shared, args.process_index, args.device)
    if opened is None:
        return _found_by_first_rank(partial(look, ()), args.device)
    return replace(start, memory=opened, checkpoint=opened.checkpoint)


def _found_by_first_rank(look_for_start: Callable[[list[Verdict]], Start], device: torch.device) -> Start:
    passed_over, failed = list[Verdict](), list[Exception]()

    def look() -> tuple[Start, str | None]:
        start = Start(None)
        try:
            start = look_for_start(passed_over)
        except Exception as error:
            failed.append(error)
        for verdict in passed_over:
            logger.warning("%s is passed over: %s.", verdict.path, verdict.reason)
        return replace(start, passed_over=tuple(passed_over)), str(failed[0]) if failed else None

    start, refusal = votes.looked_up_by_first_rank("where the run begins", look, device)
    if refusal is not None:
        raise failed[0] if failed else CheckpointError(refusal)
    return start


def _look_for_start(
    trainer: Any,
    requested: str | os.PathLike[str] | bool | None,
    launch: Launch,
    restarted: bool,
    in_memory: Sequence[SharedStep],
    passed_over: list[Verdict],
) -> Start:
    output_dir = str(trainer.args.output_dir)
    record: RunRecord | None = None
    try:
        record = RunRecord.read(Path(output_dir))
    except UnreadableRecordError as error:
        requested = "auto" if restarted and requested is None else requested
        logger.warning("%s. It is written anew, and what earlier processes of this run did is not known.", error)
    if record is not None and not (restarted and of_this_job(record, launch)):
        refuse_to_train_beside(record)
    if requested is None and not restarted:
        tell_of_unfinished(output_dir, wrapped=True)
    chosen: Verdict | None = None
    taken_up = False
    if record is not None and restarted and continues(record, launch, requested):
        taken_up = True
        usable = () if no_progress_from_memory(record) else in_memory
        # Those on disk are not read through, which takes longer than all the rest, if none can be further.
        shared = newest_beyond(usable, record.run, _newest_complete_step(output_dir))
        if shared is not None:
            return replace(start_of(None, shared.step, record, launch, taken_up, requested), shared=shared)
        chosen = newest_verdict_of(record.run, output_dir, passed_over=passed_over)
    if chosen is None and requested is not None:
        # Of a run that is taken up, and was killed before its first checkpoint: what it had been asked for.
        wanted = "auto" if requested is True and taken_up else requested
        chosen = resolve_checkpoint(wanted, output_dir, passed_over)
    if chosen is None:
        return start_of(None, 0, record, launch, taken_up, requested)
    if (refusal := refusal_of_another_job(chosen.path, trainer)) is not None:
        raise CheckpointError(refusal)
    for doubt in chosen.doubts:
        logger.warning("Resuming from %s anyway: %s.", chosen.path, doubt)
    return start_of(chosen.path, chosen.step or 0, record, launch, taken_up, requested)


def refuse_to_train_beside(record: RunRecord) -> None:
    """Refuses to train into a directory in which another process of this machine still trains."""
    newest = record.newest
    elsewhere = newest.host != socket.gethostname() or newest.pid == os.getpid()
    if newest.ending is not ExitReason.RUNNING or elsewhere:
        return
    if state_of(newest.pid, newest.process_began) in (State.RUNS, State.STOPPED):
        raise CheckpointError(
            f"Process {newest.pid} trains into {record.directory} at this moment: each would overwrite checkpoints of "
            "the other. Please end it, or give this run an output_dir of its own."
        )


def refusal_of_another_job(checkpoint: str, trainer: Any) -> str | None:
    """Says why a good checkpoint cannot be gone on from by a job of this kind; `None` if it can."""
    why = why_of_another_job(Path(checkpoint), zero_job_of(trainer))
    return None if why is None else f"{checkpoint} is whole, and this job cannot go on from it: {why}."


def no_progress_from_memory(record: RunRecord) -> bool:
    """Whether the process before this one has finished no step since it went on from memory: the state may be why."""
    newest = record.newest
    in_memory = newest.resumed_from is not None and newest.resumed_from.startswith(str(directory_of(record.directory)))
    return in_memory and newest.last_step <= newest.first_step


def _newest_complete_step(output_dir: str) -> int:
    """The most steps of a checkpoint that was written to its end, as its marker says."""
    complete = (checkpoint for checkpoint in checkpoints_in(output_dir) if read_marker(checkpoint) is not None)
    return max((number_of(checkpoint) or 0 for checkpoint in complete), default=0)


def tell_of_unfinished(output_dir: str, wrapped: bool) -> None:
    """Says what a run that came to no end has left where another one begins at step 0, and how to go on from it."""
    # What cannot be read is no reason not to train.
    with contextlib.suppress(OSError, ValueError, LookupError):
        status = read_status(Path(output_dir))
        if status is None or status.state in (RunState.ENDED, RunState.RUNNING):
            return
        newest = find_trusted_checkpoint(output_dir)
        how = "It has left no checkpoint that can be resumed from"
        if newest is not None:
            asked = '"auto"' if wrapped else repr(newest)
            how = f"To go on from {newest}, write train(resume_from_checkpoint={asked})"
        text = "Training begins at step 0 in %s, and will overwrite what run %s has left there. %s %s."
        logger.warning(text, output_dir, status.run, status, how)


def note_start(journal: Journal, start: Start, output_dir: str) -> None:
    """Journals which checkpoint a run begins with, and which ones it does not."""
    for verdict in start.passed_over:
        journal.event("checkpoint_passed_over", verdict.step or 0, path=verdict.path, reason=verdict.reason)
    if start.memory is not None:
        return
    if start.checkpoint is not None:
        note_checkpoint(journal, start.checkpoint, start.step)
    elif start.passed_over:
        logger.warning("No checkpoint in %s can be resumed from; the run starts anew.", output_dir)


def note_checkpoint(journal: Journal, checkpoint: str, step: int) -> None:
    """Journals the checkpoint that a run goes on from."""
    journal.event("checkpoint_chosen", step, path=checkpoint, standing=standing_of(checkpoint))


def note_memory_start(journal: Journal, state: StoredState) -> None:
    """Tells on the first rank that a run goes on from a state in shared memory, which has been put in place."""
    if journal.rank > 0:
        return
    step = state.facts.shared.step
    journal.event("resumed_from_memory", step, bytes=state.nbytes)
    logger.warning(
        "Resumed from memory at step %d: the process before this one has left its state there (%.2f GB).",
        step,
        state.nbytes / 1e9,
    )


def of_this_job(record: RunRecord, launch: Launch) -> bool:
    """Whether a launcher that has started this process again has started the one that wrote a record as well."""
    newest = record.newest
    by_same_agent = launch.by_agent and newest.agent == launch.agent
    return newest.job == launch.job and (by_same_agent or launch.requeued)


def continues(record: RunRecord, launch: Launch, requested: Any) -> bool:
    """
    Whether this process goes on with the run of a record by itself, whatever checkpoint was asked for: a launcher has
    started the same script again, and it has come to the same place.
    """
    if not launch.started_again or requested is False or not first_call(record.directory):
        return False
    newest = record.newest
    if of_this_job(record, launch) and newest.call == 1:
        return True
    what = "a job before this one" if newest.call == 1 else f"this script, which had trained there {newest.call} times"
    logger.warning(
        "%s holds run %s of %s: it is not continued, and this process starts as requested. Please give each run an "
        "output_dir of its own.",
        record.directory,
        record.run,
        what,
    )
    return False


def start_of(
    checkpoint: str | None, step: int, record: RunRecord | None, launch: Launch, taken_up: bool, requested: Any
) -> Start:
    """Puts together what it means to begin at a checkpoint."""
    if record is None or not record.attempts:
        return Start(checkpoint, step)
    if not taken_up:
        newest_wanted = requested is True or requested == "auto"
        if not newest_wanted or record.ending is ExitReason.FINISHED:
            # Whoever names a checkpoint begins another branch: what the run wrote after it is not of this one.
            return Start(checkpoint, step)
        marker = None if checkpoint is None else read_marker(Path(checkpoint))
        if checkpoint is not None and (marker is None or marker.get("run") != record.run):
            # The newest checkpoint there is not of the run that was last trained there.
            return Start(checkpoint, step)
    again = launch.started_again and of_this_job(record, launch)
    # A pod is started again without being told so, by the same words.
    unattended = again or (launch.in_a_pod and requested == "auto")
    by_hand = not unattended and record.ending in _LOOKED_AT
    return Start(checkpoint, step, record, by_hand, launch.by_agent)


# ---- healing off: an earlier start has ended because code of this library failed on one of several ranks ----


def is_off(config: HealingConfig, args: Any) -> bool:
    """Whether a run trains without healing; if so, says and journals why, and how it is switched on again."""
    file = Path(config.healing_dir or args.output_dir) / OFF_FILE
    if votes.all_ranks("healing is attached", not file.exists(), args.device):
        return False
    # On own disks, that of another rank may be the only one.
    text = file.read_text("utf-8", "replace") if file.exists() else None
    of_ranks = votes.from_every_rank("why it is not", text, args.device)
    noted: Any = None
    with contextlib.suppress(ValueError):
        noted = json.loads(next(each for each in of_ranks if each is not None))
    noted = noted if isinstance(noted, dict) else {}
    why = noted.get("why") or f"{file.name} does not say why"
    if processes.is_first_rank():
        with speaking_of(args):
            logger.warning(
                "Healing is off: %s. Training goes on as with the plain Trainer; to heal again, please remove %s.",
                why,
                file,
            )
        journal = Journal(file.parent, config, noted.get("run") or "without-healing")
        journal.event("healing_off", noted.get("step") or 0, why=why)
    return True


def resumed_without_healing(config: HealingConfig, args: Any, requested: Any) -> str | None:
    """
    Gives what the plain Trainer resumes from: what was asked for, or, where the newest checkpoint was, or a launcher
    has started the job again, the newest one that the Trainer has written to its end.
    """
    if requested is None and config.resume_after_restart and launch_of().started_again:
        requested = "auto"
    if requested is not True and requested != "auto":
        return os.fspath(requested) if requested else None
    whole = [(step, path) for step, path in numbered(Path(str(args.output_dir))) if (path / STATE_FILE).is_file()]
    return str(max(whole)[1]) if whole else None
