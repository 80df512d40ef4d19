"""Writes and reads `healing_status.json`: whether the run in an `output_dir` goes on, has ended or died."""

from __future__ import annotations

import json
import logging
import os
import socket
import textwrap
import time
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from ..system.files import replace_file
from ..system.processes import Process, State, state_of
from .record import MARK, PROGRESS_FILE, WRITING, ExitReason, read_mark


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
    ExitReason.FINISHED: RunState.ENDED,
    ExitReason.PREEMPTED: RunState.LEFT,
    ExitReason.RESTART: RunState.LEFT,
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


def read_status(directory: Path) -> RunStatus | None:
    """Reads the status of the newest run into an `output_dir`; `None` if nothing that can be read is written down."""
    try:
        content = json.loads((directory / STATUS_FILE).read_text(encoding="utf-8"))
        known = {each.name for each in fields(RunStatus)}
        status = RunStatus(**{key: value for key, value in content.items() if key in known})
        status = replace(status, state=RunState(status.state))
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    if status.over:
        return status
    step, seen = _progress_in(directory, status)
    return replace(status, state=looked_up(status), step=step, since=seen)


def _progress_in(directory: Path, status: RunStatus) -> tuple[int, float]:
    """The step a process came to, which it leaves where no write is needed for it, and when."""
    mark = read_mark(directory)
    if mark is None:
        return status.step, status.since
    seen = (directory / PROGRESS_FILE).stat().st_mtime
    # Of an earlier run, if it is older.
    return (max(mark[1], status.step), seen) if seen >= status.since - 1 else (status.step, status.since)


def looked_up(status: RunStatus) -> RunState:
    """Of a run whose end is not written down: whether its process is still there."""
    if status.host != socket.gethostname():
        return RunState.UNKNOWN
    found = state_of(status.pid, status.process_began)
    return {State.GONE: RunState.DIED, State.UNKNOWN: RunState.UNKNOWN}.get(found, RunState.RUNNING)


@dataclass(slots=True)
class StatusKeeper:
    """Keeps the status of a run up to date, and the mark of how far it has come."""

    directory: Path
    status: RunStatus | None = None
    _attempt: int = 0
    # The file of the mark.
    _mark: int | None = None

    def begin(self, run: str, journal: Path, step: int, max_steps: int, attempt: int) -> None:
        """`train()` is entered."""
        now, process, host = time.time(), Process.this_one(), socket.gethostname()
        where = os.path.relpath(journal, self.directory)
        self._attempt = attempt
        self.status = RunStatus(
            run, where, max_steps, process.pid, host, now, step=step, since=now, process_began=process.began
        )
        self._write()
        if self._mark is None:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._mark = os.open(self.directory / PROGRESS_FILE, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                text = "%s cannot be kept (%s): after a kill, the step it came to will not be known."
                logger.warning(text, PROGRESS_FILE, error)
        self.note_step(step)

    def note_step(self, step: int) -> None:
        """Marks the step the run is at."""
        if self._mark is not None:
            try:
                os.pwrite(self._mark, MARK.pack(self._attempt, step), 0)
            except OSError:
                self._let_go_of_mark()

    def end(self, state: RunState, step: int, why: str = "") -> None:
        """The run is over for this process; what was written first counts."""
        why = textwrap.shorten((why.strip().splitlines() or [""])[0], _LONGEST, placeholder=" ...")
        with WRITING:
            if self.status is None or self.status.over:
                return
            self.status = replace(self.status, state=state, step=step, since=time.time(), why=why)
            self._write()
        self._let_go_of_mark()

    def _let_go_of_mark(self) -> None:
        mark, self._mark = self._mark, None
        if mark is not None:
            os.close(mark)

    def end_attempt(self, ending: ExitReason, step: int, why: str) -> None:
        """The same, of a run whose record is kept."""
        self.end(_STATES.get(ending, RunState.STOPPED), step, "" if ending is ExitReason.FINISHED else why)

    def _write(self) -> None:
        assert self.status is not None
        content: dict[str, Any] = {"schema": SCHEMA_VERSION, **asdict(self.status)}
        try:
            with WRITING:
                replace_file(self.directory / STATUS_FILE, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            text = "%s could not be written (%s): `self-healing report` will not know how far the run came."
            logger.warning(text, STATUS_FILE, error)
