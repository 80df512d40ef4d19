"""Makes what can be drawn of a run from its step log, and from what the trainer has logged."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..checkpoint_files import STATE_FILE
from ..checkpoints.listing import checkpoints_in
from ..journal.step_log import StepRow, read_step_log, step_log_of
from .journals import number
from .records import LoggedMetric, Series, StepColumns
from .values import is_count, is_time
from .words import counted


# Points of one metric: more than a screen has columns.
_POINTS = 4096
_COLUMNS = tuple(each.name for each in fields(StepColumns))
_WHOLE = frozenset({"step", "steps", "skipped", "attempt"})
# Of float32, in which most are kept; of loss and norm more digits would say nothing.
_DIGITS = 7


def read_steps(directory: Path, run: str, remarks: list[str]) -> tuple[list[StepRow], dict[str, Any]]:
    """
    Reads the step log of a run.

    Args:
        directory (`Path`), run (`str`):
            Where its journal lies, and its name.
        remarks (`list[str]`):
            Gets what could not be read.

    Returns:
        Its rows in the order in which they were written, and what its first line says.
    """
    path = step_log_of(directory, run)
    try:
        about, rows = read_step_log(path)
    except FileNotFoundError:
        return [], {}
    except (OSError, ValueError) as error:
        remarks.append(f"{path.name} cannot be read ({error}): there are no charts of each step.")
        return [], {}
    whole = [row for row in rows if row.step >= 0 and row.steps > 0 and is_time(row.time)]
    if odd := len(rows) - len(whole):
        remarks.append(f"{counted(odd, 'row')} of {path.name} cannot be read: the charts are made of the others.")
    return whole, about


def branches(rows: Iterable[StepRow]) -> tuple[list[StepRow], list[list[StepRow]]]:
    """
    Tells the steps that lead to the weights there are from those that were done again, or gone back from.

    Args:
        rows (`Iterable[StepRow]`):
            In the order in which they were written.

    Returns:
        The rows of the former, by their steps, and stretches of the latter.
    """
    kept: list[StepRow] = []
    discarded: list[list[StepRow]] = []
    for row in rows:
        if kept and row.step <= kept[-1].step:
            left = []
            while kept and kept[-1].step >= row.step:
                left.append(kept.pop())
            discarded.append(left[::-1])
        kept.append(row)
    return kept, discarded


def series_of(rows: Sequence[StepRow], about: Mapping[str, Any], output_dir: Path) -> Series:
    """
    Makes what can be drawn of a run.

    Args:
        rows (`Sequence[StepRow]`), about (`Mapping[str, Any]`):
            Its step log.
        output_dir (`Path`):
            Where its checkpoints are, which hold what the trainer has logged.
    """
    history = log_history_in(output_dir)
    logged = _logged(history)
    if rows:
        kept, discarded = branches(rows)
        columns = [_columns(stretch) for stretch in discarded]
        return Series("steps", _columns(kept), columns, logged, number(about.get("memory_total")))
    columns_logged = _columns(_rows_of(history))
    return Series("logs" if len(columns_logged) else "none", columns_logged, [], logged)


def _columns(rows: Sequence[StepRow]) -> StepColumns:
    found: dict[str, list[Any]] = {}
    for name in _COLUMNS:
        values = [getattr(row, name) for row in rows]
        if name not in _WHOLE:
            values = [_rounded(value) for value in values]
        found[name] = values
    return StepColumns(**found)


def _rounded(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return value if abs(value) >= 1e6 else float(f"{value:.{_DIGITS}g}")


# ---- what the trainer logs ----


def log_history_in(output_dir: Path) -> list[dict[str, Any]]:
    """Reads what the trainer has logged, from the newest state there is; empty if there is none."""
    states = [output_dir / STATE_FILE, *(checkpoint / STATE_FILE for checkpoint in checkpoints_in(output_dir))]
    newest: tuple[int, list[dict[str, Any]]] = (-1, [])
    for path in states:
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            step, history = int(state["global_step"]), list(state["log_history"])
        except (OSError, ValueError, LookupError, TypeError, OverflowError):
            continue
        if step > newest[0]:
            newest = (step, history)
        if path.parent != output_dir:
            # They are listed newest first.
            break
    return [entry for entry in newest[1] if isinstance(entry, dict) and is_count(entry.get("step"))]


def _logged(history: Sequence[Mapping[str, Any]]) -> dict[str, LoggedMetric]:
    found: dict[str, LoggedMetric] = {}
    for entry in history:
        for name, value in entry.items():
            known = None if isinstance(value, str) else number(value)
            if name != "step" and known is not None:
                metric = found.setdefault(name, LoggedMetric())
                metric.step.append(entry["step"])
                metric.value.append(_rounded(known))
    return {name: _thinned(metric) for name, metric in found.items()}


def _thinned(metric: LoggedMetric) -> LoggedMetric:
    every = math.ceil(len(metric.step) / _POINTS)
    return metric if every <= 1 else LoggedMetric(metric.step[::every], metric.value[::every])


def _rows_of(history: Sequence[Mapping[str, Any]]) -> list[StepRow]:
    """What an earlier version, which kept no step log, has left: averages, at the steps that were logged."""
    rows: dict[int, StepRow] = {}
    for entry in history:
        if "loss" not in entry:
            continue
        loss, norm, rate = (number(entry.get(name)) for name in ("loss", "grad_norm", "learning_rate"))
        found = [math.nan if value is None else value for value in (loss, norm, rate)]
        row = StepRow(max(entry["step"] - 1, 0), loss=found[0], grad_norm=found[1], learning_rate=found[2])
        rows[row.step] = row._replace(loss_max=row.loss, grad_norm_max=row.grad_norm)
    return [rows[step] for step in sorted(rows)]
