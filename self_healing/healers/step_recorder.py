"""`StepRecorder`: writes down each optimizer step of a run as it was applied, for the charts of its report."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from ..hf.memory import memory_of, memory_taken
from ..hf.step import Window
from ..journal.step_log import StepLog, step_log_of
from ..run.healer import Healer
from ..run.run import Run
from .numerics.state import NumericsState


logger = logging.getLogger("self_healing")

_NAN = math.nan


class StepRecorder(Healer):
    """
    Appends each step to the step log of the run, once it is judged: loss, gradient norm and its bound, learning rate,
    memory, time.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._numerics = run.part(NumericsState)
        self._log: StepLog | None = None
        self._incidents = len(run.journal.incidents)
        # When the last step was judged.
        self._judged = _NAN
        # What changes slowly, looked at when the log is written: baseline and bound of the gradient norm; memory.
        self._bounds = (_NAN, _NAN)
        self._memory = (_NAN, _NAN, _NAN)

    def attach(self, first: bool) -> None:
        if self._run.journal.rank == 0:
            self._contained(self._begin)
            self._run.instrument.on_detach.append(self.process_ends)

    def _begin(self) -> None:
        journal = self._run.journal
        about = {"run": journal.run_id, "memory_total": memory_of(self._run.instrument.view.device)}
        log = StepLog(step_log_of(journal.directory, journal.run_id), about)
        self._look_at_what_changes_slowly()
        self._log = log

    def _write(self) -> None:
        if self._log is not None:
            self._log.write()
            self._look_at_what_changes_slowly()

    def judge(self, window: Window) -> None:
        # All in one place, and an append at its end: it comes in every step.
        if self._log is None:
            return
        journal, numerics, step, now = self._run.journal, self._numerics, window.step, time.perf_counter()
        seconds, self._judged = now - self._judged, now
        busy = loss = norm = _NAN
        applied = numerics.applied
        if applied is not None and applied.step == step and not window.skipped:
            # With the update of the step before.
            busy, loss = applied.seconds + self._run.instrument.optimizer_step.seconds, applied.loss
            norm = _NAN if applied.grad_norm is None else applied.grad_norm
            if math.isnan(seconds):
                seconds = applied.seconds
        if len(journal.incidents) != self._incidents:
            # What was healed in it is no step.
            self._incidents, busy = len(journal.incidents), _NAN
        if now >= self._log.due:
            # Without this step: its engine may leave it out yet.
            self._contained(self._write)
            if self._log is None:
                return
        skipped = window.skipped or window.engine.left_out_by_itself
        scale = numerics.learning_rate.scale(step) if numerics.learning_rate.touched else 1.0
        self._log.kept.append(
            (
                *(step, 1, int(skipped), journal.attempt, time.time(), seconds, busy, loss, loss, norm, norm),
                *(*self._bounds, numerics.schedule.rate * scale, scale, *self._memory),
            )
        )

    def left_out_by_engine(self) -> None:
        if self._log is not None and self._log.kept:
            step, steps, _, *others = self._log.kept[-1]
            self._log.kept[-1] = (step, steps, 1, *others)

    def _look_at_what_changes_slowly(self) -> None:
        panel = self._numerics.panel
        usual, bound = panel.gradient_level, panel.gradient_spike.bound(panel.gradient_trend)
        self._bounds = (_NAN if usual is None else usual, _NAN if bound is None else bound)
        self._memory = memory_taken(self._run.instrument.view.device)

    def process_ends(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            self._contained(log.write)

    def _contained(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._log = None
            logger.warning(
                "The step log in %s failed; training goes on without it, and the report will have no charts of each "
                "step.",
                self._run.journal.directory,
                exc_info=error,
            )
