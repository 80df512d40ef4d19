"""`SelfHealingTrainer`: whatever needs `train()` to be entered again."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import TrainOutput

from . import consensus
from .actions import HealingContext
from .callback import SelfHealingCallback, adopt_session
from .checkpoints import (
    CheckpointError,
    newest_checkpoint_of,
    publish,
    remove_emergency_checkpoints,
    resolve_checkpoint,
    step_of,
)
from .config import HealingConfig
from .dry_run import DryRunReport, dry_run
from .failures import FAILURE_RECIPES, Action, FailureType, UnrecoverableTrainingError, classify_exception
from .instrument import RandomState, let_go
from .journal import Incident
from .report import HealingReport
from .session import Session
from .vetting import Verdict


logger = logging.getLogger("self_healing")


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
        sleep (`Callable[[float], None]`, *optional*, defaults to `time.sleep`):
            How waiting between attempts is done, in seconds.

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
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"SelfHealingTrainer wraps a trainer that exists, got {trainer!r}. Please build it first: "
                "SelfHealingTrainer(SFTTrainer(model=..., args=...), config)."
            )
        self.trainer: Any = trainer
        for callback in callbacks or ():
            trainer.add_callback(callback)
        existing = self._find_callback()
        if config is None:
            config = existing.config if existing is not None else HealingConfig()
        elif not isinstance(config, HealingConfig):
            config = HealingConfig.from_dict(dict(config))
        self.config = config
        if existing is None:
            trainer.add_callback(SelfHealingCallback(config))
        else:
            existing.reconfigure(config)
        self._sleep = sleep
        self._session: Session | None = None
        self._memory_ran_out_at = -1

    def __getattr__(self, name: str) -> Any:
        if name == "trainer":
            raise AttributeError(name)
        return getattr(self.trainer, name)

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
        self._switch_off_auto_find_batch_size()
        args = self.trainer.args
        directory = Path(self.config.healing_dir or args.output_dir)
        self._session = session = Session(self.config, directory, args.process_index, self._sleep)
        resume = None if resume_from_checkpoint is None else self._choose_checkpoint(session, resume_from_checkpoint)
        adopt_session(self.trainer, session)
        theirs = args.eval_on_start, args.ignore_data_skip
        session.may_enter_again = consensus.world_size() == 1
        self._memory_ran_out_at = -1
        try:
            output = self._enter_until_done(session, resume, kwargs)
        except (KeyboardInterrupt, SystemExit) as error:
            session.close_outcomes()
            point = session.resume_point
            path = None if point is None else publish(point.path, args.output_dir)
            self._write_postmortem(session, FailureType.INTERRUPTED, error, "the run was interrupted", path)
            raise
        finally:
            args.eval_on_start, args.ignore_data_skip = theirs
            adopt_session(self.trainer, None)
            self._let_go(session)
            session.rollback.release()
        if session.resume_point is not None:
            remove_emergency_checkpoints(args.output_dir)
        return output

    def _choose_checkpoint(self, session: Session, requested: str | os.PathLike[str] | bool) -> str | None:
        """What to resume from; with several processes the first one decides for all of them."""
        chosen: str | None = None
        failed: Exception | None = None
        if self.trainer.args.process_index == 0:
            try:
                chosen = self._look_for_checkpoint(session, requested)
            except Exception as error:
                # Raised once the others know: they wait to be told.
                failed = error
        chosen, refusal = consensus.from_first_rank((chosen, None if failed is None else str(failed)))
        if refusal is not None and failed is None:
            failed = CheckpointError(refusal)
        if failed is not None:
            raise failed
        return chosen

    def _look_for_checkpoint(self, session: Session, requested: str | os.PathLike[str] | bool) -> str | None:
        output_dir, passed_over = self.trainer.args.output_dir, list[Verdict]()
        try:
            chosen = resolve_checkpoint(requested, output_dir, passed_over)
        finally:
            for verdict in passed_over:
                logger.warning("%s is passed over: %s.", verdict.path, verdict.reason)
                session.journal.event(
                    "checkpoint_passed_over", verdict.step or 0, path=verdict.path, reason=verdict.reason
                )
        if chosen is None:
            if passed_over:
                logger.warning("No checkpoint in %s can be resumed from; the run starts anew.", output_dir)
            return None
        session.journal.event("checkpoint_chosen", chosen.step or 0, path=chosen.path, standing=chosen.standing)
        return chosen.path

    def _enter_until_done(self, session: Session, resume: Any, kwargs: dict[str, Any]) -> TrainOutput:
        entry_rng = RandomState.capture(self.trainer.accelerator.device)
        while True:
            try:
                output: TrainOutput = self.trainer.train(resume_from_checkpoint=resume, **kwargs)
                return output
            except UnrecoverableTrainingError:
                raise
            except Exception as error:
                recovery = self._recover(session, error, resume)
                if recovery is None:
                    raise
                let_go(error)
            # Outside the handler: the exception and with it the failed step's activations are gone.
            self._let_go(session)
            began = time.perf_counter()
            if recovery.waits:
                self._wait(session, recovery)
            recovery.incident.seconds_lost += time.perf_counter() - began
            session.journal.dealt_with(recovery.incident)
            session.await_outcome(recovery.incident)
            resume = recovery.resume
            # Samplers and their seeds are made anew on entry, some from the global generators.
            entry_rng.restore()
            if session.resume_point is not None:
                # Evaluated at the start it has, or the resume point owes it; and what was trained on is skipped.
                self.trainer.args.eval_on_start = self.trainer.args.ignore_data_skip = False

    def _recover(self, session: Session, error: Exception, resume: Any) -> _Recovery | None:
        """What to do about an exception that left `train()`; `None` if it cannot be healed."""
        try:
            return self._plan_recovery(session, error, resume)
        except UnrecoverableTrainingError:
            raise
        except Exception:
            logger.exception("self_healing failed while it dealt with %s, which is raised unchanged.", type(error))
            return None

    def _plan_recovery(self, session: Session, error: Exception, resume: Any) -> _Recovery | None:
        began = time.perf_counter()
        failure = classify_exception(error)
        step = int(self.trainer.state.global_step)
        incident, session.handed_over = session.handed_over, None
        if incident is None:
            incident = session.journal.open(step, type(error).__name__, {"message": str(error)[:500]})
            session.journal.diagnosed(incident, failure, failure.value.replace("_", " "), {})
        point, unmoved = self._resume_from(session, incident, error, failure, resume)
        remedies = self._remedies(session, failure, step)
        if not remedies or consensus.world_size() > 1:
            self._end(session, incident, failure, error, point)
            return None
        why = ""
        if point is None and not unmoved:
            why = "there is no state to resume from"
        elif not session.budget.spend(step):
            why = f"the budget of {self.config.max_recovery_attempts} attempts without progress is spent"
        if why:
            self._end(session, incident, failure, error, point)
            path = session.postmortem_path
            raise UnrecoverableTrainingError(
                f"Training stopped at step {step}: {type(error).__name__}: {error}; {why}. "
                f"What to do: {FAILURE_RECIPES[failure].advice} Postmortem: {path or 'could not be written'}.",
                failure=failure,
                postmortem=path,
            ) from error
        incident.steps_lost = 0 if unmoved else max(step - step_of(point, default=step), 0)
        if Action.REDUCE_BATCH_SIZE in remedies:
            self._reduce_batch_size(session, incident)
        incident.seconds_lost += time.perf_counter() - began
        return _Recovery(incident, point, waits=Action.WAIT_AND_RESUME in remedies)

    def _remedies(self, session: Session, failure: FailureType, step: int) -> tuple[Action, ...]:
        """What is done before `train()` is entered again; nothing if it is not."""
        if failure is FailureType.OUT_OF_MEMORY and self.config.on_oom == "heal":
            if session.batch_plan is not None:
                return (Action.REDUCE_BATCH_SIZE,)
            # Somewhere nothing could be split (a callback, the data): once more, with the memory freed.
            again, self._memory_ran_out_at = step > self._memory_ran_out_at, step
            return (Action.FREE_MEMORY,) if again else ()
        return (Action.WAIT_AND_RESUME,) if Action.WAIT_AND_RESUME in FAILURE_RECIPES[failure].ladder else ()

    def _reduce_batch_size(self, session: Session, incident: Incident) -> None:
        callback, plan = self._find_callback(), session.batch_plan
        session.batch_plan = None
        if callback is not None and session.instrument is not None:
            context = HealingContext(incident, session.instrument, batch=plan)
            callback.actions.apply((Action.REDUCE_BATCH_SIZE,), context, self.trainer.args)

    def _resume_from(
        self, session: Session, incident: Incident, error: Exception, failure: FailureType, resume: Any
    ) -> tuple[Any, bool]:
        """Where to enter again, and whether that is where this entry began."""
        instrument, callback = session.instrument, self._find_callback()
        if instrument is None or callback is None or callback.session is not session:
            # Before our on_train_begin: nothing has moved, the same call can be made again.
            return resume, True
        unmoved = not instrument.reentry.moved
        if Action.EMERGENCY_CHECKPOINT not in FAILURE_RECIPES[failure].ladder or (unmoved and resume is not None):
            instrument.reentry.settle()
            return resume, unmoved
        context = HealingContext(incident, instrument, error=error)
        saved = callback.actions.apply((Action.EMERGENCY_CHECKPOINT,), context, self.trainer.args)
        if saved["checkpoint"] is None and not unmoved:
            newest = newest_checkpoint_of(session.run_id, self.trainer.args.output_dir)
            return newest or session.first_resume, False
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
            session.instrument.reentry.release()
            session.instrument = None

    def _end(
        self, session: Session, incident: Incident, failure: FailureType, error: BaseException, point: Any
    ) -> None:
        session.journal.acted(incident, Action.STOP.value)
        session.close_as_fatal(incident)
        verdict = f"{type(error).__name__}: {error}"
        path = point if isinstance(point, str) else None
        if session.resume_point is not None and session.resume_point.path == path:
            path = publish(session.resume_point.path, self.trainer.args.output_dir)
        self._write_postmortem(session, failure, error, verdict, path)
        session.journal.dealt_with(incident)

    def _write_postmortem(
        self,
        session: Session,
        failure: FailureType,
        error: BaseException,
        verdict: str,
        checkpoint: str | None = None,
    ) -> None:
        state = self.trainer.state
        session.postmortem_path = session.journal.write_postmortem(
            verdict, failure, int(state.global_step), error, state.log_history, checkpoint
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
        """What happened in the last run."""
        if self._session is None:
            return HealingReport()
        session = self._session
        return HealingReport.from_incidents(
            session.journal.incidents, str(session.journal.path), session.rate_in_force()
        )
