"""
Runs a script under faults in processes of its own, and tells what was survived.

`python -m self_healing.tools.chaos.rehearsal train.py --lr 1e-4` is what `self-healing chaos` and torchrun start: the
script as it is, under the faults that `SELF_HEALING_CHAOS` names.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ...failures.recipes import FailureType
from ...report.journals import Event, incident_of, lines_of_incidents, read_journals
from .faults import Ledger, Strike, parse_faults


VARIABLE = "SELF_HEALING_CHAOS"

_NONFINITE = {each for each in FailureType if each.startswith("nonfinite_")}
_SPIKES = {FailureType.SPIKE_TRANSIENT, FailureType.GRADIENT_SPIKE}
# What a fault may rightly be taken for.
_EXPECTED: dict[str, set[FailureType]] = {
    "nan_loss": _NONFINITE,
    "nan_gradient": _NONFINITE,
    "inf_gradient": _NONFINITE | _SPIKES,
    "corrupted_weights": {FailureType.CORRUPTED_STATE},
    "scrambled_layer": _NONFINITE
    | _SPIKES
    | {FailureType.LOSS_SPIKE, FailureType.DIVERGENCE, FailureType.CORRUPTED_STATE, FailureType.LEARNING_RATE},
    "poison_samples": _NONFINITE,
    "oom": {FailureType.OUT_OF_MEMORY},
    "network_error": {FailureType.NETWORK},
    "bad_sample": {FailureType.BAD_DATA},
    "slow_step": {FailureType.HANG},
    "hang": {FailureType.HANG},
    "sigterm": {FailureType.PREEMPTED},
    "sigkill": {FailureType.PROCESS_DIED},
    "disk_full": {FailureType.DISK},
}
# Clocks of files and processes; an incident is never seen before its fault strikes.
_EARLY_SECONDS = 1.0


# ---- the script ----


def rehearse(
    script: Path, faults: str, arguments: Sequence[str], seed: int, restarts: int, ledger: Path, processes: int
) -> tuple[int, list[Survival]]:
    """Runs a training script under faults; gives its exit code, and what became of each fault."""
    parse_faults(faults)
    book = Ledger(ledger)
    command = command_line(script, arguments, restarts, processes)
    process = subprocess.run(command, env=environment(faults, seed, book.path), check=False)
    return process.returncode, survived(book, *book.run_dirs())


def command_line(script: Path, arguments: Sequence[str], restarts: int, processes: int = 1) -> list[str]:
    """Plain Python, or torchrun where the script is to be started again, or in several processes."""
    launcher = [sys.executable]
    if restarts > 0 or processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        launcher += ["--max-restarts", str(restarts)]
    return [*launcher, "-m", "self_healing.tools.chaos.rehearsal", str(script), *arguments]


def environment(faults: str, seed: int, ledger: Path) -> dict[str, str]:
    """Gives the environment that tells processes and their children of a rehearsal."""
    told = {"faults": faults, "seed": seed, "ledger": str(ledger)}
    return os.environ | {VARIABLE: json.dumps(told)}


def _attach_to_every_trainer(settings: dict[str, Any]) -> None:
    """Makes every `Trainer` of this process begin with a `Chaos` callback."""
    from transformers import Trainer

    from .callback import Chaos

    # The one place where a class of others is changed: there is no instance before the user's script makes one, and
    # the process does nothing else and ends with the rehearsal.
    cls: Any = Trainer
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not any(isinstance(callback, Chaos) for callback in self.callback_handler.callbacks):
            Chaos(**settings).attach(self)

    cls.__init__ = __init__


def main(script: str, *arguments: str) -> None:
    """Runs the script in this process."""
    _attach_to_every_trainer(json.loads(os.environ[VARIABLE]))
    sys.argv = [script, *arguments]
    # As `python script` has it.
    sys.path[0] = str(Path(script).absolute().parent)
    runpy.run_path(script, run_name="__main__")


# ---- what was survived ----


@dataclass(frozen=True, slots=True)
class Survival:
    """The outcome of one strike; survived is what was noticed and was not the end, and what may pass unnoticed."""

    fault: str
    step: int | None
    effect: bool
    incident: str | None
    outcome: str
    survived: bool
    detail: dict[str, Any] = field(default_factory=dict)
    rank: int = 0


def survived(ledger: str | os.PathLike[str] | Ledger, *run_dirs: str | os.PathLike[str]) -> list[Survival]:
    """Finds the incident of every strike in the journals of a run; one row more for each fault that never struck."""
    book = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
    events: list[Event] = []
    for directory in run_dirs:
        with contextlib.suppress(OSError, ValueError):
            events += read_journals(Path(directory)).events
    incidents = _incidents(events)
    passed_over = {Path(event["path"]).absolute() for event in events if event["kind"] == "checkpoint_passed_over"}
    found = [_fate(strike, incidents, passed_over) for strike in book.strikes()]
    struck = {row.fault for row in found}
    missing = [name for name in book.asked_for() if name not in struck]
    return found + [Survival(name, None, False, None, "did not strike", True) for name in missing]


def _incidents(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The incidents of all ranks, each with when and where it was seen."""
    found = []
    for lines in lines_of_incidents(events).values():
        incident, first = incident_of(lines), lines[0]
        started = [event for event in events if event["kind"] == "run_started" and event["rank"] == first["rank"]]
        if first["rank"] > 0 and incident.outcome == "fatal" and started[-1]["time"] > lines[-1]["time"]:
            # What has ended another rank is taken up by the first one alone, as what has ended that.
            incident.outcome = "started again"
        found.append(asdict(incident) | {"time": first["time"], "rank": first["rank"], "taken": False})
    return found


