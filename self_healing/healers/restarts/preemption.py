"""SIGTERM and SIGUSR1: finish the step, save, exit."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, ClassVar, NoReturn

from ...checkpoints.choice import newest_checkpoint_of
from ...checkpoints.marker import step_of
from ...failures.recipes import Action, FailureType, Interruption
from ...hf.patching import is_training
from ...ranks.messages import Failure
from ...run.record import Ending
from ...run.run import Run
from ...run.status import RunState
from ...system.processes import EXIT_FOR_RESTART
from .attempts import Attempts


logger = logging.getLogger("self_healing")


# ---- preemption: sIGTERM and SIGUSR1 end the run after the step, with a checkpoint ----


# SIGTERM ends a process by convention with 128 + its number; SIGUSR1 is how schedulers announce that they will stop a
# job, which is then to be queued again.
EXIT_CODES = {signal.SIGTERM: 128 + signal.SIGTERM}
if hasattr(signal, "SIGUSR1"):
    # Not on Windows.
    EXIT_CODES[signal.SIGUSR1] = EXIT_FOR_RESTART
# What ranks that were sent a signal say in the vote of a step, in which it is added up: of one signal more than all
# ranks together can say of the other one. Such sums are exact in single precision.
_OF_SIGUSR1, _OF_SIGTERM = 1, 4096
# What a checkpoint may take longer than the longest one so far, and what leaving takes besides, in seconds.
_SLOWER_SAVE, _LEAVING = 2.0, 2.0
# Written to the thread that waits for signals; no signal has this number.
_NOTHING = b"\0"


class Preemption:
    """Listens to SIGTERM and SIGUSR1 for the time of a run, and keeps its deadline."""

    # In this process; one may be of a run that an exception has ended without a word.
    _listening: ClassVar[list[Preemption]] = []

    def __init__(self, departure: Departure, deadline: float) -> None:
        self.deadline = deadline
        self.requested: signal.Signals | None = None
        # By which signal all ranks have agreed to leave.
        self.agreed: signal.Signals | None = None
        self.raised: BaseException | None = None
        # `None` once nothing is held of the run.
        self._departure: Departure | None = departure
        self._earlier: dict[signal.Signals, Any] = {}
        self._main = self._pid = self._wake = self._waits = -1
        # Whether signals are written to the thread by the interpreter itself.
        self._wakes = False
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._interrupting = False

    # ---- listening ----

    def listen(self) -> None:
        """Takes the signals over; only possible in the main thread, elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            logger.info("train() does not run in the main thread: SIGTERM and SIGUSR1 are left as they are.")
            return
        for stale in reversed([each for each in self._listening if not each._is_training(sys._getframe())]):
            stale.release()
        self._main, self._pid = threading.get_ident(), os.getpid()
        self._waits, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._thread = threading.Thread(target=self._keep_the_deadline, name="self_healing preemption", daemon=True)
        self._thread.start()
        self._earlier = {signum: signal.signal(signum, self._on_signal) for signum in EXIT_CODES}
        # Python runs a handler when the main thread is back from native code, which may be never: a collective whose
        # other side is gone. The number of the signal is written to the thread at once.
        theirs = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._wakes = theirs == -1
        if not self._wakes:
            signal.set_wakeup_fd(theirs)
        self._listening.append(self)

    def release(self) -> None:
        """Gives the signals back, where no other handler was installed since."""
        self._over.set()
        if self in self._listening:
            self._listening.remove(self)
        if self._wakes:
            self._wakes = False
            with contextlib.suppress(ValueError):
                current = signal.set_wakeup_fd(-1)
                if current != self._wake:
                    signal.set_wakeup_fd(current)
        self._close()
        for signum, earlier in self._earlier.items():
            if signal.getsignal(signum) == self._on_signal:
                # A handler that was not set from Python cannot be set again.
                signal.signal(signum, signal.SIG_DFL if earlier is None else earlier)
        self._earlier.clear()

    def _close(self) -> None:
        """The thread ends, and with it what it listens to."""
        if self._thread is None:
            return
        with contextlib.suppress(OSError):
            os.write(self._wake, _NOTHING)
        self._thread.join(1.0)
        if not self._thread.is_alive():
            os.close(self._wake)
            os.close(self._waits)
        self._thread = None

    def forget(self) -> None:
        """Holds on to nothing of a run that has ended without a word."""
        self._over.set()
        self._departure = None
        if self._thread is not None:
            with contextlib.suppress(OSError):
                os.write(self._wake, _NOTHING)

    def _is_training(self, frame: FrameType | None) -> bool:
        return self._departure is not None and self._departure.still_training(frame)

    @property
    def exit_code(self) -> int:
        """The process's exit code: 143 after SIGTERM, 75 after SIGUSR1."""
        return EXIT_CODES[self.agreed or self.requested or signal.SIGTERM]

    @property
    def wish(self) -> int:
        """What this process says in the vote of a step; 0 where it was sent no signal."""
        if self.requested is None:
            return 0
        return _OF_SIGTERM if self.requested == signal.SIGTERM else _OF_SIGUSR1

    def agree(self, wishes: float) -> None:
        """Takes over by which signal the ranks leave; 0 on one process."""
        if wishes:
            self.agreed = signal.SIGTERM if wishes >= _OF_SIGTERM else signal.SIGUSR1

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
            if not self._over.is_set() and self._departure is not None and self._departure.may_be_interrupted():
                raise Interruption("the step did not end in time to be saved", FailureType.PREEMPTED)
            return
        if not self._is_training(frame):
            if signal.getsignal(signum) == self._on_signal:
                self.release()
                os.kill(os.getpid(), signum)
            else:
                # Whoever has the signal now has passed it on.
                self._call_earlier(signal.Signals(signum), frame)
            return
        if self.requested is None:
            # Nothing is logged here, no thread is started and no lock is taken: the handler may have interrupted the
            # very code that holds it.
            self.requested = signal.Signals(signum)
            with contextlib.suppress(OSError):
                os.write(self._wake, bytes([signum]))
        self._call_earlier(signal.Signals(signum), frame)

    def _call_earlier(self, signum: signal.Signals, frame: FrameType | None) -> None:
        earlier = self._earlier.get(signum)
        if not callable(earlier) or _is_just_in_time(earlier):
            return
        try:
            earlier(signum, frame)
        except BaseException as error:
            self.raised = self.raised or error

    # ---- the deadline, in a thread of its own ----

    def _first_request(self) -> float | None:
        """Waits for a signal that is meant for the run; when it came, or `None` if the run is over before."""
        while True:
            number = os.read(self._waits, 1)[0]
            came = time.monotonic()
            if self._over.is_set():
                return None
            if number in EXIT_CODES and (self.requested or signal.getsignal(number) == self._on_signal):
                self.requested = self.requested or signal.Signals(number)
                return came

    def _keep_the_deadline(self) -> None:
        came = self._first_request()
        departure = self._departure
        if came is None or departure is None:
            return
        # A step is left so that its state is saved before the deadline.
        reserve = _SLOWER_SAVE * departure.longest_save() + _LEAVING
        left_by = came + max(self.deadline - reserve, self.deadline / 2)
        if not self._over.wait(max(left_by - time.monotonic(), 0.0)):
            self._interrupting = True
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(self._main, self.requested or signal.SIGTERM)
        if self._over.wait(max(came + self.deadline - time.monotonic(), 0.0)):
            return
        text = (
            f"The process did not come to an end within {self.deadline:g} s of "
            f"{(self.requested or signal.SIGTERM).name} (preemption_deadline) and is ended now; a restart goes on "
            "from the newest complete checkpoint."
        )
        with contextlib.suppress(Exception):
            departure.end_at_the_deadline(text)
        logging.shutdown()
        os._exit(self.exit_code)


