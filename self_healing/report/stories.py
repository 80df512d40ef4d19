"""Tells incidents from their events: what was seen, what was tried, the cause, the remedy, what came of it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint_files import EMERGENCY_DIR, PINNED_DIR, number_of
from ..failures import FAILURE_RECIPES, Action, FailureType
from ..journal.incident import Incident, describe, figures
from .journals import Event, number, told_once
from .records import FileNamed, IncidentStory, RowNamed, StoryLine
from .words import counted


# What every line of a journal has, and what is told in other words.
_COMMON = frozenset({"schema", "time", "run", "rank", "attempt", "step", "kind", "incident"})
# What an incident says by itself, in the keys of its events.
_FIELDS = ("failure", "cause", "outcome", "steps_lost", "steps_repeated", "seconds_lost")
_OUTCOMES = {
    "open": "the outcome is not known yet",
    "resolved": "resolved",
    "self_recovered": "it passed by itself",
    "unresolved": "not resolved",
    "reported": "no action was taken",
    "fatal": "it ended this process's part in the run",
}
# Files of an incident, by the key that names them in evidence or in an action.
_FILES = {
    "stacks": "stacks of all threads",
    "path": "stacks of all threads",
    "batch": "offending batch",
    "offending_batch": "offending batch",
    "memory_snapshot": "memory snapshot",
    "checkpoint": "checkpoint",
}
_LISTED = 5


class Places:
    """
    Finds the files that a journal names, also where the run directory was moved or copied since.

    Args:
        directory (`Path`), output_dir (`Path`):
            Where journal and checkpoints lie now.
        recorded (`Sequence[str]`):
            Directories they were in when the journal was written.
    """

    def __init__(self, directory: Path, output_dir: Path, recorded: Sequence[str] = ()) -> None:
        self.directory = directory
        self.output_dir = output_dir
        self._recorded = [Path(each) for each in recorded]

    def named(self, what: str, path: str | Path) -> FileNamed:
        """Names a file, relative to the journal where it lies below it."""
        found = self.find(Path(path))
        shown = found.relative_to(self.directory) if found.is_relative_to(self.directory) else found
        try:
            size = os.path.getsize(found) if os.path.isfile(found) else None
        except OSError:
            size = None
        return FileNamed(what, str(shown), size)

    def find(self, path: Path) -> Path:
        """Where a file is now."""
        if not path.is_absolute():
            beside = self.directory / path
            return beside if os.path.exists(beside) else self._checkpoint(path) or beside
        # `Path.exists` raises for a name that is too long to be one.
        if os.path.exists(path):
            return path
        for recorded in self._recorded:
            for now in (self.output_dir, self.directory):
                if path.is_relative_to(recorded) and os.path.exists(moved := now / path.relative_to(recorded)):
                    return moved
        return self._checkpoint(path) or path

    def _checkpoint(self, path: Path) -> Path | None:
        """Where a checkpoint is now: at the end of a run, an emergency one is put among the regular ones."""
        if number_of(path) is None:
            return None
        found = [self.output_dir / path.name]
        if path.parent.name in (EMERGENCY_DIR, PINNED_DIR):
            found.insert(0, self.output_dir / path.parent.name / path.name)
        return next((each for each in found if os.path.exists(each)), None)


def tell_incidents(events: Iterable[Event], places: Places, rows: Sequence[RowNamed] = ()) -> list[IncidentStory]:
    """
    Tells the incidents of one run, in the order in which they were seen.

    Args:
        events (`Iterable[dict]`):
            Of all its ranks, by time.
        places ([`Places`]):
            Where the files are.
        rows (`Sequence[RowNamed]`, *optional*):
            The quarantine of the run.
    """
    stories = [_tell(each.shown, each.names, each.lines, places, rows) for each in told_once(events)]
    return sorted(stories, key=lambda story: (story.time or 0.0, story.id))


def _tell(
    shown: str, names: Sequence[tuple[str, int]], lines: Sequence[Event], places: Places, rows: Sequence[RowNamed]
) -> IncidentStory:
    first = lines[0]
    incident = Incident(shown, first["step"], first.get("symptom", "?"))
    for event in lines:
        if event["kind"] == "action" and event.get("happened", True):
            incident.actions.append(event.get("action", "?"))
        for key in _FIELDS:
            if key in event:
                setattr(incident, key, event[key])
        incident.evidence.update(event.get("evidence", {}))
    incident.failure = _failure(incident.failure)
    recipe = None if incident.failure is None else FAILURE_RECIPES[incident.failure]
    healed = Action.ROLL_BACK in incident.actions and Action.STOP not in incident.actions
    severity = "warning" if recipe is None or healed else recipe.severity
    of_it = [row for row in rows if _is_of(row, names, incident)]
    symptom = incident.symptom.removeprefix("rule:").replace("_", " ")
    plain = incident.cause in ("unknown", symptom)
    unhealed = incident.outcome in ("unresolved", "fatal", "reported", "open")
    return IncidentStory(
        id=shown,
        step=incident.step,
        symptom=incident.symptom,
        failure=None if incident.failure is None else incident.failure.value,
        cause=incident.cause,
        severity="error" if incident.outcome == "fatal" else severity,
        outcome=incident.outcome,
        actions=incident.actions,
        steps_lost=incident.steps_lost,
        steps_repeated=incident.steps_repeated,
        seconds_lost=incident.seconds_lost,
        title=symptom if plain else f"{symptom}: {incident.cause}",
        text=describe(incident),
        diagnosis=str(incident.evidence.get("diagnosis") or ("" if recipe is None else recipe.diagnosis)),
        advice=str(incident.evidence.get("remedy") or (recipe.advice if recipe is not None and unhealed else "")),
        time=first.get("time"),
        closed=next((event.get("time") for event in reversed(lines) if event["kind"] == "outcome"), None),
        rank=first.get("rank", 0),
        attempt=first.get("attempt", 0),
        evidence=incident.evidence,
        story=[line for event in lines for line in _lines_of(event)],
        rows=of_it,
        files=_files_of(names[0][0], lines, places),
    )


def _failure(name: str | None) -> FailureType | None:
    try:
        return None if name is None else FailureType(name)
    except ValueError:
        # Of a later version.
        return None


def _is_of(row: RowNamed, names: Sequence[tuple[str, int]], incident: Incident) -> bool:
    if row.incident is not None:
        # In files of an earlier version, ids say nothing of the rank.
        return any(row.incident == name and row.details.get("rank", rank) == rank for name, rank in names)
    samples = incident.evidence.get("samples")
    if row.kind != "sample" or not isinstance(samples, list):
        return False
    place = ("dataset_index", "shard", "stream_ordinal")
    wanted = [row.details.get(key) for key in place]
    return any(isinstance(each, Mapping) and [each.get(key) for key in place] == wanted for each in samples)


# ---- the story ----


def _lines_of(event: Event) -> Iterable[StoryLine]:
    time, kind = event.get("time"), event["kind"]
    details = {key: value for key, value in event.items() if key not in _COMMON}
    evidence = event.get("evidence", {})
    if kind == "detected":
        seen = event.get("symptom", "?").replace("_", " ")
        shown = figures(evidence) or _scalars(evidence)
        yield StoryLine(
            "evidence", f"Step {event['step']}: {seen}{f' ({shown})' if shown else ''}.", time, True, details
        )
    elif kind == "diagnosed":
        for text in _experiments(evidence):
            yield StoryLine("experiment", text, time)
        failure = _failure(event.get("failure"))
        meaning = "" if failure is None else f": {FAILURE_RECIPES[failure].diagnosis}"
        yield StoryLine("cause", f"{_capital(event.get('cause', 'unknown'))}{meaning}", time, True, details)
    elif kind == "action":
        yield _remedy(event, time, details)
    elif kind == "repeats":
        yield StoryLine(
            "experiment", f"A step that is computed again repeats: {event.get('repeats')}.", time, True, details
        )
    elif kind == "taken_up":
        where = event.get("checkpoint") or "the beginning"
        yield StoryLine(
            "remedy", f"The next process goes on from {where} (step {event['step']}).", time, True, details
        )
    elif kind == "outcome":
        yield StoryLine("outcome", _outcome(event), time, True, details)


def _experiments(evidence: Mapping[str, Any]) -> Iterable[str]:
    if "reexecutions" in evidence:
        times = evidence["reexecutions"]
        yield f"Computed again from the same random state, {times} time{'' if times == 1 else 's'}."
    if isinstance(evidence.get("again"), Mapping):
        yield f"Computed again: {_scalars(evidence['again'])}."
    if "poison_rows" in evidence:
        yield (
            f"Bisected to the rows: {evidence['poison_rows']} of {evidence.get('rows_in_step', '?')} are not finite "
            "by themselves."
        )
    tensors = evidence.get("tensors")
    if tensors:
        total = evidence.get("tensors_total", len(tensors))
        hold = "1 tensor holds" if total == 1 else f"{total} tensors hold"
        shown = ", ".join(map(str, tensors[:_LISTED]))
        yield f"Searched for NaN and Inf: {hold} some ({shown}{', ...' if total > _LISTED else ''})."
    if isinstance(evidence.get("ranks"), list) and evidence["ranks"]:
        yield f"Found on rank {', '.join(map(str, evidence['ranks'][:_LISTED]))}."
    if "same_batch" in evidence:
        same = evidence["same_batch"]
        yield f"The same batch with trusted weights: {_scalars(same) if isinstance(same, Mapping) else _shown(same)}."
    if evidence.get("diagnosis"):
        yield f"{_capital(str(evidence['diagnosis']).removesuffix('.'))}."


def _remedy(event: Event, time: float | None, details: dict[str, Any]) -> StoryLine:
    happened = event.get("happened", True)
    name = event.get("action", "?").replace("_", " ")
    known = {key: value for key, value in details.items() if key not in ("action", "happened", "why", "rows", "by")}
    shown = _scalars(known)
    text = f"{_capital(name)}{f' ({shown})' if shown else ''}."
    if not happened:
        why = event.get("why")
        text = f"{_capital(name)}: tried in vain{f' ({why})' if why else ''}."
    return StoryLine("remedy", text, time, happened, details)


def _outcome(event: Event) -> str:
    parts = []
    if (after := number(event.get("loss_after"))) is not None and math.isfinite(after):
        trend = number(_mapping(event.get("trend")).get("median"))
        usual = "" if trend is None else f", {trend:.4g} was usual before"
        parts.append(f"loss {after:.4g} in the steps that followed{usual}")
    for key, what in (("steps_lost", "lost"), ("steps_repeated", "done again")):
        if event.get(key):
            parts.append(f"{counted(event[key], 'step')} {what}")
    parts.append(f"{event.get('seconds_lost', 0.0):.1f} s")
    outcome = event.get("outcome") or "open"
    return f"{_capital(_OUTCOMES.get(outcome, outcome))} ({'; '.join(parts)})."


def _files_of(name: str, lines: Sequence[Event], places: Places) -> list[FileNamed]:
    found: dict[str, FileNamed] = {}
    for event in lines:
        for key, value in (*event.items(), *event.get("evidence", {}).items()):
            if key in _FILES and isinstance(value, str):
                named = places.named(_FILES[key], value)
                if os.path.exists(places.directory / named.path):
                    found.setdefault(named.path, named)
    batch = places.directory / "incidents" / f"{name}.pt"
    if os.path.isfile(batch):
        found.setdefault(str(batch), places.named("offending batch", batch))
    return list(found.values())


# ---- words ----


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _scalars(values: Mapping[str, Any]) -> str:
    """The numbers and short texts among some values, in a line."""
    shown = [
        f"{key.replace('_', ' ')} {_shown(value)}"
        for key, value in values.items()
        if value is not None and not isinstance(value, Mapping | list) and len(str(value)) <= 120
    ]
    return ", ".join(shown)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
