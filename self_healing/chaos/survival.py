"""Holds the ledger of a rehearsal against the journal of the run, and tells what became of each fault."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ..failures import FailureType
from ..files import parse_lines
from ..own_files import EVENTS_FILE
from .ledger import Ledger, Strike


_NONFINITE = frozenset(
    {
        FailureType.NONFINITE_TRANSIENT,
        FailureType.NONFINITE_NUMERICAL,
        FailureType.NONFINITE_UNDIAGNOSED,
        FailureType.NONFINITE_POISON_ROWS,
    }
)
# What a fault may rightly be taken for.
EXPECTED: dict[str, frozenset[FailureType]] = {
    "nan_loss": _NONFINITE,
    "nan_gradient": _NONFINITE,
    "inf_gradient": _NONFINITE | {FailureType.SPIKE_TRANSIENT, FailureType.GRADIENT_SPIKE},
    "corrupted_weights": frozenset({FailureType.CORRUPTED_STATE}),
    "scrambled_layer": frozenset(
        {
            FailureType.DIVERGENCE,
            FailureType.LOSS_SPIKE,
            FailureType.GRADIENT_SPIKE,
            FailureType.SPIKE_TRANSIENT,
            FailureType.CORRUPTED_STATE,
            FailureType.NONFINITE_NUMERICAL,
            FailureType.LEARNING_RATE,
        }
    ),
    "poison_samples": _NONFINITE,
    "oom": frozenset({FailureType.OUT_OF_MEMORY}),
    "network_error": frozenset({FailureType.NETWORK}),
    "bad_sample": frozenset({FailureType.BAD_DATA}),
    "slow_step": frozenset({FailureType.HANG}),
    "hang": frozenset({FailureType.HANG}),
    "sigterm": frozenset({FailureType.PREEMPTED}),
    "sigkill": frozenset({FailureType.PROCESS_DIED}),
    "disk_full": frozenset({FailureType.DISK}),
    "torn_checkpoint": frozenset({FailureType.PROCESS_DIED}),
}
# These may rightly leave no trace: a slow step within its timeout, a torn checkpoint that was not read.
_MAY_PASS = {"slow_step": "within its timeout", "torn_checkpoint": "was not needed"}
# Clocks of files and processes; an incident is never seen before its fault strikes.
_EARLY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Survival:
    """
    The outcome of one strike.

    Args:
        fault (`str`):
            As it was asked for.
        step (`int`, *optional*):
            Optimizer steps finished when it struck; `None` if it never did.
        effect (`bool`):
            Whether it took place.
        incident (`str`, *optional*):
            The incident of the run's journal that speaks of it.
        outcome (`str`):
            That of the incident, or why there is none.
        survived (`bool`):
            Whether the run has noticed and outlived it: it has its incident, and that was not the end. (`"unresolved"`
            is no end: the loss was not back on its trend yet.) `True` for one without an effect, and for what may
            rightly pass unnoticed.
        detail (`dict`):
            What it was done to.
        actions (`tuple[str, ...]`):
            What was done about it, as the journal names it.
        rank (`int`):
            The rank that it struck.
    """

    fault: str
    step: int | None
    effect: bool
    incident: str | None
    outcome: str
    survived: bool
    detail: dict[str, Any] = field(default_factory=dict)
    actions: tuple[str, ...] = ()
    rank: int = 0


@dataclass(slots=True)
class _Seen:
    """An incident as the journal of a rank tells it."""

    id: str
    time: float
    step: int
    rank: int
    failure: str | None = None
    outcome: str = "open"
    actions: list[str] = field(default_factory=list)
    taken: bool = False
    # Of the process that died, where the next one knows it.
    pid: int | None = None
    # Where a rank ends because another one has failed: that one, and with what.
    failed_rank: int | None = None
    failed_with: str | None = None


def survived(
    ledger: str | os.PathLike[str] | Ledger, run_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
) -> list[Survival]:
    """
    Finds the incident of every strike.

    Args:
        ledger (`str`, `PathLike` or [`Ledger`]):
            Of the rehearsal.
        run_dir (`str` or `PathLike`, or several):
            The directory with the run's `healing_events.jsonl`, and those of the other ranks.

    Returns:
        `list[Survival]`: One row per strike in the order they came, and one per fault that never struck.
    """
    book = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
    directories = [run_dir] if isinstance(run_dir, (str, os.PathLike)) else run_dir
    events = sorted(
        (event for directory in directories for event in _events(Path(directory))), key=lambda event: event["time"]
    )
    incidents, passed_over = _incidents(events), _passed_over(events)
    strikes = book.strikes()
    found = [_survival(strike, incidents, passed_over) for strike in strikes]
    struck = {strike.fault for strike in strikes}
    missing = [name for name in book.asked_for() if name not in struck]
    return found + [Survival(name, None, False, None, "did not strike", True) for name in missing]


def _events(directory: Path) -> list[dict[str, Any]]:
    path = directory if directory.is_file() else directory / EVENTS_FILE
    found: list[dict[str, Any]] = []
    for journal in (path, *path.parent.glob(f"{path.stem}.rank*{path.suffix}")):
        with contextlib.suppress(OSError):
            # Lines torn by a killed process are left out.
            found += parse_lines(journal.read_text(encoding="utf-8", errors="replace"))[0]
    return found


def _incidents(events: Sequence[dict[str, Any]]) -> list[_Seen]:
    found: dict[str, _Seen] = {}
    for event in events:
        name, rank = event.get("incident"), event.get("rank", 0)
        if event.get("kind") == "run_started" and rank > 0:
            # What has ended another rank is taken up by the first one alone, as what has ended that.
            for earlier in (each for each in found.values() if each.rank == rank and each.outcome == "fatal"):
                earlier.outcome = "started again"
        if name is None:
            continue
        incident = found.setdefault(name, _Seen(name, event["time"], event["step"], rank))
        incident.failure = event.get("failure") or incident.failure
        incident.outcome = event.get("outcome") or incident.outcome
        if event.get("kind") == "action" and event.get("happened"):
            incident.actions.append(event["action"])
        evidence = event.get("evidence")
        if not isinstance(evidence, dict):
            continue
        if incident.pid is None:
            incident.pid = evidence.get("pid")
        if event.get("symptom") == "failure_on_another_rank":
            incident.failed_rank, incident.failed_with = evidence.get("rank"), evidence.get("failure")
    return sorted(found.values(), key=lambda incident: incident.time)


def _passed_over(events: Sequence[dict[str, Any]]) -> set[str]:
    """Checkpoints that were looked at and not taken."""
    return {str(event["path"]) for event in events if event.get("kind") == "checkpoint_passed_over"}


def _survival(strike: Strike, incidents: Sequence[_Seen], passed_over: set[str]) -> Survival:
    def told(effect: bool, incident: str | None, outcome: str, outlived: bool, done: Sequence[str] = ()) -> Survival:
        actions = tuple(done)
        return Survival(
            strike.fault, strike.step, effect, incident, outcome, outlived, strike.detail, actions, strike.rank
        )

    if not strike.effect:
        return told(False, None, "had no effect", True)
    incident = _matching(strike, incidents)
    if strike.kind == "torn_checkpoint":
        name = str(strike.detail.get("checkpoint"))
        if any(Path(path).absolute() == Path(name).absolute() for path in passed_over):
            found = None if incident is None else incident.id
            return told(True, found, "passed over", True)
        if strike.detail.get("then") != "sigkill":
            incident = None
    if incident is None:
        may = _MAY_PASS.get(strike.kind)
        return told(True, None, may or "no incident", may is not None)
    incident.taken = True
    return told(True, incident.id, incident.outcome, incident.outcome != "fatal", incident.actions)


def _speaks_of(incident: _Seen, strike: Strike) -> bool:
    if incident.failed_rank is not None:
        return incident.failed_rank == strike.rank and incident.failed_with in EXPECTED[strike.kind]
    if incident.failure == FailureType.PROCESS_DIED and incident.pid not in (None, strike.pid):
        return False
    return incident.failure in EXPECTED[strike.kind]


def _matching(strike: Strike, incidents: Sequence[_Seen]) -> _Seen | None:
    """
    The first incident after the strike that speaks of such a fault, by the journal of its rank where that does; one
    that tells of several where it has to.
    """
    fitting = [
        incident
        for incident in incidents
        if _speaks_of(incident, strike) and incident.time >= strike.time - _EARLY_SECONDS
    ]
    free = [incident for incident in fitting if not incident.taken]
    if free:
        return next((incident for incident in free if incident.rank == strike.rank), free[0])
    # Several steps in a row, or several calls, are one incident.
    shared = [
        incident
        for incident in incidents
        if _speaks_of(incident, strike) and abs(incident.step - strike.step) <= strike.count
    ]
    return shared[-1] if shared else None


def survival_table(rows: Sequence[Survival]) -> Table:
    """Puts the rows into a table for the terminal."""
    table = Table(title="What was survived", header_style="bold")
    several = any(row.rank > 0 for row in rows)
    for column in ("fault", "step", *(["rank"] if several else []), "incident", "outcome", "survived"):
        table.add_column(column, justify="right" if column in ("step", "rank") else "left", overflow="fold")
    for row in rows:
        never = row.step is None
        table.add_row(
            row.fault,
            "-" if never else str(row.step),
            *(["-" if never else str(row.rank)] if several else []),
            row.incident or "-",
            row.outcome,
            "[green]yes[/green]" if row.survived else "[bold red]no[/bold red]",
        )
    return table
