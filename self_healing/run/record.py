"""healing_run.json: the record of a run over all its processes."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from ..journal.incident import Incident
from ..system.files import jsonable, matches, replace_file
from ..system.processes import Process


logger = logging.getLogger("self_healing")


def new_run_id() -> str:
    """Makes a name for a run that begins; on several ranks one of them does."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"


# ---- record ----


RECORD_FILE = "healing_run.json"
SCHEMA_VERSION = 1
# Attempts that are written down; a run that was started more often than that is told by its newest ones.
_KEPT_ATTEMPTS = 50


# What a record says, each with a value of its kind.
_EMPTY: dict[str, Any] = {"run": "", "attempts": [], "incidents": [], "memory": {}, "postmortem": None}
_INCIDENT = Incident("", 0, "").to_dict()


# Of this process and not of one run: how often training into a directory has begun in it.
_CALLS: Counter[str] = Counter()


def first_call(directory: Path) -> bool:
    """Whether this process has not trained into a directory yet."""
    return _CALLS[os.path.abspath(directory)] == 0


class Ending(StrEnum):
    """The end of an attempt; `RUNNING` in the record of one that is gone says that it was killed."""

    RUNNING = "running"
    FINISHED = "finished"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"
    RESTART = "restart"
    FAILED = "failed"
    GAVE_UP = "gave_up"


class UnreadableRecordError(ValueError):
    """There is a record, and it is damaged, or of another version of this library."""


@dataclass(slots=True)
class Attempt:
    """One process's part in a run."""

    number: int
    pid: int
    host: str
    began: float
    resumed_from: str | None = None
    first_step: int = 0
    last_step: int = 0
    ending: Ending = Ending.RUNNING
    why: str = ""
    call: int = 1
    job: str = ""
    agent: str = ""
    process_began: float = 0.0
    rows: int = 0


_ATTEMPT = asdict(Attempt(0, 0, "", 0.0))


