"""Passes the events of an instrument to the judge, the memory healer and the run they belong to."""

from __future__ import annotations

from typing import Any

from .assembly import Run
from .instrument import Hooks, OutOfMemory, StepPasses, Window
from .memory.healer import MemoryHealer
from .numerics.judge import StepJudge
from .restarts.ending import RunEnding
from .restarts.lost_device import write_down_lost_device


class RunHooks(Hooks):
    """
    Passes the events of one `train()` call on.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer.
        run ([`Run`]):
            The run.
        judge ([`StepJudge`]):
            Judges its steps.
        memory ([`MemoryHealer`]):
            Handles memory that runs out.
    """

    def __init__(self, trainer: Any, run: Run, judge: StepJudge, memory: MemoryHealer) -> None:
        self._trainer = trainer
        self._run = run
        self._judge = judge
        self._memory = memory
        self._ending = RunEnding(run.context, run.attempts, run.departure, trainer)

    @property
    def passes(self) -> StepPasses | None:
        return self._memory.passes

    @property
    def heals_memory(self) -> bool:
        return self._memory.heals

    def handle_oom(self, ran_out: OutOfMemory, window: Window | None) -> bool:
        return self._memory.handle_oom(ran_out, window)

    def handle_oom_in_optimizer_step(self, ran_out: OutOfMemory, window: Window | None) -> bool:
        return self._memory.handle_oom_in_optimizer_step(ran_out, window)

    def oom_on_one_rank(self, ran_out: OutOfMemory) -> None:
        self._memory.oom_on_one_rank(ran_out)

    def on_success(self) -> None:
        self._memory.on_success()

    def judge(self, window: Window) -> None:
        self._judge.judge(window)

    def before_optimizer_step(self) -> None:
        self._run.rollback.join()

    def about_to_step(self) -> None:
        self._memory.about_to_step()

    def rate_scale(self, step: int) -> float:
        return self._run.numerics.learning_rate.scale(step)

    def stepped(self) -> None:
        self._memory.stepped()

    def metrics(self, training: bool, summary: bool) -> dict[str, float]:
        run, config = self._run, self._run.context.config
        # The log that sums up the run is written before what is open is closed.
        found = run.journal.metrics(run.context.outcomes.resolved_at_the_end if summary else 0)
        if config.healing_metrics:
            found |= self._memory.metrics()
        return found | run.numerics.metrics(None if run.instrument is None else run.instrument.view.step, training)

    def checkpoints_wait(self) -> bool:
        return self._run.numerics.watch.open

    def owes_checkpoint(self) -> bool:
        return self._run.numerics.watch.owed

    def checkpoint_waits(self) -> None:
        self._run.numerics.watch.owed = True

    def vouch_for_state(self) -> None:
        self._judge.vouch_for_state()

    def before_save(self, step: int) -> None:
        self._run.numerics.watch.owed = False
        self._run.about_to_save(step)

    def device_lost(self, error: BaseException) -> None:
        write_down_lost_device(self._ending, error)

    def broken(self) -> None:
        self._run.context.attachment.broken = True
