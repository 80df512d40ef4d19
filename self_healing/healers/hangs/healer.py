"""`JointExit`: ends this process when another rank of the job has failed, whatever collective it waits in."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ...failures.recipes import Action, FailureType
from ...hangs.bounded import within
from ...hangs.collectives import collective_in, unfinished_collectives
from ...hangs.stacks import current_frames, line_of, user_line_of, write_stacks
from ...ranks.messages import Failure, Position, where_all_are
from ...run.run import RunContext
from ...system.processes import EXIT_FOR_RESTART, restarts_on_exit


logger = logging.getLogger("self_healing")

# The others may have failed with the same exception, and end by themselves, unless they wait in a collective for
# so many seconds, give no sign of life for so many, or are still there after so many.
_IN_COLLECTIVE, _SILENT, _STILL_THERE = 1.0, 3.0, 6.0
_GLANCE = 0.2
# Where the others are is waited for as long, and what is written down as long, in seconds: in all less than the ten
# within which the last rank ends.
_ASKING, _WRITING, _LEAVING, _FLUSHING = 1.0, 2.0, 2.5, 0.5


class JointExit:
    """
    Ends this process when another rank has failed: training cannot go on without that rank, and a collective whose
    other side is gone returns after the timeout of its process group at best, half an hour.
    """

    def __init__(
        self,
        run: RunContext,
        position: Callable[[], Position],
        at_the_end: Callable[[], bool],
        before_exit: Callable[[str, Failure, int], None],
        leave_state: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._leave_state = leave_state
        self._position = position
        self._at_the_end = at_the_end
        self._before_exit = before_exit
        self._called_off = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # Where this rank was when it was clear that it does not end by itself.
        self._stayed_at: Position | None = None
        # Whether the training thread has come to `call_off` while this rank is being ended, and stays there.
        self.holds_training = False
        self.training_thread = 0
        self._began = time.monotonic()

    def begin(self) -> None:
        """Called in the training thread when `train()` begins."""
        self.training_thread = threading.get_ident()
        self._began = time.monotonic()
        self._called_off.clear()
        self._thread = None

    def position_before(self, step: int) -> Position:
        """Says where this rank is before its signs of life are watched."""
        frame = current_frames().get(self.training_thread)
        return Position(
            step,
            "before the first step",
            0,
            time.monotonic() - self._began,
            0.0,
            training=False,
            collective=collective_in(frame),
            line=None if frame is None else line_of(frame),
            called_from=user_line_of(frame),
        )

    def call_off(self) -> None:
        """Called in the training thread when `train()` is left: from here on the process is the caller's."""
        # Not while it is being ended: what is written down would be cut off.
        self.holds_training = True
        with self._lock:
            self._called_off.set()
        self.holds_training = False

    def failed(self, failure: Failure) -> None:
        """Another rank has failed: ends this one as soon as it is clear that it does not end by itself."""
        if self._thread is None and not self._called_off.is_set():
            self._thread = threading.Thread(
                target=self._follow, args=(failure,), name="self_healing joint exit", daemon=True
            )
            self._thread.start()

    def _follow(self, failure: Failure) -> None:
        try:
            if not self._stays(failure):
                return
            if self._run.config.hang_action != "recover":
                within(_WRITING, lambda: self._write_down(failure, None))
                return
            with self._lock:
                if not self._called_off.is_set():
                    self._leave(failure)
        except Exception:
            logger.exception("What another rank has failed with could not be followed; this one stays as it is.")

    def _stays(self, failure: Failure) -> bool:
        """Waits until it is clear that this rank does not end by itself; `False` if it does."""
        known = time.monotonic()
        while not self._called_off.wait(_GLANCE):
            position, since = self._position(), time.monotonic() - known
            self._stayed_at = position
            if position.collective is not None and position.seconds >= _IN_COLLECTIVE:
                return True
            if self._at_the_end():
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
            within(_LEAVING, self._leave_state)
        within(_FLUSHING, logging.shutdown)
        within(_FLUSHING, sys.stdout.flush)
        within(_FLUSHING, sys.stderr.flush)
        # Nothing of Python's own end may run: it would wait for the thread that is blocked.
        os._exit(code)

    def _write_down(self, failure: Failure, code: int | None) -> None:
        run, journal = self._run, self._run.journal
        # Since then the collective may have returned, with an exception that waits for this thread in `call_off`.
        here = self._stayed_at or self._position()
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
        found: dict[str, Any] = {"diagnosis": f"{told[0].upper()}{told[1:]}. {where_all_are(everywhere)}"}
        if unfinished := self._unfinished_collectives():
            found["unfinished_collectives"] = unfinished
        journal.diagnosed(incident, FailureType.PROCESS_DIED, f"{failure.whose}: {failure.failure.value}", found)
        path = journal.directory / "hangs" / f"{incident.id}-stacks.txt"
        try:
            write_stacks(path, found["diagnosis"], self.training_thread, {})
            journal.acted(incident, Action.WRITE_STACKS.value, path=str(path))
        except OSError as error:
            logger.warning("The stacks could not be written to %s: %s.", path, error)
        why = f"{failure}; this rank {here}"
        if code is None:
            logger.error("Another rank has failed, and this one stays as it is (hang_action). %s", found["diagnosis"])
            journal.closed(incident, "reported")
            journal.dealt_with(incident)
            return
        logger.error("This rank ends because another one has failed. %s", found["diagnosis"])
        if code == EXIT_FOR_RESTART:
            journal.acted(incident, Action.EXIT_FOR_RESTART.value, exit_code=code)
        else:
            journal.acted(incident, Action.STOP.value, exit_code=code)
            journal.closed(incident, "fatal")
        self._before_exit(why, failure, code)
        journal.dealt_with(incident)

    @staticmethod
    def _unfinished_collectives() -> list[str]:
        try:
            return unfinished_collectives()
        except Exception:
            logger.warning("The flight recorder of torch could not be read.", exc_info=True)
            return []
