"""The machine is asked for back: SIGTERM and SIGUSR1 end the run after the step, with a checkpoint."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from .failures import FailureType, Interruption
from .launcher import EXIT_FOR_RESTART


logger = logging.getLogger("self_healing")

# SIGTERM ends a process by convention with 128 + its number; SIGUSR1 is how schedulers announce that they will stop a
# job, which is then to be queued again.
EXIT_CODES = {signal.SIGTERM: 128 + signal.SIGTERM}
if hasattr(signal, "SIGUSR1"):
    # Not on Windows.
    EXIT_CODES[signal.SIGUSR1] = EXIT_FOR_RESTART
# What a checkpoint may take longer than the longest one so far, and what leaving takes besides, in seconds.
_SLOWER_SAVE, _LEAVING = 2.0, 2.0


class Preemption:
    """
    Listens to SIGTERM and SIGUSR1 for the time of a run.

    The first signal asks for the end of the run; `requested` is looked at between two steps. Should the step not end
    in time for a checkpoint before the deadline, it is interrupted (where `may_interrupt` allows it); at the deadline
    the process ends, whatever it is doing.

    Handlers that were there are called as well, at once. What they raise (`sys.exit` is usual) is put off to the end
    of the step.

    Args:
        deadline (`float`):
            Seconds from the signal to the end of the process.
        may_interrupt (`Callable[[], bool]`):
            Whether an exception in the main thread leaves weights and checkpoints whole.
        longest_save (`Callable[[], float]`):
            How long the slowest checkpoint has taken, in seconds: as early as that the step has to be left.
        still_training (`Callable[[FrameType | None], bool]`):
            Whether the run still goes on in a frame of the main thread: an exception may have ended `train()` without
            a word.
        note (`Callable[[str], None]`):
            Told why the process ends at the deadline, right before it does.
    """

    def __init__(
        self,
        deadline: float,
        may_interrupt: Callable[[], bool],
        longest_save: Callable[[], float],
        still_training: Callable[[FrameType | None], bool],
        note: Callable[[str], None],
    ) -> None:
        self.deadline = deadline
        self.requested: signal.Signals | None = None
        self.raised: BaseException | None = None
        self._may_interrupt = may_interrupt
        self._longest_save = longest_save
        self._still_training = still_training
        self._note = note
        self._earlier: dict[signal.Signals, Any] = {}
        self._main: int | None = None
        self._pid = self._wake = -1
        self._over = threading.Event()
        self._interrupting = False

    # ---- listening ----

    def listen(self) -> None:
        """Takes the signals over; only possible in the main thread, elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            logger.info("train() does not run in the main thread: SIGTERM and SIGUSR1 are left as they are.")
            return
        self._main, self._pid = threading.get_ident(), os.getpid()
        reading, self._wake = os.pipe()
        threading.Thread(
            target=self._keep_the_deadline, args=(reading,), name="self_healing preemption", daemon=True
        ).start()
        for signum in EXIT_CODES:
            self._earlier[signum] = _before_stale_ones(signum, signal.signal(signum, self._on_signal))

    def release(self) -> None:
        """Gives the signals back, where nobody else has taken them since."""
        self._over.set()
        if self._wake >= 0:
            with contextlib.suppress(OSError):
                os.write(self._wake, b".")
                os.close(self._wake)
            self._wake = -1
        for signum, earlier in self._earlier.items():
            if signal.getsignal(signum) == self._on_signal:
                # A handler that was not set from Python cannot be set again.
                signal.signal(signum, signal.SIG_DFL if earlier is None else earlier)
        self._earlier.clear()

    def forget(self) -> None:
        """
        Holds on to nothing of a run that has ended without a word. Callable from any thread: signals are given back
        when the next one comes.
        """
        self._over.set()
        self._may_interrupt, self._longest_save = (lambda: False), (lambda: 0.0)
        self._still_training, self._note = (lambda frame: False), (lambda why: None)
        with contextlib.suppress(OSError):
            os.write(self._wake, b".")

    @property
    def exit_code(self) -> int:
        """What the process ends with: 143 after SIGTERM, 75 after SIGUSR1."""
        return EXIT_CODES[self.requested or signal.SIGTERM]

    # ---- a signal comes ----

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A child process that was forked with our handler, and is to end as it would without.
            earlier = self._earlier.get(signal.Signals(signum))
            signal.signal(signum, signal.SIG_DFL if earlier is None else earlier)
            os.kill(os.getpid(), signum)
            return
        if self._interrupting:
            # Sent by the thread below, which has waited long enough.
            self._interrupting = False
            if not self._over.is_set() and self._may_interrupt():
                raise Interruption("the step did not end in time to be saved", FailureType.PREEMPTED)
            return
        if not self._still_training(frame):
            if signal.getsignal(signum) == self._on_signal:
                self.release()
                os.kill(os.getpid(), signum)
            else:
                # Whoever has the signal now has passed it on.
                self._call_earlier(signal.Signals(signum), frame)
            return
        first = self.requested is None
        if first:
            # Nothing is logged here, no thread is started and no lock is taken: the handler may have interrupted the
            # very code that holds it.
            self.requested = signal.Signals(signum)
            with contextlib.suppress(OSError):
                os.write(self._wake, b"!")
        self._call_earlier(signal.Signals(signum), frame)

    def _call_earlier(self, signum: signal.Signals, frame: FrameType | None) -> None:
        earlier = self._earlier.get(signum)
        if not callable(earlier) or _is_just_in_time(earlier):
            return
        try:
            earlier(signum, frame)
        except BaseException as error:
            self.raised = self.raised or error

    def _keep_the_deadline(self, signals: int) -> None:
        try:
            os.read(signals, 1)
        finally:
            os.close(signals)
        if self._over.is_set():
            return
        ends = time.monotonic() + self.deadline
        reserve = _SLOWER_SAVE * self._longest_save() + _LEAVING
        if not self._over.wait(max(self.deadline - reserve, self.deadline / 2)) and self._main is not None:
            self._interrupting = True
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(self._main, self.requested or signal.SIGTERM)
        if self._over.wait(max(ends - time.monotonic(), 0.0)):
            return
        text = (
            f"The process did not come to an end within {self.deadline:g} s of "
            f"{(self.requested or signal.SIGTERM).name} (preemption_deadline) and is ended now; a restart goes on "
            "from the newest complete checkpoint."
        )
        with contextlib.suppress(Exception):
            self._note(text)
        logging.shutdown()
        os._exit(self.exit_code)


def _before_stale_ones(signum: signal.Signals, handler: Any) -> Any:
    """What was there before handlers of runs that an exception has ended without a word."""
    owner = getattr(handler, "__self__", None)
    while isinstance(owner, Preemption) and not owner._still_training(sys._getframe()):
        handler = owner._earlier.get(signum, signal.SIG_DFL)
        owner = getattr(handler, "__self__", None)
    return handler


def _is_just_in_time(handler: Any) -> bool:
    """Whether it is that of `enable_jit_checkpoint` of transformers, which promises the same: one is enough."""
    return type(getattr(handler, "__self__", None)).__module__.endswith("trainer_jit_checkpoint")
