"""Leaves `train()` by an exception or early, and enters it again as if it had never been left."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import EarlyStoppingCallback
from transformers.optimization import GreedyLR
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ..failures.classify import classify_exception, describe_exception
from ..failures.recipes import FailureType, TrainingFault
from ..system.random_state import RandomState
from .dataloader import DataPosition
from .memory import free_memory
from .sections import Phase
from .state import discard_gradients, unwrap_optimizer
from .step import Window
from .trainer_state import Bookkeeper, Bookkeeping, Pending, ResumePoint
from .view import TrainerView


logger = logging.getLogger("self_healing")


class Reentry:
    """Follows one `train()` call closely enough to leave it at any point and to continue it in another."""

    def __init__(self, trainer: Any, ledger: Bookkeeper, position: DataPosition) -> None:
        self._trainer = trainer
        self._ledger = ledger
        self._position = position
        self._device = trainer.accelerator.device
        self._entry_step = int(trainer.state.global_step)
        self.phase = Phase.IDLE
        # As the last finished step has left it, and its number.
        self.finished: Bookkeeping | None = None
        self.finished_step = -1
        # The rate in force in the step that follows it, once that is known to differ or asked for.
        self.learning_rate: Any = None
        self._stop = False
        self._window: Window | None = None
        self._epoch_rng: RandomState | None = None
        self.after_fetch_rng: RandomState | None = None
        # After what was done again for the step of the checkpoint that is resumed from.
        self._rng_after_pending: RandomState | None = None
        # Puts all that is counted back to before the events of the step that was finished last.
        self._undo_events: Callable[[], Bookkeeping] | None = None
        # How often log, evaluation and save have been through: after the step, and after its epoch.
        self.events_done = 0
        self._epoch_began = False
        self._epoch_ended = False
        self._step_ended = False
        self.epoch_end_begun = False
        self._finalizing = False
        self._rng_of_left_epoch: RandomState | None = None
        self._continues = False
        self._epoch_end_done = False
        self._schedule_before: Any = None
        self.has_fetched = False

    def epoch_begins(self) -> None:
        """Called before the callbacks' `on_epoch_begin`: an epoch entered again begins from its random state."""
        rng, self._rng_of_left_epoch = self._rng_of_left_epoch, None
        if rng is not None and self._position.micro_batches > 0:
            # The Trainer loads that of mid-epoch later; samplers that draw from the global generators need this first.
            rng.restore()
        # Where the run ends before the first step of an epoch, the end of the epoch before was delivered already.
        self._epoch_end_done = self._epoch_end_done or (self._stop and self._position.micro_batches == 0)
        self._epoch_rng = RandomState.capture(self._device)
        self._epoch_began = True
        self.after_fetch_rng = None

    def fetching(self) -> None:
        """Called before the batches of a step are fetched: the step before it is finished in every respect."""
        self.phase = Phase.FETCHING
        self.finished = self._ledger.capture()
        self.finished_step = int(self._trainer.state.global_step)
        self._schedule_before = getattr(self._trainer.lr_scheduler, "last_epoch", None)
        self._window = None
        self.after_fetch_rng = self._undo_events = self.learning_rate = None
        self._epoch_began = self._epoch_ended = self._step_ended = self.epoch_end_begun = False
        self.events_done = 0

    def fetched(self, window: Window | None) -> None:
        """Called once they are fetched."""
        self.phase = Phase.COMPUTING
        self.has_fetched = True
        self._window = window
        self.after_fetch_rng = RandomState.capture(self._device)

    def epoch_ends(self, control: Any) -> None:
        """Called after the callbacks' `on_epoch_end`."""
        self._epoch_ended = True
        if self._epoch_end_done:
            # A run that was left at its very end: what follows from the epoch's end is done already.
            control.should_log = control.should_evaluate = control.should_save = False

    def events_begin(self) -> None:
        """Called before the Trainer logs, evaluates and saves: an exception in there has all of it done again."""
        if not self._step_ended:
            self._step_ends()
        control = self._trainer.control
        follows = control.should_log or control.should_evaluate or control.should_save
        if follows and self._undo_events is None and self.phase is Phase.STEPPED:
            self._undo_events = self._mark_events()

    def _mark_events(self) -> Callable[[], Bookkeeping]:
        trainer, state, ledger = self._trainer, self._trainer.state, self._ledger
        bookkeeping = ledger.capture()
        best = state.best_metric, state.best_global_step, state.best_model_checkpoint
        # Some schedules, and stopping early, go by the evaluations.
        schedule = copy.deepcopy(trainer.lr_scheduler.state_dict())
        groups = unwrap_optimizer(trainer.optimizer).param_groups
        rates = [copy.deepcopy(group["lr"]) for group in groups]
        stopping = [each for each in trainer.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]
        patience = [each.early_stopping_patience_counter for each in stopping]

        def undo() -> Bookkeeping:
            ledger.rewind(bookkeeping)
            state.best_metric, state.best_global_step, state.best_model_checkpoint = best
            if _goes_by_evaluations(trainer.lr_scheduler):
                trainer.lr_scheduler.load_state_dict(schedule)
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate
            for each, count in zip(stopping, patience, strict=True):
                each.early_stopping_patience_counter = count
            return bookkeeping

        return undo

    @property
    def stop_owed(self) -> bool:
        """Whether the run had reached its end, or been asked to stop, when it was left."""
        state = self._trainer.state
        return self._stop or 0 < state.max_steps <= state.global_step

    @property
    def resumed_at_the_end(self) -> bool:
        """Whether a run that was over is resumed from outside, and not entered again."""
        state = self._trainer.state
        return not self._continues and 0 < state.max_steps <= self._entry_step

    def finalizing(self) -> None:
        """Called at the last log of the run: the running loss is part of the total by now, and is not added again."""
        self._finalizing = True
        self._trainer._tr_loss.zero_()

    def _step_ends(self) -> None:
        """All of a step is done but what follows from it (logging, evaluating, saving)."""
        if self._window is not None and not self._step_ended:
            self._position.advance(self._window.size)
        self._step_ended = True

    @property
    def interrupted(self) -> Window | None:
        window = self._window
        return window if window is not None and window.start is not None else None

    @property
    def uncounted(self) -> bool:
        """Whether the update of a step is done that the Trainer has not counted yet."""
        return self.phase is Phase.STEPPED and int(self._trainer.state.global_step) == self.finished_step

    @property
    def moved(self) -> bool:
        """Whether a step was finished, or may have been begun to be applied, since `train()` was entered."""
        finished = int(self._trainer.state.global_step) > self._entry_step
        return finished or self.phase in (Phase.STEPPING, Phase.STEPPED)

    def rewind_to_last_step(self) -> ResumePoint | None:
        """Brings the trainer to the end of its last finished step, after an exception left `train()`."""
        trainer = self._trainer
        if self.finished is None or self.phase in (Phase.IDLE, Phase.STEPPING):
            return None
        if self.phase is Phase.STEPPED:
            bookkeeping, pending = self._rewind_after_the_step()
        else:
            bookkeeping, pending = self.finished, Pending(epoch_ended=self._epoch_ended)
            self._ledger.rewind(bookkeeping)
            bookkeeping.rng = self._resume_rng(bookkeeping)
        bookkeeping.rng.restore()
        discard_gradients(trainer.model)
        control = trainer.control
        pending.stop = self._stop or control.should_training_stop
        control.should_log = control.should_evaluate = control.should_save = False
        control.should_epoch_stop = control.should_training_stop = False
        return ResumePoint(int(trainer.state.global_step), bookkeeping, pending, self._epoch_rng)

    def _resume_rng(self, finished: Bookkeeping) -> RandomState:
        """Gives the random state a resume has to load to draw what the interrupted step would have drawn."""
        if self._position.micro_batches == 0 and self._epoch_rng is not None:
            return self._epoch_rng
        return self.after_fetch_rng or finished.rng

    def random_state_to_resume(self) -> RandomState | None:
        """Gives the random state that a resume between the last finished step and the one that begins has to load."""
        return None if self.finished is None else self._resume_rng(self.finished)

    def _rewind_after_the_step(self) -> tuple[Bookkeeping, Pending]:
        history = self._trainer.state.log_history
        if self.uncounted:
            self._count_the_step()
        self._step_ends()
        over = self._epoch_began or self._epoch_end_done or self.events_done > 1
        epoch_end = not over and (self.epoch_end_begun or self._position.at_epoch_end())
        pending = Pending(
            events=not self.events_done or epoch_end,
            epoch_end=epoch_end,
            epoch_ended=self._epoch_ended or epoch_end,
            grad_norm=None if self._window is None else self._window.grad_norm,
            learning_rate=None if self.learning_rate is None else float(self.learning_rate),
        )
        if self._finalizing and history and "train_runtime" in history[-1]:
            history.pop()
        if pending.events and self._undo_events is not None:
            return self._undo_events(), pending
        bookkeeping = self._ledger.capture()
        if self._epoch_began and self._epoch_rng is not None:
            bookkeeping.rng = self._epoch_rng
        return bookkeeping, pending

    def _count_the_step(self) -> None:
        """Counts a step that is done: the exception came between `optimizer.step()` and the count."""
        trainer, window = self._trainer, self._window
        scheduler = trainer.lr_scheduler
        skipped = trainer.accelerator.optimizer_step_was_skipped
        moved = getattr(scheduler, "last_epoch", None) != self._schedule_before
        if self.learning_rate is None and not moved:
            self.learning_rate = trainer._get_learning_rate()
        if not _goes_by_evaluations(scheduler) and not skipped and not moved:
            scheduler.step()
        trainer.state.global_step += 1
        epoch = None if window is None else self._position.epoch_after(window.size)
        if epoch is not None:
            trainer.state.epoch = epoch

    def release(self) -> None:
        """Gives back what the Trainer only gives back when it ends by itself."""
        trainer = self._trainer
        _end_scaled_step(trainer)
        gradient_state = trainer.accelerator.gradient_state
        for loader in list(gradient_state.dataloader_references):
            if loader is not None:
                gradient_state._remove_dataloader(loader)
        trainer.is_in_train = False
        # Counted in the checkpoint that is resumed from, or of a step that was not finished.
        trainer.current_flos = 0
        self._window = self.finished = self._undo_events = None
        discard_gradients(trainer.model)
        free_memory(trainer.accelerator.device)

    def continue_from(self, point: ResumePoint, started_at: float) -> None:
        """Goes on with the counters of the interrupted call, and does again what was pending of its last step."""
        self._ledger.continue_from(point.bookkeeping)
        self._rng_of_left_epoch = point.epoch_rng
        point.bookkeeping.rng.restore()
        self._do_again(point.pending, started_at, self._trainer.callback_handler)

    def continue_in_another_process(self, path: str, pending: Pending, started_at: float) -> None:
        """The same, from a checkpoint of an earlier process."""
        try:
            self._trainer._load_rng_state(path)
        except Exception as error:
            raise TrainingFault(error) from error
        # The callbacks of this process get the events of the steps that it trains; of this one only the schedule
        # decides what follows.
        self._do_again(pending, started_at, DefaultFlowCallback())

    def _do_again(self, pending: Pending, started_at: float, tell: Any) -> None:
        self._continues, self._stop = True, pending.stop
        self._epoch_end_done = pending.epoch_ended and self.stop_owed
        if not pending.events and not pending.evaluation:
            return
        try:
            pending.deliver(self._trainer, started_at, tell)
        except Exception as error:
            raise TrainingFault(error) from error
        self._stop = self._stop or self._trainer.control.should_training_stop
        self._epoch_end_done = pending.epoch_ended and self.stop_owed
        self._rng_after_pending = RandomState.capture(self._device)
        self._note_best()

    def load_random_state(self, original: Callable[..., None], checkpoint: Any) -> None:
        """Wraps `_load_rng_state`: what was done again for the step of the checkpoint may have drawn from it."""
        drawn, self._rng_after_pending = self._rng_after_pending, None
        try:
            original(checkpoint) if drawn is None else drawn.restore()
            if self.phase is Phase.COMPUTING:
                # A resume in mid-epoch: its first step begins from here.
                self.after_fetch_rng = RandomState.capture(self._device)
        except Exception as error:
            if classify_exception(error) is FailureType.DEVICE:
                raise
            args = self._trainer.args
            logger.warning(
                "%s/rng_state%s.pth cannot be loaded (%s) and is taken for missing: training goes on, and draws other "
                "random numbers than the interrupted run, so the result is not bitwise the same.",
                checkpoint,
                f"_{args.process_index}" if args.world_size > 1 else "",
                describe_exception(error),
            )

    def _note_best(self) -> None:
        """Records the checkpoint of this step as the best: it was saved before its evaluation."""
        args, state = self._trainer.args, self._trainer.state
        checkpoint = os.path.join(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        is_best = args.save_strategy != SaveStrategy.NO and state.best_global_step == state.global_step
        if is_best and os.path.isdir(checkpoint):
            state.best_model_checkpoint = checkpoint


def _goes_by_evaluations(scheduler: Any) -> bool:
    return isinstance(scheduler, (ReduceLROnPlateau, GreedyLR))


def _end_scaled_step(trainer: Any) -> None:
    """Ends a step under a `GradScaler` that was left half-way: gradients that are unscaled twice are an error."""
    scaler, optimizer = trainer.accelerator.scaler, trainer.optimizer
    if scaler is not None:
        scaler._per_optimizer_states.clear()
    if hasattr(optimizer, "_optimizer_original_step_method"):
        # accelerate sets both back only after a step that returns.
        optimizer.optimizer.step = optimizer._optimizer_original_step_method
        optimizer._accelerate_step_called = False


class EarlyStop:
    """Ends one trainer's run with the step that is under way; notes what is left to the process that continues it."""

    def __init__(self, instrument: Any) -> None:
        self._instrument = instrument
        self._trainer = instrument.trainer
        self._view: TrainerView = instrument.view
        self._position: DataPosition = instrument.position
        self._theirs: tuple[Any, Any] | None = None
        # Whether other processes have a say in it.
        self.together = self._view.world_size > 1
        # Whether the run ends with the step that is under way.
        self.begun = False
        # Whether the evaluation that was due is left to the process that continues the run.
        self.owes_evaluation = False

    def leaves(self, asked: bool) -> bool:
        """Whether the run ends with this step, because some process (`asked`: this one) has to leave."""
        if self.together:
            window: Window | None = self._instrument.window
            asked = window is not None and window.leave_wanted
        if not asked or self._view.last_step_done:
            # Only the end of the run is left, with the last evaluation and the best model: it is not cut short.
            return False
        if not self.begun:
            self.begun, args = True, self._trainer.args
            # A run that leaves is not at its end, where the best checkpoint would replace the newest.
            self._theirs = args.load_best_model_at_end, args.save_total_limit
            args.load_best_model_at_end, args.save_total_limit = False, None
        return True

    def detach(self) -> None:
        if self._theirs is not None:
            args = self._trainer.args
            args.load_best_model_at_end, args.save_total_limit = self._theirs
            self._theirs = None

    def epoch_ended(self, control: Any) -> None:
        """Called after the callbacks' `on_epoch_end`, which comes in mid-epoch here: the checkpoint is written."""
        if not self.begun:
            return
        if control.should_evaluate and self._position.at_epoch_end():
            self.owes_evaluation = True
        control.should_log = control.should_evaluate = control.should_save = False
