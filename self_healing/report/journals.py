"""Finds the journals of a run directory, and reads the events in them: of all runs, processes and ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import parse_lines
from ..own_files import EVENTS_FILE
from ..restarts.status import RunState, RunStatus, read_status


Event = dict[str, Any]

_OF_RANK = re.compile(r"healing_events\.rank(\d+)\.jsonl")
# What every event has.
_KEYS = {"run", "step", "kind"}


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
        torn (`int`):
            Lines that cannot be read.
    """

    path: Path
    status: RunStatus | None
    events: list[Event] = field(default_factory=list)
    ranks: dict[int, Path] = field(default_factory=dict)
    torn: int = 0

    @property
    def runs(self) -> list[str]:
        """Names of the runs, oldest first."""
        return list(dict.fromkeys(str(event["run"]) for event in self.events))

    @property
    def newest(self) -> str | None:
        """The run that the status speaks of, else the one that began last."""
        runs = self.runs
        if self.status is not None and (self.status.run in runs or not runs):
            return self.status.run
        started = [str(event["run"]) for event in self.events if event["kind"] == "run_started"]
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
    if status is not None and (told := place / status.journal).is_file():
        # Not by its spelling: `..` of a directory that is a link leads elsewhere.
        return (told.resolve() if ".." in told.parts else told), status
    return place / EVENTS_FILE, status


def read_events(path: Path) -> tuple[list[Event], int]:
    """
    Reads one journal.

    Args:
        path (`Path`):
            The file.

    Returns:
        Its events, and how many lines of it cannot be read.

    Raises:
        ValueError: If it is no journal. An empty one that bears a journal's name is that of a run to which nothing has
            happened yet.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    lines, torn = parse_lines(text)
    events = [event for event in lines if event.keys() >= _KEYS]
    if not events and (text.strip() or not path.name.startswith(Path(EVENTS_FILE).stem)):
        raise ValueError(
            f"{path} is no journal: not one of its lines is an event. Please name the output_dir (or healing_dir) "
            f"of a run that had a SelfHealingCallback, or its {EVENTS_FILE}."
        )
    return events, torn


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
        raise FileNotFoundError(
            f"There is no {EVENTS_FILE} in {place}. Please name the output_dir (or healing_dir) of a run that had a "
            "SelfHealingCallback."
        )
    events, torn = read_events(path)
    ranks = {0: path}
    for other in sorted(path.parent.glob("healing_events.rank*.jsonl")):
        match = _OF_RANK.fullmatch(other.name)
        if match is None or other == path:
            continue
        ranks[int(match[1])] = other
        try:
            more, torn_there = read_events(other)
        except (OSError, ValueError):
            continue
        events, torn = events + more, torn + torn_there
    if len(ranks) > 1:
        events.sort(key=lambda event: number(event.get("time")) or 0.0)
    return Journals(path, status, events, ranks, torn)


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
    status = read_status(Path(str(started["output_dir"]))) if "output_dir" in started else None
    if status is not None and status.run == started["run"]:
        return status
    own = [event for event in events if event["run"] == started["run"]]
    last = own[-1]
    ended = {"run_ended": RunState.ENDED, "postmortem": RunState.STOPPED}
    newest = next((event for event in reversed(own) if event["kind"] in {*ended, "run_started"}), last)
    return RunStatus(
        str(started["run"]),
        "",
        int(started.get("max_steps", 0)),
        int(started.get("pid", 0)),
        str(started.get("host", "a machine that is not known")),
        float(started.get("time", 0.0)),
        ended.get(str(newest["kind"]), RunState.UNKNOWN),
        int(last["step"]),
        float(last.get("time", 0.0)),
        str(newest.get("verdict", "")),
    )


def number(value: Any) -> float | None:
    """The number that a journal says, which writes those that are not finite by name; `None` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
