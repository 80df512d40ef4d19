"""Puts the parts of a run together: the one place that knows all of them, and their order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .config import HealingConfig
from .last_resorts import LastResorts
from .memory_remedies import MemoryRemedies
from .numerics_remedies import NumericsRemedies
from .row_quarantine import RowQuarantine
from .session import Session


def assemble(
    config: HealingConfig,
    directory: Path,
    rank: int = 0,
    sleep: Callable[[float], None] | None = None,
    run_id: str | None = None,
    may_enter_again: bool = False,
) -> Session:
    """
    Builds what one run remembers, with all the remedies it may need.

    Args:
        config ([`HealingConfig`]):
            The configuration in force.
        directory (`Path`):
            Where journal, quarantine and postmortem go.
        rank (`int`, *optional*, defaults to 0):
            This process.
        sleep (`Callable[[float], None]`, *optional*):
            How waiting is done, in seconds. Defaults to `time.sleep`, cut short by a preemption.
        run_id (`str`, *optional*):
            Of the run that an earlier process began; a new one otherwise, on which all ranks agree: they have to come
            here together.
        may_enter_again (`bool`, *optional*, defaults to `False`):
            Whether an exception may leave `train()` to be healed outside, where it is entered again.
    """
    session = Session(config, directory, rank, sleep, run_id, may_enter_again)
    for remedies in (
        NumericsRemedies(session.run, session.numerics, session.rollback),
        MemoryRemedies(session.memory),
        RowQuarantine(config, session.quarantine),
        LastResorts(config, session),
    ):
        session.remedies.offer(remedies.table())
    return session
