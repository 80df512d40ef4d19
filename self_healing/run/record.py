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
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from ..journal.incident import Incident
from ..system.files import jsonable, replace_file
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


# The training thread, and one that is about to end the process, may want to write at the same time.
WRITING = threading.RLock()

# Of this process and not of one run: how often training into a directory has begun in it.
_CALLS: Counter[str] = Counter()


def first_call(directory: Path) -> bool:
    """Whether this process has not trained into a directory yet."""
    return _CALLS[os.path.abspath(directory)] == 0


class ExitReason(StrEnum):
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
    ending: ExitReason = ExitReason.RUNNING
    why: str = ""
    call: int = 1
    job: str = ""
    agent: str = ""
    process_began: float = 0.0


@dataclass(slots=True)
class RunRecord:
    """The record of one run, however many processes it takes."""

    directory: Path
    run: str
    attempts: list[Attempt] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    recovery_state: dict[str, Any] = field(default_factory=dict)
    postmortem: str | None = None

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
        mark = read_mark(directory)
        if mark is not None and mark[0] == record.newest.number:
            # A process that was killed left its last step where no write was needed for it.
            record.newest.last_step = max(record.newest.last_step, mark[1])
        return record

    @classmethod
    def _from(cls, directory: Path, content: Any) -> Self:
        if content["schema"] != SCHEMA_VERSION:
            raise ValueError(f"it is not of schema {SCHEMA_VERSION}")
        attempts = [Attempt(**each | {"ending": ExitReason(each["ending"])}) for each in content["attempts"]]
        for each in content["incidents"]:
            # Whether they can be read: they are taken up later, where a failure would end the start.
            Incident.from_dict(each)
        return cls(directory, content["run"], attempts, content["incidents"], content["memory"], content["postmortem"])

    @property
    def newest(self) -> Attempt:
        return self.attempts[-1]

    @property
    def ending(self) -> ExitReason:
        """The end of the newest attempt."""
        return self.newest.ending if self.attempts else ExitReason.FINISHED

    # ---- writing ----

    def begin_attempt(self, resumed_from: str | None, first_step: int, job: str = "", agent: str = "") -> Attempt:
        """A process begins its part."""
        number = self.newest.number + 1 if self.attempts else 1
        process = Process.this_one()
        _CALLS[os.path.abspath(self.directory)] += 1
        attempt = Attempt(
            number,
            process.pid,
            socket.gethostname(),
            time.time(),
            resumed_from,
            first_step,
            first_step,
            call=_CALLS[os.path.abspath(self.directory)],
            job=job,
            agent=agent,
            process_began=process.began,
        )
        self.attempts = [*self.attempts, attempt][-_KEPT_ATTEMPTS:]
        return attempt

    def write(self) -> None:
        """Writes the record, whole or not at all. What the file system refuses stops nothing."""
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
        path = self.directory / RECORD_FILE
        try:
            with WRITING:
                replace_file(path, json.dumps(jsonable(content)) + "\n", sync=True)
        except OSError as error:
            text = "%s could not be written (%s): a restart will not know of budgets and earlier attempts."
            logger.warning(text, path, error)

    def describe_attempts(self) -> list[dict[str, Any]]:
        return list(map(asdict, self.attempts))


# ---- progress mark: how far a process has come, on disk after each step, for whoever finds it killed ----


PROGRESS_FILE = "healing_progress.bin"
# Attempt (0 without a record) and optimizer steps finished, little endian.
MARK = struct.Struct("<qq")


def read_mark(directory: Path) -> tuple[int, int] | None:
    """Reads the attempt and the step that were marked last."""
    try:
        attempt, step = MARK.unpack((directory / PROGRESS_FILE).read_bytes())
    except (OSError, struct.error):
        return None
    return int(attempt), int(step)
