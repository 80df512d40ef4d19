"""`HangWatch`: has the signs of life of each `train()` call of a run watched, here and on the other ranks."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import FrameType

from ..healers.hangs.healer import JointExit
from ..healers.hangs.watchdog import Watchdog
from ..hf.adapter import Instrument
from ..ranks.messages import Failure, Position, failure_of
from ..run.healer import Claim, Healer
from ..run.run import RunContext
from ..system.processes import EXIT_FOR_RESTART


logger = logging.getLogger("self_healing")

# Seconds in which an exception that lets the training thread out of a collective has left `train()`.
_LETTING_OUT, _GLANCE = 1.0, 0.05


class HangWatch(Healer):
    """
    Watches for hangs, from one entry into `train()` to its end; and tells the other ranks what ends this one, to end
    with the first of them that fails.
    """

    def __init__(
        self,
        run: RunContext,
        before_exit: Callable[[str, Failure | None, int], None],
        still_training: Callable[[FrameType | None], bool],
        over: Callable[[], None],
        counts_attempts: Callable[[], bool],
        leave_state: Callable[[Instrument, Callable[[], bool]], None],
    ) -> None:
        self._run = run
        self._leave_state = leave_state
        self._before_exit = before_exit
        self._still_training = still_training
        self._over = over
        self._counts_attempts = counts_attempts
        self._watchdog: Watchdog | None = None
        self._joint_exit = JointExit(run, self._position, self._at_the_end, before_exit, self._leave_last_step)

    def attach(self, first: bool) -> None:
        """Watches this `train()` call, until the instrument is detached."""
        run, instrument = self._run, self._run.instrument
        watchdog = self._watchdog = self._watchdog or Watchdog(
            run.config,
            run.heartbeat,
            run.journal,
            may_recover=lambda: run.may_enter_again,
            before_exit=lambda why: self._before_exit(why, None, EXIT_FOR_RESTART),
            step=lambda: run.step,
            still_training=self._still_training,
            at_the_end=self._at_the_end,
            over=self._ended_without_a_word,
            counts_attempts=self._counts_attempts,
            ranks=run.ranks,
        )
        try:
            watchdog.start()
        except Exception:
            logger.warning("Hangs are not watched for in this run.", exc_info=True)
        self.listen()
        # Undone last to first: it stays known where this rank is until the others have been told that it leaves.
        instrument.on_detach.append(watchdog.stop)
        instrument.on_detach.append(self._detached)
        if not first and instrument.view.streams:
            # Skipping what a stream has given takes no longer than consuming it did.
            run.heartbeat.be_patient("data", at_least=time.time() - run.started_at)
        if instrument.view.loader_workers > 0:
            # They wait before another attempt as well, and cannot say so from where they are.
            run.heartbeat.allow("data", run.config.retry_total_seconds + run.config.hang_floor_seconds)

    def listen(self) -> None:
        """
        Begins to listen to the other ranks; the wrapper does so before it enters `train()`, where one of them may fail
        before it has come to `on_train_begin`.
        """
        if self._run.config.hang_action != "off":
            self._joint_exit.begin()
            self._run.ranks.watch(self._position, self._joint_exit.failed)

    def left_by(self, error: BaseException) -> None:
        """Tells the other ranks of an exception that leaves `train()`; of the first one, and not of how a run ends."""
        self._joint_exit.call_off()
        ranks, instrument = self._run.ranks, self._run.attachment.instrument
        if not ranks.known:
            return
        if isinstance(error, SystemExit) and instrument is not None and instrument.leaving.begun:
            # All of them leave: one of them was asked to.
            return
        try:
            position = self._position()
            failure = failure_of(error, ranks.rank, position.step, position.section)
            if failure is not None:
                ranks.tell(failure)
        except Exception:
            logger.exception("The other ranks could not be told of %s, which is raised unchanged.", type(error))

    def close(self) -> None:
        """The run is over in this process: the other ranks are told so, if it has not failed."""
        self._joint_exit.call_off()
        self._run.ranks.leave()

    @property
    def has_claim(self) -> bool:
        return self._watchdog is not None and self._watchdog.has_claim

    def claim(self, error: BaseException) -> Claim | None:
        return None if self._watchdog is None else self._watchdog.claim(error)

    def _at_the_end(self) -> bool:
        instrument = self._run.attachment.instrument
        return instrument is not None and instrument.view.at_the_end

    def _leave_last_step(self) -> None:
        """
        Called beside the training thread, which waits in a collective for a rank that is gone, or has been let out of
        it by an exception since.
        """
        instrument, deadline = self._run.attachment.instrument, time.monotonic() + _LETTING_OUT
        began = self._position()
        while not self._stands(began) and time.monotonic() < deadline:
            time.sleep(_GLANCE)
            began = self._position()
        if instrument is not None and self._stands(began):
            self._leave_state(instrument, lambda: self._stands(began))

    def _stands(self, since: Position) -> bool:
        """Whether the training thread changes nothing any more, and has not since it was somewhere."""
        now = self._position()
        if self._joint_exit.holds_training:
            return now.step == since.step
        return now.collective is not None and (now.step, now.section) == (since.step, since.section)

    def _position(self) -> Position:
        if self._watchdog is None:
            return self._joint_exit.position_before(self._run.step)
        return self._watchdog.position()

    def _detached(self) -> None:
        error, instrument = sys.exception(), self._run.attachment.instrument
        switched_off = instrument is not None and instrument.failsafe.switched_off
        # The wrapper's run goes on to its postmortem, and says itself when it is over.
        says_when_over = self._counts_attempts()
        if switched_off and says_when_over:
            # Training goes on without us, and ends with the others all the same.
            return
        self._joint_exit.call_off()
        if error is not None and not switched_off:
            self.left_by(error)
        if not says_when_over:
            self._run.ranks.leave()

    def _ended_without_a_word(self) -> None:
        self.close()
        self._over()
