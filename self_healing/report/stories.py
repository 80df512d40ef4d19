"""Tells incidents from their events: what was seen, what was tried, the cause, the remedy, what came of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..failures.recipes import FAILURE_RECIPES, FailureType
from ..journal.incident import BECAME, Incident, counted, describe, figures, headline
from .journals import Event, incident_of, told_once
from .records import Entry, IncidentStory, capital, plain, spoken


# What every line of a journal has, and what is told in other words.
_COMMON = frozenset({"schema", "time", "run", "rank", "attempt", "step", "kind", "incident"})
# Files of an incident, by the key that names them in evidence or in an action.
_FILES = {
    "stacks": "stacks of all threads",
    "path": "stacks of all threads",
    "batch": "offending batch",
    "offending_batch": "offending batch",
    "checkpoint": "checkpoint",
}
# Events that are worth a word though nothing had to be done, by their kind.
_NOTICED = {
    "healing_off": "healing is off",
    "snapshots_off": "there is no host memory for snapshots",
    "snapshot_refused": "a snapshot was not trusted",
    "checkpoint_passed_over": "a checkpoint was passed over",
    "best_model_passed_over": "the best model could not be loaded",
    "kept_checkpoints_gave_way": "kept checkpoints were removed to make room",
    "preemption_deadline": "the process was ended before it could save",
}
_LISTED = 5


# Names a file that a journal speaks of, by what it is and its path; `None` if it is gone.
Naming = Callable[[str, str | Path], Entry | None]


def tell_incidents(events: Iterable[Event], naming: Naming, rows: Sequence[Entry] = ()) -> list[IncidentStory]:
    """Tells the incidents of one run, in the order in which they were seen; `rows` is its quarantine."""
    stories = [_tell(names, lines, naming, rows) for names, lines in told_once(events)]
    return sorted(stories, key=lambda story: (story.time or 0.0, story.id))


def _tell(names: Sequence[str], lines: Sequence[Event], naming: Naming, rows: Sequence[Entry]) -> IncidentStory:
    first, incident = lines[0], incident_of(lines)
    recipe = None if incident.failure is None else FAILURE_RECIPES[incident.failure]
    symptom = spoken(incident.symptom.removeprefix("rule:"))
    unhealed = incident.outcome in ("unresolved", "fatal", "reported", "open")
    known: dict[str, Any] = {each.name: getattr(incident, each.name) for each in fields(incident)}
    known["severity"] = "error" if incident.outcome == "fatal" else incident.shown_severity
    return IncidentStory(
        **known,
        title=symptom if incident.cause in ("unknown", symptom) else f"{symptom}: {incident.cause}",
        line=headline(incident),
        text=describe(incident),
        diagnosis=str(incident.evidence.get("diagnosis") or ("" if recipe is None else recipe.diagnosis)),
        advice=str(incident.evidence.get("remedy") or (recipe.advice if recipe is not None and unhealed else "")),
        time=first.get("time"),
        closed=next((event.get("time") for event in reversed(lines) if event["kind"] == "outcome"), None),
        rank=first.get("rank", 0),
        attempt=first.get("attempt", 0),
        story=[line for event in lines for line in _lines_of(event)],
        rows=[row for row in rows if _is_of(row, names, incident)],
        files=_files_of(lines, naming),
    )


def _is_of(row: Entry, names: Sequence[str], incident: Incident) -> bool:
    if row["incident"] is not None or row["kind"] != "sample":
        return row["incident"] in names
    place = ("dataset_index", "shard", "stream_ordinal")
    wanted = [row["details"].get(key) for key in place]
    return any([each.get(key) for key in place] == wanted for each in incident.evidence.get("samples", ()))


def _files_of(lines: Sequence[Event], naming: Naming) -> list[Entry]:
    told = [item for event in lines for item in (*event.items(), *event.get("evidence", {}).items())]
    told.append(("batch", os.path.join("incidents", f"{lines[0]['incident']}.pt")))
    found: dict[str, Entry] = {}
    for key, value in told:
        if key in _FILES and isinstance(value, str) and (named := naming(_FILES[key], value)) is not None:
            found.setdefault(named["path"], named)
    return list(found.values())


# ---- the story ----


def _lines_of(event: Event) -> Iterable[Entry]:
    kind, evidence = event["kind"], event.get("evidence", {})
    if kind == "detected":
        shown = figures(evidence) or _scalars(evidence)
        seen = spoken(event.get("symptom", "?"))
        yield _line(event, "evidence", f"Step {event['step']}: {seen}{f' ({shown})' if shown else ''}.")
    elif kind == "diagnosed":
        for text in _experiments(evidence):
            yield _line(event, "experiment", text) | {"details": {}}
        diagnosis = FAILURE_RECIPES[FailureType(event["failure"])].diagnosis
        yield _line(event, "cause", f"{capital(event['cause'])}: {diagnosis}")
    elif kind == "action":
        yield _line(event, "remedy", _remedy(event))
    elif kind == "repeats":
        yield _line(event, "experiment", f"A step that is computed again repeats: {event.get('repeats')}.")
    elif kind == "taken_up":
        where = event.get("checkpoint") or "the beginning"
        yield _line(event, "remedy", f"The next process goes on from {where} (step {event['step']}).")
    elif kind == "outcome":
        yield _line(event, "outcome", _outcome(event))


def _line(event: Event, part: str, text: str) -> Entry:
    details = {key: value for key, value in event.items() if key not in _COMMON}
    happened = event.get("happened", True)
    return {"part": part, "text": text, "time": event.get("time"), "happened": happened, "details": details}


def _experiments(evidence: Mapping[str, Any]) -> Iterable[str]:
    if "reexecutions" in evidence:
        yield f"Computed again from the same random state, {counted(evidence['reexecutions'], 'time')}."
    if isinstance(evidence.get("again"), Mapping):
        yield f"Computed again: {_scalars(evidence['again'])}."
    if "poison_rows" in evidence:
        of = evidence.get("rows_in_step", "?")
        yield f"Bisected to the rows: {evidence['poison_rows']} of {of} fail by themselves."
    if tensors := evidence.get("tensors"):
        total = evidence.get("tensors_total", len(tensors))
        shown = ", ".join(map(str, tensors[:_LISTED])) + (", ..." if total > _LISTED else "")
        hold = f"{counted(total, 'tensor')} {'holds' if total == 1 else 'hold'}"
        yield f"Searched for NaN and Inf: {hold} some ({shown})."
    if evidence.get("ranks") and isinstance(evidence["ranks"], list):
        yield f"Found on rank {', '.join(map(str, evidence['ranks'][:_LISTED]))}."
    if "same_batch" in evidence:
        yield f"The same batch with trusted weights: {plain(evidence['same_batch'])}."
    if evidence.get("diagnosis"):
        yield f"{capital(str(evidence['diagnosis']).removesuffix('.'))}."


def _remedy(event: Event) -> str:
    name, why = capital(spoken(event.get("action", "?"))), event.get("why")
    if not event.get("happened", True):
        return f"{name}: did not succeed{f' ({why})' if why else ''}."
    left_out = _COMMON | {"action", "happened", "why", "rows", "by"}
    shown = _scalars({key: value for key, value in event.items() if key not in left_out})
    return f"{name}{f' ({shown})' if shown else ''}."


def _outcome(event: Event) -> str:
    parts = []
    # One that is not finite is written as a text.
    if isinstance(after := event.get("loss_after"), float):
        trend = (event.get("trend") or {}).get("median")
        usual = "" if trend is None else f", {trend:.4g} was usual before"
        parts.append(f"loss {after:.4g} in the steps that followed{usual}")
    for key, what in (("steps_lost", "lost"), ("steps_repeated", "done again")):
        if event.get(key):
            parts.append(f"{counted(event[key], 'step')} {what}")
    parts.append(f"{event.get('seconds_lost', 0.0):.1f} s")
    return f"{capital(BECAME[event['outcome']])} ({'; '.join(parts)})."


def _scalars(values: Mapping[str, Any]) -> str:
    """The numbers and short texts among some values, in a line."""
    return ", ".join(
        f"{spoken(key)} {plain(value)}"
        for key, value in values.items()
        if value is not None and not isinstance(value, Mapping | list) and len(str(value)) <= 120
    )


# ---- what needed no action ----


def tell_notices(events: Iterable[Event]) -> list[Entry]:
    """Tells what is worth knowing though it needed no action: a high loss, a checkpoint passed over."""
    return [_notice(event) for event in events if event["kind"] == "noticed" or event["kind"] in _NOTICED]


def _notice(event: Event) -> Entry:
    name = event.get("symptom", "?") if event["kind"] == "noticed" else event["kind"]
    told = {**event, **event.get("evidence", {})}
    shown = [str(told[key]) for key in ("path", "reason", "why", "service") if told.get(key)]
    if isinstance(value := told.get("value"), int | float):
        shown.append(f"{value:.4g}")
    return {
        "step": event["step"],
        "name": name,
        "text": _NOTICED.get(name, spoken(name)) + (f" ({', '.join(shown)})" if shown else ""),
        "time": event.get("time"),
        "rank": event.get("rank", 0),
    }
