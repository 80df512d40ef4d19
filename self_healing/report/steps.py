"""What a run's steps say: its curves, where its wall time went, and what is left of its budgets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ..checkpoints.marker import checkpoints_in
from ..failures.recipes import Action
from ..journal.step_log import StepRow, read_step_log, step_log_of
from ..system.files import STATE_FILE
from .records import Budget, Entry, Goodput, IncidentStory, no_series


_WHOLE = frozenset({"step", "steps", "skipped", "attempt"})


def read_steps(directory: Path, run: str, remarks: list[str]) -> tuple[list[StepRow], Entry]:
    """Reads the step log of a run: its rows in the order in which they were written, and what its first line says."""
    path = step_log_of(directory, run)
    try:
        about, rows = read_step_log(path)
        return rows, about
    except FileNotFoundError:
        return [], {}
    except (OSError, ValueError) as error:
        remarks.append(f"{path.name} cannot be read ({error}): there are no charts of each step.")
        return [], {}


def branches(rows: Iterable[StepRow]) -> tuple[list[StepRow], list[list[StepRow]]]:
    """Tells the steps that lead to the weights from the stretches that were done again, or rolled back."""
    kept: list[StepRow] = []
    discarded: list[list[StepRow]] = []
    for row in rows:
        if kept and row.step <= kept[-1].step:
            first = next(at for at, each in enumerate(kept) if each.step >= row.step)
            discarded.append(kept[first:])
            del kept[first:]
        kept.append(row)
    return kept, discarded


# ---- curves ----


def series_of(rows: Sequence[StepRow], about: Mapping[str, Any], output_dir: Path) -> Entry:
    """Makes what can be drawn of a run: columns of its steps, and what the trainer has logged."""
    series = {**no_series(), "logged": _logged(_log_history(output_dir))}
    if rows:
        kept, discarded = branches(rows)
        series |= {"source": "steps", "kept": _columns(kept), "discarded": [_columns(each) for each in discarded]}
        series["memory_total"] = about.get("memory_total")
    return series


def _columns(rows: Sequence[StepRow]) -> dict[str, list[Any]]:
    columns = zip(StepRow._fields, zip(*rows, strict=True), strict=True)
    return {name: list(values) if name in _WHOLE else [*map(_rounded, values)] for name, values in columns}


def _rounded(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return value if abs(value) >= 1e6 else float(f"{value:.7g}")


def _log_history(output_dir: Path) -> list[Entry]:
    """What the trainer has logged, from the newest state there is."""
    newest: tuple[int, list[Entry]] = (-1, [])
    # Checkpoints are listed newest first.
    for folder in (output_dir, *checkpoints_in(output_dir)[:1]):
        with suppress(OSError, ValueError, LookupError):
            state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
            newest = max(newest, (state["global_step"], state["log_history"]), key=lambda found: found[0])
    return newest[1]


def _logged(history: Sequence[Entry]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in history:
        for name, value in entry.items():
            if name != "step" and "step" in entry and isinstance(value, int | float):
                metric = found.setdefault(name, {"step": [], "value": []})
                metric["step"].append(entry["step"])
                metric["value"].append(_rounded(value))
    return found


# ---- where the time went ----


def goodput(
    rows: Sequence[StepRow],
    incidents: Sequence[IncidentStory],
    attempts: Sequence[Entry],
    until: float | None,
) -> Goodput | None:
    """Reckons where the wall time of a run went; `None` if no step of it is known, or not when it began."""
    began = attempts[0]["began"] if attempts else None
    if began is None or until is None or not rows:
        return None
    wall = max(until - began, 0.0)
    missing = sum(incident.steps_lost for incident in incidents)
    # Not known where something was healed in the step.
    usual = median([row.busy for row in rows if math.isfinite(row.busy)] or [0.0])
    kept, discarded = branches(row if math.isfinite(row.busy) else row._replace(busy=usual) for row in rows)
    again = [row for stretch in discarded for row in stretch]
    skipped, useful_steps = sum(row.skipped for row in kept), sum(row.steps - row.skipped for row in kept)
    # Those of a state that was rolled back are in no row as such.
    rolled_back = min(max(missing - skipped, 0), useful_steps)
    in_kept = sum(row.busy * (row.steps - row.skipped) for row in kept)
    of_rolled_back = rolled_back * in_kept / max(useful_steps, 1)
    lost = sum(row.busy * row.skipped for row in kept) + sum(row.busy * row.steps for row in again)
    healing = sum(incident.seconds_lost for incident in incidents)
    # What was measured more closely comes first: the parts are to add up.
    wanted = (_between(attempts), in_kept - of_rolled_back, lost + of_rolled_back, healing)
    parts, left = [], wall
    for seconds in wanted:
        parts.append(min(max(seconds, 0.0), left))
        left -= parts[-1]
    down, useful, lost, healing = parts
    done, share = sum(row.steps for row in (*kept, *again)), useful / wall if wall > 0 else 0.0
    return Goodput(wall, useful, lost, healing, down, left, share, useful_steps - rolled_back, done)


def steps_missing(rows: Sequence[StepRow], incidents: Sequence[IncidentStory]) -> int:
    """Counts the steps that are known not to be in the weights."""
    # What is still open has lost nothing yet as far as the incident says.
    return max(sum(row.skipped for row in branches(rows)[0]), sum(incident.steps_lost for incident in incidents))


def _between(attempts: Sequence[Entry]) -> float:
    return sum(
        max(float(after["began"] - before["ended"]), 0.0)
        for before, after in pairwise(attempts)
        if before["ended"] is not None and after["began"] is not None
    )


# ---- budgets ----


def budgets(
    limits: Mapping[str, Any],
    incidents: Sequence[IncidentStory],
    recovery: Mapping[str, Any],
    reductions: int,
    step: int,
) -> list[Budget]:
    """
    Reckons what is left of the budgets of a run: `limits` are settings as it began with them, `recovery` is what its
    record says, `reductions` what its journal says of the learning rate.
    """
    if not limits:
        return []
    refund, window = limits["budget_refund_steps"], limits["skip_window"]
    budget = recovery.get("budget", {"used": 0, "failed_at": -1})
    full_again = budget["failed_at"] >= 0 and step >= budget["failed_at"] + refund
    skips = [
        each
        for each in incidents
        if each.step > step - window and Action.SKIP_STEP in each.actions and Action.ROLL_BACK not in each.actions
    ]
    spikes = [each for each in skips if each.symptom in ("co_spike", "gradient_spike", "gradient_explosion")]
    return [
        Budget(
            "recoveries without progress",
            "max_recovery_attempts",
            0 if full_again else budget["used"],
            limits["max_recovery_attempts"],
            "How often the run is brought back without progress before it ends. "
            f"Full again {refund} steps beyond the last failure.",
        ),
        Budget(
            "steps left out",
            "max_skipped_fraction",
            len(skips),
            limits["max_skipped_fraction"] * window,
            f"Of the last {window} steps; when more of them were left out, the run ends.",
        ),
        Budget(
            "steps left out for a spike",
            "on_spike",
            len(spikes),
            limits["max_spike_skips"],
            f"Of the last {window} steps; further spikes are clipped, and the run goes on.",
        ),
        Budget(
            "reductions of the learning rate",
            "max_lr_reductions",
            int(recovery.get("learning_rate", {}).get("reductions", reductions)),
            limits["max_lr_reductions"],
            "How often the rate may be reduced; a failure after that ends the run.",
        ),
    ]
