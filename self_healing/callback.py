"""SelfHealingCallback passes the Trainer's events to the healers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from .actions import HealingActions
from .checkpoints.choice import CheckpointError, refuse_unwritable
from .checkpoints.marker import healing_state_of
from .config.healing_config import HealingConfig, as_config
from .config.schema import ConfigurationError
from .failures.recipes import HealingFailed, TrainingFault, UnrecoverableTrainingError
from .healers.assembly import assemble, state_of
from .healers.numerics.clipping import ZClip
from .healers.numerics.detectors.rules import MetricRule, load_rules
from .healers.numerics.state import NumericsState
from .healers.restarts.attempts import Attempts
from .healers.restarts.ending import ending_the_job
from .healers.restarts.preemption import Preemption
from .healers.restarts.start import is_off, tell_of_unfinished
from .healers.train_begin_end import end_run, enter, start_speaking, stop_speaking
from .hf.patching import find_resume_path, find_trainer
from .hf.saving import leave_out_of_uploads
from .journal.incident import Incident
from .journal.terminal import speaking_of
from .ranks.votes import meet
from .report.healing_report import HealingReport
from .run.run import Run
from .run.status import read_status
from .system import processes
from .system.files import hide_from_uploads, own_patterns
from .system.processes import contained


logger = logging.getLogger("self_healing")


# ---- callback: heals in place, inside one `train()` call ----


_RUN_ATTRIBUTE = "_self_healing_run"


def _of_report(name: str) -> Any:
    return property(lambda self: getattr(self.get_report(), name))


class SelfHealingCallback(TrainerCallback, ExportableState):
    """
    Judges every optimizer step before it is applied, and heals it inside the step.

    A step whose loss or gradient norm is not finite is computed again; if that does not cure it, weights and
    optimizer state are scanned and the batch is bisected to the rows at fault, which are dropped and written to
    `quarantine.jsonl`; a step nothing explains is skipped. On a run in which nothing goes wrong the weights are
    bitwise those of the plain trainer.

    Args:
        config ([`HealingConfig`] or `dict`, *optional*):
            What to do about what. Defaults to `HealingConfig()`.
        trainer ([`~transformers.Trainer`], *optional*):
            The trainer, for code that calls callbacks by other ways than `train()`; found by itself otherwise.

    Example:

    ```python
    trainer = SFTTrainer(..., callbacks=[SelfHealingCallback()])
    trainer.train()
    ```
    """

    def __init__(
        self, config: HealingConfig | Mapping[str, Any] | None = None, trainer: Trainer | None = None
    ) -> None:
        self.config = config = as_config(config)
        self.run: Run | None = None
        self.actions = HealingActions(config, self)
        # Read now, so that a mistake in the file is known before the run begins.
        self._rules = _rules_of(config)
        self._trainer = trainer
        self._saved_state: dict[str, Any] | None = None
        self._trainer_state: Any = None
        # Set by the wrapper where the run trains without healing.
        self.off = False

    # ---- state in checkpoints: transformers rebuilds the callback as `type(callback)(**args)` plus attributes ----

    def state(self) -> dict[str, Any]:
        return {"args": {"config": self.config.to_dict()}, "attributes": {"healing_state": self.healing_state}}

    @property
    def healing_state(self) -> dict[str, Any] | None:
        """The state of detectors, policy and quarantine, as JSON."""
        if self.run is None:
            return self._saved_state
        failed = "What healing has learned could not be put into the checkpoint, which is good without it."
        # Called by the Trainer in the middle of a save.
        with contained(logger, f"{failed} The bug is ours, not yours."):
            return state_of(self.run)
        return None

    @healing_state.setter
    def healing_state(self, state: dict[str, Any] | None) -> None:
        self._saved_state = state

    def __getstate__(self) -> dict[str, Any]:
        # A copy goes on from what is remembered; threads and the trainer of the run are not part of it.
        gone = {"run": None, "actions": None, "_trainer_state": None}
        return vars(self) | gone | {"_saved_state": self.healing_state}

    def get_state(self) -> dict[str, Any]:
        """What healing has learned so far, as JSON; empty before a run."""
        return self.healing_state or {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Has the next run that goes on from a checkpoint go on from what [`get_state`] gave."""
        self.healing_state = dict(state) or None

    # ---- to be read, during a run and after it ----

    def get_report(self) -> HealingReport:
        """Reports the run that the callback heals, or has healed last; an empty report before the first one."""
        return HealingReport() if self.run is None else report_of(self.run)

    @property
    def zclip(self) -> ZClip | None:
        """The statistic of gradient norms; `None` without a run, and where it is off."""
        clipping = None if self.run is None else self.run.part(NumericsState).clipping
        return None if clipping is None else clipping.zclip

    @property
    def loss_history(self) -> list[float]:
        """The losses that the trainer has logged."""
        return self._logged("loss")

    @property
    def grad_norm_history(self) -> list[float]:
        """The gradient norms that the trainer has logged."""
        return self._logged("grad_norm")

    def _logged(self, name: str) -> list[float]:
        history = [] if self._trainer_state is None else self._trainer_state.log_history
        return [float(entry[name]) for entry in history if isinstance(entry.get(name), int | float)]

    # As in [`HealingReport`], whose docstrings say what they are.
    nan_count, recovery_actions = _of_report("nan_count"), _of_report("callback_actions")
    lr_reductions, batch_reductions = _of_report("lr_reductions"), _of_report("batch_reductions")
    last_good_step, postmortem_data = _of_report("last_good_step"), _of_report("postmortem_data")

    @property
    def recovery_attempts(self) -> int:
        """Attempts of `max_recovery_attempts` that are spent."""
        return 0 if self.run is None else self.run.budget.used

    # ---- a run begins and ends ----

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.actions = HealingActions(self.config, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer or find_trainer(self)
        if trainer is None:
            with speaking_of(args):
                logger.warning(
                    "SelfHealingCallback found no trainer in the call stack and does nothing. Please pass it: "
                    "SelfHealingCallback(config, trainer=trainer)."
                )
            return
        # transformers raises a KeyError at the next save for a stateful callback that the checkpoint resumed from
        # does not know (Trainer._save_checkpoint, 5.23).
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if self.off:
            return
        self._trainer_state = state
        resumed_from = find_resume_path()
        fault: TrainingFault | None = None
        meant = ConfigurationError, CheckpointError, UnrecoverableTrainingError
        try:
            with ending_the_job(self.config, args, *meant, TrainingFault):
                self._attach(trainer, state, resumed_from)
        except TrainingFault as caught:
            fault = caught
        except Exception as error:
            # Not what is asked for and cannot be with this model, has nothing to train with, or is of another process.
            ours = processes.world_size() == 1 and not isinstance(error, (*meant, HealingFailed))
            if ours:
                logger.error("self_healing could not attach; training goes on without it.", exc_info=error)
            self._detach()
            if not ours:
                raise
            if self.run is not None:
                self.run.broken = True
        finally:
            if self.run is not None and self.run.terminal is not None:
                # Until the next part of this `train()` call begins, which may never come.
                self.run.terminal.stop()
        if fault is not None:
            raise fault.error

    def _attach(self, trainer: Any, state: Any, resumed_from: str | None) -> None:
        args = trainer.args
        adopted: Run | None = getattr(trainer, _RUN_ATTRIBUTE, None)
        if self.run is not None and self.run.attached is not None:
            self.run.attached.detach()
        if callback_of(trainer) not in (None, self):
            with speaking_of(args):
                logger.warning(
                    "The trainer has more than one SelfHealingCallback; only the first one heals. Please remove the "
                    "rest."
                )
            self.run = None
            return
        if adopted is None:
            meet(self.config.to_dict(), args.ddp_timeout)
            if is_off(self.config, args):
                self.run = None
                return
            refuse_unwritable(args)
        directory = Path(self.config.healing_dir or args.output_dir)
        self.run = run = adopted or assemble(self.config, directory, rank=args.process_index, device=args.device)
        if self.config != run.config:
            # restore_callback_states_from_checkpoint=True has built this object from a checkpoint.
            self.reconfigure(run.config)
        if adopted is None:
            start_speaking(run, args.process_index)
            if resumed_from is None and args.process_index == 0:
                tell_of_unfinished(str(args.output_dir), wrapped=False)
        run.journal.notify = partial(self._tell_callbacks, trainer)
        if not run.part(Attempts).entries:
            self._hide_own_files(args)
        saved, self._saved_state = self._saved_state, None
        if state.global_step == 0:
            saved = None
        elif saved is None:
            # Without restore_callback_states_from_checkpoint the state is in the checkpoint all the same.
            saved = healing_state_of(state.stateful_callbacks)
        enter(run, trainer, self._rules, resumed_from, saved)
        if adopted is None and args.auto_find_batch_size:
            logger.warning(
                "auto_find_batch_size=True starts over with a smaller batch after an out-of-memory error that could "
                "not be healed in place. Please set it to False, or train with SelfHealingTrainer(trainer).train(), "
                "which sets it."
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run, left_by = self.run, None
        if run is None or run.attached is None:
            return
        instrument = run.attached
        failsafe = instrument.failsafe
        try:
            if not run.broken and instrument.attached:
                # What the last step has left would be handed over as trained. All ranks have to come.
                with failsafe.contained(), failsafe.together(), run.heartbeat.section("judge"):
                    run.healers.last_step_taken()
            # All is trained: what fails here is no reason to lose it.
            with failsafe.contained():
                end_run(run, instrument, int(state.global_step))
        except BaseException as error:
            left_by = error
            raise
        finally:
            instrument.detach()
            stop_speaking(run, left_by)
            if not run.wrapped:
                run.let_go()

    def _detach(self) -> None:
        if self.run is not None and self.run.attached is not None:
            self.run.attached.detach()
        if self.run is not None:
            stop_speaking(self.run, sys.exception())
            if not (self.run.wrapped or self.run.device_lost):
                # The wrapper may still go on from them.
                self.run.rollback.release()

    # ---- one optimizer step ----

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.run
        if run is None or run.broken or run.attached is None or not run.attached.replaced.held:
            return
        states, step = run.rollback.states, int(state.global_step)
        try:
            if states.step_begins(step) and run.numerics.calm:
                states.take_snapshot(step)
        except Exception:
            # Entered only where they are needed: this comes in every step.
            with run.attached.failsafe.contained(), run.attached.failsafe.together():
                raise

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.run
        if run is None:
            return
        if run.status is not None:
            run.status.note_step(int(state.global_step))
        if run.broken or run.attached is None:
            return
        leaving = run.attached.leaving
        asked = run.asked_to_leave is not None
        if (asked or leaving.together) and leaving.leaves(asked):
            run.part(Preemption).begun = True
            # Saved now, whatever the schedule of checkpoints is; there is no time for an evaluation.
            control.should_save = control.should_training_stop = True
            if control.should_evaluate:
                control.should_evaluate = False
                leaving.owes_evaluation = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        run = self.run
        if logs and run is not None and not run.broken and run.attached is not None and run.attached.attached:
            with run.attached.failsafe.contained():
                run.healers.read_logs(int(state.global_step), logs)

    # ---- checkpoints and callbacks ----

    def _hide_own_files(self, args: TrainingArguments) -> None:
        """From whatever uploads the folder, not only the trainer."""
        if args.should_save:
            folder = str(args.output_dir)
            hide_from_uploads(folder, self.config.healing_dir, hide=not self.config.upload_healing_files)

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Also after training, when `trainer.push_to_hub()` is called.
        folder = str(args.output_dir)
        failed = f"Files of self_healing in {folder} could not be taken out of the upload; please look at the Hub."
        with contained(logger, failed, logging.WARNING):
            self._hide_own_files(args)
            patterns = [] if self.config.upload_healing_files else own_patterns(folder, self.config.healing_dir)
            leave_out_of_uploads(folder, patterns)

    def reconfigure(self, config: HealingConfig) -> None:
        """Takes another configuration; between runs, not during one."""
        self.config = self.actions.config = config
        self._rules = _rules_of(config)

    def _tell_callbacks(self, trainer: Trainer, incident: Incident) -> None:
        """`on_instability(args, state, control, incident, **kwargs)` of every callback that has it."""
        for callback in trainer.callback_handler.callbacks:
            handler = getattr(callback, "on_instability", None)
            if handler is None or callback is self:
                continue
            with contained(logger, f"on_instability of {type(callback).__name__} raised.", logging.WARNING):
                handler(trainer.args, trainer.state, trainer.control, incident, model=trainer.model)


def _rules_of(config: HealingConfig) -> tuple[MetricRule, ...]:
    try:
        return load_rules(config.rules_file)
    except OSError as error:
        raise ConfigurationError(
            f"`rules_file` is {config.rules_file!r}, which cannot be read: {error.strerror} (working directory: "
            f"{Path.cwd()}). Please check the path, or leave it out for the built-in rules."
        ) from error


def report_of(run: Run) -> HealingReport:
    """Reports a run of this process."""
    numerics, applied = run.part(NumericsState), run.part(NumericsState).applied
    return HealingReport(
        [incident.to_dict() for incident in run.journal.of_all_ranks],
        str(run.journal.path),
        **numerics.rate_in_force(),
        status=read_status(run.directory if run.trainer is None else Path(run.trainer.args.output_dir)),
        attempts=run.part(Attempts).entries,
        last_good_step=None if applied is None else applied.step + 1,
        zclip_total_clips=0 if numerics.clipping is None else numerics.clipping.total,
        verdict=run.verdict,
    )


def callback_of(trainer: Trainer) -> SelfHealingCallback | None:
    """Finds the callback of a trainer, the first one if there are several."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, SelfHealingCallback):
            return callback
    return None


def adopt_run(trainer: Trainer, run: Run | None) -> None:
    """Hands a run to whatever callback attaches to the trainer next; `None` takes it away again."""
    if run is None:
        vars(trainer).pop(_RUN_ATTRIBUTE, None)
    else:
        setattr(trainer, _RUN_ATTRIBUTE, run)


def is_adopted(trainer: Trainer) -> bool:
    """Whether a wrapper has entered `train()` of the trainer, and has handed it its run."""
    return _RUN_ATTRIBUTE in vars(trainer)
