"""`RunEvents`: what a `train()` call means to the run as a whole, whatever goes wrong in it."""

from __future__ import annotations

from .failures.classify import describe_exception
from .healers.assembly import Run
from .healers.restarts.healing_off import switch_off_next_time
from .restarts.lost_device import write_down_lost_device
from .run.healer import Healer
from .start_and_end import stop_speaking


class RunEvents(Healer):
    """Logs what the incidents of a run come to, and writes down where it goes on before its state is saved or lost."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def attach(self, first: bool) -> None:
        terminal, instrument = self._run.context.attachment.terminal, self._run.instrument
        if terminal is not None and instrument is not None:
            # And nowhere in between: no code of ours sees what another callback raises there.
            instrument.stay_within(terminal.speaking)

    def before_optimizer_step(self) -> None:
        self._run.rollback.ring.join()

    def metrics(self, training: bool, summary: bool) -> dict[str, float]:
        run = self._run
        # The log that sums up the run is written before what is open is closed.
        return run.journal.metrics(run.context.outcomes.resolved_at_the_end if summary else 0)

    def before_save(self, step: int) -> None:
        self._run.about_to_save(step)

    def device_lost(self, error: BaseException) -> None:
        # First, so that the postmortem has the ranks in it.
        self._run.hangs.left_by(error)
        write_down_lost_device(self._run.ending, error)

    def left_by(self, error: BaseException) -> None:
        # The wrapper's outlives the call, and speaks of what becomes of the exception.
        stop_speaking(self._run, error)

    def broken(self, error: Exception) -> None:
        context = self._run.context
        context.attachment.broken = True
        self._run.journal.event("healing_off", context.step, why=describe_exception(error)[:300])

    def ends_the_job(self, error: BaseException) -> None:
        context = self._run.context
        switch_off_next_time(context.directory, context.run_id, context.step, error)