def _write_no_signals_of_a_child() -> None:
    """A forked child has the handlers of its parent, and would write its signals to the parent's thread."""
    with contextlib.suppress(ValueError):
        theirs = signal.set_wakeup_fd(-1)
        if theirs not in [each._wake for each in Preemption._listening]:
            signal.set_wakeup_fd(theirs)


if hasattr(os, "register_at_fork"):
    # Not on Windows.
    os.register_at_fork(after_in_child=_write_no_signals_of_a_child)


def _is_just_in_time(handler: Any) -> bool:
    """Whether it is that of `enable_jit_checkpoint` of transformers, which promises the same: one is enough."""
    return type(getattr(handler, "__self__", None)).__module__.endswith("trainer_jit_checkpoint")


# ---- departure: a process that is asked to leave saves what there is, writes down where it goes on, and ends ----


class Departure:
    """Lets a process leave when it is preempted."""

    def __init__(self, run: Run, attempts: Attempts) -> None:
        self._run = run
        self._attempts = attempts
        # Whether the run ends with the step that was finished last.
        self.begun = False
        self.preemption = Preemption(self, run.config.preemption_deadline)

    @property
    def asked(self) -> bool:
        """Whether this process was asked to leave."""
        return self.preemption.requested is not None

    @property
    def wish(self) -> int:
        """What this process says of that in the vote of a step ([`Preemption.wish`]); 0 if it was not asked."""
        return self.preemption.wish

    def begin(self, wishes: float) -> None:
        """Notes that the run ends with the step that was finished last."""
        self.begun = True
        self.preemption.agree(wishes)

    def sleep(self, seconds: float) -> None:
        """Waits, until this process is asked to leave."""
        ends = time.monotonic() + seconds
        while not self.asked and (left := ends - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))

    def still_training(self, frame: Any) -> bool:
        """Whether the run still goes on: without the wrapper, an exception ends `train()` without a word."""
        instrument = self._run.attached
        # The wrapper takes its handlers back whatever happens.
        return self._attempts.record is not None or (instrument is not None and is_training(instrument.trainer, frame))

    def leave(self, step: int, output_dir: str, checkpoint: str | None = None) -> NoReturn:
        """Ends the process; what there is to save is saved."""
        preemption, attempts = self.preemption, self._attempts
        name = "a signal" if preemption.agreed is None else preemption.agreed.name
        name = f"{name} to another process" if preemption.requested is None else preemption.requested.name
        checkpoint = checkpoint or newest_checkpoint_of(self._run.run_id, output_dir)
        code, saved_at = preemption.exit_code, 0 if checkpoint is None else step_of(checkpoint, default=step)
        with self._run.incident(step, "preempted", {"signal": name}) as opened:
            opened.diagnosed(FailureType.PREEMPTED, name)
            opened.acted(Action.SAVE_AND_LEAVE, checkpoint=checkpoint, exit_code=code)
            opened.incident.steps_repeated = max(step - saved_at, 0)
            attempts.steps.close_outcomes()
            opened.close("unresolved" if checkpoint is None else "resolved")
        attempts.end(*self._ending(name))
        if attempts.status is not None:
            attempts.status.end(RunState.LEFT, step, name)
        if preemption.raised is not None:
            raise preemption.raised
        raise SystemExit(code)

    def forget(self) -> None:
        """Holds on to nothing of a run that an exception has ended without a word."""
        self.preemption.forget()
        if self._attempts.status is not None:
            why = "an exception that this callback did not see"
            self._attempts.status.end(RunState.STOPPED, self._run.step, why)

    def may_be_interrupted(self) -> bool:
        """Whether the step can be left where it is: only where `train()` is entered again is anything saved of it."""
        instrument = self._run.attached
        return self._run.may_enter_again and instrument is not None and instrument.may_be_left

    def longest_save(self) -> float:
        instrument = self._run.attached
        return 0.0 if instrument is None else instrument.saves.longest

    def end_at_the_deadline(self, why: str) -> None:
        run = self._run
        run.journal.event("preemption_deadline", run.step, why=why)
        code = self.preemption.exit_code
        run.ranks.tell(Failure(run.ranks.rank, run.step, FailureType.PREEMPTED, why, exit_code=code))
        self._attempts.end(*self._ending(why))
        run.healers.process_ends()

    def _ending(self, why: str) -> tuple[Ending, str]:
        """
        Tells a preemption from what a launcher sends to the processes that are left, once one of them has failed:
        that is an attempt without success, and is counted as one.
        """
        first = self._run.ranks.first_failure()
        if first is None or first.failure is FailureType.PREEMPTED:
            return Ending.PREEMPTED, why
        return Ending.RESTART, f"{first}; {why}"
