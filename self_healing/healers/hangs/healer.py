"""Watches a run for hangs, and ends it together with ranks that have failed."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Any

from ...failures.recipes import Action, FailureType
from ...failures.retry import RetryPolicy
from ...ranks.messages import Failure, Position, failure_of, where_all_are
from ...run.healer import Claim, Healer, claim_for
from ...run.run import Run
from ...system.processes import EXIT_FOR_RESTART, contained, restarts_on_exit
from .threads import keep_stacks
from .watchdog import Watchdog, leave_process, within


logger = logging.getLogger("self_healing")


# ---- healer: has the signs of life of each `train()` call of a run watched, here and on the other ranks ----


# Seconds in which an exception that lets the training thread out of a collective has left `train()`.
_LETTING_OUT, _GLANCE_AT_TRAINING = 1.0, 0.05
# The others may have failed with the same exception, and end by themselves, unless they wait in a collective for
# so many seconds, give no sign of life for so many, or are still there after so many.
_IN_COLLECTIVE, _SILENT, _STILL_THERE = 1.0, 3.0, 6.0
_GLANCE_AT_RANKS = 0.2
# Where the others are is waited for as long, and what is written down as long, in seconds: in all less than the ten
# within which the last rank ends.
_ASKING, _WRITING, _LEAVING, _FLUSHING = 1.0, 2.0, 2.5, 0.5


class HangWatch(Healer):
    """
    Watches for hangs, from one entry into `train()` to its end; and tells the other ranks what ends this one, to end
    with the first of them that fails. Training cannot go on without that rank, and a collective whose other side is
    gone returns after the timeout of its process group at best, half an hour.
    """

    def __init__(self, run: Run, ending: Any) -> None:
        self._run = run
        # `Shutdown`, of a family that this one does not import.
        self._ending = ending
        self._watchdog = Watchdog(run, ending)
        self._called_off = threading.Event()
        self._lock = threading.Lock()
        self._following: threading.Thread | None = None
        # Where this rank was when it was clear that it does not end by itself.
        self._stayed_at: Position | None = None
        # Whether the training thread has come to `_call_off` while this rank is being ended, and stays there.
        self._holds_training = False

    def attach(self, first: bool) -> None:
        """Watches this `train()` call, until the instrument is detached."""
        run, instrument = self._run, self._run.instrument
        self._watchdog.start()
        if first:
            # Only a run of one process enters again.
            self.listen()
        # Undone last to first: it stays known where this rank is until the others have been told that it leaves.
        instrument.on_detach.append(self._watchdog.stop)
        instrument.on_detach.append(self._detached)
        if not first and instrument.view.streams:
            # Skipping what a stream has given takes no longer than consuming it did.
            run.heartbeat.be_patient("data", at_least=time.time() - run.started_at)
        if instrument.trainer.args.dataloader_num_workers > 0:
            # They wait before another attempt as well, and cannot say so from where they are.
            run.heartbeat.allow("data", RetryPolicy.of(run.config).total_seconds + run.config.hang_floor_seconds)

    def listen(self) -> None:
        """
        Begins to listen to the other ranks; the wrapper does so before it enters `train()`, where one of them may fail
        before it has come to `on_train_begin`.
        """
        if self._run.config.on_hang != "off":
            self._watchdog.training_thread = threading.get_ident()
            self._called_off.clear()
            self._following = None
            self._run.ranks.watch(self._watchdog.position, self._failed)

    def left_by(self, error: BaseException) -> None:
        """Tells the other ranks of an exception that leaves `train()`; of the first one, and not of how a run ends."""
        self._call_off()
        ranks, instrument = self._run.ranks, self._run.attached
        if not ranks.known:
            return
        if isinstance(error, SystemExit) and instrument is not None and instrument.leaving.begun:
            # All of them leave: one of them was asked to.
            return
        with contained(logger, f"The other ranks could not be told of {type(error)}, which is raised unchanged."):
            position = self._watchdog.position()
            failure = failure_of(error, ranks.rank, position.step, position.section)
            if failure is not None:
                ranks.tell(failure)

    def run_ends(self, step: int) -> None:
        incident, self._watchdog.claimed = self._watchdog.claimed, None
        if incident is not None:
            # The code around it has swallowed the interrupt, and training went on.
            self._run.journal.closed(incident, "self_recovered")

    def close(self) -> None:
        """The run is over in this process: the other ranks are told so, if it has not failed."""
        self._call_off()
        self._run.ranks.leave()

    @property
    def has_claim(self) -> bool:
        return self._watchdog.claimed is not None

    def claim(self, error: BaseException) -> Claim | None:
        incident, self._watchdog.claimed = self._watchdog.claimed, None
        return claim_for(incident, error)

    def _detached(self) -> None:
        error, run = sys.exception(), self._run
        switched_off = run.instrument.failsafe.switched_off
        if switched_off and run.wrapped:
            # Training goes on without us, and ends with the others all the same.
            return
        self._call_off()
        if error is not None and not switched_off:
            self.left_by(error)
        if not run.wrapped:
            # The wrapper's run goes on to its postmortem, and says itself when it is over.
            run.ranks.leave()

    def _call_off(self) -> None:
        """Called in the training thread when `train()` is left: from here on the process is the caller's."""
        # Not while it is being ended: what is written down would be cut off.
        self._holds_training = True
        with self._lock:
            self._called_off.set()
        self._holds_training = False

    # ---- another rank has failed: in threads of their own ----

    def _failed(self, failure: Failure) -> None:
        """Ends this rank as soon as it is clear that it does not end by itself."""
        if self._following is None and not self._called_off.is_set():
            self._following = threading.Thread(
                target=self._follow, args=(failure,), name="self_healing joint exit", daemon=True
            )
            self._following.start()

    def _follow(self, failure: Failure) -> None:
        with contained(logger, "What another rank has failed with could not be followed; this one stays as it is."):
            if not self._stays(failure):
                return
            if self._run.config.on_hang != "recover":
                within(_WRITING, lambda: self._write_down(failure, None))
                return
            with self._lock:
                if not self._called_off.is_set():
                    self._leave(failure)

    def _stays(self, failure: Failure) -> bool:
        """Waits until it is clear that this rank does not end by itself; `False` if it does."""
        known = time.monotonic()
        while not self._called_off.wait(_GLANCE_AT_RANKS):
            position, since = self._watchdog.position(), time.monotonic() - known
            self._stayed_at = position
            if position.collective is not None and position.seconds >= _IN_COLLECTIVE:
                return True
            if position.ending:
                # What is left of the run may need no other rank (an upload).
                continue
            if since >= failure.patience and (position.seconds >= _SILENT or since >= failure.patience + _STILL_THERE):
                return True
        return False

    def _leave(self, failure: Failure) -> None:
        run = self._run
        # Another one may have come first.
        failure = run.ranks.first_failure() or failure
        restarts = restarts_on_exit(run.config) and failure.exit_code is None
        code = EXIT_FOR_RESTART if restarts else failure.exit_code or 1
        within(_ASKING + _WRITING, lambda: self._write_down(failure, code))
        if restarts:
            within(_LEAVING, self._leave_last_step)
        leave_process(code, _FLUSHING)

    def _leave_last_step(self) -> None:
        """
        Called beside the training thread, which waits in a collective for a rank that is gone, or has been let out of
        it by an exception since.
        """
        instrument, deadline = self._run.attached, time.monotonic() + _LETTING_OUT
        began = self._watchdog.position()
        while not self._stands(began) and time.monotonic() < deadline:
            time.sleep(_GLANCE_AT_TRAINING)
            began = self._watchdog.position()
        if instrument is not None and self._stands(began):
            self._ending.last_step.leave(instrument, lambda: self._stands(began))

    def _stands(self, since: Position) -> bool:
        """Whether the training thread changes nothing any more, and has not since it was somewhere."""
        now = self._watchdog.position()
        if self._holds_training:
            return now.step == since.step
        return now.collective is not None and (now.step, now.section) == (since.step, since.section)

    def _write_down(self, failure: Failure, code: int | None) -> None:
        run, journal = self._run, self._run.journal
        # Since then the collective may have returned, with an exception that waits for this thread in `_call_off`.
        here = self._stayed_at or self._watchdog.position()
        everywhere = run.ranks.positions(within=_ASKING) | {run.ranks.rank: here}
        evidence: dict[str, Any] = {
            "rank": failure.rank,
            "failure": failure.failure.value,
            "error": failure.error,
            "failed_at_step": failure.step,
            "section": here.section,
            "seconds": round(here.seconds, 3),
            "waits_at": here.line,
            "called_from": here.called_from,
            "collective": here.collective,
        }
        incident = journal.open(run.step, "failure_on_another_rank", evidence)
        told = str(failure)
        diagnosis = f"{told[0].upper()}{told[1:]}. {where_all_are(everywhere)}"
        cause = f"{failure.whose}: {failure.failure.value}"
        journal.diagnosed(incident, FailureType.PROCESS_DIED, cause, {"diagnosis": diagnosis})
        keep_stacks(journal, incident, diagnosis, self._watchdog.training_thread)
        if code is None:
            logger.error("Another rank has failed; this one keeps running (on_hang). %s", diagnosis)
            journal.closed(incident, "reported")
        else:
            logger.error("This rank ends because another one has failed. %s", diagnosis)
            ends_for_good = code != EXIT_FOR_RESTART
            action = Action.STOP if ends_for_good else Action.EXIT_FOR_RESTART
            journal.acted(incident, action.value, exit_code=code)
            if ends_for_good:
                journal.closed(incident, "fatal")
            self._ending.end_process(f"{failure}; this rank {here}", failure, code)
        journal.dealt_with(incident)
