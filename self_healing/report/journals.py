"""Finds the journals of a run directory, and reads the events in them: of all runs, processes and ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..files import parse_lines
from ..journal.incident import OF_RANK
from ..own_files import EVENTS_FILE
from ..restarts.status import RunState, RunStatus, looked_up, read_status
from .values import is_time, taken_event
from .words import counted


Event = dict[str, Any]

_OF_RANK = re.compile(r"healing_events\.rank(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class Damage:
    """
    What of a journal cannot be read.

    Args:
        lines (`int`):
            Lines that are no events.
        values (`int`):
            Values of the other lines that are not of the kind they should be.
    """

    lines: int = 0
    values: int = 0

    def __add__(self, other: Damage) -> Damage:
        return Damage(self.lines + other.lines, self.values + other.values)

    def __str__(self) -> str:
        told = []
        if self.lines:
            them = "it" if self.lines == 1 else "them"
            told.append(
                f"{counted(self.lines, 'line')} of the journal cannot be read, probably because a process was killed "
                f"while it wrote {them}. This report is made of the others."
            )
        if self.values:
            told.append(
                f"{counted(self.values, 'value')} in the journal cannot be read (a text where a number should be, for "
                "example), as where a disk is damaged or the file was changed by hand. This report is made without."
            )
        return " ".join(told)


@dataclass(frozen=True, slots=True)
class Journals:
    """
    What the journals of a run directory say.

    Args:
        path (`Path`):
            That of the first rank.
        status ([`RunStatus`], *optional*):
            What has become of the newest run into the `output_dir`.
        events (`list[dict]`):
            Of all ranks, by time.
        ranks (`dict[int, Path]`):
            The journal of each rank.
        damage ([`Damage`]):
            What of them cannot be read.
    """

    path: Path
    status: RunStatus | None
    events: list[Event] = field(default_factory=list)
    ranks: dict[int, Path] = field(default_factory=dict)
    damage: Damage = Damage()

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
        return started[-1] if started else (runs[-1] if runs else None)

    def of_run(self, run: str) -> list[Event]:
        """The events of one run."""
        return [event for event in self.events if event["run"] == run]


def find_journal(place: Path) -> tuple[Path, RunStatus | None]:
    """
    Finds the journal of the newest run into an `output_dir`, which may lie elsewhere.

    Args:
        place (`Path`):
            The `output_dir` or `healing_dir`, or the journal itself.

    Returns:
        Its path, and what has become of that run.
    """
    if not place.is_dir():
        return place, None
    status = read_status(place)
    if status is not None and os.path.isfile(told := place / status.journal):
        # Not by its spelling: `..` of a directory that is a link leads elsewhere.
        return (told.resolve() if ".." in told.parts else told), status
    return place / EVENTS_FILE, status


def read_events(path: Path) -> tuple[list[Event], Damage]:
    """
    Reads one journal.

    Args:
        path (`Path`):
            The file.

    Returns:
        Its events, each value of which is of the kind that it should be, and what of it cannot be read.

    Raises:
        ValueError: If it is no journal. An empty one that bears a journal's name is that of a run to which nothing has
            happened yet.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    lines, torn = parse_lines(text)
    events, odd = [], 0
    for line in lines:
        event, left_out = taken_event(line)
        odd += left_out
        if event is None:
            torn += 1
        else:
            events.append(event)
    if not events and (text.strip() or not path.name.startswith(Path(EVENTS_FILE).stem)):
        raise ValueError(
            f"{path} is no journal: not one of its lines is an event. Please name the output_dir (or healing_dir) "
            f"of a healed run, or its {EVENTS_FILE}."
        )
    return events, Damage(torn, odd)


@dataclass(frozen=True, slots=True)
class Told:
    """
    An incident, as the first rank that has seen it tells it.

    Args:
        shown (`str`):
            Its id; with the rank, if that is not the first one.
        names (`list[tuple[str, int]]`):
            Its ids and ranks, wherever it was seen; that of the teller first.
        lines (`list[dict]`):
            The events of the teller.
    """

    shown: str
    names: list[tuple[str, int]]
    lines: list[Event]


def told_once(events: Iterable[Event]) -> list[Told]:
    """
    Finds the incidents among events, each once: several ranks may have seen it.

    Args:
        events (`Iterable[dict]`):
            Of one run or several, and of all their ranks.
    """
    of_one: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        if "incident" in event:
            of_one.setdefault((event["incident"], event.get("rank", 0)), []).append(event)
    seen_by: dict[tuple[Any, ...], list[tuple[str, int]]] = {}
    for (name, rank), lines in of_one.items():
        seen_by.setdefault(_seen(lines), []).append((name, rank))
    found = []
    for (name, rank), lines in of_one.items():
        by = seen_by[_seen(lines)]
        first = min(each for _, each in by)
        if rank == first:
            elsewhere = [(other, each) for other, each in by if each != first]
            # An earlier version has given incidents of several ranks one name.
            shown = name if rank == 0 or f"{OF_RANK}{rank}" in name else f"{name}{OF_RANK}{rank}"
            found.append(Told(shown, [(name, rank), *elsewhere], lines))
    return found


def _seen(lines: Sequence[Event]) -> tuple[Any, ...]:
    """What is the same of an event that several ranks have seen."""
    diagnosed = [event for event in lines if event["kind"] == "diagnosed"]
    found = (diagnosed[-1].get("failure"), diagnosed[-1].get("cause")) if diagnosed else (None, None)
    first = lines[0]
    return first.get("run"), first.get("attempt", 0), first["step"], first.get("symptom"), *found


def no_journal(place: str | Path) -> FileNotFoundError:
    """Builds the error for a directory without a journal."""
    return FileNotFoundError(
        f"There is no {EVENTS_FILE} in {place}: it is written when train() of a healed run begins. Please name the "
        "output_dir (or healing_dir) of one that has begun."
    )


def read_journals(place: str | Path) -> Journals:
    """
    Reads all journals of a run directory.

    Args:
        place (`str` or `Path`):
            The `output_dir` or `healing_dir`, or the journal itself.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If the file is none.
    """
    path, status = find_journal(Path(place))
    if not path.is_file():
        raise no_journal(place)
    events, damage = read_events(path)
    ranks = {0: path}
    for other in sorted(path.parent.glob("healing_events.rank*.jsonl")):
        match = _OF_RANK.fullmatch(other.name)
        if match is None or other == path:
            continue
        ranks[int(match[1])] = other
        try:
            more, damage_there = read_events(other)
        except (OSError, ValueError):
            continue
        events, damage = events + more, damage + damage_there
    if len(ranks) > 1:
        events.sort(key=lambda event: event.get("time", 0.0))
    return Journals(path, status, events, ranks, damage)


def status_in(events: Sequence[Mapping[str, Any]], run: str | None = None) -> RunStatus | None:
    """
    Reads what has become of a run in its events.

    Args:
        events (`Sequence[Mapping]`):
            Of one journal or several.
        run (`str`, *optional*):
            Which one. Defaults to the newest.

    Returns:
        [`RunStatus`]: `None` if it never began there.
    """
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
    newest = next((event for event in reversed(own) if event["kind"] in {*ended, "run_started"}), last)
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


def number(value: Any) -> float | None:
    """The number that a file says, which names those that are not finite; `None` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def moment(value: Any) -> float | None:
    """The moment, in seconds since the epoch, that a file says; `None` for anything else, and for the epoch itself."""
    return float(value) if is_time(value) and value else None
