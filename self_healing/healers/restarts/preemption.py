"""SIGTERM, SIGUSR1 and the first Ctrl-C: finish the step, save, exit."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

from ...checkpoints.choice import newest_checkpoint_of
from ...checkpoints.marker import step_of
from ...failures.recipes import Action, FailureType, Interruption
from ...hf.patching import is_training
from ...ranks.messages import Failure
from ...run.record import ExitReason
from ...run.run import Run
from ...run.status import RunState
from ...system.processes import EXIT_FOR_RESTART, world_size
from .attempts import Attempts


logger = logging.getLogger("self_healing")


# SIGTERM ends a process by convention with 128 + its number; SIGUSR1 is how schedulers announce that they will stop a
# job, which is then to be queued again.
EXIT_CODES = {signal.SIGTERM: 128 + signal.SIGTERM}
if hasattr(signal, "SIGUSR1"):
    # Not on Windows.
    EXIT_CODES[signal.SIGUSR1] = EXIT_FOR_RESTART
_CTRL_C = "[self_healing] Ctrl-C: the step is finished and saved first. Once more, and the run stops at once."
# How many times the longest save so far a save may take; seconds that the end of the process takes besides.
_SLOWER_SAVE, _LEAVING = 2.0, 2.0
# How often the thread that keeps the deadline looks whether a signal has come, in seconds.
_POLL = 0.2


class Preemption:
    """
    Has SIGTERM, SIGUSR1 and, in a job of one process, a first Ctrl-C end the run after the step, with a checkpoint.
    The signals set a deadline.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._attempts = run.part(Attempts)
        # Whether the run ends with the step that was finished last.
        self.begun = False
        # What a handler of the user has raised meanwhile.
        self.raised: BaseException | None = None
        self._earlier: dict[signal.Signals, Any] = {}
        self._main = self._pid = -1
        self._over = threading.Event()
        self._interrupting = False

    # ---- listening ----

    def listen(self) -> None:
        """Takes the signals over; only possible in the main thread, elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            logger.info("train() does not run in the main thread: SIGTERM and SIGUSR1 are left as they are.")
            return
        self._main, self._pid = threading.get_ident(), os.getpid()
        taken = [*EXIT_CODES]
        # Of several ranks the launcher is told, which goes on to end them all. A handler of the user's own stays.
        if world_size() == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            taken.append(signal.SIGINT)
        self._earlier = {signum: signal.signal(signum, self._on_signal) for signum in taken}
        threading.Thread(target=self._keep_the_deadline, name="self_healing preemption", daemon=True).start()

    def release(self) -> None:
        """Gives the signals back, where no other handler was installed since."""
        self._over.set()
        for signum, earlier in self._earlier.items():
            if signal.getsignal(signum) == self._on_signal:
                # A handler that was not set from Python cannot be set again.
                signal.signal(signum, signal.SIG_DFL if earlier is None else earlier)
        self._earlier.clear()

    @property
    def exit_code(self) -> int:
        """The process's exit code: 143 after SIGTERM, 75 after SIGUSR1, Python's own after Ctrl-C."""
        asked = self._run.asked_to_leave or signal.SIGTERM
        return EXIT_CODES.get(asked, 128 + asked)

    # ---- a signal comes ----

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        attached = self._run.attached
        if self._interrupting:
            # Sent by the thread below, which has waited long enough.
            self._interrupting = False
            # Only where `train()` is entered again is anything saved of a step that is left where it is.
            may_leave = self._run.may_enter_again and attached is not None and attached.may_be_left
            if may_leave and not self._over.is_set():
                raise Interruption("the step did not end in time to be saved", FailureType.PREEMPTED)
            return
        earlier = self._earlier.get(signal.Signals(signum))
        left = not self._run.wrapped and (attached is None or not is_training(attached.trainer, frame))
        if signum == signal.SIGINT and os.getpid() != self._pid:
            # A terminal sends it to the workers of the data loader as well, which the step still needs.
            return
        if left or os.getpid() != self._pid:
            # An exception has ended `train()` before it was watched; or a child was forked, with this handler.
            signal.signal(signum, signal.SIG_DFL if earlier is None else earlier)
            os.kill(os.getpid(), signum)
            return
        if signum == signal.SIGINT:
            self._interrupted()
            return
        # Nothing is logged here, no thread is started and no lock is taken: the handler may have interrupted the very
        # code that holds it.
        if self._run.asked_to_leave in (None, signal.SIGINT):
            self._run.asked_to_leave = signal.Signals(signum)
        # That of `enable_jit_checkpoint` of transformers promises the same: one is enough.
        just_in_time = type(getattr(earlier, "__self__", None)).__module__.endswith("trainer_jit_checkpoint")
        if callable(earlier) and not just_in_time:
            try:
                earlier(signum, frame)
            except BaseException as error:
                self.raised = self.raised or error

    def _interrupted(self) -> None:
        if self._run.asked_to_leave is not None:
            raise KeyboardInterrupt
        self._run.asked_to_leave = signal.SIGINT
        # What prints may be what is interrupted.
        with contextlib.suppress(RuntimeError, OSError):
            print(f"\n{_CTRL_C}", file=sys.stderr, flush=True)

    # ---- the deadline, in a thread of its own ----

    def _keep_the_deadline(self) -> None:
        run, deadline = self._run, self._run.config.preemption_deadline
        while run.asked_to_leave in (None, signal.SIGINT):
            if self._over.wait(_POLL):
                return
        came = time.monotonic()
        # A step is left so that its state is saved before the deadline.
        longest_save = 0.0 if run.attached is None else run.attached.saves.longest
        reserve = _SLOWER_SAVE * longest_save + _LEAVING
        left_by = came + max(deadline - reserve, deadline / 2)
        if not self._over.wait(max(left_by - time.monotonic(), 0.0)):
            self._interrupting = True
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(self._main, run.asked_to_leave)
        if self._over.wait(max(came + deadline - time.monotonic(), 0.0)):
            return
        with contextlib.suppress(Exception):
            self.end_at_the_deadline(
                f"The process did not come to an end within {deadline:g} s of {run.asked_to_leave.name} "
                "(preemption_deadline) and is ended now; a restart goes on from the newest complete checkpoint."
            )
        logging.shutdown()
        os._exit(self.exit_code)

    def end_at_the_deadline(self, why: str) -> None:
        """Writes down that the process is ended in the middle of a step."""
        run = self._run
        run.journal.event("preemption_deadline", run.step, why=why)
        run.ranks.tell(Failure(run.ranks.rank, run.step, FailureType.PREEMPTED, why, exit_code=self.exit_code))
        self._attempts.end(*self._ending(why))
        run.healers.process_ends()

    # ---- the process leaves ----

    def leave(self, step: int, output_dir: str, checkpoint: str | None = None) -> NoReturn:
        """Ends the process; what there is to save is saved."""
        run, attempts = self._run, self._attempts
        by_hand = run.asked_to_leave is signal.SIGINT
        name = "a signal to another process" if run.asked_to_leave is None else run.asked_to_leave.name
        name = "Ctrl-C" if by_hand else name
        checkpoint = checkpoint or newest_checkpoint_of(run.run_id, output_dir)
        code, saved_at = self.exit_code, 0 if checkpoint is None else step_of(checkpoint, default=step)
        with run.incident(step, "preempted", {"signal": name}) as opened:
            opened.diagnosed(FailureType.PREEMPTED, name)
            opened.acted(Action.SAVE_AND_LEAVE, checkpoint=checkpoint, exit_code=code)
            opened.incident.steps_repeated = max(step - saved_at, 0)
            run.numerics.close_outcomes()
            opened.close("unresolved" if checkpoint is None else "resolved")
        attempts.end(*self._ending(name))
        if run.status is not None:
            run.status.end(RunState.LEFT, step, name)
        raise self.raised or (KeyboardInterrupt() if by_hand else SystemExit(code))

    def _ending(self, why: str) -> tuple[ExitReason, str]:
        """
        Tells a preemption from what a launcher sends to the processes that are left, once one of them has failed:
        that is an attempt without success, and is counted as one.
        """
        if self._run.asked_to_leave is signal.SIGINT:
            return ExitReason.INTERRUPTED, why
        first = self._run.ranks.first_failure()
        if first is None or first.failure is FailureType.PREEMPTED:
            return ExitReason.PREEMPTED, why
        return ExitReason.RESTART, f"{first}; {why}"
