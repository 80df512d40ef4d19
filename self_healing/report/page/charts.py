"""The charts and the tables of the page: which there are, in which unit, on which scale, each in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from ...journal.step_log import ROWS
from ..records import Checkpoint, Entry, RunReport, digits, moment, plain, short_duration, size, spoken


# Above that many times its median, a line is flat on a linear scale but for its peaks.
_FLAT = 30.0
# Ticks are reckoned beyond the highest value, and the largest float is not far from it.
_HIGHEST = 1e300
_MOST_ROWS = 500
_STANDINGS = {"verified": "good", "unverified": "calm", "suspect": "bad", "unmarked": "calm"}
_ENDINGS = {"running": "busy", "finished": "good", "preempted": "warn", "restart": "warn", "interrupted": "warn"}

Values = Sequence[float | None]


# ---- charts ----


def charts_of(report: RunReport) -> list[Entry]:
    """Makes the charts for which the step log has values, in the order in which one looks at them."""
    if report.series["source"] == "none":
        return []
    kept, discarded, logged = (report.series[key] for key in ("kept", "discarded", "logged"))
    steps, scales = kept["step"], kept["learning_rate_scale"]
    several = max(kept["steps"], default=1)
    highest = f"highest of {several} steps" if several > 1 else ""
    scheduled = [rate / scale if rate and scale else rate for rate, scale in _pairs(kept["learning_rate"], scales)]
    # Before anything is usual, it is a limit so far away that the norm would be a flat line below it.
    bound = [None if usual is None else at for usual, at in _pairs(kept["grad_norm_usual"], kept["grad_norm_bound"])]
    ms = max(_there(kept["seconds"]), default=0) < 1
    found = [
        _chart(
            ("loss", "True loss", ""),
            _line("loss", "measured", steps, kept["loss"]),
            _line(highest, "peak", steps, kept["loss_max"] if highest else ()),
            _undone(discarded, "loss"),
            _logged("evaluation", "second", logged.get("eval_loss")),
        ),
        _chart(
            ("grad_norm", "Gradient norm, before clipping", ""),
            _line("gradient norm", "measured", steps, kept["grad_norm"]),
            _line(highest, "peak", steps, kept["grad_norm_max"] if highest else ()),
            _undone(discarded, "grad_norm"),
            _line("usual", "usual", steps, kept["grad_norm_usual"]),
            _line("looked into above", "second", steps, bound),
        ),
        _chart(("reward", "Reward", ""), _logged("reward", "measured", logged.get("reward"))),
        _chart(
            ("learning_rate", "Learning rate", ""),
            _line("in force", "measured", steps, kept["learning_rate"]),
            _line("of the schedule", "second", steps, scheduled if {*_there(scales)} - {1.0} else ()),
        ),
        _memory_chart(kept, report.series["memory_total"]),
        _chart(
            ("seconds", "Time of a step", "ms" if ms else "s"),
            _line("step time", "measured", steps, kept["seconds"], 1000.0 if ms else 1.0),
            _line("forward, backward, update", "usual", steps, kept["busy"], 1000.0 if ms else 1.0),
        ),
    ]
    return [chart for chart in found if chart is not None]


def _memory_chart(kept: Entry, total: float | None) -> Entry | None:
    steps, device = kept["step"], bool(_there(kept["memory"]))
    largest = max(_there([*kept["memory_peak"], *kept["memory"], *kept["host_memory"]]), default=0)
    unit, per_byte = ("GB", 1e-9) if largest >= 1e9 else ("MB", 1e-6)
    return _chart(
        ("memory", "Memory", unit),
        _line("accelerator", "measured", steps, kept["memory"], per_byte),
        _line("its peak so far", "peak", steps, kept["memory_peak"], per_byte),
        _line("process, on the host", "usual" if device else "measured", steps, kept["host_memory"], per_byte),
        _line("accelerator has", "second", steps, [total] * len(steps) if device else (), per_byte),
    )


def _chart(about: tuple[str, str, str], *lines: Entry) -> Entry | None:
    """One chart, about its first line; `about` is name, title and unit. `None` if there is nothing to see."""
    drawn = [line for line in lines if _there(line["values"])]
    if not drawn:
        return None
    name, title, unit = about
    everything = [value for line in drawn for value in _there(line["values"])]
    logarithmic = min(everything) > 0 and max(everything) > _FLAT * median(_there(drawn[0]["values"]))
    return {
        "name": name,
        "title": title,
        "unit": unit,
        "lines": drawn,
        "summary": _summary(name, unit, drawn[0]),
        "logarithmic": logarithmic,
        "from_zero": name not in ("loss", "reward") and not logarithmic,
    }


def _line(label: str, kind: str, steps: Sequence[int], values: Values, times: float = 1.0) -> Entry:
    """One line of a chart; its kind says how it is drawn (page.js)."""
    return {"label": label, "kind": kind, "steps": steps, "values": [_short(value, times) for value in values]}


def _short(value: float | None, times: float) -> float | None:
    """With six digits, which is more than a screen shows, and less than half of the bytes."""
    if value is None or not abs(value * times) < _HIGHEST:
        return None
    short = float(f"{value * times:.6g}")
    return int(short) if short == int(short) else short


def _undone(discarded: Sequence[Entry], column: str) -> Entry:
    """Steps that are not in the weights; of several stretches over each other the newest."""
    values: dict[int, float | None] = {}
    for stretch in discarded:
        values.update(_pairs(stretch["step"], stretch[column]))
        # A gap, or the line would run on to the next stretch.
        values.setdefault(stretch["step"][-1] + stretch["steps"][-1], None)
    return _by_step("not in the weights", "undone", values)


def _logged(label: str, kind: str, metric: Entry | None) -> Entry:
    # Logged after the step that incidents count as not yet finished; of a step that is logged twice the last counts.
    pairs = () if metric is None else _pairs(metric["step"], metric["value"])
    values = {max(step - 1, 0): value for step, value in pairs}
    # However long the run was: as many points as there are of its steps, the newest among them.
    every = len(values) // ROWS + 1
    return _by_step(f"{label}, one log in {every}" if every > 1 else label, kind, dict([*values.items()][::-every]))


def _by_step(label: str, kind: str, values: Mapping[int, float | None]) -> Entry:
    steps = sorted(values)
    return _line(label, kind, steps, [values[step] for step in steps])


def _pairs(first: Iterable[Any], second: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(first, second, strict=True)


def _there(values: Values) -> list[float]:
    return [value for value in values if value is not None]


def _summary(name: str, unit: str, line: Entry) -> str:
    points = [(value, step) for step, value in _pairs(line["steps"], line["values"]) if value is not None]
    (low, low_at), (high, high_at) = min(points), max(points, key=lambda point: float(point[0]))
    if name == "seconds":
        per_second = 1000 if unit == "ms" else 1
        usual = short_duration(median(value for value, _ in points) / per_second)
        return f"usually {usual}, longest {short_duration(high / per_second)} at step {high_at}"
    unit = f" {unit}" if unit else ""
    text = f"{digits(points[0][0])} → {digits(points[-1][0])}{unit}"
    if name == "loss":
        return f"{text}, lowest {digits(low)} at step {low_at}"
    return f"{text}, highest {digits(high)}{unit} at step {high_at}"


# ---- tables ----


def tables_of(report: RunReport, anchors: Mapping[str, str]) -> list[Entry]:
    """Makes the tables; `anchors` says where the story of each incident is on the page."""
    found = [_budgets(report), _quarantine(report, anchors), _checkpoints(report, anchors), _attempts(report)]
    found += [_ranks(report)] if len(report.ranks) > 1 else []
    return [table for table in found if table["rows"] or table["none"]]


def _table(name: str, title: str, lead: str, columns: str, rows: Sequence[Sequence[Any]], none: str = "") -> Entry:
    """One table, without columns that are empty."""
    heads = [{"title": head.removeprefix("#"), "numeric": head.startswith("#")} for head in columns.split(" | ")]
    cells = [[value if isinstance(value, dict) else _cell(value) for value in row] for row in rows]
    shown = [at for at in range(len(heads)) if any(row[at]["text"] for row in cells)]
    more = len(cells) - _MOST_ROWS
    return {
        "name": name,
        "title": title,
        "lead": lead,
        "columns": [heads[at] for at in shown],
        "rows": [[row[at] for at in shown] for row in cells[:_MOST_ROWS]],
        "none": none,
        "left_out": f"And {more} more." if more > 0 else "",
    }


def _cell(value: Any, tone: str = "", code: bool = False, anchor: str = "") -> Entry:
    text = digits(value) if isinstance(value, int | float) else value or ""
    return {"text": text, "anchor": anchor, "tone": tone, "code": code}


def _code(value: Any) -> Entry:
    return _cell(value, code=True)


def _when(at: float | None) -> str:
    return "" if at is None else moment(at)


def _incident_cell(name: str | None, anchors: Mapping[str, str]) -> Entry:
    anchor = anchors.get(name or "", "")
    return _cell(f"incident {anchor.rpartition('-')[2]}" if anchor else name, anchor=anchor)


def _budgets(report: RunReport) -> Entry:
    rows = []
    for each in report.budgets:
        used = _cell(each.used, "warn" if each.limit and each.left == 0 else "")
        rows.append((each.name, used, each.limit, each.told, _code(each.setting)))
    lead = "How often something may still happen before the run ends."
    return _table("budgets", "Budgets", lead, "budget | #used | #of | what is counted | setting", rows)


def _quarantine(report: RunReport, anchors: Mapping[str, str]) -> Entry:
    rows = []
    for row in report.quarantine:
        # Not its text: a page is passed on more easily than the file it would come from.
        name = _code((row["content_hash"] or "")[:12])
        rows.append((row["name"], row["why"], row["step"], name, _incident_cell(row["incident"], anchors)))
    lead = (
        "Rows and samples that are left out of training. Their text is in quarantine.jsonl, as far as it may be kept"
    )
    columns = "row | why | #step | SHA-256 | incident"
    return _table("quarantine", "Quarantine", f"{lead}.", columns, rows, "No row and no sample was left out.")


def _checkpoints(report: RunReport, anchors: Mapping[str, str]) -> Entry:
    rows = [
        (
            _code(each.path),
            each.step,
            _cell(standing, _STANDINGS.get(each.standing, "calm")),
            _remarks_on(each),
            "" if each.bytes is None else size(each.bytes),
            _when(each.time),
            _incident_cell(each.incident, anchors),
        )
        for each, standing in report.listed()
    ]
    lead = "Newest first, as their markers say; verified means that healthy steps followed."
    columns = "checkpoint | #step | standing | remarks | #size | written | incident"
    return _table("checkpoints", "Checkpoints", lead, columns, rows, "There is no checkpoint on disk.")


def _remarks_on(checkpoint: Checkpoint) -> str:
    remarks = {
        "not complete": not checkpoint.complete,
        "not finite": checkpoint.finite is False,
        "emergency": checkpoint.emergency,
        "kept as last known good": checkpoint.pinned,
        "of another run": not checkpoint.of_this_run,
    }
    return ", ".join(remark for remark, holds in remarks.items() if holds)


def _attempts(report: RunReport) -> Entry:
    rows = []
    for each in report.attempts:
        began, ended = each["began"], each["ended"]
        lasted = "" if began is None or ended is None else short_duration(max(ended - began, 0))
        ending = _cell(spoken(each["ending"]), _ENDINGS.get(each["ending"], "bad"))
        steps = f"{each['first_step']} to {each['last_step']}"
        process = "" if each["pid"] is None else f"process {each['pid']}"
        where = " on ".join(part for part in (process, each["host"]) if part)
        went_on = _code(each["resumed_from"])
        rows.append((each["number"], ending, steps, _when(began), lasted, each["why"], went_on, where))
    columns = "#process | ending | #steps | began | #lasted | why it ended | went on from | where"
    lead, none = "What each process did, and how it ended.", "The processes of this run are not known."
    return _table("restarts", "Processes and restarts", lead, columns, rows, none)


def _ranks(report: RunReport) -> Entry:
    rows = []
    for rank in report.ranks:
        error = _cell(plain(rank["error"]) if rank["error"] else "", "bad" if rank["error"] else "")
        rows.append(
            (rank["rank"], rank["step"], _when(rank["seen"]), rank["incidents"], error, _code(rank["journal"]))
        )
    columns = "#rank | #step | last seen | #incidents | what ended it | journal"
    return _table("ranks", "Ranks", "What each process of the distributed job has logged.", columns, rows)