@dataclass(slots=True)
class RunRecord:
    """The record of one run, however many processes it takes."""

    directory: Path
    run: str
    attempts: list[Attempt] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    recovery_state: dict[str, Any] = field(default_factory=dict)
    postmortem: str | None = None
    kept: bool = True
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _mark: ProgressMark | None = None
    _failed: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Told to other processes: what is open here stays here."""
        kept = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in kept.items() if name not in ("_lock", "_mark")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._lock, self._mark = threading.RLock(), None

    # ---- reading ----

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """The record in a directory; `None` if there is none."""
        path = directory / RECORD_FILE
        try:
            record = cls._from(directory, json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise UnreadableRecordError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
        if not record.attempts:
            # Killed before it had begun.
            return None
        record._take_in_progress()
        return record

    @classmethod
    def _from(cls, directory: Path, content: Any) -> Self:
        if not matches(_EMPTY, content) or content.get("schema") != SCHEMA_VERSION:
            raise ValueError(f"it is not of schema {SCHEMA_VERSION}")
        for name, template in (("attempts", _ATTEMPT), ("incidents", _INCIDENT)):
            if not all(matches(template, each) for each in content[name]):
                raise ValueError(f"its {name} are not known")
        incidents = content["incidents"]
        for each in incidents:
            # Those that can be taken up.
            Incident.from_dict(each)
        attempts = [Attempt(**each | {"ending": Ending(each["ending"])}) for each in content["attempts"]]
        return cls(directory, content["run"], attempts, incidents, content["memory"], content["postmortem"])

    @staticmethod
    def set_aside(directory: Path) -> None:
        """Renames a record that cannot be read, so that the run goes on with another one."""
        path = directory / RECORD_FILE
        with suppress(OSError):
            path.replace(path.with_name(f"{RECORD_FILE}.unreadable"))

    def _take_in_progress(self) -> None:
        """A process that was killed left its last step where no write was needed for it."""
        mark = read_mark(self.directory)
        if mark is not None and self.attempts and mark[0] == self.newest.number:
            self.newest.last_step = max(self.newest.last_step, mark[1])

    @property
    def newest(self) -> Attempt:
        return self.attempts[-1]

    @property
    def ending(self) -> Ending:
        """The end of the newest attempt."""
        return self.newest.ending if self.attempts else Ending.FINISHED

    # ---- writing ----

    def begin_attempt(
        self, resumed_from: str | None, first_step: int, marks: bool = True, job: str = "", agent: str = ""
    ) -> Attempt:
        """A process begins its part."""
        number = self.newest.number + 1 if self.attempts else 1
        process = Process.this_one()
        attempt = Attempt(
            number,
            process.pid,
            socket.gethostname(),
            time.time(),
            resumed_from,
            first_step,
            first_step,
            job=job,
            agent=agent,
            process_began=process.began,
        )
        _CALLS[os.path.abspath(self.directory)] += 1
        attempt.call = _CALLS[os.path.abspath(self.directory)]
        self.attempts = [*self.attempts, attempt][-_KEPT_ATTEMPTS:]
        if marks and self.kept:
            self._open_mark()
            self.note_step(first_step)
        return attempt

    def note_step(self, step: int) -> None:
        """Marks the step that a killed process leaves."""
        if self._mark is not None:
            self._mark.note_step(self.newest.number, step)

    def end_attempt(self, ending: Ending, why: str, step: int) -> None:
        """This process's part is over."""
        self.newest.ending, self.newest.why = ending, why
        self.newest.last_step = max(self.newest.last_step, step)

    def write(self) -> None:
        """Writes the record, whole or not at all. What the file system refuses is told once and stops nothing."""
        if not self.kept:
            return
        # The training thread, and one that is about to end the process, may want to at the same time: what is written
        # last is what was last known.
        with self._lock:
            self._write(self.directory / RECORD_FILE)

    def _write(self, path: Path) -> None:
        content = {
            "schema": SCHEMA_VERSION,
            "time": time.time(),
            "run": self.run,
            "ending": self.ending,
            "attempts": self.describe_attempts(),
            "incidents": self.incidents,
            "memory": self.recovery_state,
            "postmortem": self.postmortem,
        }
        try:
            replace_file(path, json.dumps(jsonable(content), indent=1) + "\n", sync=True)
        except OSError as error:
            if not self._failed:
                self._failed = True
                logger.warning(
                    "%s could not be written (%s): a restart will not know of budgets and earlier attempts.",
                    path,
                    error,
                )

    def close(self) -> None:
        """Lets go of the mark."""
        if self._mark is not None:
            self._mark.close()
            self._mark = None

    def describe_attempts(self) -> list[dict[str, Any]]:
        """All attempts as JSON."""
        return [asdict(attempt) for attempt in self.attempts]

    def _open_mark(self) -> None:
        try:
            self._mark = ProgressMark(self.directory)
        except OSError as error:
            logger.warning(
                "%s cannot be kept (%s): after a kill, the step it came to will not be known.", PROGRESS_FILE, error
            )


# ---- progress mark: how far a process has come, on disk after each step, for whoever finds it killed ----


PROGRESS_FILE = "healing_progress.bin"
# Attempt (0 without a record) and optimizer steps finished, little endian.
_MARK = struct.Struct("<qq")
# Of the training time, that marking may take.
_SHARE = 0.01


class ProgressMark:
    """Keeps the mark of one process."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file: int | None = os.open(directory / PROGRESS_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        self._next = 0.0
        self._last_took = 0.0

    def note_step(self, attempt: int, step: int) -> None:
        """Marks the attempt, and the optimizer steps finished."""
        now = time.perf_counter()
        if self._file is None or now < self._next:
            return
        try:
            os.pwrite(self._file, _MARK.pack(attempt, step), 0)
        except OSError:
            self.close()
        took = time.perf_counter() - now
        # A disk is slow twice in a row. One slow write is a machine that had something else to do.
        self._next, self._last_took = now + min(took, self._last_took) / _SHARE, took

    def close(self) -> None:
        """Lets go of the file, which stays."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_mark(directory: Path) -> tuple[int, int] | None:
    """Reads the attempt and the step that were marked last."""
    try:
        attempt, step = _MARK.unpack((directory / PROGRESS_FILE).read_bytes())
    except (OSError, struct.error):
        return None
    return int(attempt), int(step)
