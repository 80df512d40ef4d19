"""`SelfHealingTrainer`: whatever needs `train()` to be entered again."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import TrainOutput

from . import consensus
from .assembly import assemble
from .callback import SelfHealingCallback, adopt_session
from .checkpoints.choice import newest_checkpoint_of
from .checkpoints.emergency import publish, remove_emergency_checkpoints, save_emergency_checkpoint
from .checkpoints.marker import step_of
from .classify import add_note, classify_exception, describe_exception, text_of
from .config import HealingConfig, as_config
from .dry_run import DryRunReport, dry_run
from .earlier_attempts import take_up
from .failures import FAILURE_RECIPES, Action, DamagedCheckpointError, FailureType, UnrecoverableTrainingError
from .incident import Incident
from .instrument import CannotReduce, ReportingGuard, let_go, smaller_batch
from .instrument.entry_hooks import entry_hooks_removed_on_exception
from .instrument.loader_workers import end_workers_that_failed
from .instrument.loading import loading_twice_at_most, skipping_any_loader
from .lost_device import leave_lost_device, write_down_lost_device
from .postmortem import where_to_go_on
from .random_state import RandomState
from .report import HealingReport
from .reporting import Reporting
from .restart import Start, find_start, note_start
from .run.remedies import HealingContext
from .run_record import Ending, RunRecord
from .session import Session


logger = logging.getLogger("self_healing")

# Out of memory outside of the model twice within so many steps is no accident.
_LATELY = 50


@dataclass(slots=True)
class _Recovery:
    """An exception that can be healed: its incident, what `train()` resumes from, and whether to wait before."""

    incident: Incident
    resume: Any
    waits: bool


class SelfHealingTrainer:
    """
    Wraps any Hugging Face or TRL trainer and brings its run to the end.

    Everything [`SelfHealingCallback`] does, and beyond it: an exception that leaves `train()` is classified, an
    emergency checkpoint that resumes exactly is written, the remedy applied, and `train()` entered again with no step
    lost. What cannot be healed is raised unchanged, after emergency checkpoint and postmortem.

    All other attributes are the wrapped trainer's.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer to run. Only this object is touched, and only while [`train`] runs.
        config ([`HealingConfig`] or `dict`, *optional*):
            What to do about what. Defaults to that of a `SelfHealingCallback` the trainer already has, else to
            `HealingConfig()`.
        callbacks (`Sequence[TrainerCallback]`, *optional*):
            Callbacks to add to the trainer.
        sleep (`Callable[[float], None]`, *optional*):
            How waiting between attempts is done, in seconds. Defaults to `time.sleep`, cut short by a preemption.

    Example:

    ```python
    trainer = SFTTrainer(model=model, args=args, train_dataset=dataset)
    SelfHealingTrainer(trainer, HealingConfig.aggressive()).train()
    ```
    """

    def __init__(
        self,
        trainer: Trainer,
        config: HealingConfig | Mapping[str, Any] | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        if isinstance(trainer, SelfHealingTrainer):
            raise TypeError(
                "SelfHealingTrainer was given a trainer that is wrapped already. Please use the wrapper there is; for "
                "other settings, wrap the trainer inside it: SelfHealingTrainer(healer.trainer, config)."
            )
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"SelfHealingTrainer wraps a trainer that exists, got {trainer!r}. Please build it first: "
                "SelfHealingTrainer(SFTTrainer(model=..., args=...), config)."
            )
        self.trainer: Any = trainer
        for callback in callbacks or ():
            trainer.add_callback(callback)
        existing = self._find_callback()
        self.config = config = as_config(existing.config if config is None and existing is not None else config)
        if existing is None:
            trainer.add_callback(SelfHealingCallback(config))
        else:
            self._put_config_in_force(existing)
        self._sleep = sleep
        self._session: Session | None = None
        self._memory_ran_out_at = -1
        self._entered_in_vain = False

    def __getattr__(self, name: str) -> Any:
        if name == "trainer":
            raise AttributeError(name)
        return getattr(self.trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._owns(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.trainer, name, value)

    def __delattr__(self, name: str) -> None:
        if self._owns(name):
            object.__delattr__(self, name)
        else:
            delattr(self.trainer, name)

    def _owns(self, name: str) -> bool:
        """Whether an attribute is the wrapper's and not the trainer's, where it would have no effect here."""
        if name in ("trainer", "config") or name in vars(self) or hasattr(type(self), name):
            return True
        return name.startswith("_") and not hasattr(self.trainer, name)

    # ---- training ----

    def train(self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, **kwargs: Any) -> TrainOutput:
        """
        Trains to the end, however often `train()` of the wrapped trainer has to be entered.

        Args:
            resume_from_checkpoint (`str`, `PathLike` or `bool`, *optional*):
                `True` resumes from the newest checkpoint in `output_dir` that is complete, finite and not suspect,
                `"auto"` does the same or starts anew where there is none. A path is looked at before it is used.
            **kwargs:
                Handed to the wrapped trainer's `train()`.

        Returns:
            [`~transformers.trainer_utils.TrainOutput`]: Of the whole run.

        Raises:
            CheckpointError: If there is nothing that can be resumed from, or the path given is not.
            UnrecoverableTrainingError: When the remedies are spent; its message names the postmortem.
            Exception: What cannot be healed, unchanged.
        """
        if not isinstance(resume_from_checkpoint, str | os.PathLike | bool | None):
            raise TypeError(
                f"resume_from_checkpoint is {resume_from_checkpoint!r}, but must be the path of a checkpoint, True, "
                '"auto" or None. For the checkpoint of a step, please pass its path: "<output_dir>/checkpoint-<step>".'
            )
        self._switch_off_auto_find_batch_size()
        self._put_callback_in_force()
        args = self.trainer.args
        session, start = self._open_session(resume_from_checkpoint)
        theirs = args.eval_on_start, args.ignore_data_skip
        self._memory_ran_out_at = -1
        self._entered_in_vain = False
        session.reporting = reporting = Reporting(session.run)
        guard = ReportingGuard(self.trainer, reporting)
        try:
            guard.attach()
            take_up(session, start)
            adopt_session(self.trainer, session)
            if self.config.on_preemption == "save":
                session.preemption.listen()
            output = self._enter_until_done(session, start.checkpoint, kwargs)
            if session.leaving and not self._at_the_end():
                session.leave(int(self.trainer.state.global_step), self.trainer.args.output_dir)
        except BaseException as error:
            self._note_end(session, error)
            self._give_directions(session, error)
            raise
        else:
            session.end_attempt(Ending.FINISHED)
            self._look_back(session)
        finally:
            args.eval_on_start, args.ignore_data_skip = theirs
            adopt_session(self.trainer, None)
            session.preemption.release()
            self._let_go(session)
            if not session.device_lost:
                session.rollback.release()
            guard.detach()
            reporting.sum_up(int(self.trainer.state.global_step))
        return output

    def _look_back(self, session: Session) -> None:
        """At the end of the run: what was only there for a restart goes, and what was put off is done."""
        if session.resume_point is not None or session.attempts.taken_up:
            remove_emergency_checkpoints(self.trainer.args.output_dir)
        preemption = session.preemption
        if preemption.raised is not None:
            raise preemption.raised
        if preemption.requested is not None:
            logger.warning(
                "%s arrived in the last step. The run is complete; what follows train() in the script goes on, and "
                "the process will be killed when whoever sent it loses patience.",
                preemption.requested.name,
            )

    # ---- where the run begins ----

    def _open_session(self, requested: str | os.PathLike[str] | bool | None) -> tuple[Session, Start]:
        """What this call begins with: the memory of a new run, or of one that an earlier process began."""
        args = self.trainer.args
        start = find_start(self.trainer, self.config, requested)
        directory = Path(self.config.healing_dir or args.output_dir)
        self._session = session = assemble(
            self.config, directory, args.process_index, self._sleep, start.run, consensus.world_size() == 1
        )
        record = start.record or RunRecord(Path(args.output_dir), session.run_id, kept=not start.beside)
        session.attempts.keep(record, taken_up=start.record is not None)
        if args.process_index == 0:
            note_start(session.journal, start, args.output_dir)
        return session, start

    # ---- how it ends ----

    def _note_end(self, session: Session, error: BaseException) -> None:
        """Writes down how this process's part in the run ends, unless that is done."""
        try:
            self._write_down_the_end(session, error)
        except Exception:
            logger.exception("How the run ended could not be written down; what ended it is raised unchanged.")

    def _give_directions(self, session: Session, error: BaseException) -> None:
        """Adds to the exception where to read on, and how to go on: its traceback is what is looked at first."""
        directions = session.journal.directions
        if directions is not None:
            add_note(error, str(directions))

    def _write_down_the_end(self, session: Session, error: BaseException) -> None:
        why = describe_exception(error)
        if session.attempts.ended:
            return
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            session.close_outcomes()
            point = session.resume_point
            path = None if point is None else publish(point.path, self.trainer.args.output_dir)
            self._write_postmortem(session, FailureType.INTERRUPTED, error, "the run was interrupted", path)
            session.end_attempt(Ending.INTERRUPTED, why)
        else:
            # Another process goes on from the older checkpoint.
            damaged = getattr(error, "failure", None) is FailureType.DAMAGED_CHECKPOINT
            told = isinstance(error, UnrecoverableTrainingError)
            gave_up = told and not damaged
            if not told and session.journal.directions is None:
                self._write_postmortem(session, classify_exception(error), error, why)
            session.end_attempt(Ending.GAVE_UP if gave_up else Ending.FAILED, why)
            # Those of the emergency checkpoint: the process may be about to end.
            session.checksums.wait()

    def _at_the_end(self) -> bool:
        state = self.trainer.state
        return 0 < int(state.max_steps) <= int(state.global_step)

    # ---- entering train() ----

    def _enter_until_done(self, session: Session, resume: Any, kwargs: dict[str, Any]) -> TrainOutput:
        entry_rng = RandomState.capture(self.trainer.accelerator.device)
        cause: BaseException | None = None
        while True:
            recovery: _Recovery | None
            try:
                with entry_hooks_removed_on_exception(self.trainer), self._resuming(resume):
                    output: TrainOutput = self.trainer.train(resume_from_checkpoint=resume, **kwargs)
                return output
            except DamagedCheckpointError as error:
                recovery = self._leave_damaged_checkpoint(session, error)
                let_go(error)
            except (UnrecoverableTrainingError, KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:
                # A panic of a library in Rust, or a cancelled coroutine, is no `Exception`, and an error all the same.
                if cause is None or self._trains_again(session):
                    cause = error
                recovery = self._recover(session, error, resume, cause)
                if recovery is None and cause is error:
                    raise
                let_go(error)
            if recovery is None:
                assert cause is not None
                # Outside the handler, which would put another exception in the place of what it came from.
                raise cause
            # Outside the handler: the exception and with it the failed step's activations are gone.
            self._let_go(session)
            if recovery.incident.failure is FailureType.DAMAGED_CHECKPOINT:
                session.begin_from_older(recovery.resume, step_of(recovery.resume, default=0))
            began = time.perf_counter()
            if recovery.waits:
                self._wait(session, recovery)
                if session.preempted:
                    session.leave(int(self.trainer.state.global_step), self.trainer.args.output_dir)
            recovery.incident.seconds_lost += time.perf_counter() - began
            session.journal.dealt_with(recovery.incident)
            session.outcomes.wait_for(recovery.incident)
            resume = recovery.resume
            # Samplers and their seeds are made anew on entry, some from the global generators.
            entry_rng.restore()
            if session.resume_point is not None:
                # Evaluated at the start it has, or the resume point owes it; and what was trained on is skipped.
                self.trainer.args.eval_on_start = self.trainer.args.ignore_data_skip = False

    @contextlib.contextmanager
    def _resuming(self, resume: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if resume:
                stack.enter_context(skipping_any_loader(self.trainer))
            if resume and consensus.world_size() == 1:
                # The others may wait in a collective of the first attempt.
                stack.enter_context(loading_twice_at_most(self.trainer))
            yield

    def _trains_again(self, session: Session) -> bool:
        """Whether this entry has come as far as the data, so that what it is left by is a failure of its own."""
        return session.broken or (session.instrument is not None and session.instrument.reentry.has_fetched)

    def _leave_damaged_checkpoint(self, session: Session, error: DamagedCheckpointError) -> _Recovery:
        """Back to an older checkpoint, with the learning rate as it was: the steps since then are done again."""
        step = int(self.trainer.state.global_step)
        logger.warning(
            "The run has not been well since it was resumed, and with %s the same batch is: it goes on from there.",
            error.older,
        )
        error.incident.steps_repeated = max(step - step_of(error.older, default=step), 0)
        session.journal.acted(error.incident, Action.RESUME.value, checkpoint=error.older)
        return _Recovery(error.incident, error.older, waits=False)

    def _recover(self, session: Session, error: BaseException, resume: Any, cause: BaseException) -> _Recovery | None:
        """
        Decides what to do about an exception that left `train()`.

        Args:
            session ([`Session`]):
                Of this run.
            error (`BaseException`):
                The exception.
            resume (`Any`):
                What the entry it left had resumed from.
            cause (`BaseException`):
                The same, or where `train()` could not be entered again, what it had been left by before.

        Returns:
            How it is healed; `None` if it cannot be, and `cause` ends the run.
        """
        recovery = None
        try:
            recovery = self._recovery_from(session, error, resume, cause)
        except UnrecoverableTrainingError:
            raise
        except Exception:
            logger.exception("self_healing failed while it dealt with %s, which is raised unchanged.", type(error))
        if recovery is None and cause is not error:
            add_note(cause, f"self_healing: {_failed_at_entry(error)}.")
        return recovery

    def _recovery_from(
        self, session: Session, error: BaseException, resume: Any, cause: BaseException
    ) -> _Recovery | None:
        failure = classify_exception(error)
        if failure is FailureType.PROCESS_DIED:
            end_workers_that_failed(error)
        if failure is FailureType.DEVICE:
            self._lose_device(session, error, cause)
            return None
        try:
            return self._plan_recovery(session, error, resume, cause)
        except UnrecoverableTrainingError:
            raise
        except Exception as failed:
            if classify_exception(failed) is not FailureType.DEVICE:
                raise
            # The exception did not say so, and what was to be saved could not be read.
            self._lose_device(session, failed, cause)
            return None

    def _lose_device(self, session: Session, error: BaseException, cause: BaseException) -> None:
        """Nothing can be saved and nothing entered again: the process ends, or what ended the run is raised."""
        verdict = describe_exception(error) if cause is error else f"{describe_exception(cause)}; {text_of(error)}"
        write_down_lost_device(session, self.trainer, error, verdict)
        leave_lost_device(session, error)

    def _plan_recovery(
        self, session: Session, error: BaseException, resume: Any, cause: BaseException
    ) -> _Recovery | None:
        began = time.perf_counter()
        failure = classify_exception(error)
        step = int(self.trainer.state.global_step)
        if failure is FailureType.PREEMPTED:
            self._leave_unfinished_step(session, error)
        incident, session.handed_over = session.handed_over, None
        if incident is None:
            incident = session.journal.open(step, type(error).__name__, {"message": text_of(error)[:500]})
            session.journal.diagnosed(incident, failure, failure.value.replace("_", " "), {})
        point, unmoved = self._resume_from(session, incident, error, failure, resume)
        remedies = self._remedies(session, incident, failure, step)
        if not remedies and cause is not error and not self._entered_in_vain:
            # It need not be the training that fails here, but the way back to it.
            remedies = (Action.RESUME,)
        self._entered_in_vain = cause is not error
        if not remedies or consensus.world_size() > 1:
            if cause is error:
                self._end(session, incident, failure, error, point)
            else:
                verdict = f"{describe_exception(cause)}; {_failed_at_entry(error)}"
                self._end(session, incident, classify_exception(cause), cause, point, verdict)
            return None
        why = ""
        if point is None and not unmoved:
            why = "there is no state to resume from"
        elif not session.budget.spend(step):
            why = f"the budget of {self.config.max_recovery_attempts} attempts without progress is spent"
        if why:
            advice = self._end(session, incident, failure, error, point)
            path = session.attempts.postmortem
            raise UnrecoverableTrainingError(
                f"Training stopped at step {step}: {describe_exception(error)}; {why}. "
                f"What to do: {advice} Postmortem: {path or 'could not be written'}.",
                failure=failure,
                postmortem=path,
            ) from error
        incident.steps_repeated = 0 if unmoved else max(step - step_of(point, default=step), 0)
        if Action.REDUCE_BATCH_SIZE in remedies:
            self._reduce_batch_size(session, incident)
        if Action.RESUME in remedies:
            session.journal.acted(incident, Action.RESUME.value, checkpoint=point)
        incident.seconds_lost += time.perf_counter() - began
        return _Recovery(incident, point, waits=Action.WAIT_AND_RESUME in remedies)

    def _leave_unfinished_step(self, session: Session, error: BaseException) -> NoReturn:
        """The step would have taken too long: what is saved is the state before it."""
        path: str | None = None
        if session.instrument is not None and consensus.world_size() == 1:
            try:
                point = save_emergency_checkpoint(
                    session.instrument,
                    session.run_id,
                    about_to_write=session.attempts.about_to_write,
                    later=session.checksums.put,
                )
                path = None if point is None else publish(point.path, self.trainer.args.output_dir)
            except Exception:
                logger.warning("The state before the interrupted step could not be saved.", exc_info=error)
        session.leave(int(self.trainer.state.global_step), self.trainer.args.output_dir, path)

    def _remedies(self, session: Session, incident: Incident, failure: FailureType, step: int) -> tuple[Action, ...]:
        """What is done before `train()` is entered again; nothing if it is not."""
        if failure is FailureType.OUT_OF_MEMORY and self.config.on_oom == "heal":
            if session.batch_plan is not None:
                return (Action.REDUCE_BATCH_SIZE,)
            return self._remedies_outside_of_the_model(session, incident, step)
        reentry = FAILURE_RECIPES[failure].reentry
        return () if reentry is None else (reentry,)

    def _remedies_outside_of_the_model(self, session: Session, incident: Incident, step: int) -> tuple[Action, ...]:
        """
        Where nothing could be split (a callback, the data): once more with the memory freed; soon again, a smaller
        batch, which leaves more memory to everything else.
        """
        last, self._memory_ran_out_at = self._memory_ran_out_at, step
        if last < 0 or step - last > _LATELY:
            return (Action.FREE_MEMORY,)
        if self.config.oom_reduce_batch and session.instrument is not None:
            try:
                session.batch_plan = smaller_batch(self.trainer, session.instrument.objective.name)
            except CannotReduce as refusal:
                incident.evidence["not_reduced"] = str(refusal)
                logger.warning("Step %d: the batch cannot be made smaller: %s.", step, refusal)
            else:
                return (Action.REDUCE_BATCH_SIZE,)
        return (Action.FREE_MEMORY,) if step > last else ()

    def _reduce_batch_size(self, session: Session, incident: Incident) -> None:
        callback, plan = self._find_callback(), session.batch_plan
        session.batch_plan = None
        if callback is not None and session.instrument is not None:
            context = HealingContext(incident, session.instrument, batch=plan)
            callback.actions.apply((Action.REDUCE_BATCH_SIZE,), context, self.trainer.args)

    def _resume_from(
        self,
        session: Session,
        incident: Incident,
        error: BaseException,
        failure: FailureType,
        resume: Any,
    ) -> tuple[Any, bool]:
        """Where to enter again, and whether that is where this entry began."""
        instrument, callback = session.instrument, self._find_callback()
        if instrument is None or callback is None or callback.session is not session:
            # Before our on_train_begin: nothing has moved, the same call can be made again.
            return resume, True
        unmoved = not instrument.reentry.moved
        if not FAILURE_RECIPES[failure].saves_first or (unmoved and resume is not None):
            instrument.reentry.rewind_to_last_step()
            return resume, unmoved
        context = HealingContext(incident, instrument, error=error)
        saved = callback.actions.apply((Action.EMERGENCY_CHECKPOINT,), context, self.trainer.args)
        if saved["checkpoint"] is None and not unmoved:
            newest = newest_checkpoint_of(session.run_id, self.trainer.args.output_dir)
            return newest or session.attempts.first_resume, False
        return saved["checkpoint"], unmoved

    def _wait(self, session: Session, recovery: _Recovery) -> None:
        callback = self._find_callback()
        if callback is not None:
            callback.session = session
            callback.actions.apply((Action.WAIT_AND_RESUME,), HealingContext(recovery.incident), self.trainer.args)

    def _let_go(self, session: Session) -> None:
        """The trainer is itself again, and nothing holds on to the failed step."""
        if session.instrument is not None:
            session.instrument.detach()
            if session.device_lost:
                return
            session.instrument.reentry.release()
            session.instrument = None

    def _end(
        self,
        session: Session,
        incident: Incident,
        failure: FailureType,
        error: BaseException,
        point: Any,
        verdict: str | None = None,
    ) -> str:
        """Writes down that an exception ends the run, and gives what to do about it."""
        session.journal.acted(incident, Action.STOP.value)
        session.close_as_fatal(incident)
        output_dir = self.trainer.args.output_dir
        path = point if isinstance(point, str) else None
        emergency = older = None
        if session.resume_point is not None and session.resume_point.path == path:
            emergency = publish(session.resume_point.path, output_dir)
        elif path is not None and FAILURE_RECIPES[failure].saves_first:
            older = path
        else:
            # What this entry began with need not be the newest.
            older = newest_checkpoint_of(session.run_id, output_dir) or path
        advice = f"{FAILURE_RECIPES[failure].advice} {where_to_go_on(emergency or older)}"
        verdict = verdict or describe_exception(error)
        self._write_postmortem(session, failure, error, verdict, emergency, advice, older)
        session.journal.dealt_with(incident)
        return advice

    def _write_postmortem(
        self,
        session: Session,
        failure: FailureType,
        error: BaseException,
        verdict: str,
        checkpoint: str | None = None,
        advice: str | None = None,
        older_checkpoint: str | None = None,
    ) -> None:
        state = self.trainer.state
        if checkpoint is None and older_checkpoint is None:
            older_checkpoint = newest_checkpoint_of(session.run_id, self.trainer.args.output_dir)
        session.attempts.postmortem = session.journal.write_postmortem(
            verdict, failure, int(state.global_step), error, state.log_history, checkpoint, advice, older_checkpoint
        )

    def _switch_off_auto_find_batch_size(self) -> None:
        if self.trainer.args.auto_find_batch_size:
            logger.warning(
                "auto_find_batch_size=True is switched off: after an out-of-memory error it starts over at step 0 "
                "with weights that are already trained, and shrinks the effective batch."
            )
            self.trainer.args.auto_find_batch_size = False

    def _find_callback(self) -> SelfHealingCallback | None:
        # Looked up anew each time: restore_callback_states_from_checkpoint=True puts a new object in its place.
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, SelfHealingCallback):
                return callback
        return None

    def _put_callback_in_force(self) -> None:
        """What became of the callback since this object was made: without it nothing would be healed in a step."""
        callback = self._find_callback()
        if callback is not None:
            self._put_config_in_force(callback)
            return
        logger.warning(
            "The trainer's SelfHealingCallback has been removed, and is added again: without it no step would be "
            "watched. For a run that is not healed, please call train() of the trainer itself."
        )
        self.trainer.add_callback(SelfHealingCallback(self.config))

    def _put_config_in_force(self, callback: SelfHealingCallback) -> None:
        theirs, ours = callback.config.to_dict(), self.config.to_dict()
        changed = [f"{name}={value!r} (was {theirs[name]!r})" for name, value in ours.items() if value != theirs[name]]
        if not changed:
            return
        logger.warning(
            "The trainer's SelfHealingCallback had other settings than this SelfHealingTrainer. Those of the "
            "SelfHealingTrainer are in force from here on: %s.",
            ", ".join(changed),
        )
        callback.reconfigure(self.config)

    # ---- looking ----

    def dry_run(self, num_steps: int = 2) -> DryRunReport:
        """
        Runs real training steps and leaves no trace: model, optimizer, schedule, random states, counters, files.

        Args:
            num_steps (`int`, *optional*, defaults to 2):
                Optimizer steps to run.
        """
        return dry_run(self.trainer, num_steps)

    def get_report(self) -> HealingReport:
        """What happened in the last run of the trainer, whoever called its `train()`; else in those on the disk."""
        callback = self._find_callback()
        sessions = [self._session, None if callback is None else callback.session]
        session = max((each for each in sessions if each is not None), key=lambda each: each.started_at, default=None)
        if session is None:
            try:
                return HealingReport.from_run_dir(self.config.healing_dir or self.trainer.args.output_dir)
            except (OSError, ValueError):
                return HealingReport()
        return HealingReport.from_incidents(
            session.journal.incidents, str(session.journal.path), session.numerics.rate_in_force()
        )


def _failed_at_entry(error: BaseException) -> str:
    return f"train() was entered again and failed before the first batch: {describe_exception(error)}"
