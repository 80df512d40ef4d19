"""
What happened, written down: incidents as JSON lines, log messages, trackio alerts, metrics, and a postmortem when a
run ends badly.

A sink that fails is reported once and never stops the training.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from . import consensus
from .classify import text_of
from .config import HealingConfig
from .detectors import Symptom
from .detectors.symptom import Severity
from .failures import FAILURE_RECIPES, Action, Cause, FailureType
from .files import append_line, jsonable, replace_file
from .known_errors import match_known_error


logger = logging.getLogger("self_healing")

SCHEMA_VERSION = 1
EVENTS_FILE = "healing_events.jsonl"
POSTMORTEM_FILE = "postmortem.json"
# Symptoms.
_OF_PROCESSES = frozenset({"process_died", "preempted"})
_POSTMORTEM_OF_RANK = re.compile(r"postmortem\.rank(\d+)\.json")


@dataclass(slots=True)
class Incident:
    """
    One failure from its detection to its outcome.

    Args:
        id (`str`):
            Unique within the run directory.
        step (`int`):
            Optimizer steps finished when it was seen.
        symptom (`str`):
            What was seen: a detector's name, or the type of an exception.
        failure (`FailureType`, *optional*):
            What it turned out to be.
        cause (`str`):
            The diagnosis in a few words; a [`Cause`] where an experiment has shown it.
        evidence (`dict`):
            The values and experiments behind the diagnosis.
        actions (`list[str]`):
            What was done.
        steps_lost (`int`):
            Optimizer steps that are missing from the weights.
        steps_repeated (`int`):
            Optimizer steps that were finished, are in no checkpoint, and have to be done again.
        seconds_lost (`float`):
            Time diagnosis and remedy took.
        severity (`str`, *optional*):
            That of the symptom. Defaults to that of the failure.
        figures (`list[str]`):
            What the actions did, in words with numbers.
        outcome (`str`):
            `"open"`, `"resolved"` (loss back within 2 scales of its trend), `"self_recovered"` (the same, with nothing
            done about it), `"unresolved"`, `"reported"` (nothing was to be done) or `"fatal"`.
    """

    id: str
    step: int
    symptom: str
    failure: FailureType | None = None
    cause: str = Cause.UNKNOWN
    evidence: dict[str, Any] = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)
    steps_lost: int = 0
    steps_repeated: int = 0
    seconds_lost: float = 0.0
    severity: Severity | None = None
    figures: list[str] = field(default_factory=list)
    outcome: str = "open"

    @property
    def of_a_process(self) -> bool:
        """Whether it is none of the training's: a process was killed, or asked to leave."""
        return self.symptom in _OF_PROCESSES

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Incident:
        """What [`to_dict`] wrote in an earlier process."""
        known = {each.name: entry[each.name] for each in fields(cls) if each.name in entry}
        failure = known.pop("failure", None)
        return cls(
            id=entry["incident"],
            failure=None if failure is None else FailureType(failure),
            # Its own from here on.
            **{name: copy.copy(value) for name, value in known.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        told = {each.name: copy.copy(getattr(self, each.name)) for each in fields(self) if each.name != "id"}
        told["failure"] = None if self.failure is None else self.failure.value
        told["seconds_lost"] = round(self.seconds_lost, 3)
        return {"incident": self.id, **told}


@dataclass(frozen=True, slots=True)
class Directions:
    """
    Where to read what ended a run, and how to go on.

    Args:
        postmortem (`str`, *optional*):
            Its path; `None` if it could not be written.
        resume_with (`str`, *optional*):
            The line that resumes; `None` if there is no checkpoint.
    """

    postmortem: str | None
    resume_with: str | None

    def __str__(self) -> str:
        told = self.postmortem or "could not be written; the log above says why"
        go_on = self.resume_with or "not possible: there is no checkpoint of this run, it has to start again"
        return f"self_healing: the postmortem: {told}\nself_healing: to go on: {go_on}"


class Journal:
    """
    Writes events to `healing_events.jsonl` and tells log, trackio and callbacks.

    Args:
        directory (`Path`):
            The run directory. Nothing is created before there is something to write.
        config ([`HealingConfig`]):
            Which sinks are wanted.
        run_id (`str`):
            Names the run in every event.
        rank (`int`, *optional*, defaults to 0):
            This process; ranks other than 0 write to a file of their own.
        notify (`Callable[[Incident], None]`, *optional*):
            Called when an incident has been dealt with (`on_instability` of the trainer's callbacks).
    """

    def __init__(
        self,
        directory: Path,
        config: HealingConfig,
        run_id: str,
        rank: int = 0,
        notify: Callable[[Incident], None] | None = None,
    ) -> None:
        self.directory = directory
        self.config = config
        self.run_id = run_id
        self.rank = rank
        self.attempt = 0
        self.incidents: list[Incident] = []
        # The totals of a run that this one goes on from without its incidents: a resume by hand.
        self.earlier: Mapping[str, float] = {}
        self.notify = notify
        # Those of the last postmortem.
        self.directions: Directions | None = None
        # What is told to whoever keeps the run's record, and what of it belongs into a postmortem.
        self.changed: Callable[[], None] | None = None
        self.attempts: Callable[[], list[dict[str, Any]]] = list
        self._broken_sinks: set[str] = set()

    @property
    def path(self) -> Path:
        name = EVENTS_FILE if self.rank == 0 else f"healing_events.rank{self.rank}.jsonl"
        return self.directory / name

    # ---- incidents ----

    def open(self, step: int, symptom: str, evidence: Mapping[str, Any], severity: Severity | None = None) -> Incident:
        """Records that something was detected."""
        number = len(self.incidents) + 1
        name = f"{self.run_id}-{number:03d}"
        incident = Incident(name, step, symptom, evidence=dict(evidence), severity=severity)
        self.incidents.append(incident)
        self.event("detected", step, incident=incident.id, symptom=symptom, evidence=incident.evidence)
        return incident

    def noticed(self, symptom: Symptom) -> None:
        """Records something worth knowing about which nothing has to be done."""
        self.event("noticed", symptom.step, symptom=symptom.name, evidence=symptom.evidence)
        logger.info("Step %d: %s (%s).", symptom.step, symptom.name.replace("_", " "), figures(symptom.evidence))

    def diagnosed(self, incident: Incident, failure: FailureType, cause: str, evidence: Mapping[str, Any]) -> None:
        """Records what the experiments showed."""
        incident.failure, incident.cause = failure, cause
        incident.evidence.update(evidence)
        self.event(
            "diagnosed", incident.step, incident=incident.id, failure=failure.value, cause=cause, evidence=evidence
        )

    def acted(self, incident: Incident, action: str, happened: bool = True, **result: Any) -> None:
        """Records one action and what came of it; one that was tried in vain is not among those of the incident."""
        if happened:
            incident.actions.append(action)
        self.event("action", incident.step, incident=incident.id, action=action, happened=happened, **result)

    def dealt_with(self, incident: Incident) -> None:
        """Tells everybody about an incident once its actions are done; the outcome is measured later."""
        recipe = None if incident.failure is None else FAILURE_RECIPES[incident.failure]
        severity = "warning" if recipe is None else recipe.severity
        if incident.failure is FailureType.RED_FLAG and incident.severity is not None:
            # Every rule has its own.
            severity = incident.severity
        if Action.ROLL_BACK in incident.actions and Action.STOP not in incident.actions:
            # What would have ended the run has not.
            severity = "warning"
        text = describe(incident)
        # Never below WARNING, which is what Python shows by default: a run that was healed must not look untouched.
        logger.log(logging.ERROR if severity == "error" else logging.WARNING, "%s", text)
        self.alert(f"self_healing: {incident.cause}", text, severity, incident.step)
        if self.notify is not None:
            self._contained("on_instability", lambda: self.notify(incident) if self.notify else None)
        self._record()

    def closed(self, incident: Incident, outcome: str, **evidence: Any) -> None:
        """Records the measured outcome."""
        incident.outcome = outcome
        self.event(
            "outcome",
            incident.step,
            incident=incident.id,
            failure=None if incident.failure is None else incident.failure.value,
            outcome=outcome,
            steps_lost=incident.steps_lost,
            steps_repeated=incident.steps_repeated,
            seconds_lost=round(incident.seconds_lost, 3),
            **evidence,
        )
        self._record()

    def _record(self) -> None:
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

        self._contained(str(self.path), lambda: append_line(self.path, line))

    def alert(self, title: str, text: str, severity: str, step: int) -> None:
        """Raises a trackio alert about an optimizer step if a trackio run is active."""
        trackio = sys.modules.get("trackio")
        if trackio is None or not self.config.trackio_alerts or self.rank != 0:
            return
        run = trackio.context_vars.current_run.get()
        if run is None:
            return
        level = {"info": "INFO", "warning": "WARN", "error": "ERROR"}[severity]
        # Of the run: `trackio.alert` takes no step, and counts how often something was logged.
        self._contained("trackio", lambda: run.alert(title, text, level=trackio.AlertLevel[level], step=step))

    def metrics(self, resolved_at_the_end: int = 0) -> dict[str, float]:
        """
        `healing/*` metrics for the trackers; empty while nothing has happened.

        Args:
            resolved_at_the_end (`int`, *optional*, defaults to 0):
                Incidents whose outcome is open, and will be that they are resolved when the run ends now.
        """
        totals = self.totals()
        if not totals["incidents"] or not self.config.healing_metrics:
            return {}
        totals["resolved"] += resolved_at_the_end
        return {f"healing/{name}": value for name, value in totals.items()}

    def totals(self, without: Collection[str] = ()) -> dict[str, float]:
        """
        What the incidents come to, with those before the checkpoint a run was resumed from. That a process was killed
        or asked to leave is left out: what is trained, and logged, is the same in one process and in several.

        Args:
            without (`Collection[str]`, *optional*):
                Incidents to leave out, by their id.
        """
        wanted = (incident for incident in self.incidents if incident.id not in without)
        counted = [incident for incident in wanted if not incident.of_a_process]
        own = {
            "incidents": len(counted),
            "resolved": sum(incident.outcome in ("resolved", "self_recovered") for incident in counted),
            "skipped_steps": sum(Action.SKIP_STEP in incident.actions for incident in counted),
            "quarantined_rows": sum(map(_quarantined, counted)),
            "steps_lost": sum(incident.steps_lost for incident in counted),
            "steps_repeated": sum(incident.steps_repeated for incident in counted),
            "seconds_lost": sum(incident.seconds_lost for incident in counted),
        }
        return {name: round(self.earlier.get(name, 0) + value, 3) for name, value in own.items()}

    def _contained(self, sink: str, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception:
            # Once per sink: a full disk must not fill the log as well.
            if sink not in self._broken_sinks:
                self._broken_sinks.add(sink)
                logger.warning("The sink %s failed; training goes on without it.", sink, exc_info=True)

    # ---- the end of a run that did not finish ----

    def set_aside_postmortem(self) -> None:
        """
        Renames the postmortem of an earlier run, so that one that is there always speaks of the last run. Every rank
        does so with its own, and the first with those of ranks that there are no longer.
        """

        def rename() -> None:
            own = self.directory / self._postmortem_file
            gone = [path for rank, path in self._postmortems_of_ranks() if rank >= consensus.world_size()]
            for stale in [own, *(gone if self.rank == 0 else ())]:
                if stale.exists():
                    stale.rename(stale.with_name(f"{stale.stem}.before-{self.run_id}.json"))

        self._contained("postmortem", rename)

    @property
    def _postmortem_file(self) -> str:
        return POSTMORTEM_FILE if self.rank == 0 else f"postmortem.rank{self.rank}.json"

    def _postmortems_of_ranks(self) -> list[tuple[int, Path]]:
        """Those of all ranks but the first."""
        found = ((_POSTMORTEM_OF_RANK.fullmatch(path.name), path) for path in self.directory.glob("postmortem.rank*"))
        return sorted((int(match[1]), path) for match, path in found if match is not None)

    def errors_of_other_ranks(self, since: int = 0) -> list[dict[str, Any]]:
        """
        What the other ranks of this run ended with, as far as they could write it down.

        Args:
            since (`int`, *optional*, defaults to 0):
                Ends before this step are left out: the run has got over them.
        """
        found: list[dict[str, Any]] = []
        for rank, path in self._postmortems_of_ranks():
            try:
                told = json.loads(path.read_text(encoding="utf-8"))
                if told["run"] == self.run_id and told["step"] >= since and told["error"] is not None:
                    found.append({"rank": rank} | {key: told[key] for key in ("step", "failure", "error")})
            except (OSError, ValueError, LookupError, TypeError):
                logger.warning("%s cannot be read; what that process ended with is not known.", path)
        return found

    def write_postmortem(
        self,
        verdict: str,
        failure: FailureType,
        step: int,
        error: BaseException | None,
        log_history: Sequence[Mapping[str, Any]],
        checkpoint: str | None,
        advice: str | None = None,
        older_checkpoint: str | None = None,
        exit_code: int | None = None,
        other_ranks: Sequence[Mapping[str, Any]] = (),
    ) -> str | None:
        """
        Writes `postmortem.json`: what started it, what followed, what was tried, what to do next.

        Args:
            verdict (`str`):
                Why the run ends.
            failure ([`FailureType`]), step (`int`), error (`BaseException`, *optional*):
                What ended it, and where.
            log_history (`Sequence[Mapping]`):
                Of the trainer; its tail is kept.
            checkpoint (`str`, *optional*):
                The emergency checkpoint.
            advice (`str`, *optional*):
                What to do. Defaults to that of the failure.
            older_checkpoint (`str`, *optional*):
                Where there is no emergency checkpoint, one from before the failure that can be resumed from.
            exit_code (`int`, *optional*):
                Of a process that left no exception.
            other_ranks (`Sequence[Mapping]`, *optional*):
                What other processes of the job ended with ([`errors_of_other_ranks`]).

        Returns:
            The path, or `None` if it could not be written.
        """
        known = match_known_error(error, exit_code)
        what_to_do = advice or FAILURE_RECIPES[failure].advice
        if known is not None:
            what_to_do += f" Known error {known.name}: {known.cause} {known.fix}"
            told = "The error that ended the run is known (%s): %s What to do: %s"
            logger.error(told, known.name, known.cause, known.fix)
        path = self.directory / self._postmortem_file
        recipe = FAILURE_RECIPES[failure]
        resume = checkpoint or older_checkpoint
        resume_with = None if resume is None else f"trainer.train(resume_from_checkpoint={resume!r})"
        content = {
            "schema": SCHEMA_VERSION,
            "time": time.time(),
            "run": self.run_id,
            "verdict": verdict,
            "failure": failure.value,
            "diagnosis": recipe.diagnosis,
            "what_to_do": what_to_do,
            "known_error": None if known is None else known.to_dict(),
            "step": step,
            "error": None
            if error is None
            else {
                "type": f"{type(error).__module__}.{type(error).__qualname__}",
                "message": text_of(error),
                "traceback": traceback.format_exception(error),
            },
            "other_ranks": list(other_ranks),
            "emergency_checkpoint": checkpoint,
            "resume_with": resume_with,
            "attempts": self.attempts(),
            "chain": [incident.to_dict() for incident in self.incidents],
            "initiating_incident": self.incidents[0].id if self.incidents else None,
            "metric_tail": list(log_history)[-20:],
            "journal": str(self.path),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "accelerate": accelerate.__version__,
            },
            "pid": os.getpid(),
        }

        def write() -> None:
            replace_file(path, json.dumps(jsonable(content), indent=2) + "\n")

        self._contained(str(path), write)
        self.event("postmortem", step, verdict=verdict, failure=failure.value, path=str(path))
        self.alert("self_healing: run ended", verdict, "error", step)
        written = str(path) if str(path) not in self._broken_sinks else None
        self.directions = Directions(written, resume_with)
        return written


def _quarantined(incident: Incident) -> int:
    """Rows of batches, and samples of the data."""
    return sum(len(incident.evidence[kind]) for kind in ("rows", "samples") if kind in incident.evidence)


# What is still going on when it is told: the reader may want to do something about it.
_ADVISED = frozenset(
    {
        FailureType.GRADIENT_SPIKE,
        FailureType.DIVERGENCE,
        FailureType.VANISHING_GRADIENT,
        FailureType.DEAD_LOSS,
        FailureType.NEVER_LEARNED,
        FailureType.SLOW_RISE,
    }
)


def where_to_go_on(checkpoint: str | None) -> str:
    """What a postmortem says about the checkpoint to resume from."""
    if checkpoint is None:
        return "There is no checkpoint of this run to go on from: it has to start anew."
    return f"The checkpoint to go on from: {checkpoint}."


def figures(evidence: Mapping[str, Any]) -> str:
    """The numbers of a detector's evidence in a few words."""
    if isinstance(evidence.get("loss"), Mapping) and isinstance(evidence.get("grad_norm"), Mapping):
        return f"loss: {figures(evidence['loss'])}; gradient norm: {figures(evidence['grad_norm'])}"
    shown = [
        f"{name.replace('_', ' ')} {evidence[name]:.4g}"
        for name in ("value", "baseline", "z", "bound", "threshold", "limit", "steps", "window")
        if isinstance(evidence.get(name), int | float)
    ]
    return ", ".join(([str(evidence["metric"])] if "metric" in evidence else []) + shown)


def describe(incident: Incident) -> str:
    """One incident in a sentence, for a person at 3 a.m."""
    lost = "no step lost" if incident.steps_lost == 0 else f"{incident.steps_lost} step(s) lost"
    if incident.steps_repeated:
        lost += f", {incident.steps_repeated} step(s) done again"
    done = ", ".join(action.replace("_", " ") for action in incident.actions) or "nothing"
    if incident.figures:
        done += f" ({'; '.join(incident.figures)})"
    failure = "" if incident.failure is None else f" {FAILURE_RECIPES[incident.failure].diagnosis}"
    if incident.symptom == "vanishing_gradient" and incident.failure is FailureType.DIVERGENCE:
        # Healed as a divergence, though no loss need have risen.
        failure = " There is no gradient with these weights, and there is one with trusted ones: nothing is learned."
    numbers = figures(incident.evidence)
    if numbers:
        failure += f" ({numbers}.)"
    if incident.evidence.get("diagnosis"):
        failure += f" {str(incident.evidence['diagnosis']).removesuffix('.')}."
    tensors = incident.evidence.get("tensors")
    if tensors:
        failure += f" In: {', '.join(map(str, tensors[:5]))}."
    healed = Action.ROLL_BACK in incident.actions and Action.STOP not in incident.actions
    advice = incident.evidence.get("remedy") or (
        FAILURE_RECIPES[incident.failure].advice if incident.failure in _ADVISED and not healed else ""
    )
    if advice:
        failure += f" What to do: {advice}"
    if "why" in incident.evidence:
        failure += f" ({incident.evidence['why']}.)"
    now = incident.evidence.get("widened_at")
    steps = f"Step {incident.step}" if now is None else f"Step {incident.step} to {now}"
    return (
        f"{steps}: {incident.symptom.replace('_', ' ')}; cause: {incident.cause}.{failure} "
        f"Done: {done}; {lost}, {incident.seconds_lost:.1f} s. Incident {incident.id}."
    )
