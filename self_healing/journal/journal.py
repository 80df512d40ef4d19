"""
The journal of a run: incidents as JSON lines, log messages, alerts and metrics, and a postmortem when the run ends
badly.

A sink that fails is reported once and never stops the training.
"""

from __future__ import annotations

import json
import logging
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..config.healing_config import HealingConfig
from ..failures.recipes import FAILURE_RECIPES, Action, FailureType, Severity, Symptom
from ..system import processes
from ..system.files import EVENTS_FILE, POSTMORTEM_FILE, append_line, jsonable, of_rank, rank_in, replace_file
from ..system.processes import log_safely
from .alerts import Webhook, to_trackio, to_wandb
from .incident import HEALED, IN_DOUBT, OF_RANK, Incident, describe, figures, headline
from .postmortem import Postmortem, directions_to
from .terminal import HEADLINE_WIDTH


logger = logging.getLogger("self_healing")

SCHEMA_VERSION = 1
# What the incidents of a run come to.
_COUNTED = ("incidents", "resolved", "skipped_steps", "quarantined_rows")
_COSTS = ("steps_lost", "steps_repeated", "seconds_lost")


class Journal:
    """Writes events to `healing_events.jsonl`, and reports them to log, trackers, webhook and callbacks."""

    def __init__(self, directory: Path, config: HealingConfig, run_id: str, rank: int = 0) -> None:
        self.directory = directory
        self.config = config
        self.run_id = run_id
        self.rank = rank
        self.path = of_rank(directory / EVENTS_FILE, rank)
        # The end of the ids of this rank: each numbers its incidents by itself.
        self._suffix = "" if rank == 0 else f"{OF_RANK}{rank}"
        self.attempt = 0
        self.incidents: list[Incident] = []
        # The totals of a run that this one goes on from without its incidents: a resume by hand.
        self.earlier: Mapping[str, float] = {}
        # Tells callbacks that listen.
        self.notify: Callable[[Incident], None] | None = None
        # Of ranks other than the first: tells it of an incident, when all of them meet the next time.
        self.tell: Callable[[Callable[[], Mapping[str, Any]]], None] = lambda record: None
        # Of the first rank: incidents that others have had without it.
        self.heard: list[Incident] = []
        # Incidents of others that are the same events as its own, by their ids.
        self._shared: set[str] = set()
        # Of the last postmortem.
        self.directions: str | None = None
        # Set by what keeps the record of the run: called at each change, and the processes so far for a postmortem.
        self.changed: Callable[[], None] | None = None
        self.attempts: Callable[[], list[dict[str, Any]]] = list
        self._broken_sinks: set[str] = set()
        self._webhook, self._told_of_end = Webhook(), False
        # Why it is not known how many steps the incident has cost that is told of next; empty if it is.
        self.doubt = ""
        # The highest number that an incident has had. They are opened in the training thread and beside it, where the
        # second one may interrupt the first.
        self._numbered = 0
        self._opening = threading.RLock()

    @property
    def of_all_ranks(self) -> list[Incident]:
        """The incidents of this rank, and on the first one those that others have had without it."""
        return [*self.incidents, *self.heard]

    # ---- incidents ----

    def take_up(self, incidents: Sequence[Incident]) -> None:
        """Goes on with the incidents of earlier processes."""
        of_first = [incident for incident in incidents if OF_RANK not in incident.id]
        own = [incident for incident in incidents if incident.id.endswith(self._suffix)] if self.rank > 0 else []
        # All ranks go on with those of the first one, whose outcomes they judge alike.
        self.incidents = [*own, *of_first]
        self.heard = [incident for incident in incidents if OF_RANK in incident.id] if self.rank == 0 else []
        # Those of other ranks as well: the journal of a rank may lie on a machine that it does not run on any more.
        names = [incident.id.partition(OF_RANK)[0] for incident in incidents]
        self._numbered = max((int(name.rpartition("-")[2]) for name in names), default=0)

    def open(self, step: int, symptom: str, evidence: Mapping[str, Any], severity: Severity | None = None) -> Incident:
        """Records that something was detected."""
        with self._opening:
            self._numbered += 1
            name = f"{self.run_id}-{self._numbered:03d}{self._suffix}"
            incident = Incident(name, step, symptom, evidence=dict(evidence), severity=severity)
            self.incidents.append(incident)
        self._tell_of(incident, "detected", symptom=symptom, evidence=incident.evidence)
        return incident

    def _tell_of(self, incident: Incident, kind: str, step: int | None = None, **fields: Any) -> None:
        # Of one that it has taken up from the first rank, that one tells.
        if self.rank == 0 or incident.id.endswith(self._suffix):
            self.event(kind, incident.step if step is None else step, incident=incident.id, **fields)

    def noticed(self, symptom: Symptom) -> None:
        """Records something worth knowing about which nothing has to be done."""
        self.event("noticed", symptom.step, symptom=symptom.name, evidence=symptom.evidence)
        logger.info("Step %d: %s (%s).", symptom.step, symptom.name.replace("_", " "), figures(symptom.evidence))

    def diagnosed(self, incident: Incident, failure: FailureType, cause: str, evidence: Mapping[str, Any]) -> None:
        """Records the result of the experiments."""
        incident.failure, incident.cause = failure, cause
        incident.evidence.update(evidence)
        self._tell_of(incident, "diagnosed", failure=failure.value, cause=cause, evidence=evidence)

    def acted(self, incident: Incident, action: str, happened: bool = True, **result: Any) -> None:
        """Records one action and its result; one that failed is not among the actions of the incident."""
        if happened:
            incident.did(action, result)
        self._tell_of(incident, "action", action=action, happened=happened, **result)

    def taken_up(self, incident: Incident, step: int, checkpoint: str | None) -> None:
        """Records what an incident of an earlier process has cost, now that this one goes on from a checkpoint."""
        self._tell_of(
            incident,
            "taken_up",
            step,
            checkpoint=checkpoint,
            steps_lost=incident.steps_lost,
            steps_repeated=incident.steps_repeated,
            outcome=incident.outcome,
        )

    def dealt_with(self, incident: Incident) -> None:
        """Reports an incident to all sinks once its actions are done; the outcome is measured later."""
        if self.doubt and incident.failure is not None:
            doubt, self.doubt = self.doubt, ""
            self.diagnosed(incident, incident.failure, incident.cause, {IN_DOUBT: doubt})
        self._report(incident)
        self._record(incident)

    def _report(self, incident: Incident) -> None:
        severity, text = incident.shown_severity, describe(incident)
        shown = "error" if Action.STOP in incident.actions else severity
        of_its_kind = " ".join([str(incident.failure), incident.symptom, *dict.fromkeys(incident.actions)])
        # With the incident for handlers of the program's own, in values that JSON has as well. Never below WARNING,
        # which is what Python shows by default: a run that was healed must not look untouched.
        log_safely(
            logger,
            logging.ERROR if shown == "error" else logging.WARNING,
            "%s",
            headline(incident, HEADLINE_WIDTH),
            extra={"incident": jsonable(incident.to_dict()), "severity": shown, "kind": of_its_kind},
        )
        # For whoever wants to read it in the log; the journal has it all.
        log_safely(logger, logging.INFO, "%s", text)
        self.alert(f"self_healing: {incident.cause}", text, severity, incident.step)
        if shown == "error" and Action.STOP not in incident.actions and not self._told_of_end:
            told = headline(incident, 2 * HEADLINE_WIDTH)
            self._post(told, incident.step, str(incident.failure), incident.outcome)
        if self.notify is not None:
            self._contained("on_instability", partial(self.notify, incident))

    def take_in(self, rank: int, entry: Mapping[str, Any]) -> None:
        """
        Takes in an incident of another rank: where this one, the first, has had none like it, it raises the alert that
        the other one cannot raise.
        """
        if self.rank != 0:
            return
        incident = Incident.from_dict(entry)
        if incident.id in self._shared:
            return
        told = next((at for at, each in enumerate(self.heard) if each.id == incident.id), None)
        if told is not None:
            self.heard[told] = incident
            return
        known = next((each for each in self.of_all_ranks if incident.is_like(each)), None)
        if known is not None:
            self._shared.add(incident.id)
            if "rows" in incident.evidence:
                # Each rank names those of its own batch.
                known.evidence["rows"] = [*known.evidence.get("rows", ()), *incident.evidence["rows"]]
            return
        self.heard.append(incident)
        self._report(incident)

    def closed(self, incident: Incident, outcome: str, **evidence: Any) -> None:
        """Records the measured outcome."""
        incident.outcome = outcome
        if outcome not in HEALED and "remedy" in incident.evidence:
            evidence["evidence"] = {"remedy": incident.evidence["remedy"]}
        self._tell_of(
            incident,
            "outcome",
            failure=None if incident.failure is None else incident.failure.value,
            outcome=outcome,
            steps_lost=incident.steps_lost,
            steps_repeated=incident.steps_repeated,
            seconds_lost=round(incident.seconds_lost, 3),
            **evidence,
        )
        self._record(incident)

    def _record(self, incident: Incident) -> None:
        if self.rank > 0 and incident.id.endswith(self._suffix):
            self.tell(incident.to_dict)
        if self.changed is not None:
            self._contained("the record of the run", self.changed)

    # ---- sinks ----

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Appends one line to the journal."""
        line = {
            "schema": SCHEMA_VERSION,
            "time": time.time(),
            "run": self.run_id,
            "rank": self.rank,
            "attempt": self.attempt,
            "step": step,
            "kind": kind,
            **fields,
        }
        self._contained(str(self.path), partial(append_line, self.path, line))

    def alert(self, title: str, text: str, severity: str, step: int) -> None:
        """Raises an alert about an optimizer step with the trackers that have them."""
        if self.rank == 0:
            for name, raise_alert in (("trackio", to_trackio), ("wandb", to_wandb)):
                if name in sys.modules:
                    self._contained(name, partial(raise_alert, title, text, severity, step))

    def ended(
        self, step: int, failure: FailureType, error: BaseException | None, resume_with: str | None = None
    ) -> None:
        """Posts what has stopped the run, once; not that somebody has, with a signal or Ctrl-C."""
        if self._told_of_end or failure in (FailureType.INTERRUPTED, FailureType.PREEMPTED):
            return
        self._told_of_end = True
        recipe = FAILURE_RECIPES[failure]
        # Of the error its type alone: what it says may quote a sample.
        by = "" if error is None else f" by {type(error).__name__}"
        go_on = "" if resume_with is None else f" To resume: {resume_with}"
        text = f"step {step}: training stopped{by}. {recipe.diagnosis} What to do: {recipe.advice}{go_on}"
        self._post(text, step, failure.value, "stopped")

    def _post(self, text: str, step: int, kind: str, outcome: str) -> None:
        if self.rank == 0:
            where = f"Run {self.run_id} on {socket.gethostname()}. More: self-healing report "
            text = f"self_healing: {text}\n{where}{shlex.quote(str(self.directory.resolve()))}"
            message = {"text": text, "run": self.run_id, "step": step, "kind": kind, "outcome": outcome}
            self._contained("webhook", partial(self._webhook.post, message))

    def metrics(self, resolved_at_the_end: int = 0) -> dict[str, float]:
        """`healing/*` metrics for the trackers; empty while nothing has happened."""
        totals = self.totals()
        if not totals["incidents"]:
            return {}
        totals["resolved"] += resolved_at_the_end
        return {f"healing/{name}": value for name, value in totals.items()}

    def totals(self, without: Collection[str] = ()) -> dict[str, float]:
        """Sums up the incidents, with those before the checkpoint a run was resumed from."""
        totals: dict[str, float] = {**dict.fromkeys((*_COUNTED, *_COSTS), 0), **self.earlier}
        for incident in self.of_all_ranks:
            if incident.id in without or incident.of_a_process:
                continue
            totals["incidents"] += 1
            totals["resolved"] += incident.outcome in HEALED
            totals["skipped_steps"] += Action.SKIP_STEP in incident.actions
            totals["quarantined_rows"] += incident.quarantined
            totals["steps_lost"] += incident.steps_lost
            totals["steps_repeated"] += incident.steps_repeated
            totals["seconds_lost"] = round(totals["seconds_lost"] + incident.seconds_lost, 3)
        return totals

    def _contained(self, sink: str, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception:
            # Once per sink: a full disk must not fill the log as well.
            if sink not in self._broken_sinks:
                self._broken_sinks.add(sink)
                text = "The sink %s failed; training goes on without it."
                log_safely(logger, logging.WARNING, text, sink, exc_info=True)

    # ---- the end of a run that did not finish ----

    def set_aside_postmortem(self) -> None:
        """Renames the postmortem of an earlier run, so that one that is there is always that of the last run."""
        stale = [of_rank(self.directory / POSTMORTEM_FILE, self.rank)]
        if self.rank == 0:
            stale += [path for path in self._postmortems_of_others() if rank_in(path) >= processes.world_size()]
        for path in filter(Path.exists, stale):
            aside = path.with_name(f"{path.stem}.before-{self.run_id}.json")
            self._contained("postmortem", partial(path.rename, aside))

    def errors_of_other_ranks(self, since: int = 0) -> list[dict[str, Any]]:
        """Reads the errors that ended the other ranks of this run, as far as they could be written."""
        found: list[dict[str, Any]] = []
        for path in self._postmortems_of_others():
            # A process may have been killed while it wrote its own.
            with suppress(OSError, ValueError, KeyError, TypeError):
                content = json.loads(path.read_text(encoding="utf-8"))
                if content["run"] == self.run_id and content["step"] >= since and content["error"] is not None:
                    found.append({"rank": rank_in(path)} | {key: content[key] for key in ("step", "failure", "error")})
        return found

    def _postmortems_of_others(self) -> list[Path]:
        return sorted(self.directory.glob("postmortem.rank*[0-9].json"), key=rank_in)

    def write_postmortem(self, *about: Any, **more: Any) -> str | None:
        """
        Writes `postmortem.json`, and reports to the sinks that the run has ended; the arguments are those of
        [`Postmortem`].
        """
        ending = Postmortem(*about, **more)
        path = of_rank(self.directory / POSTMORTEM_FILE, self.rank)
        content = ending.to_dict(self.run_id, self.attempts(), self.incidents, self.path)
        self._contained(str(path), lambda: replace_file(path, json.dumps(jsonable(content), indent=2) + "\n"))
        self.event("postmortem", ending.step, verdict=ending.verdict, failure=ending.failure.value, path=str(path))
        self.alert("self_healing: run ended", ending.verdict, "error", ending.step)
        self.ended(ending.step, ending.failure, ending.error, ending.resume_with)
        written = str(path) if str(path) not in self._broken_sinks else None
        self.directions = directions_to(ending.step, written, ending.resume_with)
        return written
