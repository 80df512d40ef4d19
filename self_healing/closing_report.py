"""`ClosingReport`: the report of a run where `train()` is left, in files and in the trackers."""

from __future__ import annotations

import logging
import time
from typing import Any

from .assembly import Run
from .detectors.progress import movement_of
from .report.files import write_report_files
from .report.reading import read_run
from .report.records import RunReport, State
from .report.trackers import log_to_tracker


logger = logging.getLogger("self_healing")


class ClosingReport:
    """
    Writes `report.json` and `agent.md` when `train()` is left, and logs the same to trackers as long as they are open:
    most close at the end of training, before everything is known, and stay open where an exception ends it.

    Args:
        run ([`Run`]):
            The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._told: set[int] = set()

    def before_closing(self, tracker: Any) -> None:
        """
        Logs to a tracker that is about to close, after the last step.

        Args:
            tracker ([`~transformers.TrainerCallback`]):
                The callback that tells it.
        """
        journal = self._run.journal
        if journal.rank > 0:
            return
        try:
            self._log(tracker, read_run(journal.directory, journal.run_id, ended=self._at_the_end()))
        except Exception:
            self._tell_of_failure(tracker)

    def write(self) -> None:
        """Writes the files, and logs to the trackers that are open still."""
        journal = self._run.journal
        if journal.rank > 0:
            return
        report = write_report_files(journal.directory, journal.run_id)
        if report is not None and report.state.name == "ended" and report.verdict is not None:
            attachment = self._run.context.attachment
            attachment.verdict, attachment.doubtful = str(report.verdict), report.verdict.name != "good"
        if report is None or report.state.name in ("running", "ended"):
            return
        for callback in self._trainer.callback_handler.callbacks:
            try:
                self._log(callback, report)
            except Exception:
                self._tell_of_failure(callback)

    def _tell_of_failure(self, tracker: Any) -> None:
        # No incident: the run has lost nothing, and the report is on disk.
        logger.warning("The report could not be logged to %s.", type(tracker).__name__, exc_info=True)

    def _log(self, tracker: Any, report: RunReport) -> None:
        if id(tracker) not in self._told and log_to_tracker(tracker, report, report.state.step):
            self._told.add(id(tracker))

    def _at_the_end(self) -> tuple[State, dict[str, Any]] | None:
        """Of a run that has taken its last step, which is not written down yet."""
        state = self._trainer.state
        step, of = int(state.global_step), int(state.max_steps)
        if not 0 < of <= step:
            return None
        told = f"The run came to its end at step {step} of {of}."
        return State("ended", step, of, time.time(), told=told), {"learned": movement_of(state.log_history)}

    @property
    def _trainer(self) -> Any:
        return self._run.context.attachment.trainer
