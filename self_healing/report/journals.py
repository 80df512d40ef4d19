"""Finds the journals of a run directory, and reads the events in them: of all runs, processes and ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..failures.recipes import FailureType
from ..journal.incident import Incident, counted
from ..run.status import RunState, RunStatus, read_status
from ..system.files import EVENTS_FILE, POSTMORTEM_FILE, of_rank, parse_lines, rank_in


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
                events += more
                torn += torn_there
    if len(ranks) > 1:
        events.sort(key=lambda event: event.get("time", 0.0))
    damage = ""
    if torn:
        damage = (
            f"{counted(torn, 'line')} of the journal cannot be read, probably because a process was killed while it "
            f"wrote {'it' if torn == 1 else 'them'}. This report is made of the others."
        )
    return Journals(path, status, events, ranks, damage)


def _find_journal(place: Path) -> tuple[Path, RunStatus | None]:
    """The journal of the newest run into an `output_dir` may lie elsewhere: its status says where."""
    if not place.is_dir():
        return place, None
    status = read_status(place)
    if status is not None and (told := place / status.journal).is_file():
        return told.resolve(), status
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


# ---- incidents ----


def lines_of_incidents(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Gathers the events of each incident by its id, in the order in which they were seen."""
    found: dict[str, list[Event]] = {}
    for event in events:
        if "incident" in event:
            found.setdefault(event["incident"], []).append(event)
    return found


def told_once(events: Iterable[Event]) -> list[tuple[list[str], list[Event]]]:
    """Finds the incidents, each by the first rank that has seen it: its ids, that rank's first, and its events."""
    seen: dict[tuple[Any, ...], dict[int, list[tuple[str, list[Event]]]]] = {}
    for name, lines in lines_of_incidents(events).items():
        by_rank = seen.setdefault(_seen(lines), {})
        by_rank.setdefault(lines[0].get("rank", 0), []).append((name, lines))
    found = []
    for by_rank in seen.values():
        first, *others = [by_rank[rank] for rank in sorted(by_rank)]
        found += [([name, *(other for each in others for other, _ in each)], lines) for name, lines in first]
    return found


def _seen(lines: Sequence[Event]) -> tuple[Any, ...]:
    """What is the same of an event that several ranks have seen."""
    incident = incident_of(lines)
    about = lines[0]["run"], lines[0].get("attempt", 0), incident.step, incident.symptom
    return (*about, incident.failure, incident.cause)


def incident_of(lines: Sequence[Event]) -> Incident:
    """Puts an incident together again from its events."""
    first = lines[0]
    incident = Incident(first["incident"], first["step"], first.get("symptom", "?"))
    for event in lines:
        if event["kind"] == "action" and event.get("happened", True):
            incident.did(event.get("action", "?"), event)
        for key in ("cause", "outcome", "steps_lost", "steps_repeated", "seconds_lost"):
            if key in event:
                setattr(incident, key, event[key])
        if event.get("failure") is not None:
            incident.failure = FailureType(event["failure"])
        incident.evidence.update(event.get("evidence", {}))
    return incident


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
    ends = {"run_ended": RunState.ENDED, "postmortem": RunState.STOPPED}
    newest = next(event for event in reversed(own) if event["kind"] in {*ends, "run_started"})
    return RunStatus(
        run=started["run"],
        journal="",
        max_steps=started.get("max_steps", 0),
        pid=started.get("pid", 0),
        host=started.get("host", "a machine that is not known"),
        began=started["time"],
        state=ends.get(newest["kind"], RunState.UNKNOWN),
        step=own[-1]["step"],
        since=own[-1]["time"],
        why=newest.get("verdict", ""),
    )


def read_postmortem(directory: Path, run: str, rank: int = 0) -> dict[str, Any] | None:
    """Reads what ended a run, or one rank of it; `None` if there is nothing, or it is of another run."""
    try:
        content = json.loads(of_rank(directory / POSTMORTEM_FILE, rank).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if content.get("run") == run else None
