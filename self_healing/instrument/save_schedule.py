"""`SaveSchedule`: writes the checkpoints that the Trainer's schedule asks for, once their state is vouched for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..hf.hooks import Failsafe
from ..hf.trainer_state import Bookkeeper, Bookkeeping
from ..hf.view import TrainerView
from .hooks import Hooks
from .leaving import Leaving
from .own_checkpoints import refusing_nothing
from .saving import CheckpointSaving


class SaveSchedule:
    """Wraps what the Trainer calls to save on its schedule."""

    def __init__(
        self, trainer: Any, view: TrainerView, ledger: Bookkeeper, hooks: Hooks, failsafe: Failsafe, leaving: Leaving
    ) -> None:
        self._trainer = trainer
        self._view = view
        self._ledger = ledger
        self._hooks = hooks
        self._failsafe = failsafe
        self._leaving = leaving
        # Set where a checkpoint that cannot be written does not end the run.
        self.writer: CheckpointSaving | None = None
        self.longest = 0.0
        # Whether one is being written right now.
        self.writing = False
        self._on_schedule = self._held_back = False
        self._best_before: tuple[float | None, int | None] = (None, None)

    # ---- wrapped methods, in the order they are called ----

    def maybe_log_save_evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps `_maybe_log_save_evaluate`: asks for a checkpoint that is owed."""
        control, state = self._trainer.control, self._trainer.state
        if self._hooks.owes_checkpoint() and (control.should_training_stop or not self._hooks.checkpoints_wait()):
            control.should_save = True
        self._best_before = state.best_metric, state.best_global_step
        if self.writer is not None:
            self.writer.evaluation_may_follow()
        return self._as_scheduled(original, *args, **kwargs)

    def save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps `_save_checkpoint`."""
        if self._on_schedule and self._failsafe.attached and not self._must_wait():
            with self._failsafe.contained(), self._failsafe.together():
                self._hooks.vouch_for_state()
        if self._must_wait():
            self._held_back = True
            self._hooks.checkpoint_waits()
            return None
        if self._on_schedule:
            with self._failsafe.contained():
                self._hooks.before_save(self._view.step)
        with self._timed(), refusing_nothing(self._trainer, whole=self._leaving.begun):
            if not self._on_schedule or self.writer is None:
                return original(*args, **kwargs)
            if not self.writer.write(original, *args, **kwargs):
                self._held_back = True
        return None

    def on_save(self, original: Callable[..., Any], args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Wraps the callbacks' `on_save`, which is not called where no checkpoint was written."""
        if self._on_schedule and self._held_back:
            control.should_save = False
            return control
        return original(args, state, control, **kwargs)

    def _must_wait(self) -> bool:
        """Whether a checkpoint that the Trainer's schedule asks for has to wait."""
        state = self._trainer.state
        vouched_for = state.best_global_step is not None and state.best_global_step == state.global_step
        at_the_end = self._trainer.control.should_training_stop
        return self._on_schedule and self._hooks.checkpoints_wait() and not vouched_for and not at_the_end

    def _as_scheduled(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._on_schedule, self._held_back = True, False
        try:
            return save(*args, **kwargs)
        finally:
            self._on_schedule = False

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began, self.writing = time.monotonic(), True
        try:
            yield
        finally:
            self.writing = False
            self.longest = max(self.longest, time.monotonic() - began)

    # ---- for healers ----

    def write_checkpoint(self) -> None:
        """Writes a checkpoint of the trainer as it stands, as if its schedule had asked for one."""
        self._as_scheduled(self._write_checkpoint)

    def _write_checkpoint(self) -> None:
        trainer = self._trainer
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

    def disown_best(self) -> None:
        """Takes back that the state about to be saved is the best model, whatever the evaluation of this step said."""
        state = self._trainer.state
        if state.best_global_step == self._view.step:
            state.best_metric, state.best_global_step = self._best_before

    def finite_once_healed(self, finished: Bookkeeping) -> bool:
        """Whether weights, buffers and optimizer state are finite between two steps, once what can be healed is."""
        if not self._view.nonfinite_tensors():
            return True
        with self._failsafe.contained():
            self._hooks.vouch_for_state()
        self._ledger.rewind(finished)
        return not self._view.nonfinite_tensors()
