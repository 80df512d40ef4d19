"""An incident, and how it is told in one line."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..failures.recipes import FAILURE_RECIPES, INSPECTIONS, Action, Cause, FailureType, Severity


# ---- incident: one failure from its detection to its outcome, and the sentence that describes it to a person ----


# In the id of an incident of a rank other than the first, before the number of that rank.
OF_RANK = ".rank"
# Symptoms.
_OF_PROCESSES = frozenset({"process_died", "preempted", "failure_on_another_rank"})
# Outcomes, and in words; and the evidence of why it is not known how many steps are lost.
HEALED = frozenset({"resolved", "self_recovered"})
BECAME = {
    "resolved": "healed",
    "self_recovered": "healed",
    "reported": "reported only",
    "unresolved": "not healed",
    "fatal": "fatal",
    "open": "not judged yet",
}
IN_DOUBT = "steps_lost_unknown"
# What the results of actions call a number before and after.
_CHANGED: Mapping[str, tuple[str, str]] = {
    Action.REDUCE_LEARNING_RATE: ("from", "learning_rate"),
    Action.INCREASE_LEARNING_RATE: ("from", "learning_rate"),
    Action.SPLIT_BATCH: ("did_not_fit", "at_a_time"),
    Action.REDUCE_BATCH_SIZE: ("rows_before", "rows"),
}
# Still going on when they are reported: the reader may want to act on the advice.
_ADVISED = frozenset(
    {
        FailureType.CORRUPTED_COPY,
        FailureType.GRADIENT_SPIKE,
        FailureType.DIVERGENCE,
        FailureType.VANISHING_GRADIENT,
        FailureType.DEAD_LOSS,
        FailureType.NEVER_LEARNED,
        FailureType.SLOW_RISE,
    }
)


@dataclass(slots=True)
class Incident:
    """
    One failure from its detection to its outcome.

    Args:
        id (`str`):
            Unique within the run directory: those of ranks other than the first end with `.rank1`, `.rank2`, ...
        step (`int`):
            Optimizer steps finished when it was seen.
        symptom (`str`):
            A detector's name, or the type of an exception.
        failure (`FailureType`, *optional*):
            The kind of failure the diagnosis found.
        cause (`str`):
            The diagnosis in a few words; a [`Cause`] where an experiment has shown it.
        evidence (`dict`):
            The values and experiments behind the diagnosis.
        actions (`list[str]`):
            Names of the actions that were carried out.
        steps_lost (`int`):
            Optimizer steps that are missing from the weights.
        steps_repeated (`int`):
            Optimizer steps that were finished, are in no checkpoint, and have to be done again.
        seconds_lost (`float`):
            Time diagnosis and remedy took.
        severity (`str`, *optional*):
            That of the symptom. Defaults to that of the failure.
        figures (`list[str]`):
            Effects of the actions, in words with numbers.
        changes (`dict`):
            Of each action that changed a number what it was before the first time, and what it is now.
        outcome (`str`):
            `"open"`, `"resolved"` (loss back within 2 scales of its trend), `"self_recovered"` (the same, without an
            action), `"unresolved"`, `"reported"` (no action was taken) or `"fatal"`.
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
    changes: dict[str, list[float]] = field(default_factory=dict)
    outcome: str = "open"

    @property
    def of_a_process(self) -> bool:
        """Whether it is about a process, killed or asked to leave, and not about training."""
        return self.symptom in _OF_PROCESSES

    @property
    def quarantined(self) -> int:
        """Rows of batches, and samples of the data, that it put into quarantine."""
        return sum(len(self.evidence[kind]) for kind in ("rows", "samples") if kind in self.evidence)

    @property
    def rolled_back(self) -> bool:
        """Whether the run went back to a trusted state, and on from there."""
        return Action.ROLL_BACK in self.actions and Action.STOP not in self.actions

    @property
    def shown_severity(self) -> str:
        """As its failure or its metric rule has it; one that was rolled back did not end the run."""
        if self.failure is None or self.rolled_back:
            return "warning"
        if self.failure is FailureType.RED_FLAG and self.severity is not None:
            return self.severity
        return FAILURE_RECIPES[self.failure].severity

    def did(self, action: str, result: Mapping[str, Any]) -> None:
        """Takes up an action that was carried out, with its result."""
        self.actions.append(action)
        was, became = _CHANGED.get(action, ("", ""))
        before, after = result.get(was), result.get(became)
        before = before[0] if isinstance(before, list) else before
        if isinstance(before, int | float) and isinstance(after, int | float):
            self.changes[action] = [self.changes.get(action, [before])[0], after]

    def is_like(self, other: Incident) -> bool:
        """Whether another one is the same event, seen by another rank."""
        mine, theirs = ((each.step, each.symptom, each.failure, each.cause) for each in (self, other))
        return mine == theirs

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Incident:
        """Makes an incident of what [`to_dict`] wrote in an earlier process."""
        known = {each.name: entry[each.name] for each in fields(cls) if each.name in entry}
        failure = known.pop("failure", None)
        return cls(
            id=entry["incident"],
            failure=None if failure is None else FailureType(failure),
            # Its own from here on.
            **{name: copy.copy(value) for name, value in known.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        entry = {each.name: copy.copy(getattr(self, each.name)) for each in fields(self) if each.name != "id"}
        entry["failure"] = None if self.failure is None else self.failure.value
        entry["seconds_lost"] = round(self.seconds_lost, 3)
        return {"incident": self.id, **entry}


def counted(number: int, what: str) -> str:
    """Counts something: `"1 step"`, `"2 steps"`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def lost_steps(steps: int, *evidence: Mapping[str, Any]) -> str:
    """Puts the steps that incidents have cost into words: `"1 step lost"`, or that nobody knows how many."""
    return "steps lost not known" if any(IN_DOUBT in each for each in evidence) else f"{counted(steps, 'step')} lost"


def figures(evidence: Mapping[str, Any]) -> str:
    """Puts the numbers of a detector's evidence into a few words."""
    if isinstance(evidence.get("loss"), Mapping) and isinstance(evidence.get("grad_norm"), Mapping):
        return f"loss: {figures(evidence['loss'])}; gradient norm: {figures(evidence['grad_norm'])}"
    shown = [
        f"{name.replace('_', ' ')} {evidence[name]:.4g}"
        for name in ("value", "baseline", "z", "bound", "threshold", "limit", "steps", "window")
        if isinstance(evidence.get(name), int | float)
    ]
    return ", ".join(([str(evidence["metric"])] if "metric" in evidence else []) + shown)


def describe(incident: Incident) -> str:
    """Puts an incident into a sentence, for a person at 3 a.m."""
    lost = "no step lost" if incident.steps_lost == 0 else f"{counted(incident.steps_lost, 'step')} lost"
    if IN_DOUBT in incident.evidence:
        lost = f"steps lost not known ({incident.evidence[IN_DOUBT]})"
    if incident.steps_repeated:
        lost += f", {counted(incident.steps_repeated, 'step')} done again"
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
    advice = incident.evidence.get("remedy") or (
        FAILURE_RECIPES[incident.failure].advice if incident.failure in _ADVISED and not incident.rolled_back else ""
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


# ---- headline: the headline of an incident: what, where, done and cost in one line, for a terminal ----


# What a detector has seen, where its name does not say it.
_SEEN = {
    "nonfinite_loss": "NaN/Inf in loss",
    "nonfinite_gradient": "NaN/Inf in gradient",
    "nonfinite_state": "NaN/Inf in model state",
    "nonfinite_weights": "NaN/Inf in model state",
    "co_spike": "loss and gradient spike",
    "divergence": "loss diverged",
    "NonFiniteReward": "NaN/Inf reward",
    "dead_loss": "loss is exactly 0.0",
    "vanishing_gradient": "gradient vanished",
    "never_learned": "nothing learned yet",
}
# The cause says what was seen as well.
_CAUSE_ALONE = frozenset(
    {
        FailureType.OUT_OF_MEMORY,
        FailureType.HANG,
        FailureType.PROCESS_DIED,
        FailureType.NOT_TRAINED,
        FailureType.CORRUPTED_COPY,
        FailureType.REPLICAS_DIFFER,
        FailureType.WRONG_RESULTS,
    }
)
# It adds nothing to what was seen.
_NO_CAUSE = frozenset({Cause.UNKNOWN, Cause.NOT_LOOKED_FOR})
_SAID_BY = {"nonfinite_state": Cause.CORRUPTED_STATE, "divergence": Cause.WEIGHTS}
_CAUSES: dict[str, str] = {Cause.WEIGHTS: "worse weights"}
# Steps on the way, left out where something was done in the end.
_ON_THE_WAY = {
    *INSPECTIONS,
    Action.RETRY_CALL,
    Action.FREE_MEMORY,
    Action.WRITE_STACKS,
    Action.HOLD_CHECKPOINTS,
    Action.REMOVE_PARTIAL_CHECKPOINT,
}
_DONE: dict[str, str] = {
    Action.USE_REEXECUTED_STEP: "computed again",
    Action.QUARANTINE_ROWS: "quarantined",
    Action.DROP_ROWS: "dropped",
    Action.SKIP_STEP: "step skipped",
    Action.CLIP_GRADIENT: "gradient clipped",
    Action.HOLD_CHECKPOINTS: "checkpoints wait",
    Action.ROLL_BACK: "rolled back",
    Action.REPLAY_STEPS: "steps replayed",
    Action.REDUCE_LEARNING_RATE: "LR lowered",
    Action.RESET_MOMENTS: "optimizer moments reset",
    Action.CHECK_DATA_QUALITY: "data checked",
    Action.CHECK_MODEL_INIT: "model checked",
    Action.FREE_MEMORY: "memory freed",
    Action.SPLIT_BATCH: "batch split",
    Action.CHECKPOINT_ACTIVATIONS: "activations checkpointed",
    Action.REDUCE_BATCH_SIZE: "batch size reduced",
    Action.MOVE_PREDICTIONS_TO_HOST: "predictions to the host",
    Action.RETRY_CALL: "retried",
    Action.QUARANTINE_SAMPLE: "quarantined",
    Action.REPLACE_SAMPLE: "replaced",
    Action.GO_ON_WITHOUT: "went on without",
    Action.REMOVE_PARTIAL_CHECKPOINT: "partial one removed",
    Action.MAKE_ROOM: "old checkpoints removed",
    Action.WRITE_STACKS: "stacks written",
    Action.INTERRUPT: "interrupted",
    Action.EMERGENCY_CHECKPOINT: "saved",
    Action.WAIT_AND_RESUME: "waits, then resumes",
    Action.RESUME: "resumed",
    Action.SAVE_AND_LEAVE: "saved, exits",
    Action.EXIT_FOR_RESTART: "exits for a restart",
    Action.STOP: "run stopped",
    Action.INCREASE_LEARNING_RATE: "LR raised",
    Action.ENABLE_GRAD_CLIP: "clipping switched on",
}


def headline(incident: Incident, width: int | None = None) -> str:
    """Tells of an incident in one line: where, what, what was done, what it cost."""
    ranks = incident.evidence.get("ranks")
    on = f" on rank{'s' * (len(ranks) > 1)} {_listed(ranks)}" if isinstance(ranks, list) and ranks else ""
    # In one line, whatever names hold.
    seen, done = " ".join(printable(_seen(incident) + on).split()), done_by(incident)
    before, after = f"step {incident.step}: ", f"; {_cost(incident)}"
    if width is not None:
        room = width - len(before) - len(" -> ") - len(after)
        # Half of it for each, unless the other one needs less.
        seen = _cut(seen, max(room - len(done), room // 2))
        done = _cut(done, room - len(seen))
    return f"{before}{seen} -> {done}{after}"


def printable(text: str) -> str:
    """Leaves out what steers a terminal, and what no encoding has: texts of exceptions, and parts of file names."""
    return "".join(each if each.isprintable() or each == "\n" else " " for each in text)


def _seen(incident: Incident) -> str:
    evidence, cause = incident.evidence, incident.cause
    seen = _SEEN.get(incident.symptom) or incident.symptom.removeprefix("rule:").replace("_", " ")
    if incident.failure in _CAUSE_ALONE:
        return cause
    if incident.failure is FailureType.DISK:
        full = incident.symptom == "DiskFull"
        return "checkpoint not written" + (f": {evidence['message']}" if full else f" ({incident.symptom})")
    if incident.failure is FailureType.HARDER_DATA:
        return f"loss rose, {cause}"
    if incident.failure is FailureType.PREEMPTED:
        return f"preempted by {cause}"
    if incident.failure is FailureType.BAD_DATA and evidence.get("samples"):
        return _samples(evidence["samples"])
    if cause in _NO_CAUSE or _SAID_BY.get(incident.symptom) == cause or cause.replace("_", " ") == seen:
        return seen
    if cause == Cause.POISON_ROWS:
        found = (row.get("dataset_index") for row in _mappings(evidence.get("rows")))
        if rows := [index for index in found if index is not None]:
            return f"{seen}, poison row{'s' if len(rows) > 1 else ''} {_listed(rows)}"
    return f"{seen}, {_CAUSES.get(cause, cause)}"


def _samples(samples: Any) -> str:
    """Samples of the data that cannot be used, by name and type of error: what they raise may quote them."""
    found = _mappings(samples)
    kinds = dict.fromkeys(str(sample["error_type"]) for sample in found if sample.get("error_type"))
    why = f" ({', '.join(kinds)})" if kinds else ""
    names = [_name_of(sample) for sample in found]
    return f"bad sample{'s' if len(found) > 1 else ''} {_listed(names)}{why}"


def _name_of(sample: Mapping[str, Any]) -> str:
    if sample.get("dataset_index") is not None:
        return str(sample["dataset_index"])
    if sample.get("stream_ordinal") is not None:
        return f"{sample.get('shard')}:{sample['stream_ordinal']}"
    return "of unknown place"


def _mappings(entries: Any) -> list[Mapping[str, Any]]:
    # An incident may have been made by a program of the user's.
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, Sequence) else []


def _listed(names: Sequence[Any]) -> str:
    shown = ", ".join(str(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def done_by(incident: Incident) -> str:
    """What was done about an incident, each once, with the numbers that it changed."""
    done = dict.fromkeys(incident.actions)
    if Action.ROLL_BACK in done:
        # The step in hand is one of those that are lost.
        done.pop(Action.SKIP_STEP, None)
    told = []
    for action in [action for action in done if action not in _ON_THE_WAY] or done:
        words = _DONE.get(action, action.replace("_", " "))
        if action in incident.changes:
            before, after = incident.changes[action]
            words = f"{'batch' if action == Action.REDUCE_BATCH_SIZE else 'LR'} {before:.3g} -> {after:.3g}"
            if action == Action.SPLIT_BATCH:
                pieces = [after] * int(before // after) + [before % after] * bool(before % after)
                shown = " + ".join(map(str, pieces)) if len(pieces) <= 4 else f"{after} at a time"
                words = f"split {before} rows -> {shown}"
        told.append(words)
    return ", ".join(told) or "only reported"


def _cost(incident: Incident) -> str:
    lost = lost_steps(incident.steps_lost, incident.evidence)
    if incident.steps_repeated:
        lost += f", {incident.steps_repeated} repeated"
    seconds = incident.seconds_lost
    return lost if seconds < 0.05 else f"{lost}, {seconds:.{0 if seconds >= 10 else 1}f} s"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."
