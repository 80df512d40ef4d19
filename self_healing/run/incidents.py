"""Incidents from their opening to their outcome, with the diagnosis in between."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from ..failures.classify import classify_exception
from ..failures.recipes import Action, Cause, FailureType
from ..journal.incident import HEALED, Incident
from ..journal.journal import Journal
from ..system.files import jsonable


# ---- incidents: one incident while it is dealt with, timed, and told of in the end ----


# Where the process ends, the next one takes up what is open.
_ENDS_THE_PROCESS = frozenset({FailureType.PREEMPTED, FailureType.INTERRUPTED, FailureType.DEVICE})


@dataclass(eq=False, slots=True)
class OpenIncident:
    """
    One incident while it is dealt with: its clock runs, and no way out of a `with` block leaves it without an outcome.
    """

    _journal: Journal
    _outcomes: Outcomes
    incident: Incident
    _since: float | None = field(default_factory=time.perf_counter)
    _waits: bool = False
    _told: bool = False

    def diagnosed(self, failure: FailureType, cause: str, evidence: Mapping[str, Any] | None = None) -> None:
        self._journal.diagnosed(self.incident, failure, cause, {} if evidence is None else evidence)

    def acted(self, action: Action, **result: Any) -> None:
        self._journal.acted(self.incident, action.value, **result)

    def stop_clock(self) -> None:
        """What follows is not counted as time lost."""
        self._take_time()
        self._since = None

    def close(self, outcome: str) -> None:
        """Tells of it, and closes it."""
        self._take_time()
        self._told = True
        self._journal.dealt_with(self.incident)
        self._journal.closed(self.incident, outcome)

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
            self._told = True
            self._journal.dealt_with(self.incident)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.done()
        elif self._waits or classify_exception(error) in _ENDS_THE_PROCESS:
            return
        elif self.incident.outcome == "open":
            self._take_time()
            self._journal.closed(self.incident, "unresolved")

    def _take_time(self) -> None:
        if self._since is not None:
            now = time.perf_counter()
            self.incident.seconds_lost += now - self._since
            self._since = now


# ---- outcomes: judges what became of incidents by the healthy steps that follow them ----


@dataclass(slots=True)
class _Awaited:
    """An incident whose outcome is not known yet."""

    incident: Incident
    trend: tuple[float, float] | None
    after: list[float] = field(default_factory=list)

    @property
    def typical(self) -> float | None:
        """Median of the losses since."""
        return statistics.median_high(self.after) if self.after else None


# Healthy steps after an incident before its outcome is judged.
OUTCOME_STEPS = 5


@dataclass(eq=False)
class Outcomes:
    """Waits for what becomes of incidents that were dealt with, and closes them in the journal."""

    _journal: Journal
    # Knows which losses are usual for the run: its `NumericsState`.
    baseline: Any = None
    awaited: list[_Awaited] = field(default_factory=list)
    # After these the run went back, and it is not known yet whether that helped: nothing new is trusted.
    rollback_in_doubt: set[str] = field(default_factory=set)

    def wait_for(self, incident: Incident) -> None:
        """Judges an incident by the healthy steps that follow it; steps that are done again do not follow it yet."""
        # One that was waited for already has cost more meanwhile.
        self._stop_waiting_for(incident)
        for earlier in self.awaited:
            if _came_back(earlier.incident, incident):
                earlier.after.clear()
        self.awaited.append(_Awaited(incident, None if self.baseline is None else self.baseline.trend()))
        if Action.ROLL_BACK in incident.actions:
            self.rollback_in_doubt.add(incident.id)

    def take_in(self, loss: float, step: int) -> None:
        """Takes in a healthy step, and closes the incidents that enough of them have followed."""
        for awaited in list(self.awaited):
            if step < awaited.incident.step and (awaited.incident.steps_repeated or may_be_repeated(awaited.incident)):
                continue
            awaited.after.append(loss)
            if len(awaited.after) >= OUTCOME_STEPS:
                self.awaited.remove(awaited)
                self._close(awaited)

    def went_back(self, incident: Incident) -> None:
        """Closes earlier incidents that the run went back for as not cured: it went back again."""
        for awaited in list(self.awaited):
            if Action.ROLL_BACK in awaited.incident.actions and awaited.incident is not incident:
                # It has come back before it could be told whether it was gone.
                self.awaited.remove(awaited)
                self.rollback_in_doubt.discard(awaited.incident.id)
                self._journal.closed(awaited.incident, "unresolved", relapse=incident.id)

    def close(self, unfollowed: str | None = None) -> None:
        """Judges what is still open by the steps there were, at the end of the run or of this process's part in it."""
        for awaited in self.awaited:
            incident, goes_on = awaited.incident, may_be_repeated(awaited.incident)
            again = unfollowed is None and sum(_came_back(incident, each.incident) for each in self.awaited) > 1
            if awaited.after or not (again or goes_on):
                self._close(awaited)
            elif unfollowed is not None or not goes_on:
                self._journal.closed(incident, unfollowed or "unresolved", loss_after=None, trend=None)
        self.awaited.clear()

    def ends_with(self, incident: Incident) -> None:
        """The run ends with an incident: those before it that it has not come beyond since were not healed either."""
        self._stop_waiting_for(incident)
        self.rollback_in_doubt.discard(incident.id)
        behind = [each for each in self.awaited if incident.step <= each.incident.step]
        not_passed = [each.incident for each in behind if not each.after or _came_back(each.incident, incident)]
        in_vain = [each for each in self._journal.incidents if each.outcome in HEALED and each.is_like(incident)]
        for earlier in not_passed + in_vain:
            self._stop_waiting_for(earlier)
            self._journal.closed(earlier, "unresolved", relapse=incident.id)

    @property
    def resolved_at_the_end(self) -> int:
        """Incidents that are open, and resolved if the run ends now ([`close`])."""
        counted = [awaited for awaited in self.awaited if not awaited.incident.of_a_process]
        followed = [awaited for awaited in counted if awaited.after or not may_be_repeated(awaited.incident)]
        return sum(self._judge(awaited) == "resolved" for awaited in followed) + len(counted) - len(followed)

    def _stop_waiting_for(self, incident: Incident) -> None:
        self.awaited = [awaited for awaited in self.awaited if awaited.incident is not incident]

    def _close(self, awaited: _Awaited) -> None:
        self.rollback_in_doubt.discard(awaited.incident.id)
        trend = awaited.trend
        self._journal.closed(
            awaited.incident,
            self._judge(awaited),
            loss_after=awaited.typical,
            trend=None if trend is None else {"median": trend[0], "scale": trend[1]},
        )

    def _judge(self, awaited: _Awaited) -> str:
        """Judges an incident by the steps after it."""
        incident, typical = awaited.incident, awaited.typical
        if not incident.actions or Action.GO_ON_WITHOUT in incident.actions:
            return "unresolved"
        if typical is None:
            # Nothing followed: the run ended with this step, or on a step that was skipped.
            return "resolved" if incident.steps_lost + incident.steps_repeated == 0 else "unresolved"
        if incident.actions == [Action.USE_REEXECUTED_STEP]:
            # What was applied is what an undisturbed run applies: where the loss goes from there says nothing of it.
            return "resolved"
        if awaited.trend is None:
            # Without a trend, the losses the run began with.
            limit = math.inf if self.baseline is None else self.baseline.early_limit
            return "resolved" if typical <= limit else "unresolved"
        centre, scale = awaited.trend
        # A floor of 5 % of the loss: after few or very even steps the scale says little.
        return "resolved" if typical <= centre + 2 * max(scale, 0.05 * abs(centre), 1e-3) else "unresolved"

    # ---- state in checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        return {
            "totals": self._journal.totals({awaited.incident.id for awaited in self.awaited}),
            "awaited": [
                [jsonable(awaited.incident.to_dict()), awaited.trend, awaited.after] for awaited in self.awaited
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Takes in what a run that is resumed without its record knew: what its incidents come to, and those that are
        still to be judged.
        """
        self._journal.earlier = dict(state.get("totals", {}))
        for entry, trend, after in state.get("awaited", []):
            incident = Incident.from_dict(entry)
            self.awaited.append(_Awaited(incident, None if trend is None else (trend[0], trend[1]), list(after)))
            self._journal.incidents.append(incident)
            if Action.ROLL_BACK in incident.actions:
                self.rollback_in_doubt.add(incident.id)


def _came_back(earlier: Incident, later: Incident) -> bool:
    """Whether a failure has come back at the same place."""
    return (earlier.step, earlier.failure) == (later.step, later.failure)


def may_be_repeated(incident: Incident) -> bool:
    """Whether the steps an incident has cost are those that went with a process, and that the next one does again."""
    ends_a_process = incident.failure in (FailureType.PROCESS_DIED, FailureType.USER_CODE)
    taken_up = Action.STOP in incident.actions and Action.RESUME in incident.actions
    return ends_a_process or taken_up or Action.EXIT_FOR_RESTART in incident.actions


# ---- diagnosis: the cause of a failure, as the experiments showed it ----


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of a failure and the experiments that showed it."""

    failure: FailureType
    cause: Cause
    evidence: dict[str, Any] = field(default_factory=dict)
    poison: dict[int, list[int]] = field(default_factory=dict)
    rows: int = 0
    poison_rows: int = 0
    everywhere: bool = False
