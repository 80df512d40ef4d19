"""`Entry`: one `train()` call of a run, with the healers of what happens inside of it, in their order."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoints.marker import healing_state_of
from ..checkpoints.vetting import may_be_loaded, vet_weights
from ..detectors.rules.rule import MetricRule
from ..end_of_run import tell_of_best_model
from ..entry_checks import (
    refuse_damaged_checkpoint,
    refuse_nonfinite_weights,
    refuse_wrong_sums,
    tell_of_offloaded,
    warn_about_the_rate,
)
from ..hf.adapter import Instrument
from ..hf.saving import BestModel
from ..hf.services import ReportingGuard
from ..report.output import ClosingReport
from ..restarts.resumed_bookkeeping import continue_bookkeeping
from ..run.healer import Healers
from ..run_events import RunEvents
from ..services.reporting import Reporting
from ..system.files import PINNED_DIR, remove_leftovers
from ..system.processes import Process
from .assembly import Run
from .data.healer import SampleHealer
from .numerics.judge import StepJudge
from .oom.healer import MemoryHealer
from .services import ServiceCalls
from .step_recorder import StepRecorder


logger = logging.getLogger("self_healing")

# Settings by which a report reckons what is left of the budgets of a run.
_LIMITS = (
    "max_recovery_attempts",
    "budget_refund_steps",
    "max_skipped_fraction",
    "max_spike_skips",
    "skip_window",
    "max_lr_reductions",
)


class Entry:
    """Heals what happens inside of one `train()` call."""

    def __init__(self, run: Run, trainer: Any, moved: bool) -> None:
        context = run.context
        self._run = run
        self._trainer = context.attachment.trainer = trainer
        context.attachment.healers = healers = _healers_of(run)
        self.instrument = Instrument(
            trainer,
            healers,
            heals_exceptions=context.config.on_nonfinite in ("heal", "skip"),
            started_at=context.started_at,
            heartbeat=context.heartbeat,
        )
        self.instrument.call.doubt = partial(setattr, context.journal, "doubt")
        # What a checkpoint holds was trained, by us or by somebody else; a run that is entered again goes on.
        self.instrument.optimizer_step.weights_moved |= moved
        context.attachment.instrument = self.instrument
        self._finite = True
        self._closing = ClosingReport(run.context)

    def begin(
        self, rules: Sequence[MetricRule], resumed_from: str | None, saved: Mapping[str, Any] | None, wrapped: bool
    ) -> None:
        """Takes in where the run is, and looks at what it would go on with, before anything is attached."""
        run, attempts, numerics = self._run, self._run.attempts, self._run.numerics
        args, state = self._trainer.args, self._trainer.state
        step = int(state.global_step)
        if not attempts.entered:
            if args.process_index == 0:
                remove_leftovers(args.output_dir, run.context.config.healing_dir)
            if not attempts.taken_up:
                run.journal.set_aside_postmortem()
            numerics.begin_watching(self.instrument, rules)
            if saved is not None:
                run.load_state_dict(saved)
            attempts.load_recovery_state()
            # A state in shared memory is gone by the time that anything is gone back to.
            attempts.first_resume = None if attempts.in_memory(resumed_from) else resumed_from
            numerics.learning_rate.begin(int(state.max_steps), self.instrument.view.beta2)
            numerics.missing.begin(step)
            numerics.resumed_from, numerics.on_trial = resumed_from, resumed_from is not None
        else:
            numerics.go_on_counting(step, healing_state_of(state.stateful_callbacks) or {})
        attempts.enter()
        self._finite = not attempts.in_first_entry or refuse_nonfinite_weights(run.context, resumed_from)
        if attempts.in_first_entry:
            if not wrapped and resumed_from is not None:
                # The wrapper has looked before the Trainer loaded anything.
                refuse_damaged_checkpoint(run.context, Path(resumed_from))
            tell_of_offloaded(self.instrument)

    def go_on(self, resumed_from: str | None) -> None:
        """
        Goes on where a checkpoint was written, tells that the run has started, and keeps the state it starts with.
        """
        run, instrument = self._run, self.instrument
        args, state, rules = self._trainer.args, self._trainer.state, run.numerics.rules
        step, max_steps = int(state.global_step), int(state.max_steps)
        continue_bookkeeping(run.context, run.attempts, instrument, resumed_from, step)
        run.journal.event(
            "run_started",
            step,
            objective=instrument.objective.name,
            detectors=["nonfinite", *sorted(instrument.objective.detectors)],
            rules=[] if rules is None else sorted(rule.name for rule in rules.rules),
            resumed_from=resumed_from,
            max_steps=max_steps,
            output_dir=os.path.abspath(args.output_dir),
            pid=os.getpid(),
            process_began=Process.this_one().began,
            host=socket.gethostname(),
            limits={name: getattr(run.context.config, name) for name in _LIMITS},
            **run.numerics.rate_in_force(),
        )
        run.attempts.tell_status(Path(args.output_dir), max_steps)
        on_disk = None if run.attempts.in_memory(resumed_from) else resumed_from
        if resumed_from is not None and run.attempts.in_first_entry:
            warn_about_the_rate(instrument, on_disk)
        run.rollback.begin(instrument, not run.numerics.warm, on_disk, self._finite)
        run.last_step.begin()
        if instrument.view.only_watched is not None:
            logger.warning("%s; steps are watched, but not healed.", instrument.view.only_watched)

    def attach(self, wrapped: bool) -> None:
        """Attaches the instrument, and then what goes around it: what is attached later is called first."""
        run, context, instrument = self._run, self._run.context, self.instrument
        if not wrapped:
            # Last of all: what is taken off first may still write something down.
            instrument.on_detach.insert(0, self._closing.write)
        instrument.attach()
        context.attachment.healers.attach(first=run.attempts.in_first_entry)
        if run.attempts.in_first_entry:
            refuse_wrong_sums(context)
        output_dir = Path(self._trainer.args.output_dir)
        instrument.best_model = BestModel(
            self._trainer,
            [output_dir, output_dir / PINNED_DIR],
            vet_weights,
            may_be_loaded,
            partial(tell_of_best_model, context),
        )
        if not wrapped:
            self._guard_reporting()
        if not wrapped and context.config.on_preemption == "save":
            run.departure.preemption.listen()
            instrument.on_detach.append(run.departure.preemption.release)

    def _guard_reporting(self) -> None:
        """Without the wrapper, which guards trackers and Hub from before `train()` to its very end."""
        instrument, reporting = self.instrument, Reporting(self._run.context)
        guard = ReportingGuard(self._trainer, reporting, self._closing.before_closing)
        instrument.on_detach.append(lambda: reporting.sum_up(instrument.view.step))
        instrument.on_detach.append(guard.detach)
        guard.attach()


def _healers_of(run: Run) -> Healers:
    """What heals one `train()` call, in the order in which it is attached, told of events, and asked for claims."""
    context = run.context
    judge = StepJudge(context, run.numerics, run.rollback)
    memory = MemoryHealer(
        context,
        run.memory,
        run.rollback.in_place.free_batches,
        run.numerics.repeatability.owe,
        judge.heal_interrupted_step,
    )
    return Healers(
        (
            RunEvents(run),
            judge,
            memory,
            run.hangs,
            # Calls after those: the user's code may have let one fail some time before memory ran out or training
            # hung, and its claim waits still.
            ServiceCalls(context),
            SampleHealer(context, run.quarantine, ServiceCalls(context)),
            run.saves,
            # Last: it writes down what the others have made of a step.
            StepRecorder(run),
        )
    )
