"""Reads the report of a run from what it has left in its directory, whether it goes on, has ended or died."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..journal.step_log import StepRow
from ..restarts.record import RunRecord, UnreadableRecordError
from ..restarts.status import RunState, RunStatus
from .advice import next_steps
from .costs import budgets, goodput, steps_missing
from .healing_report import HealingReport
from .journals import Event, Journals, moment, number, read_journals, status_in
from .left_behind import list_checkpoints, list_files, read_postmortem, read_quarantine
from .records import AttemptRow, NextStep, Notice, RankRow, RunBrief, RunReport, Series, State
from .steps import read_steps, series_of
from .stories import Places, tell_incidents
from .verdict import judge_weights


# Events that are worth a word though nothing had to be done, by their kind.
_NOTICED = {
    "snapshots_off": "there is no host memory for snapshots",
    "snapshot_refused": "a snapshot was not trusted",
    "checkpoint_passed_over": "a checkpoint was passed over",
    "best_model_passed_over": "the best model could not be loaded",
    "kept_checkpoints_gave_way": "kept checkpoints were removed to make room",
    "preemption_deadline": "the process was ended before it could save",
}


def read_run(
    directory: str | Path,
    run: str | None = None,
    charts: bool = True,
    now: float | None = None,
    ended: tuple[State, Mapping[str, Any]] | None = None,
) -> RunReport:
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
        now (`float`, *optional*):
            In seconds since the epoch. Defaults to the time it is.
        ended (`tuple`, *optional*):
            Of a run whose end is not written down yet: its state, and what the event of it will say.

    Returns:
        [`RunReport`]

    Raises:
        FileNotFoundError: If there is no journal.
        ValueError: If the file is no journal, or there is no such run, or more than one.
    """
    journals = read_journals(directory)
    reader = _Reader(journals, Path(directory), _chosen(journals, run), time.time() if now is None else now)
    return reader.read(charts, ended)


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

    def __init__(self, journals: Journals, place: Path, run: str, now: float) -> None:
        self.journals = journals
        self.run = run
        self.now = now
        self.events = journals.of_run(run)
        self.remarks: list[str] = []
        if told := str(journals.damage):
            self.remarks.append(told)
        self.directory = journals.path.parent.resolve()
        self.started = [event for event in self.events if event["kind"] == "run_started"]
        self.output_dir = self._find_output_dir(place)
        self.status = self._find_status()
        self.record = self._find_record()

    def read(self, charts: bool, ended: tuple[State, Mapping[str, Any]] | None) -> RunReport:
        status, journals = self.status, self.journals
        recorded = [event["output_dir"] for event in self.started if "output_dir" in event]
        places = Places(self.directory, self.output_dir, recorded)
        named = {event["incident"] for event in self.events if "incident" in event}
        quarantine = read_quarantine(self.directory, self.run, named, self.remarks)
        incidents = tell_incidents(self.events, places, quarantine)
        rows, about = read_steps(self.directory, self.run, self.remarks)
        last: Mapping[str, Any] = next((each for each in reversed(self.events) if each["kind"] == "run_ended"), {})
        state, last = ended or (self._state(status, rows), last)
        times = [event.get("time", 0.0) for event in self.events] + [row.time for row in rows]
        attempts = self._attempts(state, sorted(each for each in times if each))
        until = self.now if state.name == "running" else state.since
        spent = goodput(rows, incidents, attempts, attempts[0].began if attempts else None, until, state.step)
        checkpoints = list_checkpoints(self.output_dir, self.run)
        started = self.started[-1] if self.started else {}
        recovery = self.record.recovery_state if self.record is not None else {}
        left = budgets(started.get("limits", {}), incidents, recovery, state.step)
        rate = HealingReport.of_events(self.events, journals.path)
        postmortem = None
        if state.name != "ended":
            postmortem = read_postmortem(self.directory / "postmortem.json", self.run)
        verdict = judge_weights(state, incidents, checkpoints, steps_missing(rows, incidents), last)
        todo: list[NextStep] = next_steps(
            self.directory,
            self.output_dir,
            state,
            incidents,
            quarantine,
            checkpoints,
            left,
            verdict,
            rate.learning_rate,
            postmortem,
        )
        return RunReport(
            run=self.run,
            directory=str(self.directory),
            output_dir=str(self.output_dir),
            made=self.now,
            state=state,
            objective=started.get("objective"),
            detectors=started.get("detectors", []),
            rules=started.get("rules", []),
            began=attempts[0].began if attempts else None,
            incidents=incidents,
            notices=_notices(self.events),
            goodput=spent,
            budgets=left,
            attempts=attempts,
            ranks=self._ranks(),
            quarantine=quarantine,
            checkpoints=checkpoints,
            learning_rate=rate.rate,
            verdict=verdict,
            next_steps=todo,
            series=series_of(rows, about, self.output_dir) if charts else Series(),
            files=list_files(places, self.run),
            remarks=self.remarks,
            other_runs=[self._brief(run) for run in journals.runs if run != self.run],
        )

    # ---- where, and what has become of it ----

    def _find_output_dir(self, place: Path) -> Path:
        """The `output_dir`: the directory that was named if the status lies there, else what the journal says."""
        if self.journals.status is not None and place.is_dir():
            return place.resolve()
        told = next((event["output_dir"] for event in reversed(self.started) if "output_dir" in event), None)
        # A run directory that was moved says where it was.
        return Path(told) if told is not None and os.path.isdir(told) else self.directory

    def _find_status(self) -> RunStatus | None:
        status = self.journals.status
        if status is not None and status.run == self.run:
            return status
        return status_in(self.events, self.run)

    def _find_record(self) -> RunRecord | None:
        try:
            record = RunRecord.read(self.output_dir)
        except UnreadableRecordError as error:
            self.remarks.append(f"{error}.")
            return None
        return record if record is not None and record.run == self.run else None

    def _state(self, status: RunStatus | None, rows: Sequence[StepRow]) -> State:
        logged = rows[-1].step + rows[-1].steps if rows else 0
        if status is None:
            last = max((event["step"] for event in self.events), default=0)
            seen = self.events[-1].get("time") if self.events else None
            told = "Whether the run is still going is not known: its journal does not say that it began."
            return State("unknown", max(last, logged), None, seen, told=told)
        if status.state in (RunState.RUNNING, RunState.DIED, RunState.UNKNOWN):
            # Where nothing marked how far it came, what it wrote down is the last sign of life.
            signs = [row.time for row in rows[-1:]] + [event.get("time", 0.0) for event in self.events[-1:]]
            status = replace(status, step=max(status.step, logged), since=max(status.since, *signs))
        elif status.state in (RunState.STOPPED, RunState.LEFT):
            status = replace(status, step=self._left_at(status, rows))
        known = status.state is not RunState.UNKNOWN or status.pid > 0
        return State(
            status.state.value,
            status.step,
            status.max_steps if status.max_steps > 0 else None,
            moment(status.since),
            status.pid if known else None,
            status.host if known else None,
            status.why,
            str(status),
        )

    def _left_at(self, status: RunStatus, rows: Sequence[StepRow]) -> int:
        """The step at which `train()` was left: an interrupt may come before the status knows of any."""
        # An earlier process may have come further than the one that went on from its checkpoint.
        own = [row for row in rows if row.time >= status.began]
        told = next((event for event in reversed(self.events) if event["kind"] in ("run_started", "postmortem")), None)
        known = [status.step, own[-1].step + own[-1].steps if own else 0, 0 if told is None else told["step"]]
        if not any(known) and self.record is not None and self.record.attempts:
            # The furthest it came to, which may have been gone back from.
            known.append(self.record.attempts[-1].last_step)
        return max(known)

    # ---- its processes ----

    def _attempts(self, state: State, times: Sequence[float]) -> list[AttemptRow]:
        found = list(self._attempts_of_record() if self.record is not None else self._attempts_of_journal())
        whole: list[AttemptRow] = []
        for at, attempt in enumerate(found):
            following = found[at + 1].began if at + 1 < len(found) else None
            newest = at + 1 == len(found)
            ending, ended = attempt.ending, None
            if newest:
                ended = None if state.name == "running" else state.since
                if ending in ("running", "unknown"):
                    ending = state.name
            elif following is not None:
                ended = max((each for each in times if (attempt.began or 0.0) <= each < following), default=following)
            last = max(attempt.last_step, state.step) if newest else attempt.last_step
            whole.append(replace(attempt, ended=ended, ending=ending, last_step=last))
        return whole

    def _attempts_of_record(self) -> Iterable[AttemptRow]:
        assert self.record is not None
        for each in self.record.attempts:
            yield AttemptRow(
                each.number,
                each.pid or None,
                each.host or None,
                moment(each.began),
                None,
                each.first_step,
                each.last_step,
                each.resumed_from,
                each.ending.value,
                each.why,
            )

    def _attempts_of_journal(self) -> Iterable[AttemptRow]:
        """Without a record: each process that entered `train()`."""
        own = [event for event in self.started if event.get("rank", 0) == 0]
        firsts = [event for at, event in enumerate(own) if at == 0 or event.get("pid") != own[at - 1].get("pid")]
        for place, event in enumerate(firsts):
            first = event["step"]
            following = firsts[place + 1] if place + 1 < len(firsts) else None
            last = first if following is None else max(following["step"], first)
            yield AttemptRow(
                place + 1,
                event.get("pid"),
                event.get("host"),
                event.get("time"),
                None,
                first,
                last,
                event.get("resumed_from"),
                "unknown",
            )

    def _ranks(self) -> list[RankRow]:
        """What each process of a distributed job has written; empty where there is one."""
        found = [self._rank(rank, path) for rank, path in sorted(self.journals.ranks.items())]
        of_it = [each for each in found if each.seen is not None or each.error is not None]
        return of_it if any(each.rank > 0 for each in of_it) else []

    def _rank(self, rank: int, journal: Path) -> RankRow:
        own = [event for event in self.events if event.get("rank", 0) == rank]
        name = "postmortem.json" if rank == 0 else f"postmortem.rank{rank}.json"
        postmortem = read_postmortem(self.directory / name, self.run)
        error = None if postmortem is None else postmortem.get("error")
        told = f"{error.get('type')}: {error.get('message')}" if isinstance(error, dict) else None
        last = own[-1] if own else None
        return RankRow(
            rank,
            None if last is None else last["step"],
            None if last is None else last.get("time"),
            len({event["incident"] for event in own if "incident" in event}),
            told,
            journal.name,
            None if postmortem is None else name,
        )

    def _brief(self, run: str) -> RunBrief:
        events = self.journals.of_run(run)
        status = status_in(events, run)
        began = next((event.get("time") for event in events if event["kind"] == "run_started"), None)
        incidents = len({event["incident"] for event in events if "incident" in event})
        step = max(event["step"] for event in events)
        if status is None:
            return RunBrief(run, began, step, incidents, "unknown")
        return RunBrief(run, began, max(step, status.step), incidents, status.state.value)


def _notices(events: Sequence[Event]) -> list[Notice]:
    return [notice for event in events if (notice := _notice(event)) is not None]


def _notice(event: Event) -> Notice | None:
    kind = event["kind"]
    if kind == "noticed":
        name = event.get("symptom", "?")
        text = name.replace("_", " ")
    elif kind in _NOTICED:
        name, text = kind, _NOTICED[kind]
    else:
        return None
    told = {**event, **event.get("evidence", {})}
    shown = [str(told[key]) for key in ("path", "reason", "why", "service") if told.get(key)]
    value = number(told.get("value"))
    if value is not None:
        shown.append(f"{value:.4g}")
    detail = f" ({', '.join(shown)})" if shown else ""
    return Notice(event["step"], name, f"{text}{detail}", event.get("time"), event.get("rank", 0))
