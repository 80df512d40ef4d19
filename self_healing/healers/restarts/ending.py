"""How a run ends: checkpoint, postmortem, exit code; a device that is lost; a failure of this library."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from ...checkpoints.choice import newest_checkpoint_of, newest_marked_checkpoint_of
from ...checkpoints.marker import step_of
from ...config.healing_config import HealingConfig
from ...failures.classify import (
    add_note,
    classify_exception,
    comes_from_a_collective,
    describe_exception,
    drop_own_frames,
)
from ...failures.recipes import (
    ASKS_FOR_A_NEW_RUN,
    FAILURE_RECIPES,
    Action,
    FailureType,
    HealingFailed,
    Target,
    UnrecoverableTrainingError,
    text_of,
)
from ...failures.retry import RetryPolicy
from ...hf.hooks import is_meant
from ...hf.memory import in_evaluation
from ...hf.objective import what_is_trained
from ...hf.trainer_state import loads_more
from ...journal.incident import Incident
from ...journal.postmortem import where_to_go_on
from ...ranks.messages import Failure, where_all_are
from ...rollback.shared_memory import ROOT, SharedStates, remove_rank
from ...run.healer import CarryOut, HealingContext
from ...run.record import ExitReason
from ...run.run import Run
from ...system import processes
from ...system.files import OFF_FILE, of_rank, replace_file
from ...system.processes import EXIT_FOR_RESTART, contained, log_safely, restarts_on_exit
from .attempts import Attempts
from .emergency import publish, remove_emergency_checkpoints, save_emergency_checkpoint
from .preemption import Preemption
from .shared_memory import FinalSnapshot, remove_other_states


logger = logging.getLogger("self_healing")


# ---- ending: writes down how a run ends, or this process's part in it ----


# For what other ranks have to say, a postmortem waits so many seconds.
_HEARING_OF_IT, _HEARING_WHERE = 2.5, 1.5


class Shutdown:
    """Writes down how a run ends, or this process's part in it: closes what is open, and leaves a postmortem."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.attempts = run.part(Attempts)
        self.last_step = run.part(FinalSnapshot)
        # Whether the process ends for a restart as soon as `train()` of the wrapper has put its things away.
        self.ends_process = False

    # ---- an incident that nothing cures ----

    def stop(self, incident: Incident, verdict: str, error: BaseException | None = None) -> UnrecoverableTrainingError:
        """Ends the run with an incident whose remedies are spent."""
        run, attempts = self.run, self.attempts
        failure = incident.failure or FailureType.USER_CODE
        self._close_as_fatal(incident)
        for each in run.journal.incidents:
            # It may end the run while another one is dealt with. The watchdog closes its own when it stops.
            if each.outcome == "open" and each.failure is not FailureType.HANG:
                run.journal.closed(each, "unresolved")
        run.journal.dealt_with(incident)
        point, checkpoint, older = attempts.resume_point, None, None
        if point is not None and point.step == self.step:
            checkpoint = point.path = publish(point.path, self.output_dir)
        if checkpoint is None:
            # Of a run that came to nothing the newest checkpoint is no better than its end.
            verified = failure is FailureType.NOT_TRAINED
            older = newest_checkpoint_of(run.run_id, self.output_dir, verified=verified)
        advice = str(incident.evidence.get("remedy") or FAILURE_RECIPES[failure].advice)
        if failure not in ASKS_FOR_A_NEW_RUN:
            advice += f" {where_to_go_on(checkpoint or older)}"
        where = {"checkpoint": checkpoint, "older_checkpoint": older}
        path = self._write_postmortem(verdict, failure, error, advice=advice, **where)
        return UnrecoverableTrainingError(
            f"Training stopped at step {self.step}: {verdict.rstrip('.')}. What to do: {advice} "
            f"Postmortem: {path or 'could not be written, see the log'}.",
            failure=failure,
            postmortem=path,
        )

    def stop_for_exception(
        self, incident: Incident, failure: FailureType, error: BaseException, resume_from: Any
    ) -> str:
        """Ends the run with an exception that left `train()`."""
        run, attempts = self.run, self.attempts
        self._close_as_fatal(incident)
        path = resume_from if isinstance(resume_from, str) else None
        emergency = older = None
        if attempts.resume_point is not None and attempts.resume_point.path == path:
            emergency = publish(attempts.resume_point.path, self.output_dir)
        elif path is not None and Action.EMERGENCY_CHECKPOINT in FAILURE_RECIPES[failure].actions:
            older = path
        else:
            # What this entry began with need not be the newest.
            older = newest_checkpoint_of(run.run_id, self.output_dir) or path
        remedy = incident.evidence.get("remedy") if incident.failure is failure else None
        advice = f"{remedy or FAILURE_RECIPES[failure].advice} {where_to_go_on(emergency or older)}"
        where = {"checkpoint": emergency, "older_checkpoint": older}
        self._write_postmortem(describe_exception(error), failure, error, advice=advice, **where)
        run.journal.dealt_with(incident)
        return advice

    def note_lost_device(self, error: BaseException, verdict: str = "") -> None:
        """Writes down, once in a run, that nothing can be computed, saved or freed in this process any more."""
        run = self.run
        if run.device_lost:
            return
        run.device_lost = True
        with contained(logger, "The loss of the device could not be recorded; the original exception is raised."):
            incident = run.journal.open(self.step, type(error).__name__, {"message": text_of(error)[:500]})
            run.journal.diagnosed(incident, FailureType.DEVICE, "device", {})
            # What was raised first may have been looked into when this showed.
            raised = [each for each in (error.__context__, error) if each is not None]
            verdict = (verdict or "; ".join(map(describe_exception, raised))) + self._computed_from(error)
            if self._is_started_again:
                run.journal.acted(incident, Action.EXIT_FOR_RESTART.value, exit_code=EXIT_FOR_RESTART)
            else:
                self._close_as_fatal(incident)
            self._write_postmortem_beside(verdict, FailureType.DEVICE, error)
            run.journal.dealt_with(incident)

    def _computed_from(self, error: BaseException) -> str:
        """Names the samples of a step that a device-side assertion has ended: one is out of some range, most often."""
        window = None if self.run.attached is None else self.run.attached.window
        if window is None or "device-side assert" not in text_of(error):
            return ""
        named = ", ".join(map(str, sorted(window.samples())))
        return f"; most often a token id or a label out of range: look at the samples of the step ({named})"

    def leave_lost_device(self, error: BaseException) -> None:
        """
        Has the process end where a launcher starts it again, before the interpreter frees anything: freeing memory of
        the device may abort the process, and its driver may keep it from ending.
        """
        if self._is_started_again:
            logger.error("The process ends for a restart, because its device is lost.", exc_info=error)
            self.attempts.end(ExitReason.RESTART, describe_exception(error))
            self.ends_process = True

    @property
    def _is_started_again(self) -> bool:
        """Whether the process is ended: only the wrapper does; with the callback alone the exception is the user's."""
        return self.run.wrapped and restarts_on_exit(self.run.config)

    def end_process(self, why: str, failure: Failure | None, code: int) -> None:
        """
        Writes down that this process is about to be ended from the inside: because of a hang, or with another rank.
        """
        run, attempts = self.run, self.attempts
        if failure is not None or run.ranks.known:
            self._write_postmortem_beside(why, FailureType.HANG if failure is None else failure.failure, None)
        ending = ExitReason.RESTART if code == EXIT_FOR_RESTART else ExitReason.FAILED
        if failure is not None and failure.failure is FailureType.PREEMPTED:
            ending = ExitReason.PREEMPTED
        elif failure is not None and failure.for_good:
            ending = ExitReason.GAVE_UP
        attempts.end(ending, why)
        # Last: a disk that hangs here keeps nothing from the next process.
        run.healers.process_ends()

    def _close_as_fatal(self, incident: Incident) -> None:
        self.run.journal.acted(incident, Action.STOP.value)
        self.run.numerics.close_as_fatal(incident)

    # ---- the wrapper's train() is left ----

    def finish(self) -> None:
        """
        Writes down that the run came to its end; what was only there for a restart goes, and what was put off is done.
        """
        attempts, preemption = self.attempts, self.run.part(Preemption)
        attempts.end(ExitReason.FINISHED)
        if attempts.resume_point is not None or attempts.taken_up:
            remove_emergency_checkpoints(self.output_dir)
        if preemption.raised is not None:
            raise preemption.raised

    def note_exception(self, error: BaseException) -> None:
        """Writes down what this process's part ends with, unless that is done, and adds to it where to read on."""
        with contained(
            logger, "The end of the run could not be recorded; the original exception is raised unchanged."
        ):
            self._write_down(error)
        # The traceback is what is looked at first.
        drop_own_frames(error)
        directions = self.run.journal.directions
        if directions is not None:
            add_note(error, directions)

    def _write_down(self, error: BaseException) -> None:
        run, attempts, why = self.run, self.attempts, describe_exception(error)
        if attempts.ended:
            return
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            run.numerics.close_outcomes()
            point = attempts.resume_point
            path = None if point is None else publish(point.path, self.output_dir)
            self._write_postmortem_of(error, FailureType.INTERRUPTED, "the run was interrupted", path)
            attempts.end(ExitReason.INTERRUPTED, why)
            return
        told = isinstance(error, UnrecoverableTrainingError)
        if not told and run.journal.directions is None:
            self._write_postmortem_of(error, classify_exception(error), why)
        # Of several ranks one alone may not be able to read its data: the others end to be started again.
        alone = any(each.rank == run.ranks.rank and each.exit_code is None for each in run.ranks.failures)
        attempts.end(ExitReason.GAVE_UP if told and not alone else ExitReason.FAILED, why)
        # Those of the emergency checkpoint: the process may be about to end.
        run.checksums.wait()

    def _write_postmortem_of(
        self, error: BaseException, failure: FailureType, verdict: str, checkpoint: str | None = None
    ) -> None:
        older = None if checkpoint is not None else newest_checkpoint_of(self.run.run_id, self.output_dir)
        self._write_postmortem(verdict, failure, error, checkpoint=checkpoint, older_checkpoint=older)

    # ---- the postmortem ----

    def _write_postmortem_beside(self, verdict: str, failure: FailureType, error: BaseException | None) -> None:
        """Writes one where nothing may be read, because the device or the disk may not answer."""
        newest = newest_marked_checkpoint_of(self.run.run_id, self.output_dir) or self.attempts.first_resume
        advice = f"{FAILURE_RECIPES[failure].advice} {where_to_go_on(newest)}"
        self._write_postmortem(verdict, failure, error, checkpoint=None, older_checkpoint=newest, advice=advice)

    def _write_postmortem(
        self, verdict: str, failure: FailureType, error: BaseException | None, **known: str | None
    ) -> str | None:
        """`known` are the checkpoint to resume from, and the advice, if it is not that of the failure."""
        if error is not None:
            drop_own_frames(error)
        logged = self.run.trainer.state.log_history
        ranks = self._ranks(error)
        if ranks is not None and error is not None and ranks["first_failure"]["rank"] != self.run.ranks.rank:
            verdict = f"{ranks['what_happened']}; here: {verdict}"
        trained = what_is_trained(self.run.trainer, error)
        if error is not None and in_evaluation(error):
            trained += "[in evaluation]"
        # Noted, so that a start that is refused names it, and writes none over it.
        path = self.attempts.postmortem = self.run.journal.write_postmortem(
            verdict, failure, self.step, error, logged, ranks=ranks, trained=trained, **known
        )
        return path

    def told_by_another_rank(self, error: BaseException) -> Failure | None:
        """Finds what another rank has failed with, where an exception says no more than that it is gone."""
        first = self.run.ranks.first_failure(within=_HEARING_OF_IT) if comes_from_a_collective(error) else None
        return None if first is None or first.follows or first.rank in (None, self.run.ranks.rank) else first

    def _ranks(self, error: BaseException | None) -> dict[str, Any] | None:
        """Gives what is known of the ranks of the job: which one failed first, and where the others were."""
        ranks = self.run.ranks
        if not ranks.known:
            return None
        # What a collective raises comes before what another rank has failed with, and before that it is gone.
        caused_elsewhere = error is not None and comes_from_a_collective(error)
        first = ranks.first_failure(within=_HEARING_OF_IT if caused_elsewhere else 0.0)
        if first is None:
            return None
        # A rank that has failed is on its way out.
        failed = {each.rank for each in ranks.failures}
        found = ranks.positions(within=_HEARING_WHERE)
        everywhere = {rank: each for rank, each in found.items() if rank not in failed}
        return {
            "what_happened": str(first),
            "first_failure": first.to_record(),
            "where_they_were": where_all_are(everywhere),
            "positions": {str(rank): asdict(each) for rank, each in sorted(everywhere.items())},
        }

    # ---- remedies ----

    def table(self) -> dict[Action, CarryOut]:
        """The actions, and what does each."""
        return {
            Action.EMERGENCY_CHECKPOINT: self._emergency_checkpoint,
            Action.WAIT_AND_RESUME: self._wait,
            Action.STOP: self._stop,
        }

    def _emergency_checkpoint(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        why = self._not_worth_saving(context)
        if why:
            return {"checkpoint": None, "why": why, "happened": False}
        if processes.world_size() > 1:
            self.last_step.leave(context.running)
        try:
            point = save_emergency_checkpoint(self.run, heals=context.error is not None)
        except Exception as error:
            if classify_exception(error) is FailureType.DEVICE:
                raise
            logger.warning(
                "The emergency checkpoint could not be written (%s); falling back on the newest regular one.",
                describe_exception(error),
            )
            return {"checkpoint": None, "why": describe_exception(error), "happened": False}
        if point is None:
            half_way = context.running.call.half_way
            why = half_way or f"the weights cannot be trusted: it happened {context.running.reentry.phase.value}"
            if processes.world_size() > 1:
                why = "several processes train together, and the others may not be able to save"
            return {"checkpoint": None, "why": why, "happened": False}
        self.attempts.resume_point = point
        return {"checkpoint": point.path}

    def _not_worth_saving(self, context: HealingContext) -> str:
        """Says why a checkpoint of the state gone back to would mislead: there is none, or one that got further."""
        if Action.ROLL_BACK not in context.attempted:
            return ""
        if context.went_back is None:
            return "there is no trusted state to save"
        trainer = context.running.trainer
        trained = self.run.numerics.missing.trained(int(trainer.state.global_step) + 1)
        if trained <= 0 or context.went_back.target is Target.INITIAL:
            return "it would hold the state the run began with"
        newest = newest_checkpoint_of(self.run.run_id, str(trainer.args.output_dir))
        if newest is not None and step_of(newest, default=0) >= trained:
            return f"{newest} holds more training"
        return ""

    def _wait(self, _: HealingContext, __: TrainingArguments) -> dict[str, Any]:
        seconds = RetryPolicy.of(self.run.config).draw_wait(max(self.run.budget.used, 1))
        self.run.sleep(seconds)
        return {"waited_seconds": round(seconds, 3)}

    def _stop(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        verdict = context.verdict or "it was asked to stop"
        error = self.stop(context.incident, verdict, context.error)
        if not self.run.wrapped:
            # The wrapper does so once it is known whether another process goes on from them.
            self.run.rollback.release()
        raise error

    @property
    def step(self) -> int:
        """Optimizer steps finished."""
        return int(self.run.trainer.state.global_step)

    @property
    def output_dir(self) -> str:
        return str(self.run.trainer.args.output_dir)


# ---- healing off: code of this library has failed on one of several ranks, and the job ends with it ----


def switch_off_next_time(directory: Path, run: str, step: int, error: BaseException) -> None:
    """Notes a failure of this library that ends a job of several ranks: the next start trains without healing."""
    rank = processes.own_rank()
    why = f"self_healing failed on rank {rank} at step {step}: {describe_exception(error)[:300]}"
    noted = {"run": run or "without-healing", "step": step, "why": why}
    text = "self_healing failed on rank %d at step %d, and the job ends. The bug is ours, not yours."
    log_safely(logger, logging.ERROR, text, rank, step, exc_info=error)
    try:
        # Beside that of another rank that fails at the same moment.
        own = of_rank(directory / OFF_FILE, rank)
        replace_file(own, json.dumps(noted, indent=1) + "\n")
        os.replace(own, directory / OFF_FILE)
    except OSError:
        logger.warning("That could not be written down: the next start will heal again.", exc_info=True)


@contextlib.contextmanager
def ending_the_job(config: HealingConfig, args: Any, *meant: type[Exception]) -> Iterator[None]:
    """Has a failure of this library before the first step end a job of several ranks."""
    try:
        yield
    except Exception as error:
        lost = classify_exception(error) is FailureType.DEVICE
        if processes.world_size() == 1 or isinstance(error, meant) or is_meant(error) or lost:
            raise
        switch_off_next_time(Path(config.healing_dir or args.output_dir), "", 0, error)
        raise HealingFailed.on_rank(processes.own_rank(), 0, error) from error


# ---- outliving ----


# After which another process goes on with the run, if a launcher starts one.
_GOES_ON = frozenset({ExitReason.RUNNING, ExitReason.RESTART, ExitReason.FAILED})


def keep_snapshots_after_exit(run: Run) -> None:
    """Has snapshots taken in shared memory, where a launcher will start the job again."""
    args, config, memory = run.trainer.args, run.config, run.part(Attempts).memory
    place = args.output_dir, run.run_id, args.process_index, args.world_size
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        remove_other_states(args.output_dir, run.run_id, args.world_size)
    if memory is None:
        remove_rank(*place)
    else:
        memory.remove_others()
    outlives = config.snapshots and restarts_on_exit(config) and ROOT.is_dir() and loads_more(run.trainer) is None
    run.rollback.begin_anew(SharedStates(*place) if outlives else None, memory)


def leave_snapshots(run: Run) -> None:
    """Leaves them to the next process, or removes them if there will be none."""
    args, record, shared = run.trainer.args, run.part(Attempts).record, run.rollback.shared
    # What one rank gives up may be tried once more: that is for the first one to decide, in the record.
    alone = record is not None and args.process_index > 0 and record.ending is ExitReason.GAVE_UP
    goes_on = record is not None and (record.ending in _GOES_ON or alone)
    if goes_on and restarts_on_exit(run.config):
        if shared is not None:
            shared.keep()
        return
    if shared is not None:
        shared.close()
    remove_rank(args.output_dir, run.run_id, args.process_index, args.world_size)
