"""`Departure`: a process that is asked to leave saves what there is, writes down where it goes on, and ends."""

from __future__ import annotations

import time
from typing import Any, NoReturn

from ..checkpoints.choice import newest_checkpoint_of
from ..checkpoints.marker import step_of
from ..failures.recipes import Action, FailureType
from ..healers.restarts.preemption import Preemption
from ..hf.patching import is_training
from ..ranks.messages import Failure
from ..run.record import Ending
from ..run.run import RunContext
from ..run.status import RunState
from .attempts import Attempts


class Departure:
    """Lets a process leave when it is preempted."""

    def __init__(self, run: RunContext, attempts: Attempts) -> None:
        self._run = run
        self._attempts = attempts
        # Whether the run ends with the step that was finished last.
        self.begun = False
        self.preemption = Preemption(
            run.config.preemption_deadline,
            self._may_be_interrupted,
            self._longest_save,
            self.still_training,
            self._end_at_the_deadline,
        )

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
        instrument = self._run.attachment.instrument
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

    def _may_be_interrupted(self) -> bool:
        """Whether the step can be left where it is: only where `train()` is entered again is anything saved of it."""
        instrument = self._run.attachment.instrument
        return self._run.may_enter_again and instrument is not None and instrument.may_be_left

    def _longest_save(self) -> float:
        instrument = self._run.attachment.instrument
        return 0.0 if instrument is None else instrument.saves.longest

    def _end_at_the_deadline(self, why: str) -> None:
        run = self._run
        run.journal.event("preemption_deadline", run.step, why=why)
        code = self.preemption.exit_code
        run.ranks.tell(Failure(run.ranks.rank, run.step, FailureType.PREEMPTED, why, exit_code=code))
        self._attempts.end(*self._ending(why))
        run.attachment.healers.process_ends()

    def _ending(self, why: str) -> tuple[Ending, str]:
        """
        Tells a preemption from what a launcher sends to the processes that are left, once one of them has failed:
        that is an attempt without success, and is counted as one.
        """
        first = self._run.ranks.first_failure()
        if first is None or first.failure is FailureType.PREEMPTED:
            return Ending.PREEMPTED, why
        return Ending.RESTART, f"{first}; {why}"
