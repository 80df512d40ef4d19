"""Decides what to do about an exception that left `train()`."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from .checkpoints.choice import newest_checkpoint_of
from .checkpoints.marker import step_of
from .failures.classify import add_note, classify_exception, describe_exception
from .failures.recipes import (
    FAILURE_RECIPES,
    Action,
    DamagedCheckpointError,
    FailureType,
    HealingFailed,
    UnrecoverableTrainingError,
    text_of,
)
from .healers.assembly import Run
from .healers.oom.healer import MemoryOutsideOfModel
from .healers.restarts.emergency import publish, save_emergency_checkpoint
from .healers.restarts.ending import leave_lost_device, write_down_lost_device
from .hf.dataloader import end_workers_that_failed
from .hf.deepspeed import can_be_entered_again
from .journal.incident import Incident
from .run.healer import Claim, HealingContext, claim_by_recipe
from .system import processes


logger = logging.getLogger("self_healing")


@dataclass(frozen=True, slots=True)
class NextEntry:
    """The next entry into `train()`."""

    incident: Incident
    resume_from: Any
    wait: bool = False


class Recovery:
    """Decides what to do about exceptions that leave `train()`, in one run of the wrapper."""

    def __init__(self, trainer: Any, run: Run) -> None:
        self.run = run
        # What ends the run if it cannot go on; an entry that fails before its first batch does not replace it.
        self.cause: BaseException | None = None
        self._trainer = trainer
        self._config = run.context.config
        self._ending = run.ending
        self._outside_of_model = MemoryOutsideOfModel(run.context, trainer)
        self._entered_in_vain = False
        self._can_enter_again = can_be_entered_again(trainer)

    def decide(self, error: BaseException, resume_from: Any) -> NextEntry | None:
        """Decides what to do about an exception that left `train()`."""
        if self.cause is None or self._trained_again:
            self.cause = error
        entry = None
        try:
            entry = self._decide(error, resume_from, self.cause)
        except UnrecoverableTrainingError:
            raise
        except Exception:
            logger.exception("self_healing failed while it dealt with %s, which is raised unchanged.", type(error))
        if entry is None and self.cause is not error:
            add_note(self.cause, f"self_healing: {_failed_at_entry(error)}.")
        return entry

    def leave_damaged_checkpoint(self, error: DamagedCheckpointError) -> NextEntry:
        """Goes back to an older checkpoint, with the learning rate as it was: the steps since then are done again."""
        step = self._step
        logger.warning(
            "The run has failed since it was resumed; the same batch is fine with %s. Training goes on from there.",
            error.older,
        )
        error.incident.steps_repeated = max(step - step_of(error.older, default=step), 0)
        self.run.journal.acted(error.incident, Action.RESUME.value, checkpoint=error.older)
        return NextEntry(error.incident, error.older)

    def prepare(self, entry: NextEntry) -> None:
        """Does what comes before `train()` is entered again, with the trainer given back: waits, and tells of it."""
        run, incident = self.run, entry.incident
        if incident.failure is FailureType.DAMAGED_CHECKPOINT:
            run.start_over(entry.resume_from, step_of(entry.resume_from, default=0))
        opened = run.context.dealing_with(incident)
        if entry.wait:
            run.context.remedies.apply(Action.WAIT_AND_RESUME, HealingContext(incident), self._trainer.args)
            if run.departure.asked:
                run.departure.leave(self._step, self._output_dir)
        opened.done()

    # ---- whose it is, and what cures it ----

    def _decide(self, error: BaseException, resume_from: Any, cause: BaseException) -> NextEntry | None:
        failure = classify_exception(error)
        if failure is FailureType.PROCESS_DIED:
            end_workers_that_failed(error)
        if failure is FailureType.DEVICE:
            self._leave_lost_device(error, cause)
            return None
        if failure is FailureType.PREEMPTED:
            self._leave_unfinished_step(error)
        try:
            return self._plan(error, failure, resume_from, cause)
        except UnrecoverableTrainingError:
            raise
        except Exception as failed:
            if classify_exception(failed) is not FailureType.DEVICE:
                raise
            # The exception did not say so, and what was to be saved could not be read.
            self._leave_lost_device(failed, cause)
            return None

    def _plan(
        self, error: BaseException, failure: FailureType, resume_from: Any, cause: BaseException
    ) -> NextEntry | None:
        began, step = time.perf_counter(), self._step
        claim = self._first_claim(error)
        incident = self._opened(error, failure) if claim is None else claim.incident
        if processes.world_size() > 1:
            self._leave_last_step()
        # Saved before anything else is tried: what follows may fail.
        point, unmoved = self._resume_from(incident, error, failure, resume_from)
        if claim is None or (failure is FailureType.OUT_OF_MEMORY and claim.batch is None):
            # Memory that ran out while another exception was on its way has remedies of its own.
            claim = self._outside_of_model.claim(error, incident) or claim_by_recipe(incident, failure)
        if claim.remedy is Action.STOP and cause is not error and not self._entered_in_vain:
            # It need not be the training that fails here, but the way back to it.
            claim = replace(claim, remedy=Action.RESUME)
        self._entered_in_vain = cause is not error
        if claim.remedy is Action.STOP or processes.world_size() > 1 or not self._can_enter_again:
            verdict = None if cause is error else f"{describe_exception(cause)}; {_failed_at_entry(error)}"
            self._ending.stop_for_exception(incident, classify_exception(cause), cause, point, verdict)
            return None
        if point is None and not unmoved:
            self._stop(incident, failure, error, point, "there is no state to resume from")
        if not self.run.context.budget.spend(step):
            why = f"the budget of {self._config.max_recovery_attempts} attempts without progress is spent"
            self._stop(incident, failure, error, point, why)
        incident.steps_repeated = 0 if unmoved else max(step - step_of(point, default=step), 0)
        self._carry_out(claim, point)
        incident.seconds_lost += time.perf_counter() - began
        return NextEntry(incident, point, claim.wait)

    def _leave_last_step(self) -> None:
        """The job ends, and is perhaps started again: each of its ranks then goes on from what it has left."""
        if self.run.instrument is not None:
            self.run.last_step.leave(self.run.instrument)

    def _first_claim(self, error: BaseException) -> Claim | None:
        """Asks those inside `train()` in a fixed order; what else one of them was waiting for has not come."""
        claim, *others = [*self.run.context.attachment.healers.claims(error), None]
        for other in others:
            if other is not None:
                self.run.journal.closed(other.incident, "unresolved")
        return claim

    def _opened(self, error: BaseException, failure: FailureType) -> Incident:
        journal = self.run.journal
        evidence = {"message": text_of(error)[:500]}
        if isinstance(error, HealingFailed):
            evidence["remedy"] = error.remedy
        incident = journal.open(self._step, type(error).__name__, evidence)
        journal.diagnosed(incident, failure, failure.value.replace("_", " "), {})
        return incident

    def _carry_out(self, claim: Claim, point: Any) -> None:
        """Does what does not have to wait until the exception, and with it the failed step, is gone."""
        incident, run = claim.incident, self.run
        if claim.remedy is Action.REDUCE_BATCH_SIZE and run.instrument is not None:
            context = HealingContext(incident, run.instrument, batch=claim.batch)
            run.context.remedies.apply(Action.REDUCE_BATCH_SIZE, context, self._trainer.args)
        if claim.remedy is Action.RESUME:
            run.journal.acted(incident, Action.RESUME.value, checkpoint=point)

    def _resume_from(
        self, incident: Incident, error: BaseException, failure: FailureType, resume_from: Any
    ) -> tuple[Any, bool]:
        """Finds where to enter again, and whether that is where this entry began."""
        run, instrument = self.run, self.run.instrument
        if instrument is None:
            # Before our on_train_begin: nothing has moved, the same call can be made again.
            return resume_from, True
        unmoved = not instrument.reentry.moved
        if not FAILURE_RECIPES[failure].saves_first or (unmoved and resume_from is not None):
            instrument.reentry.rewind_to_last_step()
            return resume_from, unmoved
        context = HealingContext(incident, instrument, error=error)
        saved = run.context.remedies.apply(Action.EMERGENCY_CHECKPOINT, context, self._trainer.args)
        if saved["checkpoint"] is None and not unmoved:
            return newest_checkpoint_of(run.context.run_id, self._output_dir) or run.attempts.first_resume, False
        return saved["checkpoint"], unmoved

    @property
    def _trained_again(self) -> bool:
        """Whether this entry has come as far as the data, so that what it is left by is a failure of its own."""
        run = self.run
        return run.broken or (run.instrument is not None and run.instrument.reentry.has_fetched)

    # ---- the run ends ----

    def _stop(self, incident: Incident, failure: FailureType, error: BaseException, point: Any, why: str) -> NoReturn:
        advice = self._ending.stop_for_exception(incident, failure, error, point)
        path = self.run.attempts.postmortem
        raise UnrecoverableTrainingError(
            f"Training stopped at step {self._step}: {describe_exception(error)}; {why}. "
            f"What to do: {advice} Postmortem: {path or 'could not be written'}.",
            failure=failure,
            postmortem=path,
        ) from error

    def _leave_lost_device(self, error: BaseException, cause: BaseException) -> None:
        """Nothing can be saved and nothing entered again: the process ends, or what ended the run is raised."""
        verdict = describe_exception(error) if cause is error else f"{describe_exception(cause)}; {text_of(error)}"
        write_down_lost_device(self._ending, error, verdict)
        leave_lost_device(self._ending, error)

    def _leave_unfinished_step(self, error: BaseException) -> NoReturn:
        """Leaves with the state before the step, which would have taken too long."""
        run, path = self.run, None
        if run.instrument is not None and processes.world_size() == 1:
            try:
                point = save_emergency_checkpoint(
                    run.instrument,
                    run.context.run_id,
                    about_to_write=run.attempts.about_to_write,
                    later=run.context.checksums,
                )
                path = None if point is None else publish(point.path, self._output_dir)
            except Exception:
                logger.warning("The state before the interrupted step could not be saved.", exc_info=error)
        run.departure.leave(self._step, self._output_dir, path)

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)

    @property
    def _output_dir(self) -> str:
        return str(self._trainer.args.output_dir)


def _failed_at_entry(error: BaseException) -> str:
    return f"train() was entered again and failed before the first batch: {describe_exception(error)}"
