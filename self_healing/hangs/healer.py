"""`HangWatch`: has the signs of life of each `train()` call of a run watched."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import FrameType

from ..run.claims import Claim
from ..run.context import RunContext
from ..run.healer import Healer
from .watchdog import Watchdog


logger = logging.getLogger("self_healing")


class HangWatch(Healer):
    """
    Watches for hangs, from one entry into `train()` to its end.

    Args:
        run ([`RunContext`]):
            The run.
        before_exit (`Callable[[str], None]`):
            Told why, before the process ends for a restart.
        still_training (`Callable[[FrameType | None], bool]`):
            Whether the run still goes on in a frame of the training thread.
        over (`Callable[[], None]`):
            Told when a run turns out to have ended without a word.
        counts_attempts (`Callable[[], bool]`):
            Whether a job that is started again and again without progress is ended.
    """

    def __init__(
        self,
        run: RunContext,
        before_exit: Callable[[str], None],
        still_training: Callable[[FrameType | None], bool],
        over: Callable[[], None],
        counts_attempts: Callable[[], bool],
    ) -> None:
        self._run = run
        self._before_exit = before_exit
        self._still_training = still_training
        self._over = over
        self._counts_attempts = counts_attempts
        self._watchdog: Watchdog | None = None

    def attach(self, first: bool) -> None:
        """Watches this `train()` call, until the instrument is detached."""
        run, instrument = self._run, self._run.instrument
        watchdog = self._watchdog = self._watchdog or Watchdog(
            run.config,
            run.heartbeat,
            run.journal,
            may_recover=lambda: run.may_enter_again,
            before_exit=self._before_exit,
            step=lambda: run.step,
            still_training=self._still_training,
            at_the_end=self._at_the_end,
            over=self._over,
            counts_attempts=self._counts_attempts,
        )
        try:
            watchdog.start()
        except Exception:
            logger.warning("Hangs are not watched for in this run.", exc_info=True)
        instrument.on_detach.append(watchdog.stop)
        if not first and instrument.view.streams:
            # Skipping what a stream has given takes no longer than consuming it did.
            run.heartbeat.be_patient("data", at_least=time.time() - run.started_at)
        if instrument.view.loader_workers > 0:
            # They wait before another attempt as well, and cannot say so from where they are.
            run.heartbeat.allow("data", run.config.retry_total_seconds + run.config.hang_floor_seconds)

    @property
    def has_claim(self) -> bool:
        return self._watchdog is not None and self._watchdog.has_claim

    def claim(self, error: BaseException) -> Claim | None:
        return None if self._watchdog is None else self._watchdog.claim(error)

    def _at_the_end(self) -> bool:
        instrument = self._run.attachment.instrument
        return instrument is not None and instrument.view.at_the_end
