"""`StepRecorder`: writes down each optimizer step of a run as it was applied, for the charts of its report."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator

from ..hf.memory import memory_of, memory_taken
from ..hf.step import Window
from ..journal.step_log import StepLog, StepRow, step_log_of
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
        self._log: StepLog | None = None
        self._incidents = len(run.journal.incidents)
        # When the last step was judged, and how long its update took.
        self._judged: float | None = None
        self._updated_in = _NAN
        # What changes slowly: baseline and bound of the gradient norm; memory.
        self._bounds = (_NAN, _NAN)
        self._memory = (_NAN, _NAN, _NAN)

    def attach(self, first: bool) -> None:
        journal = self._run.journal
        if journal.rank > 0:
            return
        instrument = self._run.instrument
        about = {"run": journal.run_id, "memory_total": memory_of(instrument.view.device)}
        with self._contained():
            self._log = StepLog(step_log_of(journal.directory, journal.run_id), about)
        instrument.on_detach.append(self._close)

    def judge(self, window: Window) -> None:
        if self._log is None:
            return
        with self._contained():
            if self._log.due:
                self._look_at_what_changes_slowly()
            self._log.add(self._row(window))

    def stepped(self) -> None:
        if self._judged is not None:
            self._updated_in = time.perf_counter() - self._judged

    def process_ends(self) -> None:
        with self._contained():
            self._close()

    def _row(self, window: Window) -> StepRow:
        run, numerics, step = self._run, self._run.part(NumericsState), window.step
        applied = numerics.applied
        if applied is None or applied.step != step or window.skipped:
            applied = None
        now, before, self._judged = time.perf_counter(), self._judged, None
        self._judged = now
        computed_in = _NAN if applied is None else applied.seconds
        seconds = computed_in if before is None else now - before
        incidents, self._incidents = self._incidents, len(run.journal.incidents)
        busy = computed_in + self._updated_in if incidents == self._incidents else _NAN
        loss = _NAN if applied is None else applied.loss
        norm = _NAN if applied is None or applied.grad_norm is None else applied.grad_norm
        scale = numerics.learning_rate.scale(step)
        return StepRow(
            step,
            1,
            int(window.skipped),
            run.journal.attempt,
            time.time(),
            seconds,
            busy,
            loss,
            loss,
            norm,
            norm,
            *self._bounds,
            numerics.schedule.rate * scale,
            scale,
            *self._memory,
        )

    def _look_at_what_changes_slowly(self) -> None:
        panel = self._run.part(NumericsState).panel
        if panel is not None:
            usual, bound = panel.gradient_level, panel.gradient_bound
            self._bounds = (_NAN if usual is None else usual, _NAN if bound is None else bound)
        self._memory = memory_taken(self._run.instrument.view.device)

    def _close(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            with contextlib.suppress(Exception):
                # Its file is let go of even where nothing can be written.
                self._close()
            logger.warning(
                "The step log in %s failed; training goes on without it, and the report will have no charts of each "
                "step.",
                self._run.journal.directory,
                exc_info=error,
            )
