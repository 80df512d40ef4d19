"""`SelfHealingCallback`: heals in place, inside one `train()` call."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from . import consensus
from .actions import HealingActions
from .assembly import assemble
from .bad_samples import SampleHealer
from .checkpoint_files import PINNED_DIR
from .checkpoints.choice import CheckpointError
from .checkpoints.marker import Standing, write_marker
from .checkpoints.owed import bookkeeping_now, owe_evaluation
from .checkpoints.trainer_state import healing_state_of
from .checkpoints.vetting import may_be_loaded, vet_weights
from .config import HealingConfig, as_config
from .detectors.rules import MetricRule, load_rules
from .disk import SaveHealer
from .end_of_run import tell_of_best_model, tell_what_to_know
from .entry_checks import (
    refuse_damaged_checkpoint,
    refuse_nonfinite_weights,
    refuse_unwritable_output,
    tell_of_offloaded,
    warn_about_the_rate,
)
from .failures import UnrecoverableTrainingError
from .incident import Incident
from .instrument import (
    BestModel,
    CheckpointSaving,
    Instrument,
    ReportingGuard,
    ServiceGuard,
    TrainingFault,
    find_resume_path,
    find_trainer,
    is_training,
    leave_out_of_uploads,
    save_generated,
)
from .judge import StepJudge
from .memory import MemoryHealer
from .own_files import hide_from_uploads, own_patterns, remove_leftovers
from .reporting import Reporting
from .resumed_bookkeeping import continue_bookkeeping
from .run_hooks import RunHooks
from .run_status import RunState
from .services import ServiceCalls
from .session import Session
from .setting import ConfigurationError


logger = logging.getLogger("self_healing")

_SESSION_ATTRIBUTE = "_self_healing_session"


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
        self.session: Session | None = None
        # Read now, so that a mistake in the file is known before the run begins.
        self._rules = _rules_of(config)
        self._judge: StepJudge | None = None
        self._trainer = trainer
        self._saved_state: dict[str, Any] | None = None

    @property
    def actions(self) -> HealingActions:
        """Carries out actions in the run that is healed, for code of your own."""
        return HealingActions(self.session)

    # ---- state in checkpoints: transformers rebuilds the callback as `type(callback)(**args)` plus attributes ----

    def state(self) -> dict[str, Any]:
        return {"args": {"config": self.config.to_dict()}, "attributes": {"healing_state": self.healing_state}}

    @property
    def healing_state(self) -> dict[str, Any] | None:
        """What detectors, policy and quarantine remember, as JSON."""
        return self._saved_state if self.session is None else self.session.state_dict()

    @healing_state.setter
    def healing_state(self, state: dict[str, Any] | None) -> None:
        self._saved_state = state

    def __getstate__(self) -> dict[str, Any]:
        # A copy goes on from what is remembered; threads and the trainer of the run are not part of it.
        return vars(self) | {"session": None, "_judge": None, "_saved_state": self.healing_state}

    # ---- a run begins and ends ----

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self._trainer or find_trainer(self)
        if trainer is None:
            logger.warning(
                "SelfHealingCallback found no trainer in the call stack and does nothing. Please pass it: "
                "SelfHealingCallback(config, trainer=trainer)."
            )
            return
        resumed_from = find_resume_path()
        fault: TrainingFault | None = None
        try:
            self._attach(trainer, state, resumed_from)
        except TrainingFault as caught:
            fault = caught
        except (ConfigurationError, CheckpointError, UnrecoverableTrainingError):
            # Asked for, and not possible with this model; or there is nothing to train with.
            if self.session is not None and self.session.instrument is not None:
                self.session.instrument.detach()
            raise
        except Exception as error:
            logger.error("self_healing could not attach; training goes on without it.", exc_info=error)
            if self.session is not None and self.session.instrument is not None:
                self.session.instrument.detach()
            self._give_up_quietly()
        if fault is not None:
            raise fault.error

    def _attach(self, trainer: Any, state: Any, resumed_from: str | None) -> None:
        args = trainer.args
        adopted: Session | None = getattr(trainer, _SESSION_ATTRIBUTE, None)
        if self.session is not None and self.session.instrument is not None:
            _warn_about_the_run_it_leaves(self.session.instrument, trainer)
            self.session.instrument.detach()
        if self._is_second(trainer):
            logger.warning(
                "The trainer has more than one SelfHealingCallback; only the first one heals. Please remove the rest."
            )
            self.session = None
            return
        if adopted is None:
            refuse_unwritable_output(args)
        self.session = session = adopted or assemble(
            self.config, Path(self.config.healing_dir or args.output_dir), rank=args.process_index
        )
        session.journal.notify = lambda incident: self._tell_callbacks(trainer, incident)
        self._hide_own_files(args)
        self._judge = judge = StepJudge(
            session.run, session.numerics, session.rollback, lambda: any(each.has_claim for each in session.claimants)
        )
        memory = MemoryHealer(self.config, session, session.remedies, judge.heal_interrupted_step)
        session.memory_metrics = memory.metrics
        instrument = Instrument(
            trainer,
            RunHooks(trainer, session, judge, memory),
            heals_exceptions=self.config.on_nonfinite in ("heal", "skip"),
            started_at=session.started_at,
            heartbeat=session.heartbeat,
        )
        # What a checkpoint holds was trained, by us or by somebody else; a run that is entered again goes on.
        before = session.instrument
        moved = before.optimizer_step.weights_moved if before is not None else int(state.global_step) > 0
        instrument.optimizer_step.weights_moved |= moved
        session.instrument = instrument
        # transformers raises a KeyError at the next save for a stateful callback that the checkpoint resumed from
        # does not know (Trainer._save_checkpoint, 5.23).
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if session.attempts.entries == 0:
            if args.process_index == 0:
                remove_leftovers(args.output_dir, self.config.healing_dir)
            if not session.attempts.taken_up:
                session.journal.set_aside_postmortem()
            session.numerics.begin_watching(instrument, self._rules)
            self._restore_state(session, state)
            session.attempts.recall()
            session.attempts.first_resume = resumed_from
            session.numerics.learning_rate.begin(int(state.max_steps), instrument.view.beta2)
            session.numerics.missing.begin(int(state.global_step))
            session.numerics.resumed_from, session.numerics.on_trial = resumed_from, resumed_from is not None
        else:
            session.numerics.go_on_counting(int(state.global_step), healing_state_of(state.stateful_callbacks) or {})
        session.attempts.enter()
        finite = session.attempts.entries > 1 or refuse_nonfinite_weights(session.run, resumed_from)
        if session.attempts.entries == 1 and adopted is None and resumed_from is not None:
            # The wrapper has looked before the Trainer loaded anything.
            refuse_damaged_checkpoint(session.run, Path(resumed_from))
        if session.attempts.entries == 1:
            tell_of_offloaded(instrument)
        instrument.attach()
        memory.attach()
        samples = SampleHealer(self.config, session, session.remedies)
        samples.attach()
        if self.config.on_save_failure == "continue":
            session.saves = session.saves or SaveHealer(session.run, lambda: session.rollback.give_way())
            instrument.saves.writer = CheckpointSaving(trainer, session.saves, instrument.failsafe.contained)
        places = [Path(args.output_dir), Path(args.output_dir, PINNED_DIR)]
        instrument.best_model = BestModel(
            trainer, places, vet_weights, may_be_loaded, partial(tell_of_best_model, session.run)
        )
        services = ServiceCalls(self.config, session)
        ServiceGuard(instrument, services).attach()
        if session.reporting is None:
            self._guard_reporting(trainer, session, instrument)
        watchdog = session.watch_for_hangs(instrument)
        # Calls last: the user's code may have let one fail some time before memory ran out, or training hung.
        session.claimants = (memory, watchdog, services, samples.calls)
        if adopted is None and self.config.on_preemption == "save":
            session.preemption.listen()
            instrument.on_detach.append(session.preemption.release)
        continue_bookkeeping(session, instrument, resumed_from, int(state.global_step))
        session.journal.event(
            "run_started",
            int(state.global_step),
            objective=instrument.objective.name,
            detectors=["nonfinite", *sorted(instrument.objective.detectors)],
            rules=[] if session.numerics.rules is None else sorted(rule.name for rule in session.numerics.rules.rules),
            resumed_from=resumed_from,
            max_steps=int(state.max_steps),
            output_dir=os.path.abspath(args.output_dir),
            pid=os.getpid(),
            host=socket.gethostname(),
            **session.numerics.rate_in_force(),
        )
        session.tell_status(Path(args.output_dir), int(state.max_steps))
        if resumed_from is not None and session.attempts.entries == 1:
            warn_about_the_rate(instrument, resumed_from)
        session.rollback.begin(instrument, not session.numerics.warm, resumed_from, finite)
        if not instrument.view.can_reexecute:
            logger.warning(
                "self_healing: %s runs the backward pass itself; steps are watched, but not healed.",
                trainer.accelerator.distributed_type,
            )
        if adopted is None and args.auto_find_batch_size:
            logger.warning(
                "auto_find_batch_size=True starts over with a smaller batch after an out-of-memory error that could "
                "not be healed in place. Please set it to False, or train with SelfHealingTrainer(trainer).train(), "
                "which does so."
            )

    def _guard_reporting(self, trainer: Any, session: Session, instrument: Instrument) -> None:
        """Without the wrapper, which guards trackers and Hub from before `train()` to its very end."""
        reporting = Reporting(session.run)
        guard = ReportingGuard(trainer, reporting)
        instrument.on_detach.append(lambda: reporting.sum_up(instrument.view.step))
        instrument.on_detach.append(guard.detach)
        guard.attach()

    def _is_second(self, trainer: Any) -> bool:
        others = [each for each in trainer.callback_handler.callbacks if isinstance(each, SelfHealingCallback)]
        return bool(others) and others[0] is not self

    def _restore_state(self, session: Session, state: Any) -> None:
        saved = self._saved_state
        if saved is None and state.global_step > 0:
            # Without restore_callback_states_from_checkpoint the state is in the checkpoint all the same.
            saved = healing_state_of(state.stateful_callbacks)
        if saved is not None and state.global_step > 0:
            session.load_state_dict(saved)
        self._saved_state = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        session = self.session
        if session is None or session.instrument is None:
            return
        if not session.broken and session.instrument.attached and self._judge is not None:
            with session.instrument.failsafe.contained(), session.heartbeat.section("judge"):
                self._judge.run_ends()
                if not session.leaving:
                    self._judge.stop_unless_trained()
        session.close_outcomes(unfollowed="resolved")
        if session.saves is not None:
            session.saves.run_ends(int(state.global_step))
        if session.stop_for is not None:
            # Seen in the last log: there is no step left to stop before.
            session.journal.dealt_with(session.stop_for)
            session.journal.closed(session.stop_for, "reported")
            session.stop_for = None
        session.journal.event(
            "run_ended",
            int(state.global_step),
            incidents=len(session.journal.incidents),
            **session.numerics.rate_in_force(),
        )
        if session.status is not None and not session.leaving:
            session.status.end(RunState.ENDED, int(state.global_step))
        tell_what_to_know(session.numerics, int(state.global_step))
        if session.leaving and session.instrument.leaving.owes_evaluation and args.should_save:
            owe_evaluation(Path(args.output_dir or ".") / f"checkpoint-{state.global_step}")
        session.instrument.detach()
        session.rollback.release()
        if not session.leaving:
            session.checksums.wait()
        if session.leaving and session.attempts.record is None and state.global_step < state.max_steps:
            session.leave(int(state.global_step), str(args.output_dir))

    def _give_up_quietly(self) -> None:
        if self.session is not None:
            self.session.broken = True

    @property
    def _instrument(self) -> Instrument | None:
        """The instrument of the running `train()` call, unless we have switched ourselves off."""
        return None if self.session is None or self.session.broken else self.session.instrument

    # ---- one optimizer step ----

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._instrument is not None:
            self._instrument.epoch_begins()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        session, instrument = self.session, self._instrument
        if session is not None and instrument is not None and instrument.attached:
            instrument.step_begins()
            with instrument.failsafe.contained():
                session.rollback.step_begins(int(state.global_step), session.numerics.calm)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._instrument is not None:
            self._instrument.before_optimizer_step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        session, instrument = self.session, self._instrument
        if session is not None and session.status is not None:
            session.status.note_step(int(state.global_step))
        if session is None or instrument is None:
            return
        if session.attempts.record is not None:
            session.attempts.record.note_step(int(state.global_step))
        if instrument.leaving.leaves(session.preempted):
            session.leaving = True
            # Saved now, whatever the schedule of checkpoints is; there is no time for an evaluation.
            control.should_save = control.should_training_stop = True
            if control.should_evaluate:
                control.should_evaluate = False
                instrument.leaving.owe_evaluation()
        instrument.step_ends()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._instrument is not None:
            self._instrument.epoch_ends()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        instrument, judge = self._instrument, self._judge
        if instrument is not None and instrument.attached and judge is not None and logs:
            with instrument.failsafe.contained():
                judge.read_logs(int(state.global_step), logs)

    # ---- checkpoints and callbacks ----

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The others may still be writing their parts (rng_state_N.pth) of what is about to be called complete. Before
        # anything that a rank may see otherwise than the others: all of them save, whatever they think of us.
        consensus.wait_for_all_ranks(args.device)
        session = self.session
        if session is None or session.instrument is None or session.broken or not args.should_save:
            return
        checkpoint = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        try:
            if checkpoint.is_dir():
                exported = bookkeeping_now(session.instrument)
                save_generated(session.instrument.trainer, checkpoint)
                finite = session.rollback.finite_at(int(state.global_step))
                standing: Standing = "suspect" if finite is False else "unverified"
                write_marker(
                    checkpoint,
                    session.run_id,
                    state.global_step,
                    exported,
                    emergency=False,
                    standing=standing,
                    finite=finite,
                    later=session.checksums.put,
                )
                session.rollback.checkpoint_saved(checkpoint, int(state.global_step))
        except Exception as error:
            if session.instrument.failsafe.tells_of_lost_device(error):
                raise
            logger.warning("%s could not be marked as complete.", checkpoint, exc_info=True)

    def _hide_own_files(self, args: TrainingArguments) -> None:
        """From whatever uploads the folder, not only the trainer."""
        if args.should_save:
            folder = str(args.output_dir)
            hide_from_uploads(folder, self.config.healing_dir, hide=not self.config.upload_healing_files)

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Also after training, when `trainer.push_to_hub()` is called.
        folder = str(args.output_dir)
        try:
            self._hide_own_files(args)
            patterns = [] if self.config.upload_healing_files else own_patterns(folder, self.config.healing_dir)
            leave_out_of_uploads(folder, patterns)
        except Exception:
            logger.warning(
                "The files of self_healing in %s could not be taken out of the upload; please look at what is on the "
                "Hub.",
                folder,
                exc_info=True,
            )

    def reconfigure(self, config: HealingConfig) -> None:
        """Takes another configuration; between runs, not during one."""
        self.config = config
        self._rules = _rules_of(config)

    def _tell_callbacks(self, trainer: Trainer, incident: Incident) -> None:
        """`on_instability(args, state, control, incident, **kwargs)` of every callback that has it."""
        for callback in trainer.callback_handler.callbacks:
            handler = getattr(callback, "on_instability", None)
            if handler is None or callback is self:
                continue
            try:
                handler(trainer.args, trainer.state, trainer.control, incident, model=trainer.model)
            except Exception:
                logger.warning("on_instability of %s raised.", type(callback).__name__, exc_info=True)


def _warn_about_the_run_it_leaves(instrument: Instrument, trainer: Any) -> None:
    outer = instrument.trainer
    if outer is trainer or not instrument.attached or not is_training(outer, sys._getframe()):
        return
    logger.warning(
        "This SelfHealingCallback watches a run that is still going on (step %d, %s), and leaves it for the one "
        "that begins within it: the outer run is not healed from here on. Please give each trainer a "
        "SelfHealingCallback of its own.",
        instrument.view.step,
        outer.args.output_dir,
    )


def _rules_of(config: HealingConfig) -> tuple[MetricRule, ...]:
    try:
        return load_rules(config.rules_file)
    except OSError as error:
        raise ConfigurationError(
            f"`rules_file` is {config.rules_file!r}, which cannot be read: {error.strerror} (looked for from "
            f"{Path.cwd()}). Please check the path, or leave it out for the rules of the package."
        ) from error


def adopt_session(trainer: Trainer, session: Session | None) -> None:
    """Hands a session to whatever callback attaches to the trainer next; `None` takes it away again."""
    if session is None:
        vars(trainer).pop(_SESSION_ATTRIBUTE, None)
    else:
        setattr(trainer, _SESSION_ATTRIBUTE, session)
