"""`SelfHealingTrainer`: whatever needs `train()` to be entered again."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import TrainOutput

from .callback import SelfHealingCallback, adopt_run
from .checkpoints.choice import CheckpointError, newest_checkpoint_of
from .config.healing_config import HealingConfig, as_config
from .config.schema import ConfigurationError
from .failures.recipes import DamagedCheckpointError, UnrecoverableTrainingError
from .healers.assembly import Run, assemble
from .healers.dry_run import DryRunReport, dry_run
from .healers.restarts.attempts import go_on_from_disk, take_up
from .healers.restarts.ending import leave_snapshots, let_snapshots_outlive
from .healers.restarts.healing_off import ending_the_job, is_off, resumed_without_healing
from .healers.restarts.start import Start, find_start, note_memory_start, note_start, refusal_of_another_job
from .healers.services import Reporting
from .healers.train_begin_end import tell_end
from .hf.dataloader import loading_twice_at_most, skipping_any_loader
from .hf.deepspeed import have_engine_made_again, let_go_of_engine, loading_as_written
from .hf.memory import let_go, rows_per_step
from .hf.patching import entry_hooks_removed_on_exception, remove_progress_bars
from .hf.services import ReportingGuard
from .journal.terminal import Terminal, speaking_of
from .ranks import votes
from .ranks.votes import meet
from .recovery import NextEntry, Recovery
from .report.healing_report import HealingReport
from .report.output import ClosingReport
from .rollback.shared_memory import StateUnusable
from .run.record import RunRecord
from .system import processes
from .system.processes import log_safely
from .system.random_state import RandomState


logger = logging.getLogger("self_healing")


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
        existing = self._find_callback()
        self.config = config = as_config(existing.config if config is None and existing is not None else config)
        if existing is None:
            trainer.add_callback(SelfHealingCallback(config))
        else:
            self._put_config_in_force(existing)
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
        reporting = Reporting(run.context)
        closing = ClosingReport(run.context)
        guard = ReportingGuard(self.trainer, reporting, closing.before_closing)
        try:
            # First: from here on the others learn in seconds of what ends this rank.
            _contained(run.hangs.listen)
            guard.attach()
            take_up(run.context, run.attempts, start)
            adopt_run(self.trainer, run)
            if self.config.on_preemption == "save":
                run.departure.preemption.listen()
            output = self._enter_until_done(Recovery(self.trainer, run), start.checkpoint, kwargs)
            if run.departure.begun and not self._at_the_end():
                run.departure.leave(int(self.trainer.state.global_step), self.trainer.args.output_dir)
        except BaseException as error:
            left_by = error
            run.hangs.left_by(error)
            run.ending.note_exception(error)
            raise
        else:
            run.ending.finish()
        finally:
            args.eval_on_start, args.ignore_data_skip = theirs
            for leave in (
                partial(adopt_run, self.trainer, None),
                run.departure.preemption.release,
                partial(self._let_go, run),
                partial(leave_snapshots, run.context, run.attempts, run.rollback, args),
                partial(self._release_states, run),
                guard.detach,
                partial(reporting.sum_up, int(self.trainer.state.global_step)),
                run.hangs.close,
                closing.write,
                partial(tell_end, run, left_by),
            ):
                _contained(leave)
        return output

    def _train_without_healing(self, requested: Any, kwargs: dict[str, Any]) -> TrainOutput:
        """Trains as the plain Trainer does, after a failure of this library on one of several ranks."""
        callback = self._find_callback()
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
            may_enter_again=processes.world_size() == 1,
            device=args.device,
        )
        run.context.attachment.trainer = self.trainer
        record = start.record or RunRecord(Path(args.output_dir), run.context.run_id, kept=not start.beside)
        run.attempts.rows = rows_per_step(self.trainer)
        run.attempts.keep(record, taken_up=start.record is not None)
        run.attempts.memory = start.memory
        _contained(partial(let_snapshots_outlive, run.context, run.attempts, run.rollback, self.trainer))
        if args.process_index == 0:
            note_start(run.journal, start, args.output_dir)
        return run, start

    def _at_the_end(self) -> bool:
        state = self.trainer.state
        return 0 < int(state.max_steps) <= int(state.global_step)

    # ---- entering train() ----

    def _enter_until_done(self, recovery: Recovery, resume_from: Any, kwargs: dict[str, Any]) -> TrainOutput:
        entry_rng = RandomState.capture(self.trainer.accelerator.device)
        while True:
            entry: NextEntry | None
            try:
                with entry_hooks_removed_on_exception(self.trainer), self._resuming(resume_from):
                    return self._enter(resume_from_checkpoint=resume_from, **kwargs)
            except StateUnusable as error:
                resume_from = self._start_from_disk(recovery.run, error)
                entry_rng.restore()
                continue
            except DamagedCheckpointError as error:
                entry = recovery.leave_damaged_checkpoint(error)
                let_go(error)
            except (UnrecoverableTrainingError, KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:
                # A panic of a library in Rust, or a cancelled coroutine, is no `Exception`, and an error all the same.
                entry = recovery.decide(error, resume_from)
                if entry is None and recovery.cause is error:
                    raise
                let_go(error)
            if entry is None:
                assert recovery.cause is not None
                # Outside the handler, which would put another exception in the place of what it came from.
                raise recovery.cause
            # Outside the handler: the exception and with it the failed step's activations are gone.
            self._let_go(recovery.run)
            let_go_of_engine(self.trainer)
            remove_progress_bars(self.trainer)
            recovery.prepare(entry)
            resume_from = entry.resume_from
            # Samplers and their seeds are made again on entry, some from the global generators.
            entry_rng.restore()
            if recovery.run.attempts.resume_point is not None:
                # Evaluated at the start it has, or the resume point owes it; and what was trained on is skipped.
                self.trainer.args.eval_on_start = self.trainer.args.ignore_data_skip = False

    def _start_from_disk(self, run: Run, error: StateUnusable) -> str | None:
        """Goes on from disk where a state in shared memory turned out not to fit the trainer, on all ranks."""
        run_id, args = run.context.run_id, self.trainer.args

        def look() -> tuple[str | None, str | None]:
            newest = newest_checkpoint_of(run_id, args.output_dir)
            return newest, None if newest is None else refusal_of_another_job(newest, self.trainer)

        checkpoint, refusal = votes.looked_up_by_first_rank("the newest checkpoint on disk", look, args.device)
        if refusal is not None:
            raise CheckpointError(refusal) from error
        have_engine_made_again(self.trainer)
        go_on_from_disk(run.context, run.attempts, checkpoint, error)
        return checkpoint

    def _enter(self, **kwargs: Any) -> TrainOutput:
        output: TrainOutput = self.trainer.train(**kwargs)
        return output

    @contextlib.contextmanager
    def _resuming(self, resume: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            run = self._run
            memory = None if run is None else run.attempts.memory
            if run is not None and memory is not None and memory.checkpoint == resume:
                stack.enter_context(memory.loading(self.trainer, partial(note_memory_start, run.journal)))
            if resume:
                stack.enter_context(loading_as_written(self.trainer))
                stack.enter_context(skipping_any_loader(self.trainer))
            if resume and processes.world_size() == 1:
                # The others may wait in a collective of the first attempt.
                stack.enter_context(loading_twice_at_most(self.trainer))
            yield

    def _let_go(self, run: Run) -> None:
        """The trainer is itself again, and nothing holds on to the failed step."""
        if run.instrument is not None:
            run.instrument.detach()
            if run.context.attachment.device_lost:
                return
            run.instrument.reentry.release()
            run.context.attachment.instrument = None

    def _release_states(self, run: Run) -> None:
        if not run.context.attachment.device_lost:
            run.rollback.release()

    def _switch_off_auto_find_batch_size(self) -> None:
        if self.trainer.args.auto_find_batch_size:
            logger.warning(
                "auto_find_batch_size=True is switched off: after an out-of-memory error it starts over at step 0 "
                "with weights that are already trained, and shrinks the effective batch."
            )
            self.trainer.args.auto_find_batch_size = False

    def _find_callback(self) -> SelfHealingCallback | None:
        # Looked up each time: restore_callback_states_from_checkpoint=True puts a new object in its place.
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, SelfHealingCallback):
                return callback
        return None

    def _put_callback_in_force(self) -> None:
        """Adds a callback that was removed since this object was made: without it nothing is healed in a step."""
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
        with speaking_of(self.trainer.args):
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

        Returns:
            [`DryRunReport`]: Loss, gradient norm, time and memory of the steps.

        Raises:
            ValueError: For less than one step, and for a model that is sharded (FSDP, DeepSpeed).
            Exception: What the training code raises; the state is put back first.
        """
        with Terminal(self.trainer.args.process_index).speaking():
            return dry_run(self.trainer, num_steps)

    def get_report(self) -> HealingReport:
        """Reports the last run of the trainer, whichever way its `train()` was called; else those on the disk."""
        callback = self._find_callback()
        runs = [self._run, None if callback is None else callback.run]
        run = max((each for each in runs if each is not None), key=lambda each: each.context.started_at, default=None)
        if run is None:
            try:
                return HealingReport.from_run_dir(self.config.healing_dir or self.trainer.args.output_dir)
            except (OSError, ValueError):
                return HealingReport()
        return HealingReport.from_incidents(
            run.journal.of_all_ranks, str(run.journal.path), run.numerics.rate_in_force()
        )


def _contained(leave: Callable[[], Any]) -> None:
    """Does one thing where a run was left: neither its result nor the exception that ended it is lost for it."""
    try:
        leave()
    except Exception:
        log_safely(
            logger, logging.ERROR, "self_healing failed after the end of a run, which stays as it is.", exc_info=True
        )
