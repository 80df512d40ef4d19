"""`OpenIncident`: one incident while it is dealt with, timed, and told of in the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from ..failures.classify import classify_exception
from ..failures.recipes import Action, DamagedCheckpointError, FailureType
from ..journal.incident import Incident
from ..journal.journal import Journal
from .outcomes import Outcomes


# Where the process ends, the next one takes up what is open.
_ENDS_THE_PROCESS = frozenset({FailureType.PREEMPTED, FailureType.INTERRUPTED, FailureType.DEVICE})


class OpenIncident:
    """
    One incident while it is dealt with: its clock runs, and no way out of a `with` block leaves it without an outcome.
    """

    __slots__ = ("_journal", "_outcomes", "_since", "_told", "_waits", "incident")

    def __init__(self, journal: Journal, outcomes: Outcomes, incident: Incident) -> None:
        self.incident = incident
        self._journal = journal
        self._outcomes = outcomes
        self._since: float | None = time.perf_counter()
        self._waits = self._told = False

    def diagnosed(self, failure: FailureType, cause: str, evidence: Mapping[str, Any] | None = None) -> None:
        """Records what it is."""
        self._journal.diagnosed(self.incident, failure, cause, {} if evidence is None else evidence)

    def acted(self, action: Action, **result: Any) -> None:
        """Records one action."""
        self._journal.acted(self.incident, action.value, **result)

    def stop_clock(self) -> None:
        """What follows is not counted as time lost."""
        self._take_time()
        self._since = None

    def close(self, outcome: str, **evidence: Any) -> None:
        """Tells of it, and closes it."""
        self._take_time()
        self._tell()
        self._journal.closed(self.incident, outcome, **evidence)

    def wait(self) -> None:
        """Waits for the healthy steps that follow; told of at the end of the block."""
        self._take_time()
        self._outcomes.wait_for(self.incident)
        self._waits = True

    def leave_open(self) -> None:
        """Leaves its outcome to what has it already, the watch of a loss."""
        self._waits = True

    def done(self) -> None:
        """Tells of it; what is not closed waits for the healthy steps that follow."""
        if not self._waits and self.incident.outcome == "open":
            self.wait()
        if not self._told:
            self._tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.done()
        elif not self._waits and self.incident.outcome == "open" and not self._goes_on_after(error):
            self._take_time()
            self._journal.closed(self.incident, "unresolved")

    def _goes_on_after(self, error: BaseException) -> bool:
        """Whether an exception leads to where it is dealt with further."""
        if isinstance(error, DamagedCheckpointError) and error.incident is self.incident:
            return True
        return classify_exception(error) in _ENDS_THE_PROCESS

    def _tell(self) -> None:
        self._told = True
        self._journal.dealt_with(self.incident)

    def _take_time(self) -> None:
        if self._since is not None:
            now = time.perf_counter()
            self.incident.seconds_lost += now - self._since
            self._since = now
