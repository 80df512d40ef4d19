"""SelfHealingTrainer: decides about an exception that left `train()`, and enters it again."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import TrainOutput

from .actions import HealingActions
from .callback import SelfHealingCallback, adopt_run, callback_of, report_of
from .checkpoints.choice import CheckpointError, newest_checkpoint_of
from .checkpoints.marker import step_of
from .config.healing_config import HealingConfig, as_config
from .config.schema import ConfigurationError
from .failures.classify import add_note, classify_exception, describe_exception
from .failures.recipes import FAILURE_RECIPES, Action, FailureType, HealingFailed, UnrecoverableTrainingError, text_of
from .healers.assembly import assemble
from .healers.dry_run import DryRunReport, dry_run
from .healers.hangs.healer import HangWatch
from .healers.oom.healer import MemoryOutsideOfModel
from .healers.restarts.attempts import Attempts, go_on_from_disk, take_up
from .healers.restarts.emergency import publish, save_emergency_checkpoint
from .healers.restarts.ending import Shutdown, ending_the_job, keep_snapshots_after_exit, leave_snapshots
from .healers.restarts.preemption import Preemption
from .healers.restarts.shared_memory import FinalSnapshot
from .healers.restarts.start import (
    Start,
    find_start,
    is_off,
    note_memory_start,
    note_start,
    refusal_of_another_job,
    resumed_without_healing,
)
from .healers.services import Reporting
from .healers.train_begin_end import tell_end
from .hf.dataloader import end_workers_that_failed
from .hf.deepspeed import can_be_entered_again, have_engine_made_again, let_go_of_engine
from .hf.memory import in_evaluation, release_frames
from .hf.patching import entry_hooks_removed_on_exception, remove_progress_bars
from .journal.incident import Incident
from .journal.terminal import Terminal, speaking_of
from .ranks import votes
from .ranks.votes import meet
from .report.healing_report import HealingReport
from .report.output import write_closing_report
from .rollback.shared_memory import StateUnusable
from .run.healer import Claim, HealingContext, claim_by_recipe
from .run.record import RunRecord
from .run.run import Run
from .system import processes
from .system.processes import EXIT_FOR_RESTART, contained, end_at_once
from .system.random_state import RandomState


logger = logging.getLogger("self_healing")

_LEFT = "self_healing failed at the beginning or the end of a run, which stays as it is."


# ---- trainer: whatever needs `train()` to be entered again ----


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
            Called with the seconds to wait before an attempt. Defaults to `time.sleep`, cut short by a preemption.

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
                "SelfHealingTrainer was given a trainer that is already wrapped. Please use that wrapper; for other "
                "settings, wrap the trainer inside it: SelfHealingTrainer(healer.trainer, config)."
            )
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"SelfHealingTrainer wraps an existing trainer, but got a {type(trainer).__name__}. Please build it "
                "first: SelfHealingTrainer(SFTTrainer(model=..., args=...), config)."
            )
        self.trainer: Any = trainer
        for callback in callbacks or ():
            trainer.add_callback(callback)
        existing = self.healing_callback
        self.config = as_config(existing.config if config is None and existing is not None else config)
        self._put_callback_in_force()
        self._sleep = sleep
        self._run: Run | None = None

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
                `"auto"` does the same or starts a new run where there is none. A path is looked at before it is used.
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
        with Terminal(self.trainer.args.process_index).speaking():
            return self._train(resume_from_checkpoint, kwargs)

    def _train(self, requested: str | os.PathLike[str] | bool | None, kwargs: dict[str, Any]) -> TrainOutput:
        self._switch_off_auto_find_batch_size()
        self._put_callback_in_force()
        args = self.trainer.args
        meet(self.config.to_dict(), args.ddp_timeout)
        if is_off(self.config, args):
            return self._train_without_healing(requested, kwargs)
        with ending_the_job(self.config, args, CheckpointError, ConfigurationError):
            run, start = self._open_run(requested)
        left_by: BaseException | None = None
        theirs = args.eval_on_start, args.ignore_data_skip
        reporting = Reporting(run)
        try:
            # First: from here on the others learn in seconds of what ends this rank.
            with contained(logger, _LEFT):
                run.part(HangWatch).listen()
            reporting.attach(self.trainer)
            take_up(run, start)
            adopt_run(self.trainer, run)
            if self.config.on_preemption == "save":
                run.part(Preemption).listen()
            output = self._enter_until_done(Recovery(self.trainer, run), start.checkpoint, kwargs)
            state = self.trainer.state
            if run.part(Preemption).begun and state.global_step < state.max_steps:
                run.part(Preemption).leave(int(state.global_step), self.trainer.args.output_dir)
        except BaseException as error:
            left_by = error
            run.part(HangWatch).left_by(error)
            run.part(Shutdown).note_exception(error)
            raise
        else:
            run.part(Shutdown).finish()
        finally:
            args.eval_on_start, args.ignore_data_skip = theirs
            for leave in (
                partial(adopt_run, self.trainer, None),
                run.part(Preemption).release,
                partial(self._let_go, run),
                partial(leave_snapshots, run),
                *(() if run.device_lost else (run.rollback.release,)),
                reporting.detach,
                run.part(HangWatch).close,
                partial(write_closing_report, run),
                partial(tell_end, run, left_by),
            ):
                with contained(logger, _LEFT):
                    leave()
            if run.part(Shutdown).ends_process:
                end_at_once(EXIT_FOR_RESTART)
        run.let_go()
        return output

    def _train_without_healing(self, requested: Any, kwargs: dict[str, Any]) -> TrainOutput:
        """Trains as the plain Trainer does, after a failure of this library on one of several ranks."""
        callback = self.healing_callback
        assert callback is not None
        callback.off = True
        try:
            resume_from = resumed_without_healing(self.config, self.trainer.args, requested)
            return self._enter(resume_from_checkpoint=resume_from, **kwargs)
        finally:
            callback.off = False

    # ---- where the run begins ----

    def _open_run(self, requested: str | os.PathLike[str] | bool | None) -> tuple[Run, Start]:
        """Begins a run, or goes on with one that an earlier process began."""
        args = self.trainer.args
        start = find_start(self.trainer, self.config, requested)
        directory = Path(self.config.healing_dir or args.output_dir)
        self._run = run = assemble(
            self.config,
            directory,
            args.process_index,
            self._sleep,
            start.run,
            wrapped=True,
            device=args.device,
        )
        run.trainer = self.trainer
        record = start.record or RunRecord(Path(args.output_dir), run.run_id)
        run.part(Attempts).keep(record, taken_up=start.record is not None)
        run.part(Attempts).memory = start.memory
        with contained(logger, _LEFT):
            keep_snapshots_after_exit(run)
        if args.process_index == 0:
            note_start(run.journal, start, args.output_dir)
        return run, start

    # ---- entering train() ----

    def _enter_until_done(self, recovery: Recovery, resume_from: Any, kwargs: dict[str, Any]) -> TrainOutput:
        run, attempts = recovery.run, recovery.run.part(Attempts)
        entry_rng = RandomState.capture(self.trainer.accelerator.device)
        while True:
            memory = attempts.memory
            loading: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            try:
                if memory is not None and memory.checkpoint == resume_from:
                    loading = memory.loading(self.trainer, partial(note_memory_start, run.journal))
                with entry_hooks_removed_on_exception(self.trainer), loading:
                    return self._enter(resume_from_checkpoint=resume_from, **kwargs)
            except StateUnusable as error:
                resume_from = self._start_from_disk(run, error)
                entry_rng.restore()
                continue
            except (UnrecoverableTrainingError, KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:
                # A panic of a library in Rust, or a cancelled coroutine, is no `Exception`, and an error all the same.
                entry = recovery.decide(error, resume_from)
                if entry is None:
                    raise
                release_frames(error)
            # Outside the handler: the exception and with it the failed step's activations are gone.
            self._let_go(run)
            let_go_of_engine(self.trainer)
            remove_progress_bars(self.trainer)
            claim, resume_from = entry
            recovery.prepare(claim)
            # Samplers and their seeds are made again on entry, some from the global generators.
            entry_rng.restore()
            if attempts.resume_point is not None:
                # Evaluated at the start it has, or the resume point owes it; and what was trained on is skipped.
                self.trainer.args.eval_on_start = self.trainer.args.ignore_data_skip = False

    def _start_from_disk(self, run: Run, error: StateUnusable) -> str | None:
        """Goes on from disk where a state in shared memory turned out not to fit the trainer, on all ranks."""
        run_id, args = run.run_id, self.trainer.args

        def look() -> tuple[str | None, str | None]:
            newest = newest_checkpoint_of(run_id, args.output_dir)
            return newest, None if newest is None else refusal_of_another_job(newest, self.trainer)

        checkpoint, refusal = votes.looked_up_by_first_rank("the newest checkpoint on disk", look, args.device)
        if refusal is not None:
            raise CheckpointError(refusal) from error
        have_engine_made_again(self.trainer)
        go_on_from_disk(run, checkpoint, error)
        return checkpoint

    def _enter(self, **kwargs: Any) -> TrainOutput:
        output: TrainOutput = self.trainer.train(**kwargs)
        return output

    def _let_go(self, run: Run) -> None:
        """The trainer is itself again, and nothing holds on to the failed step."""
        if run.attached is not None:
            run.attached.detach()
            if run.device_lost:
                return
            run.attached.reentry.release()
            run.attached = None

    def _switch_off_auto_find_batch_size(self) -> None:
        if self.trainer.args.auto_find_batch_size:
            logger.warning(
                "auto_find_batch_size=True is switched off: after an out-of-memory error it starts over at step 0 "
                "with weights that are already trained, and shrinks the effective batch."
            )
            self.trainer.args.auto_find_batch_size = False

    def _put_callback_in_force(self) -> None:
        """Without a callback of these settings in the trainer, nothing is healed in a step."""
        callback = self.healing_callback
        if callback is None:
            self.trainer.add_callback(SelfHealingCallback(self.config))
            return
        theirs, ours = callback.config.to_dict(), self.config.to_dict()
        changed = [f"{name}={value!r} (was {theirs[name]!r})" for name, value in ours.items() if value != theirs[name]]
        if not changed:
            return
        with speaking_of(self.trainer.args):
            logger.warning(
                "The trainer's SelfHealingCallback had other settings than this SelfHealingTrainer. Those of the "
                "SelfHealingTrainer are in force from here on: %s.",
                ", ".join(changed),
            )
        callback.reconfigure(self.config)

    # ---- looking ----

    def dry_run(self, num_steps: int | None = None) -> DryRunReport:
        """
        Runs real training steps and leaves no trace: model, optimizer, schedule, random states, counters, files.

        Args:
            num_steps (`int`, *optional*):
                Optimizer steps to run; 2 if it is left out.

        Returns:
            [`DryRunReport`]: Loss, gradient norm, time and memory of the steps, the rows and rewards in them, and what
            to look at before a long run; `print` it.

        Raises:
            ValueError: For less than one step, and for a model that is sharded (FSDP, DeepSpeed).
            Exception: What the training code raises; the state is put back first.
        """
        with Terminal(self.trainer.args.process_index).speaking():
            return dry_run(self.trainer, 2 if num_steps is None else num_steps, self.config.rules_file)

    @property
    def healing_callback(self) -> SelfHealingCallback | None:
        """The callback that heals in the step; `None` if it was taken out of the trainer."""
        # Looked up each time: restore_callback_states_from_checkpoint=True puts a new object in its place.
        return callback_of(self.trainer)

    @property
    def actions_engine(self) -> HealingActions | None:
        """Carries out actions by name, in the run of the callback."""
        callback = self.healing_callback
        if callback is None:
            return None
        callback.actions.trainer = self.trainer
        return callback.actions

    @property
    def attempt(self) -> int:
        """How often `train()` of the trainer was entered in the last run; 0 before the first one."""
        return 0 if self._run is None else self._run.part(Attempts).entries

    @property
    def converged(self) -> bool:
        """Whether the last run has come to its end."""
        return self.get_report().converged

    @property
    def recovery_history(self) -> list[dict[str, Any]]:
        """The incidents of the last run in which something was done."""
        return self.get_report().recovery_history

    def get_report(self) -> HealingReport:
        """Reports the last run of the trainer, whichever way its `train()` was called; else those on the disk."""
        callback = self.healing_callback
        runs = [self._run, None if callback is None else callback.run]
        run = max((each for each in runs if each is not None), key=lambda each: each.started_at, default=None)
        if run is None:
            try:
                return HealingReport.from_run_dir(self.config.healing_dir or self.trainer.args.output_dir)
            except (OSError, ValueError):
                return HealingReport()
        return report_of(run)


# ---- recovery: decides what to do about an exception that left `train()` ----


# The claim that is healed by the next entry into `train()`, and what that resumes from.
NextEntry = tuple[Claim, Any]


class Recovery:
    """Decides what to do about exceptions that leave `train()`, in one run of the wrapper."""

    def __init__(self, trainer: Any, run: Run) -> None:
        self.run = run
        self._trainer = trainer
        self._config = run.config
        self._ending = run.part(Shutdown)
        self._outside_of_model = MemoryOutsideOfModel(run, trainer)
        self._can_enter_again = can_be_entered_again(trainer)
        # The exception after which `train()` was entered again, in words.
        self._entered_after = ""

    def decide(self, error: BaseException, resume_from: Any) -> NextEntry | None:
        """Decides what to do about an exception that left `train()`; `None` where it is raised unchanged."""
        try:
            return self._decide(error, resume_from)
        except UnrecoverableTrainingError:
            raise
        except Exception:
            logger.exception("self_healing failed while it dealt with %s, which is raised unchanged.", type(error))
            return None

    def prepare(self, claim: Claim) -> None:
        """Does what comes before `train()` is entered again, with the trainer given back: waits, and tells of it."""
        run, incident = self.run, claim.incident
        opened = run.dealing_with(incident)
        if claim.wait:
            run.remedies.apply(Action.WAIT_AND_RESUME, HealingContext(incident), self._trainer.args)
            if run.asked_to_leave is not None:
                run.part(Preemption).leave(self._ending.step, self._ending.output_dir)
        opened.done()

    # ---- whose it is, and what cures it ----

    def _decide(self, error: BaseException, resume_from: Any) -> NextEntry | None:
        failure, attached = classify_exception(error), self.run.attached
        if self._entered_after and (attached is None or not attached.reentry.has_fetched):
            # Perhaps only of a second entry: the traceback has to name the first fault, which is out of sight by now.
            add_note(error, f"self_healing: train() had been entered again after {self._entered_after}.")
        if failure is FailureType.PROCESS_DIED:
            end_workers_that_failed(error)
        if failure is FailureType.PREEMPTED:
            self._leave_unfinished_step()
        try:
            if failure is not FailureType.DEVICE:
                return self._plan(error, failure, resume_from)
        except UnrecoverableTrainingError:
            raise
        except Exception as failed:
            # The exception did not say so, and what was to be saved could not be read.
            if classify_exception(failed) is not FailureType.DEVICE:
                raise
            verdict = f"{describe_exception(error)}; {text_of(failed)}"
            error = failed
        else:
            verdict = describe_exception(error)
        # Nothing can be saved and nothing entered again: the process ends, or what ended the run is raised.
        self._ending.note_lost_device(error, verdict)
        self._ending.leave_lost_device(error)
        return None

    def _plan(self, error: BaseException, failure: FailureType, resume_from: Any) -> NextEntry | None:
        began, step = time.perf_counter(), self._ending.step
        claim = self._first_claim(error)
        incident = self._opened(error, failure) if claim is None else claim.incident
        several = processes.world_size() > 1
        if several and self.run.attached is not None:
            # The job ends, and is perhaps started again: each of its ranks then goes on from what it has left.
            self.run.part(FinalSnapshot).leave(self.run.attached)
        # Saved before anything else is tried: what follows may fail.
        point, unmoved = self._resume_from(incident, error, failure, resume_from)
        if claim is None or (failure is FailureType.OUT_OF_MEMORY and claim.remedy is Action.STOP):
            # Memory that ran out while another exception was on its way has remedies of its own.
            claim = self._outside_of_model.claim(error, incident) or claim_by_recipe(incident, failure)
        if claim.remedy is Action.STOP or several or not self._can_enter_again:
            self._ending.stop_for_exception(incident, failure, error, point)
            return None
        if point is None and not unmoved:
            self._stop(incident, failure, error, point, "there is no state to resume from")
        if not self.run.budget.spend(step):
            why = f"the budget of {self._config.max_recovery_attempts} attempts without progress is spent"
            self._stop(incident, failure, error, point, why)
        if not unmoved:
            saved = self.run.part(Attempts).resume_point
            goes_on_at = saved.step if saved is not None and saved.path == point else step_of(point, default=step)
            incident.steps_repeated = max(step - goes_on_at, 0)
        self._carry_out(claim, point)
        incident.seconds_lost += time.perf_counter() - began
        self._entered_after = describe_exception(error)
        return claim, point

    def _first_claim(self, error: BaseException) -> Claim | None:
        """Asks those inside `train()` in a fixed order; what else one of them was waiting for has not come."""
        claim, *others = [*self.run.healers.claims(error), None]
        for other in others:
            if other is not None:
                self.run.journal.closed(other.incident, "unresolved")
        return claim

    def _opened(self, error: BaseException, failure: FailureType) -> Incident:
        journal = self.run.journal
        evidence = {"message": text_of(error)[:500]}
        if isinstance(error, HealingFailed):
            evidence["remedy"] = error.remedy
        incident = journal.open(self._ending.step, type(error).__name__, evidence)
        where = " in evaluation" if failure is FailureType.OUT_OF_MEMORY and in_evaluation(error) else ""
        cause, found = f"{failure.value.replace('_', ' ')}{where}", dict[str, Any]()
        if processes.world_size() > 1 and (first := self._ending.told_by_another_rank(error)) is not None:
            cause = f"{first.whose}: {first.failure.value}"
            advice = f"See the postmortem or the output of {first.whose}. {FAILURE_RECIPES[first.failure].advice}"
            found = {"diagnosis": str(first), "remedy": advice}
        journal.diagnosed(incident, failure, cause, found)
        return incident

    def _carry_out(self, claim: Claim, point: Any) -> None:
        """Does what does not have to wait until the exception, and with it the failed step, is gone."""
        incident, run = claim.incident, self.run
        settings = Action.REDUCE_BATCH_SIZE, Action.MOVE_PREDICTIONS_TO_HOST
        if claim.remedy in settings and run.attached is not None:
            context = HealingContext(incident, run.attached, batch=claim.batch)
            run.remedies.apply(claim.remedy, context, self._trainer.args)
        if claim.remedy is Action.RESUME:
            run.journal.acted(incident, Action.RESUME.value, checkpoint=point)

    def _resume_from(
        self, incident: Incident, error: BaseException, failure: FailureType, resume_from: Any
    ) -> tuple[Any, bool]:
        """Finds where to enter again, and whether that is where this entry began."""
        run, instrument = self.run, self.run.attached
        if instrument is None:
            # Before our on_train_begin: nothing has moved, the same call can be made again.
            return resume_from, True
        unmoved = not instrument.reentry.moved
        saves_first = Action.EMERGENCY_CHECKPOINT in FAILURE_RECIPES[failure].actions
        if not saves_first or (unmoved and resume_from is not None):
            instrument.reentry.rewind_to_last_step()
            # Whatever has become of the weights: they are loaded.
            run.journal.doubt = ""
            return resume_from, unmoved
        context = HealingContext(incident, instrument, error=error)
        saved = run.remedies.apply(Action.EMERGENCY_CHECKPOINT, context, self._trainer.args)
        if saved["checkpoint"] is None and not unmoved:
            return newest_checkpoint_of(run.run_id, self._ending.output_dir) or run.part(Attempts).first_resume, False
        return saved["checkpoint"], unmoved

    # ---- the run ends ----

    def _stop(self, incident: Incident, failure: FailureType, error: BaseException, point: Any, why: str) -> NoReturn:
        advice = self._ending.stop_for_exception(incident, failure, error, point)
        path = self.run.part(Attempts).postmortem
        raise UnrecoverableTrainingError(
            f"Training stopped at step {self._ending.step}: {describe_exception(error)}; {why}. "
            f"What to do: {advice} Postmortem: {path or 'could not be written'}.",
            failure=failure,
            postmortem=path,
        ) from error

    def _leave_unfinished_step(self) -> NoReturn:
        """Leaves with the state before the step, which would have taken too long."""
        run, path = self.run, None
        if run.attached is not None and processes.world_size() == 1:
            with contained(logger, "The state before the interrupted step could not be saved.", logging.WARNING):
                point = save_emergency_checkpoint(run)
                path = None if point is None else publish(point.path, self._ending.output_dir)
        run.part(Preemption).leave(self._ending.step, self._ending.output_dir, path)
