"""Starts from a snapshot in shared memory, and leaves one for the next process."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...checkpoints.marker import write_marker
from ...hf.adapter import Instrument
from ...hf.replicas import Replicas
from ...hf.state import LiveState, local
from ...hf.trainer_state import ResumeRecord
from ...ranks import votes
from ...rollback.shared_memory import (
    SUFFIX,
    SharedStep,
    StateFacts,
    StateUnusable,
    StoredState,
    directory_of,
    holder_of,
    is_own,
    open_state,
    read_facts,
)
from ...rollback.snapshots import Snapshot, size_of
from ...run.run import Run
from ...system import processes


logger = logging.getLogger("self_healing")


# ---- where the process before this one was ----


def steps_in_memory(output_dir: str, rank: int, device: torch.device) -> list[SharedStep]:
    """Finds the states that all ranks have in shared memory, the newest first."""
    mine = [facts.shared for _, facts in _states_of(output_dir, rank)]
    everywhere = votes.from_every_rank("states in shared memory", mine, device)
    return sorted((step for step in everywhere[0] if all(step in theirs for theirs in everywhere)), reverse=True)


def open_in_memory(output_dir: str, step: SharedStep, rank: int, device: torch.device) -> StoredState | None:
    """Opens a state that all ranks have."""
    state: StoredState | None = None
    try:
        paths = [path for path, facts in _states_of(output_dir, rank) if facts.shared == step]
        if not paths:
            raise StateUnusable("it is not there any more")
        found = open_state(paths[-1], device)
        shutil.rmtree(found.checkpoint, ignore_errors=True)
        found.record.write(Path(found.checkpoint))
        bookkeeping = found.record.bookkeeping | {"running_loss": found.facts.running_loss}
        write_marker(Path(found.checkpoint), step.run, step.step, bookkeeping, emergency=False, finite=True)
        state = found
    except (StateUnusable, OSError) as error:
        logger.warning("The state of step %d in shared memory cannot be gone on from: %s.", step.step, error)
    return state if votes.all_ranks("the state in shared memory can be read", state is not None, device) else None


def remove_other_states(output_dir: str, run: str, world_size: int) -> None:
    """Removes what earlier runs, or another number of processes, have left in shared memory for an `output_dir`."""
    directory, own = directory_of(output_dir), f"-of-{world_size}"
    if not is_own(directory):
        return
    for each in directory.iterdir():
        if not (each.name.startswith(f"{run}-rank") and each.name.endswith(own)) and holder_of(each) is None:
            shutil.rmtree(each, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def _states_of(output_dir: str, rank: int) -> list[tuple[Path, StateFacts]]:
    """Lists the whole states of one rank, of all runs of a directory that trained on as many processes."""
    directory = directory_of(output_dir)
    paths = directory.glob(f"*-rank{rank}-of-{processes.world_size()}/*{SUFFIX}") if is_own(directory) else ()
    found = [(path, read_facts(path)) for path in sorted(paths)]
    return [(path, facts) for path, facts in found if facts is not None]


def newest_beyond(steps: Sequence[SharedStep], run: str, step: int) -> SharedStep | None:
    """Gives the newest state of a run that is further than a step; of two, the one that owes least."""
    later = [each for each in steps if each.run == run and each.step > step]
    return min(later, key=lambda each: (-each.step, each.owed), default=None)


# ---- last step ----


# Seconds in which a device has computed an update for certain, and in which ranks that fail alike have all done so.
_SETTLING, _TELLING = 1.0, 2.0


class FinalSnapshot:
    """
    Leaves the state after the last finished step to the process that goes on with the run: each of several ranks its
    own, whether it has failed itself or waits for the one that has.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        # The training thread, and one that is about to end the process, may want to at the same time.
        self._lock = threading.Lock()
        # Whether it was left since `train()` was entered.
        self.left = False

    def leave(self, instrument: Instrument, undisturbed: Callable[[], bool] | None = None) -> None:
        """
        Leaves it, if it is the run's own, whole and finite, and there was a step since `train()` was entered. Beside
        the training thread, only if that was `undisturbed`.
        """
        with self._lock:
            if self.left:
                return
            try:
                if undisturbed is None:
                    self._finish_step(instrument)
                if not instrument.reentry.moved:
                    return
                self.left = True
                with _beside(instrument.view.device):
                    step = self._leave(instrument, undisturbed or (lambda: True))
            except Exception as error:
                logger.warning("The state of the last step could not be left in memory: %s.", error, exc_info=True)
                return
            if step is not None:
                self._run.journal.event("left_in_memory", step)

    def _finish_step(self, instrument: Instrument) -> None:
        """Applies a step that other ranks have applied. With shards that may be a collective."""
        view, rollback = instrument.view, self._run.rollback
        leaves = rollback.shared is not None and view.can_hand_over and not rollback.states.displaced
        if not leaves or not instrument.owes_update or view.sharded or view.under_deepspeed:
            return
        # What all have raised, all have left, and what their callbacks were to do to the gradients is pending as well.
        if not votes.all_reach("a step that was found fit is not applied", _TELLING):
            instrument.finish_step()

    def _leave(self, instrument: Instrument, undisturbed: Callable[[], bool]) -> int | None:
        rollback = self._run.rollback
        shared, taken_of = rollback.shared, rollback.ring.taken_of
        moved = rollback.states.displaced or instrument.call.half_way
        if shared is None or taken_of is None or moved or not instrument.view.can_hand_over:
            return None
        live = _live_beside_training(instrument, taken_of)
        shared.open(lambda: size_of(live))
        if not shared.active:
            return None
        versions = _versions(live)
        point = instrument.reentry.rewind_to_last_step()
        if point is None:
            return None
        owed, weights = point.pending.collectives(instrument.trainer), Replicas(instrument.trainer).fingerprint()

        def record() -> ResumeRecord:
            return ResumeRecord.of(instrument.trainer, instrument.ledger, point.bookkeeping.rng, point.pending)

        snapshot = Snapshot()
        snapshot.take(live, shared.new_block)
        snapshot.wait()
        if not undisturbed() or _versions(live) != versions:
            logger.info("Training went on while its state was left in memory, which does not count.")
            return None
        # Held, or its memory would be given back.
        rollback.ring.left = snapshot
        shared.prepare(snapshot, live, record, owed, weights)
        return instrument.view.step if snapshot.stored is not None else None


def _live_beside_training(instrument: Instrument, taken_of: LiveState) -> LiveState:
    """
    Collects the tensors of a run. In the middle of a step FSDP2 and ZeRO have put gathered weights in the place of
    shards, which are still those that the newest snapshot was taken of.
    """
    if not (instrument.view.sharded or instrument.view.under_deepspeed):
        return instrument.view.live_state()
    buffers = {name: local(each) for name, each in instrument.trainer.model.named_buffers() if not each.is_meta}
    return replace(taken_of, buffers=buffers)


def _versions(live: LiveState) -> list[int]:
    return [tensor._version for tensor in live.parameters.values()]


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """
    Has a device do something beside what it computes, which may wait for another rank, without an end; what it has
    been given, the last update above all, is waited for first.
    """
    if device.type != "cuda":
        yield
        return
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))
    until = time.monotonic() + _SETTLING
    while not done.query() and time.monotonic() < until:
        time.sleep(0.01)
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
