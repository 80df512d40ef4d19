"""Builds a Run; healer order."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.marker import ChecksumQueue, Standing, write_marker
from ..config.healing_config import HealingConfig
from ..hf.adapter import Instrument
from ..hf.sections import Heartbeat
from ..hf.trainer_state import save_generated
from ..journal.journal import Journal
from ..ranks import votes
from ..ranks.session import OtherRanks
from ..rollback.rollback import Rollback
from ..run.healer import Remedies
from ..run.incidents import Outcomes
from ..run.record import new_run_id
from ..run.run import News, RecoveryBudget, RunContext
from ..system.files import take_over_whole
from .data.quarantine import Quarantine
from .hangs.healer import HangWatch
from .numerics.remedies import NumericsRemedies
from .numerics.state import NumericsState
from .oom.sizes import KnownSizes, MemoryRemedies, MemoryState
from .restarts.attempts import Attempts
from .restarts.emergency import bookkeeping_now
from .restarts.ending import LastResorts, RunEnding
from .restarts.preemption import Departure
from .restarts.shared_memory import LastStep
from .saves import SaveHealer


logger = logging.getLogger("self_healing")


HOST = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Run:
    """
    One run, however often `train()` is entered: what all parts know of it, and the parts that last as long as it.
    """

    context: RunContext
    numerics: NumericsState
    rollback: Rollback
    memory: MemoryState
    quarantine: Quarantine
    attempts: Attempts
    departure: Departure
    ending: RunEnding
    saves: SaveHealer
    hangs: HangWatch
    last_step: LastStep

    @property
    def journal(self) -> Journal:
        """The journal of its incidents."""
        return self.context.journal

    @property
    def instrument(self) -> Instrument | None:
        """Attached to the trainer; `None` before the first `train()` call, and between two."""
        return self.context.attachment.instrument

    @property
    def broken(self) -> bool:
        """Whether code of ours has failed: training goes on without it."""
        return self.context.attachment.broken

    def about_to_save(self, step: int) -> None:
        """A regular checkpoint is about to be written."""
        self.rollback.checkpoints.about_to_save(step)
        instrument = self.instrument
        if instrument is None:
            return
        checkpoint = Path(instrument.trainer.args.output_dir) / f"checkpoint-{step}"
        # Written once more with the marker: there the disk may have room that rotation has made.
        with contextlib.suppress(OSError, RuntimeError):
            save_generated(instrument.trainer, checkpoint)

    def checkpoint_saved(self, instrument: Instrument, checkpoint: Path, step: int) -> None:
        """A regular checkpoint is written, with all its parts: marks it as complete."""
        exported = bookkeeping_now(instrument)
        save_generated(instrument.trainer, checkpoint)
        finite = self.rollback.checkpoints.finite_at(step)
        standing: Standing = "suspect" if finite is False else "unverified"
        write_marker(
            checkpoint,
            self.context.run_id,
            step,
            exported,
            emergency=False,
            standing=standing,
            finite=finite,
            later=self.context.checksums,
        )
        self.rollback.checkpoints.saved(checkpoint, step)

    def start_over(self, checkpoint: str, step: int) -> None:
        """
        Forgets what was learned from the damaged checkpoint that was resumed from; it is read from an older one when
        `train()` is entered the next time, as a new process would.
        """
        self.context.outcomes.nothing_lost_since(step)
        self.rollback.start_over()
        self.numerics.forget()
        self.context.outcomes.trust_again()
        self.context.stop.incident = None
        self.attempts.begin_from_older(checkpoint, step)

    # ---- state in checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.context.outcomes.state_dict(),
            "rate_after_reduction": self.numerics.rate_after_reduction,
            **{name: part.state_dict() for name, part in self._parts().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        reduced = state.get("rate_after_reduction")
        self.numerics.rate_after_reduction = reduced if isinstance(reduced, float) else None
        if not self.attempts.taken_up:
            self.context.outcomes.load_state_dict(state)
        for name, part in self._parts().items():
            # Written by an earlier version of the library, or with other settings.
            if name in state and not take_over_whole(part, state[name]):
                logger.warning(
                    "What %r has learned cannot be taken from the checkpoint (it is damaged, or of another version of "
                    "this library). It starts fresh.",
                    name,
                )
        if self.numerics.panel is not None and self.numerics.panel.divergence.alarmed:
            # The incident is not taken along: what still holds is seen again, and opens one in this run's journal.
            self.numerics.panel.divergence.alarmed = False

    def _parts(self) -> dict[str, Any]:
        return self.numerics.detectors() | {
            "policy": self.numerics.policy,
            "quarantine": self.quarantine,
            "learning_rate": self.numerics.learning_rate,
            "budget": self.context.budget,
            "ladder": self.numerics.ladder,
            "missing_steps": self.numerics.missing,
        }


def assemble(
    config: HealingConfig,
    directory: Path,
    rank: int = 0,
    sleep: Callable[[float], None] | None = None,
    run_id: str | None = None,
    may_enter_again: bool = False,
    device: torch.device = HOST,
) -> Run:
    """Builds a run, with all the remedies it may need."""
    heartbeat = Heartbeat()
    run_id = run_id or votes.from_first_rank("name of the run", new_run_id, device)
    journal = Journal(directory, config, run_id, rank)
    outcomes = Outcomes(journal, lambda: numerics.detector.trend(), lambda: numerics.early_limit)
    context = RunContext(
        config=config,
        directory=directory,
        run_id=run_id,
        started_at=time.time(),
        may_enter_again=may_enter_again,
        journal=journal,
        outcomes=outcomes,
        remedies=Remedies(journal),
        checksums=ChecksumQueue(),
        budget=RecoveryBudget(config),
        heartbeat=heartbeat,
        # As often as hangs are looked for.
        ranks=OtherRanks(run_id, min(1.0, config.hang_floor_seconds / 10)),
        news=News(),
        sleep=heartbeat.pausing(sleep or (lambda seconds: departure.sleep(seconds))),
        leave_asked=lambda: departure.wish,
    )
    numerics = NumericsState(config, journal, context.budget, outcomes, lambda: context.step)
    rollback = Rollback(config, journal, numerics.remember, numerics.recall)
    memory = MemoryState(KnownSizes())
    quarantine = Quarantine(directory, config.quarantine_text)
    quarantine.tell = partial(context.news.tell, "quarantine")
    context.news.on("quarantine", quarantine.take_in)
    journal.tell = partial(context.news.tell, "incident")
    context.news.on("incident", journal.take_in)
    attempts = Attempts(context, numerics)
    departure = Departure(context, attempts)
    ending = RunEnding(context, attempts, departure)
    last_step = LastStep(rollback, journal)
    hangs = HangWatch(
        context,
        before_exit=ending.end_process,
        still_training=departure.still_training,
        over=departure.forget,
        counts_attempts=lambda: attempts.record is not None,
        leave_state=last_step.leave,
    )
    for remedies in (
        NumericsRemedies(context, numerics, rollback),
        MemoryRemedies(memory),
        quarantine,
        LastResorts(context, attempts, ending, rollback, last_step),
    ):
        context.remedies.offer(remedies.table())
    saves = SaveHealer(context, lambda: rollback.checkpoints.give_way())
    return Run(context, numerics, rollback, memory, quarantine, attempts, departure, ending, saves, hangs, last_step)
