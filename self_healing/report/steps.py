"""What a run's steps say: its curves, where its wall time went, and what is left of its budgets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ..checkpoints.marker import checkpoints_in
from ..failures.recipes import Action
from ..journal.step_log import StepRow, read_step_log, step_log_of
from ..system.files import STATE_FILE
from .records import Budget, Entry, Goodput, IncidentStory, no_series, number


# Points of one metric: more than a screen has columns.
_POINTS = 4096
_WHOLE = frozenset({"step", "steps", "skipped", "attempt"})


def read_steps(directory: Path, run: str, remarks: list[str]) -> tuple[list[StepRow], Entry]:
    """Reads the step log of a run: its rows in the order in which they were written, and what its first line says."""
    path = step_log_of(directory, run)
    try:
        about, rows = read_step_log(path)
    except FileNotFoundError:
        return [], {}
    except (OSError, ValueError) as error:
        remarks.append(f"{path.name} cannot be read ({error}): there are no charts of each step.")
        return [], {}
    return rows, about


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
        series["memory_total"] = number(about.get("memory_total"))
    return series


def _columns(rows: Sequence[StepRow]) -> dict[str, list[Any]]:
    columns = zip(StepRow._fields, zip(*rows, strict=True), strict=True)
    return {name: list(values) if name in _WHOLE else [*map(_rounded, values)] for name, values in columns}


def _rounded(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    # Most are kept as float32.
    return value if abs(value) >= 1e6 else float(f"{value:.7g}")


def _log_history(output_dir: Path) -> list[Entry]:
    """What the trainer has logged, from the newest state there is."""
    newest: tuple[int, list[Entry]] = (-1, [])
    for folder in (output_dir, *checkpoints_in(output_dir)):
        try:
            state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
            newest = max(newest, (state["global_step"], state["log_history"]), key=lambda found: found[0])
        except (OSError, ValueError, LookupError):
            continue
        if folder != output_dir:
            # They are listed newest first.
            break
    return newest[1]


def _logged(history: Sequence[Entry]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in history:
        for name, value in entry.items():
            if name != "step" and "step" in entry and isinstance(value, int | float):
                metric = found.setdefault(name, {"step": [], "value": []})
                metric["step"].append(entry["step"])
                metric["value"].append(_rounded(value))
    every = {name: math.ceil(len(metric["step"]) / _POINTS) for name, metric in found.items()}
    return {name: {key: values[:: every[name]] for key, values in metric.items()} for name, metric in found.items()}


# ---- where the time went ----


def goodput(
    rows: Sequence[StepRow],
    incidents: Sequence[IncidentStory],
    attempts: Sequence[Entry],
    until: float | None,
    step: int,
) -> Goodput | None:
    """Reckons where the wall time of a run went; `None` if it is not known when it began."""
    began = attempts[0]["began"] if attempts else None
    if began is None or until is None:
        return None
    wall = max(until - began, 0.0)
    missing = sum(incident.steps_lost for incident in incidents)
    if not rows:
        repeated = sum(incident.steps_repeated for incident in incidents)
        return Goodput(wall, 0.0, 0.0, 0.0, 0.0, wall, None, max(step - missing, 0), step + repeated)
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
    return Goodput(
        wall=wall,
        useful=useful,
        lost_steps=lost,
        healing=healing,
        down=down,
        other=left,
        share=useful / wall if wall > 0 else None,
        steps_useful=useful_steps - rolled_back,
        steps_done=sum(row.steps for row in (*kept, *again)),
    )


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
    limits: Mapping[str, Any], incidents: Sequence[IncidentStory], recovery: Mapping[str, Any], step: int
) -> list[Budget]:
    """
    Reckons what is left of the budgets of a run: `limits` are settings as it began with them, `recovery` is what its
    record says of budget and learning rate.
    """
    found: list[Budget] = []
    if (attempts := limits.get("max_recovery_attempts")) is not None:
        refund = limits.get("budget_refund_steps")
        told = "How often the run is brought back without progress before it ends."
        if refund is not None:
            told += f" Full again {refund} steps beyond the last failure."
        used = _recoveries(incidents, recovery.get("budget"), refund, step)
        found.append(Budget("recoveries without progress", "max_recovery_attempts", used, attempts, told))
    window, share, spikes = (limits.get(key) for key in ("skip_window", "max_skipped_fraction", "max_spike_skips"))
    lately = [each for each in incidents if window is None or each.step > step - window]
    skips = [each for each in lately if Action.SKIP_STEP in each.actions and Action.ROLL_BACK not in each.actions]
    if window is not None and share is not None:
        told = f"Of the last {window} steps; when more of them were left out, the run ends."
        found.append(Budget("steps left out", "max_skipped_fraction", len(skips), share * window, told))
    if window is not None and spikes is not None:
        used = sum(each.symptom in ("co_spike", "gradient_spike", "gradient_explosion") for each in skips)
        told = f"Of the last {window} steps; further spikes are clipped, and the run goes on."
        found.append(Budget("steps left out for a spike", "on_spike", used, spikes, told))
    if (reductions := limits.get("max_lr_reductions")) is not None:
        in_incidents = sum(each.actions.count(Action.REDUCE_LEARNING_RATE) for each in incidents)
        used = int(recovery.get("learning_rate", {}).get("reductions", in_incidents))
        told = "How often the rate may be reduced; a failure after that ends the run."
        found.append(Budget("reductions of the learning rate", "max_lr_reductions", used, reductions, told))
    return found


def _recoveries(
    incidents: Sequence[IncidentStory], recorded: Mapping[str, Any] | None, refund: int | None, step: int
) -> int:
    """Attempts as the budget counts them: each is one more, unless the run has come far beyond the last failure."""

    def full_again(at: int) -> bool:
        return failed_at >= 0 and refund is not None and at >= failed_at + refund

    used, failed_at = 0, -1
    if recorded is not None:
        used, failed_at = int(recorded["used"]), int(recorded["failed_at"])
    else:
        for incident in incidents:
            if {Action.ROLL_BACK, Action.RESUME, Action.WAIT_AND_RESUME} & {*incident.actions}:
                used = 1 if full_again(incident.step) else used + 1
                failed_at = max(incident.step, failed_at)
    return 0 if full_again(step) else used