def _fate(strike: Strike, incidents: Sequence[dict[str, Any]], passed_over: set[Path]) -> Survival:
    """The incident of a strike, its outcome, and whether the run has outlived it."""
    incident = None
    if not strike.effect:
        outcome, outlived = "had no effect", True
    elif strike.kind == "torn_checkpoint":
        passed = Path(str(strike.detail.get("checkpoint"))).absolute() in passed_over
        outcome, outlived = "passed over" if passed else "was not needed", True
    elif (incident := _matching(strike, incidents)) is not None:
        incident["taken"] = True
        outcome, outlived = incident["outcome"], incident["outcome"] != "fatal"
    else:
        outlived = strike.kind == "slow_step"
        outcome = "within its timeout" if outlived else "no incident"
    name = None if incident is None else str(incident["id"])
    return Survival(strike.fault, strike.step, strike.effect, name, outcome, outlived, strike.detail, strike.rank)


def _matching(strike: Strike, incidents: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The first incident after the strike that speaks of such a fault, that of its own rank before others."""
    fitting = [incident for incident in incidents if _speaks_of(incident, strike)]
    free = [each for each in fitting if not each["taken"] and each["time"] >= strike.time - _EARLY_SECONDS]
    # Several steps in a row, or several calls, are one incident.
    shared = [each for each in fitting if abs(each["step"] - strike.step) <= strike.count]
    own = [each for each in free if each["rank"] == strike.rank]
    candidates = own or free or shared[-1:]
    return candidates[0] if candidates else None


def _speaks_of(incident: dict[str, Any], strike: Strike) -> bool:
    evidence = incident["evidence"]
    if incident["symptom"] == "failure_on_another_rank":
        return evidence.get("rank") == strike.rank and evidence.get("failure") in _EXPECTED[strike.kind]
    if incident["failure"] == FailureType.PROCESS_DIED and evidence.get("pid") not in (None, strike.pid):
        return False
    return incident["failure"] in _EXPECTED[strike.kind]


def survival_table(rows: Sequence[Survival]) -> Table:
    """Puts the rows into a table for the terminal."""
    table = Table(title="What was survived", header_style="bold")
    several = any(row.rank > 0 for row in rows)
    for column in ("fault", "step", *(["rank"] if several else []), "incident", "outcome", "survived"):
        table.add_column(column, justify="right" if column in ("step", "rank") else "left", overflow="fold")
    for row in rows:
        where = ["-" if row.step is None else str(each) for each in ([row.step, row.rank] if several else [row.step])]
        word = "[green]yes[/green]" if row.survived else "[bold red]no[/bold red]"
        table.add_row(row.fault, *where, row.incident or "-", row.outcome, word)
    return table


if __name__ == "__main__":
    main(*sys.argv[1:])
