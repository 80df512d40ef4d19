"""`LastStep`: leaves the state after the last finished step in shared memory, where this process is about to end."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..healers.restarts.emergency import owing
from ..hf.adapter import Instrument
from ..hf.replicas import Replicas
from ..hf.state import LiveState
from ..hf.trainer_state import ResumeRecord
from ..journal.journal import Journal
from ..ranks import votes
from .host_memory import size_of
from .rollback import Rollback
from .shared_memory import AtTheEnd
from .snapshots import Snapshot


logger = logging.getLogger("self_healing")

# Seconds in which a device has computed an update for certain, and in which ranks that fail alike have all done so.
_SETTLING, _TELLING = 1.0, 2.0


class LastStep:
    """
    Leaves the state after the last finished step to the process that goes on with the run: each of several ranks its
    own, whether it has failed itself or waits for the one that has.
    """

    def __init__(self, rollback: Rollback, journal: Journal) -> None:
        self._rollback = rollback
        self._journal = journal
        # The training thread, and one that is about to end the process, may want to at the same time.
        self._lock = threading.Lock()
        self._asked = False

    def begin(self) -> None:
        """`train()` is entered: there is another step to leave."""
        self._asked = False

    def leave(self, instrument: Instrument, waits: Callable[[], bool] | None = None) -> None:
        """Leaves it, if it is the run's own, whole and finite, and there was a step since `train()` was entered."""
        with self._lock:
            if self._asked:
                return
            try:
                alone = waits is None and self._finish_step(instrument)
                if not instrument.reentry.moved:
                    return
                self._asked = True
                with _beside(instrument.view.device):
                    step = self._leave(instrument, waits or (lambda: True), alone)
            except Exception as error:
                logger.warning("The state of the last step could not be left in memory: %s.", error, exc_info=True)
                return
            if step is not None:
                self._journal.event("left_in_memory", step)

    def _finish_step(self, instrument: Instrument) -> bool:
        """Applies a step that other ranks have applied; whether there was one."""
        view, rollback = instrument.view, self._rollback
        leaves = rollback.shared is not None and view.can_hand_over and not rollback.in_place.displaced
        # With shards, applying it may be a collective, and the weights are not to be compared.
        finishes = leaves and instrument.owes_update and view.steps_alone
        # What all have raised, all have left, and what their callbacks were to do to the gradients is owed as well.
        if finishes and votes.all_reach("a step that was found fit is not applied", _TELLING):
            finishes = False
        if finishes:
            instrument.finish_step()
        _let_settle(instrument.view.device)
        return finishes

    def _leave(self, instrument: Instrument, undisturbed: Callable[[], bool], alone: bool) -> int | None:
        shared, live = self._rollback.shared, self._rollback.ring.taken_of
        if shared is None or live is None or self._rollback.in_place.displaced:
            return None
        if not instrument.view.can_hand_over:
            return None
        shared.open(lambda: size_of(live))
        if not shared.active:
            return None
        versions = _versions(live)
        finished = instrument.reentry.rewind_to_last_step()
        if finished is None:
            return None
        bookkeeping, pending, leave = finished
        weights = Replicas(instrument.trainer).fingerprint()
        left = AtTheEnd(pending.meetings(instrument.trainer, leave), weights, alone)

        def record() -> ResumeRecord:
            taken = ResumeRecord.of(instrument.trainer, instrument.ledger, bookkeeping.rng)
            return taken.owing(owing(pending, leave))

        snapshot = Snapshot()
        snapshot.take(live, {}, True, shared.new_block)
        if not undisturbed() or _versions(live) != versions:
            logger.info("Training went on while its state was left in memory, which does not count.")
            return None
        # Held, or its memory would be given back.
        self._rollback.ring.left = snapshot
        shared.prepare(snapshot, live, record, left)
        return instrument.view.step if shared.has(snapshot) else None


def _let_settle(device: torch.device) -> None:
    """Waits for what a device has been given to compute, the last update above all."""
    if device.type != "cuda":
        return
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))
    until = time.monotonic() + _SETTLING
    while not done.query() and time.monotonic() < until:
        time.sleep(0.01)


def _versions(live: LiveState) -> list[int]:
    return [tensor._version for tensor in live.parameters.values()]


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Has a device do something beside what it computes: that may wait for another rank, without an end."""
    if device.type != "cuda":
        yield
        return
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
