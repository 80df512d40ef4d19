"""Writes and reads `healing_status.json`: whether the run in an `output_dir` goes on, has ended or died."""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import threading
import time
import weakref
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from ..system.files import matches, replace_file
from ..system.processes import Process, State, state_of
from .record import PROGRESS_FILE, Ending, ProgressMark, read_mark


logger = logging.getLogger("self_healing")

STATUS_FILE = "healing_status.json"
# Of what ended a run, in characters.
_LONGEST = 300
SCHEMA_VERSION = 1


class RunState(StrEnum):
    """The state of a run, as its status file has it."""

    RUNNING = "running"
    ENDED = "ended"
    # An exception, or the end of the script, came before the end of the run.
    STOPPED = "stopped"
    # It was asked to leave, or left to be started again.
    LEFT = "left"
    # Its process is gone without a word.
    DIED = "died"
    UNKNOWN = "unknown"


_STATES = {
    Ending.FINISHED: RunState.ENDED,
    Ending.PREEMPTED: RunState.LEFT,
    Ending.RESTART: RunState.LEFT,
}


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run as of one moment."""

    run: str
    journal: str
    max_steps: int
    pid: int
    host: str
    began: float
    state: RunState = RunState.RUNNING
    step: int = 0
    since: float = 0.0
    why: str = ""
    process_began: float = 0.0

    @property
    def over(self) -> bool:
        """Whether its end was written down."""
        return self.state is not RunState.RUNNING

    def __str__(self) -> str:
        of = f"step {self.step} of {self.max_steps}" if self.max_steps > 0 else f"step {self.step}"
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        process = f"process {self.pid} on {self.host}"
        why = f": {self.why}" if self.why else ""
        told = {
            RunState.RUNNING: f"The run is in progress ({process}): {of}, last sign of life {at}.",
            RunState.ENDED: f"The run ended at {of}, {at}.",
            RunState.STOPPED: f"The run stopped before its end: train() was left at {of}, {at}{why}",
            RunState.LEFT: f"The run left at {of}, {at}, to be started again{why}",
            RunState.DIED: f"The run died at {of}: {process} was killed or crashed, last sign of life {at}.",
            RunState.UNKNOWN: f"Whether the run is still going is not known: {of}, last sign of life {at}, {process}.",
        }[self.state]
        return told if told.endswith((".", "!", "?")) else f"{told}."


def _cut(line: str) -> str:
    """Shortens a line to whole words, and shows that there was more."""
    if len(line) <= _LONGEST:
        return line
    kept = line[: _LONGEST - 4]
    return f"{kept[: kept.rfind(' ')] if ' ' in kept else kept} ..."


def is_moment(seconds: float) -> bool:
    """Whether it can be a moment, in seconds since the epoch."""
    # The year 5138: calendars end somewhere after it, each platform's somewhere else.
    return 0 <= seconds < 1e11


# A value of the kind of each field.
_KINDS = asdict(RunStatus("", "", 0, 0, "", 0.0)) | {"state": None}


def read_status(directory: Path) -> RunStatus | None:
    """Reads the status of the newest run into an `output_dir`; `None` if nothing that can be read is written down."""
    try:
        content = json.loads((directory / STATUS_FILE).read_text(encoding="utf-8"))
        known = {each.name for each in fields(RunStatus)}
        status = RunStatus(**{key: value for key, value in content.items() if key in known})
        status = replace(status, state=RunState(status.state))
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    if not matches(_KINDS, asdict(status)) or not all(map(is_moment, (status.began, status.since))):
        return None
    if status.over:
        return status
    step, seen = _progress_in(directory, status)
    return replace(status, state=looked_up(status), step=step, since=seen)


def _progress_in(directory: Path, status: RunStatus) -> tuple[int, float]:
    """The step a process came to, which it leaves where no write is needed for it, and when."""
    mark = read_mark(directory)
    try:
        seen = (directory / PROGRESS_FILE).stat().st_mtime
    except OSError:
        mark = None
    if mark is None:
        return status.step, status.since
    # Of an earlier run, if it is older.
    return (max(mark[1], status.step), seen) if seen >= status.since - 1 else (status.step, status.since)


def looked_up(status: RunStatus) -> RunState:
    """Of a run whose end is not written down: whether its process is still there."""
    if status.host != socket.gethostname():
        return RunState.UNKNOWN
    found = state_of(status.pid, status.process_began)
    return {State.GONE: RunState.DIED, State.UNKNOWN: RunState.UNKNOWN}.get(found, RunState.RUNNING)


@dataclass(slots=True, weakref_slot=True)
class StatusKeeper:
    """Keeps the status of a run up to date."""

    directory: Path
    status: RunStatus | None = None
    _mark: ProgressMark | None = field(default=None, repr=False)
    _failed: bool = False
    # The training thread, and one that is about to end the process, may want to write at the same time.
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def begin(self, run: str, journal: Path, step: int, max_steps: int, marks: bool) -> None:
        """`train()` is entered."""
        now = time.time()
        try:
            where = os.path.relpath(journal, self.directory)
        except ValueError:
            # On another drive.
            where = os.path.abspath(journal)
        first = self.status is None
        process = Process.this_one()
        self.status = RunStatus(
            run,
            where,
            max_steps,
            process.pid,
            socket.gethostname(),
            now,
            step=step,
            since=now,
            process_began=process.began,
        )
        self._write()
        if marks and self._mark is None:
            self._open_mark()
        if first:
            at_exit = weakref.WeakMethod(self._at_exit)
            atexit.register(lambda: (method := at_exit()) and method())

    def note_step(self, step: int) -> None:
        """Marks the step the run is at."""
        if self._mark is not None:
            # Without a record there are no attempts.
            self._mark.note_step(0, step)

    def end(self, state: RunState, step: int, why: str = "") -> None:
        """The run is over for this process; what was written first counts."""
        lines = why.strip().splitlines()
        why = _cut(lines[0]) if lines else ""
        with self._lock:
            if self.status is None or self.status.over:
                return
            self.status = replace(self.status, state=state, step=step, since=time.time(), why=why)
            self._write()
            if self._mark is not None:
                self._mark.close()
                self._mark = None

    def end_attempt(self, ending: Ending, step: int, why: str) -> None:
        """The same, of a run whose record is kept."""
        self.end(_STATES.get(ending, RunState.STOPPED), step, "" if ending is Ending.FINISHED else why)

    def _at_exit(self) -> None:
        # Of the process that trains, not of one it has forked.
        if self.status is not None and self.status.pid == os.getpid():
            step, _ = _progress_in(self.directory, self.status)
            self.end(RunState.STOPPED, step, "the process ended")

    def _write(self) -> None:
        if self.status is None:
            return
        try:
            content: dict[str, Any] = {"schema": SCHEMA_VERSION, **asdict(self.status)}
            replace_file(self.directory / STATUS_FILE, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            self._tell(STATUS_FILE, error)

    def _open_mark(self) -> None:
        try:
            self._mark = ProgressMark(self.directory)
        except OSError as error:
            self._tell(PROGRESS_FILE, error)

    def _tell(self, name: str, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            logger.warning(
                "%s could not be written (%s): `self-healing report` will not know how far the run came.", name, error
            )
