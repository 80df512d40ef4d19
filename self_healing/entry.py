"""`Entry`: one `train()` call of a run, with the healers of what happens inside of it, in their order."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from .assembly import Run
from .checkpoint_files import PINNED_DIR
from .checkpoints.vetting import may_be_loaded, vet_weights
from .data.healer import SampleHealer
from .end_of_run import tell_of_best_model
from .instrument import BestModel, CheckpointSaving, Instrument, ReportingGuard, ServiceGuard
from .memory.healer import MemoryHealer
from .numerics.judge import StepJudge
from .run_hooks import RunHooks
from .services.calls import ServiceCalls
from .services.reporting import Reporting


class Entry:
    """
    Heals what happens inside of one `train()` call.

    Args:
        run ([`Run`]):
            The run.
        trainer ([`~transformers.Trainer`]):
            The trainer, in `on_train_begin`.
        moved (`bool`):
            Whether its weights were trained already.
    """

    def __init__(self, run: Run, trainer: Any, moved: bool) -> None:
        context = run.context
        self._run = run
        self._trainer = trainer
        self.judge = StepJudge(context, run.numerics, run.rollback, self._is_claimed)
        self._memory = MemoryHealer(
            context,
            run.memory,
            run.rollback.free_batches,
            run.numerics.repeatability.owe,
            self.judge.heal_interrupted_step,
        )
        self._services = ServiceCalls(context)
        self._sample_calls = ServiceCalls(context)
        self._samples = SampleHealer(context, run.quarantine, self._sample_calls)
        self.instrument = Instrument(
            trainer,
            RunHooks(trainer, run, self.judge, self._memory),
            heals_exceptions=context.config.on_nonfinite in ("heal", "skip"),
            started_at=context.started_at,
            heartbeat=context.heartbeat,
        )
        # What a checkpoint holds was trained, by us or by somebody else; a run that is entered again goes on.
        self.instrument.optimizer_step.weights_moved |= moved
        context.attachment.instrument = self.instrument

    def _is_claimed(self) -> bool:
        return any(each.has_claim for each in self._run.context.attachment.claimants)

    def attach(self, wrapped: bool) -> None:
        """
        Attaches the instrument, and then what goes around it: what is attached later is called first.

        Args:
            wrapped (`bool`):
                Whether `SelfHealingTrainer` has entered `train()`: signals, trackers and the Hub are its matter then.
        """
        run, context, instrument = self._run, self._run.context, self.instrument
        first = run.attempts.entries == 1
        instrument.attach()
        self._memory.attach(first)
        self._samples.attach()
        if context.config.on_save_failure == "continue":
            instrument.saves.writer = CheckpointSaving(self._trainer, run.saves, instrument.failsafe.contained)
        output_dir = Path(self._trainer.args.output_dir)
        instrument.best_model = BestModel(
            self._trainer,
            [output_dir, output_dir / PINNED_DIR],
            vet_weights,
            may_be_loaded,
            partial(tell_of_best_model, context),
        )
        ServiceGuard(instrument, self._services).attach()
        if not wrapped:
            self._guard_reporting()
        watchdog = run.hangs.begin(instrument, again=not first)
        # Calls last: the user's code may have let one fail some time before memory ran out, or training hung.
        context.attachment.claimants = (self._memory, watchdog, self._services, self._sample_calls)
        if not wrapped and context.config.on_preemption == "save":
            run.departure.preemption.listen()
            instrument.on_detach.append(run.departure.preemption.release)

    def _guard_reporting(self) -> None:
        """Without the wrapper, which guards trackers and Hub from before `train()` to its very end."""
        instrument, reporting = self.instrument, Reporting(self._run.context)
        guard = ReportingGuard(self._trainer, reporting)
        instrument.on_detach.append(lambda: reporting.sum_up(instrument.view.step))
        instrument.on_detach.append(guard.detach)
        guard.attach()
