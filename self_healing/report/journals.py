"""Finds the journals of a run directory, and reads the events in them: of all runs, processes and ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..failures.recipes import FailureType
from ..journal.incident import Incident, counted
from ..run.status import RunState, RunStatus, looked_up, read_status
from ..system.files import EVENTS_FILE, parse_lines, rank_in


# That of the events which are read here; a journal of another one is read as far as it is alike, and named.
SCHEMA_VERSION = 1

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Journals:
    """The events in a run directory, by time; the path is that of the first rank's journal."""

    path: Path
    # What has become of the newest run into the `output_dir`.
    status: RunStatus | None
    events: list[Event]
    ranks: dict[int, Path]
    # What of them cannot be read, in words.
    damage: str

    @property
    def runs(self) -> list[str]:
        """Names of the runs, oldest first."""
        return list(dict.fromkeys(event["run"] for event in self.events))

    @property
    def newest(self) -> str | None:
        """The run that the status speaks of, else the one that began last."""
        runs = self.runs
        if self.status is not None and (self.status.run in runs or not runs):
            return self.status.run
        started = [event["run"] for event in self.events if event["kind"] == "run_started"]
        return (started or runs or [None])[-1]

    def of_run(self, run: str) -> list[Event]:
        return [event for event in self.events if event["run"] == run]


def read_journals(place: str | Path) -> Journals:
    """
    Reads the journals of all ranks in an `output_dir` or `healing_dir`, or the one of a later rank that is named.
    """
    path, status = _find_journal(Path(place))
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no {EVENTS_FILE} in {place}: it is written when train() of a healed run begins. Please name "
            "the output_dir (or healing_dir) of one that has begun."
        )
    events, torn = _read_events(path)
    ranks = {rank_in(path): path}
    if 0 in ranks:
        for other in sorted(path.parent.glob("healing_events.rank[0-9]*.jsonl")):
            ranks[rank_in(other)] = other
            with suppress(OSError, ValueError):
                more, torn_there = _read_events(other)
                events, torn = events + more, torn + torn_there
    if len(ranks) > 1:
        events.sort(key=lambda event: event.get("time", 0.0))
    return Journals(path, status, events, ranks, _damage(events, torn))


def _find_journal(place: Path) -> tuple[Path, RunStatus | None]:
    """The journal of the newest run into an `output_dir` may lie elsewhere: its status says where."""
    if not place.is_dir():
        return place, None
    status = read_status(place)
    if status is not None and os.path.isfile(told := place / status.journal):
        # Not by its spelling: `..` of a directory that is a link leads elsewhere.
        return (told.resolve() if ".." in told.parts else told), status
    return place / EVENTS_FILE, status


def _read_events(path: Path) -> tuple[list[Event], int]:
    """Reads one journal, and counts the lines that are no events."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines, torn = parse_lines(text)
    events = [line for line in lines if line.keys() >= {"run", "step", "kind"}]
    if not events and (text.strip() or not path.name.startswith(Path(EVENTS_FILE).stem)):
        raise ValueError(
            f"{path} is no journal: not one of its lines is an event. Please name the output_dir (or healing_dir) "
            f"of a healed run, or its {EVENTS_FILE}."
        )
    return events, torn + len(lines) - len(events)


def _damage(events: Sequence[Event], torn: int) -> str:
    told = []
    if torn:
        told.append(
            f"{counted(torn, 'line')} of the journal cannot be read, probably because a process was killed while it "
            f"wrote {'it' if torn == 1 else 'them'}. This report is made of the others."
        )
    if others := {event.get("schema", SCHEMA_VERSION) for event in events} - {SCHEMA_VERSION}:
        told.append(
            f"The journal is of another version of self_healing (schema {', '.join(map(str, others))}, where "
            f"{SCHEMA_VERSION} is known): this report may be wrong."
        )
    return " ".join(told)


# ---- incidents ----


def told_once(events: Iterable[Event]) -> list[tuple[list[str], list[Event]]]:
    """Finds the incidents, each by the first rank that has seen it: its ids, that rank's first, and its events."""
    of_one: dict[str, list[Event]] = {}
    for event in events:
        if "incident" in event:
            of_one.setdefault(event["incident"], []).append(event)
    seen_as: dict[tuple[Any, ...], list[str]] = {}
    for name, lines in of_one.items():
        seen_as.setdefault(_seen(lines), []).append(name)
    found = []
    for name, lines in of_one.items():
        names = seen_as[_seen(lines)]
        first = min(_rank(of_one[each]) for each in names)
        if _rank(lines) == first:
            found.append(([name, *(each for each in names if _rank(of_one[each]) != first)], lines))
    return found


def _rank(lines: Sequence[Event]) -> int:
    return int(lines[0].get("rank", 0))


def _seen(lines: Sequence[Event]) -> tuple[Any, ...]:
    """What is the same of an event that several ranks have seen."""
    diagnosed: Event = next((event for event in reversed(lines) if event["kind"] == "diagnosed"), {})
    first = lines[0]
    about = (first["run"], first.get("attempt", 0), first["step"], first.get("symptom"))
    return (*about, diagnosed.get("failure"), diagnosed.get("cause"))


def incident_of(lines: Sequence[Event]) -> Incident:
    """Puts an incident together again from its events."""
    first = lines[0]
    incident = Incident(first["incident"], first["step"], first.get("symptom", "?"))
    for event in lines:
        if event["kind"] == "action" and event.get("happened", True):
            incident.actions.append(event.get("action", "?"))
        for key in ("cause", "outcome", "steps_lost", "steps_repeated", "seconds_lost"):
            if key in event:
                setattr(incident, key, event[key])
        if "failure" in event:
            incident.failure = failure_in(event)
        incident.evidence.update(event.get("evidence", {}))
    return incident


def failure_in(event: Event) -> FailureType | None:
    """The failure that an event names; `None` also for one that only a later version knows."""
    with suppress(ValueError):
        return FailureType(event.get("failure", ""))
    return None


# ---- what has become of a run ----


def status_in(events: Sequence[Event], run: str | None = None) -> RunStatus | None:
    """Reads what has become of a run, the newest if none is named; `None` if it never began."""
    began = [event for event in events if event["kind"] == "run_started" and run in (None, event["run"])]
    if not began:
        return None
    started = began[-1]
    status = read_status(Path(started["output_dir"])) if "output_dir" in started else None
    if status is not None and status.run == started["run"]:
        return status
    own = [event for event in events if event["run"] == started["run"]]
    last = own[-1]
    ended = {"run_ended": RunState.ENDED, "postmortem": RunState.STOPPED}
    newest = next(event for event in reversed(own) if event["kind"] in {*ended, "run_started"})
    found = RunStatus(
        started["run"],
        "",
        started.get("max_steps", 0),
        started.get("pid", 0),
        started.get("host", "a machine that is not known"),
        started.get("time", 0.0),
        ended.get(newest["kind"], RunState.UNKNOWN),
        last["step"],
        last.get("time", 0.0),
        newest.get("verdict", ""),
        started.get("process_began", 0.0),
    )
    # As of one that the status spoke of until another run began.
    known = found.state is not RunState.UNKNOWN or found.pid == 0
    return found if known else replace(found, state=looked_up(found))
