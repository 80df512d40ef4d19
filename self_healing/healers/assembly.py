"""Builds a Run; healer order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config.healing_config import HealingConfig
from ..hf.sections import Heartbeat
from ..journal.journal import Journal
from ..ranks import votes
from ..ranks.session import OtherRanks
from ..rollback.rollback import Rollback
from ..run.healer import Remedies
from ..run.incidents import Outcomes
from ..run.record import new_run_id
from ..run.run import RecoveryBudget, Run
from ..system.files import take_over_whole
from .data.quarantine import Quarantine
from .hangs.healer import HangWatch
from .numerics.remedies import NumericsRemedies
from .numerics.state import NumericsState
from .oom.healer import MemoryState
from .restarts.attempts import Attempts
from .restarts.ending import Shutdown
from .restarts.preemption import Preemption
from .restarts.shared_memory import FinalSnapshot
from .saves import SaveHealer


logger = logging.getLogger("self_healing")


HOST = torch.device("cpu")


def assemble(
    config: HealingConfig,
    directory: Path,
    rank: int = 0,
    sleep: Callable[[float], None] | None = None,
    run_id: str | None = None,
    wrapped: bool = False,
    device: torch.device = HOST,
) -> Run:
    """Builds a run, with all the remedies it may need."""
    run_id = run_id or votes.from_first_rank("a run begins", new_run_id, device)
    journal = Journal(directory, config, run_id, rank)
    run = Run(
        config=config,
        directory=directory,
        run_id=run_id,
        journal=journal,
        outcomes=Outcomes(journal),
        rollback=Rollback(config, journal),
        remedies=Remedies(journal),
        budget=RecoveryBudget(config),
        # As often as hangs are looked for.
        ranks=OtherRanks(run_id, min(1.0, config.hang_floor_seconds / 10)),
        heartbeat=Heartbeat(),
        wrapped=wrapped,
        own_sleep=sleep,
    )
    run.numerics = run.outcomes.baseline = run.rollback.learned = NumericsState(run)
    memory = MemoryState(run)
    quarantine = Quarantine(directory, config.quarantine_text, run.news)
    journal.tell = partial(run.news.tell, "incident")
    run.news.on("incident", journal.take_in)
    run.add(run.numerics, memory, quarantine, Attempts(run), FinalSnapshot(run), SaveHealer(run))
    run.add(Preemption(run))
    ending = Shutdown(run)
    run.add(ending, HangWatch(run, ending))
    for remedies in (NumericsRemedies(run), memory, quarantine, ending):
        run.remedies.offered.update(remedies.table())
    return run


# ---- what a run has learned, in checkpoints ----


def state_of(run: Run) -> dict[str, Any]:
    """What a run has learned, as JSON."""
    return {
        **run.outcomes.state_dict(),
        "rate_after_reduction": run.part(NumericsState).rate_after_reduction,
        **{name: part.state_dict() for name, part in _parts_with_state(run).items()},
    }


def load_state(run: Run, state: Mapping[str, Any]) -> None:
    """Takes in what a run had learned when a checkpoint was written."""
    numerics = run.part(NumericsState)
    numerics.rate_after_reduction = state.get("rate_after_reduction")
    if not run.part(Attempts).taken_up:
        run.outcomes.load_state_dict(state)
    for name, part in _parts_with_state(run).items():
        # Written by an earlier version of the library, or with other settings.
        if name in state and not take_over_whole(part, state[name]):
            logger.warning(
                "What %r has learned cannot be taken from the checkpoint (it is damaged, or of another version of "
                "this library). It starts fresh.",
                name,
            )
    # The incident is not taken along: what still holds is seen again, and opens one in this run's journal.
    numerics.panel.divergence.alarmed = False


def _parts_with_state(run: Run) -> dict[str, Any]:
    numerics = run.part(NumericsState)
    return numerics.detectors() | {
        "limits": numerics.limits,
        "quarantine": run.part(Quarantine),
        "learning_rate": numerics.learning_rate,
        "budget": run.budget,
        "ladder": numerics.ladder,
        "missing_steps": numerics.missing,
    }
