"""Reads the report of a run from what it has left in its directory, whether it goes on, has ended or died."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..checkpoints.marker import checkpoints_in, load_marker, number_of, read_marker
from ..journal.incident import counted
from ..journal.step_log import step_log_of
from ..run.record import Attempt, RunRecord, UnreadableRecordError
from ..run.status import RunState
from ..system.files import (
    BRIEFING_FILE,
    EVENTS_FILE,
    MARKER_FILE,
    PINNED_DIR,
    POSTMORTEM_FILE,
    REPORT_FILE,
    of_rank,
    parse_lines,
)
from .advice import next_steps
from .healing_report import HealingReport
from .journals import Event, Journals, lines_of_incidents, read_journals, read_postmortem, status_in
from .records import Checkpoint, Entry, RunReport, State, no_series
from .steps import budgets, goodput, read_steps, series_of, steps_missing
from .stories import tell_incidents, tell_notices
from .verdict import judge_weights


_QUARANTINE_FILE = "quarantine.jsonl"
_FILES = {
    EVENTS_FILE: "journal",
    _QUARANTINE_FILE: "quarantine",
    POSTMORTEM_FILE: "postmortem",
    REPORT_FILE: "this report, for programs",
    BRIEFING_FILE: "this report, for whoever decides what to do next",
    "incidents": "offending batches",
    "hangs": "stacks of all threads",
}


def read_run(directory: str | Path, run: str | None = None, charts: bool = True) -> RunReport:
    """
    Reads all that is known of a run.

    Args:
        directory (`str` or `Path`):
            Its `output_dir` or `healing_dir`, or its journal.
        run (`str`, *optional*):
            Which of several runs into the directory: its name, or a beginning that no other has. Defaults to the
            newest.
        charts (`bool`, *optional*, defaults to `True`):
            Whether to read what can be drawn.

    Returns:
        [`RunReport`]

    Raises:
        FileNotFoundError: If there is no journal.
        ValueError: If the file is no journal, or there is no such run, or more than one.
    """
    journals = read_journals(directory)
    return _Reader(journals, Path(directory), _chosen(journals, run)).read(charts)


def _chosen(journals: Journals, run: str | None) -> str:
    runs = journals.runs
    if run is None:
        return journals.newest or ""
    found = [run] if run in runs else [each for each in runs if run and each.startswith(run)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(found or runs) or "none"
    wrong = f"{len(found)} runs begin with {run!r}" if found else f"There is no run {run!r}"
    raise ValueError(f"{wrong} in {journals.path}. There are: {known}. Please name one of them.")


class _Reader:
    """One run while it is read."""

    def __init__(self, journals: Journals, place: Path, run: str) -> None:
        self.journals = journals
        self.run = run
        self.now = time.time()
        self.events = journals.of_run(run)
        self.remarks = [journals.damage] if journals.damage else []
        self.directory = journals.path.parent.resolve()
        self.started = [event for event in self.events if event["kind"] == "run_started"]
        self.output_dir = self._find_output_dir(place)
        self.summary = HealingReport.of_journals(journals, run)
        self.record = self._find_record()
        self.rows, self.about = read_steps(self.directory, run, self.remarks)

    def read(self, charts: bool) -> RunReport:
        started = self.started[-1] if self.started else {}
        quarantine = self._quarantine()
        incidents = tell_incidents(self.events, self._named, quarantine)
        last: Mapping[str, Any] = next((each for each in reversed(self.events) if each["kind"] == "run_ended"), {})
        state = self._state()
        attempts = self._attempts(state)
        until = self.now if state.name == "running" else state.since
        checkpoints = [_checkpoint(each, self.output_dir, self.run) for each in checkpoints_in(self.output_dir)]
        wanted = {**_FILES, step_log_of(self.directory, self.run).name: "every step"}
        files = [self._named(what, self.directory / name) for name, what in wanted.items()]
        recovery = {} if self.record is None else self.record.recovery_state
        report = RunReport(
            run=self.run,
            directory=str(self.directory),
            output_dir=str(self.output_dir),
            made=self.now,
            state=state,
            objective=started.get("objective"),
            detectors=started.get("detectors", []),
            rules=started.get("rules", []),
            began=attempts[0]["began"] if attempts else None,
            incidents=incidents,
            notices=tell_notices(self.events),
            goodput=goodput(self.rows, incidents, attempts, until),
            budgets=budgets(started.get("limits", {}), incidents, recovery, self.summary.lr_reductions, state.step),
            attempts=attempts,
            ranks=self._ranks(),
            quarantine=quarantine,
            checkpoints=checkpoints,
            learning_rate=self.summary.rate,
            verdict=judge_weights(state, incidents, checkpoints, steps_missing(self.rows, incidents), last),
            series=series_of(self.rows, self.about, self.output_dir) if charts else no_series(),
            files=[each for each in files if each is not None],
            remarks=self.remarks,
            other_runs=[self._brief(run) for run in self.journals.runs if run != self.run],
        )
        postmortem = None if state.name == "ended" else read_postmortem(self.directory, self.run)
        return replace(report, next_steps=next_steps(report, self.summary.learning_rate, postmortem))

    # ---- where, and what has become of it ----

    def _find_output_dir(self, place: Path) -> Path:
        """The directory that was named if the status lies there, else what the journal says."""
        if self.journals.status is not None and place.is_dir():
            return place.resolve()
        told = Path(self.started[-1].get("output_dir", "")) if self.started else self.directory
        # A run directory that was moved says where it was.
        return told if told.is_absolute() and told.is_dir() else self.directory

    def _find_record(self) -> RunRecord | None:
        try:
            record = RunRecord.read(self.output_dir)
        except UnreadableRecordError as error:
            self.remarks.append(f"{error}.")
            return None
        return record if record is not None and record.run == self.run else None

    def _state(self) -> State:
        status, rows = self.summary.status, self.rows
        logged = rows[-1].step + rows[-1].steps if rows else 0
        if status is None:
            told = "Whether the run is still going is not known: its journal does not say that it began."
            return State("unknown", max([logged, *(event["step"] for event in self.events)]), told=told)
        if status.state in (RunState.RUNNING, RunState.DIED, RunState.UNKNOWN):
            # Where nothing marked how far it came, what it wrote down is the last sign of life.
            signs = [row.time for row in rows[-1:]] + [event["time"] for event in self.events[-1:]]
            status = replace(status, step=max(status.step, logged), since=max(status.since, *signs))
        return State(
            status.state.value,
            status.step,
            status.max_steps or None,
            status.since or None,
            status.pid or None,
            status.host if status.pid else None,
            status.why,
            str(status),
        )

    # ---- its processes ----

    def _attempts(self, state: State) -> list[Entry]:
        """The processes of the run, one after another: those of its record; without one there was one process."""
        recorded = [] if self.record is None else self.record.attempts
        found = [_attempt(each) for each in recorded] or [_only_attempt(each) for each in self.started[:1]]
        times = sorted([event["time"] for event in self.events] + [row.time for row in self.rows])
        for attempt, following in pairwise(found):
            own = [each for each in times if attempt["began"] <= each < following["began"]]
            attempt["ended"] = own[-1] if own else following["began"]
        for newest in found[-1:]:
            newest["ended"] = None if state.name == "running" else state.since
            newest["last_step"] = max(newest["last_step"], state.step)
            if newest["ending"] in ("running", "unknown"):
                newest["ending"] = state.name
        return found

    def _ranks(self) -> list[Entry]:
        """What each process of a distributed job has written; empty where there is one."""
        own = {rank: list[Event]() for rank in self.journals.ranks}
        for event in self.events:
            own.setdefault(event.get("rank", 0), []).append(event)
        found = [self._rank(rank, path, own[rank]) for rank, path in sorted(self.journals.ranks.items())]
        of_it = [each for each in found if each["seen"] is not None or each["error"] is not None]
        return of_it if any(each["rank"] > 0 for each in of_it) else []

    def _rank(self, rank: int, journal: Path, own: list[Event]) -> Entry:
        postmortem = read_postmortem(self.directory, self.run, rank)
        error = None if postmortem is None else postmortem.get("error")
        return {
            "rank": rank,
            "step": own[-1]["step"] if own else None,
            "seen": own[-1]["time"] if own else None,
            "incidents": len(lines_of_incidents(own)),
            "error": f"{error['type']}: {error['message']}" if error else None,
            "journal": journal.name,
            "postmortem": None if postmortem is None else of_rank(Path(POSTMORTEM_FILE), rank).name,
        }

    def _brief(self, run: str) -> Entry:
        events = self.journals.of_run(run)
        status = status_in(events, run)
        return {
            "run": run,
            "began": next((event["time"] for event in events if event["kind"] == "run_started"), None),
            "step": max([event["step"] for event in events] + ([] if status is None else [status.step])),
            "incidents": len(lines_of_incidents(events)),
            "state": "unknown" if status is None else status.state.value,
        }

    # ---- what it has left beside its journal ----

    def _named(self, what: str, path: str | Path) -> Entry | None:
        """Names a file, relative to the journal where it lies below it; `None` if it is gone."""
        path = Path(path)
        candidates = [self.directory / path]
        # The run directory may have been moved or copied since the journal was written.
        recorded = self.started[-1].get("output_dir") if self.started else None
        if recorded is not None and path.is_relative_to(recorded):
            candidates.append(self.output_dir / path.relative_to(recorded))
        # At the end of a run, an emergency checkpoint is put among the regular ones.
        candidates.append(self.output_dir / path.name)
        found = next((each for each in candidates if each.exists()), None)
        if found is None:
            return None
        shown = found.relative_to(self.directory) if found.is_relative_to(self.directory) else found
        return {"what": what, "path": str(shown), "bytes": found.stat().st_size if found.is_file() else None}

    def _quarantine(self) -> list[Entry]:
        """The rows and samples that the run has left out."""
        try:
            text = (self.directory / _QUARANTINE_FILE).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        lines, torn = parse_lines(text)
        if torn:
            self.remarks.append(f"{counted(torn, 'line')} of {_QUARANTINE_FILE} cannot be read.")
        # A row of a data set that was not known bears no other name.
        incidents = {event["incident"] for event in self.events if "incident" in event}
        return [_row(line) for line in lines if line.get("run") == self.run or line.get("incident") in incidents]


def _attempt(attempt: Attempt) -> Entry:
    keys = ("number", "pid", "host", "began", "first_step", "last_step", "resumed_from", "why")
    return {key: getattr(attempt, key) for key in keys} | {"ended": None, "ending": attempt.ending.value}


def _only_attempt(started: Mapping[str, Any]) -> Entry:
    known = {key: started.get(key) for key in ("pid", "host", "resumed_from")}
    steps = {"first_step": started["step"], "last_step": started["step"]}
    return {"number": 1, **known, **steps, "began": started["time"], "ended": None, "ending": "unknown", "why": ""}


def _row(line: Mapping[str, Any]) -> Entry:
    kind = str(line.get("kind", "row")).removeprefix("bad_")
    why = f"it raises in the model ({line['raises']})" if line.get("raises") else "it makes a step non-finite"
    if kind != "row":
        raised = ": ".join(str(line[key]) for key in ("error_type", "error") if line.get(key))
        why = f"{line.get('problem', 'it cannot be used')}{f' ({raised})' if raised else ''}"
    return {
        "name": _name(line, kind),
        "kind": kind,
        "why": why[:300],
        **{key: line.get(key) for key in ("step", "epoch", "time", "incident", "dataset_index")},
        "content_hash": line.get("content_hash") or line.get("text_hash"),
        "preview": line.get("preview"),
        "details": dict(line),
    }


def _name(line: Mapping[str, Any], what: str) -> str:
    if line.get("dataset_index") is not None:
        part = "" if line.get("segment") is None else f", sequence {line['segment']} packed into it"
        return f"{what} {line['dataset_index']} of train_dataset{part}"
    if line.get("stream_ordinal") is not None:
        shard = "" if line.get("shard") is None else f" of shard {line['shard']}"
        return f"{what} {line['stream_ordinal']}{shard} of the stream"
    if what == "completion":
        return f"a completion at step {line.get('step')}"
    if line.get("micro_batch") is not None:
        return f"{what} {line.get('row')} of micro-batch {line['micro_batch']}"
    return f"a {what}"


def _checkpoint(path: Path, output_dir: Path, run: str) -> Checkpoint:
    marker = load_marker(path)
    place, pinned = str(path.relative_to(output_dir)), path.parent.name == PINNED_DIR
    if marker is None:
        standing = "damaged" if (path / MARKER_FILE).exists() else "unmarked"
        return Checkpoint(place, number_of(path) or 0, standing, False, pinned=pinned, of_this_run=False)
    return Checkpoint(
        path=place,
        step=marker["step"],
        standing=marker.get("standing", "unverified"),
        complete=read_marker(path) is not None,
        emergency=bool(marker.get("emergency")),
        pinned=pinned,
        finite=marker.get("finite"),
        time=marker.get("time"),
        bytes=sum(marker["files"].values()),
        run=marker.get("run"),
        of_this_run=marker.get("run") == run,
        incident=marker.get("incident"),
    )
