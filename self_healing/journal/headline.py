"""The headline of an incident: what, where, done and cost in one line, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..failures.recipes import INSPECTIONS, Action, Cause, FailureType
from .incident import Incident, lost_steps


# What a detector has seen, where its name does not say it.
_SEEN = {
    "nonfinite_loss": "NaN/Inf in loss",
    "nonfinite_gradient": "NaN/Inf in gradient",
    "nonfinite_state": "NaN/Inf in model state",
    "nonfinite_weights": "NaN/Inf in model state",
    "co_spike": "loss and gradient spike",
    "divergence": "loss diverged",
    "second_rise": "loss rose again",
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
_ON_THE_WAY = INSPECTIONS | {
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
    Action.INCREASE_LEARNING_RATE: "LR raised",
    Action.RESET_MOMENTS: "optimizer moments reset",
    Action.CHECK_DATA_QUALITY: "data checked",
    Action.CHECK_MODEL_INIT: "model checked",
    Action.FREE_MEMORY: "memory freed",
    Action.SPLIT_BATCH: "batch split",
    Action.CHECKPOINT_ACTIVATIONS: "activations checkpointed",
    Action.REDUCE_BATCH_SIZE: "batch size reduced",
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
}


def headline(incident: Incident, width: int) -> str:
    """Tells of an incident in one line: where, what, what was done, what it cost."""
    seen, done = _printable(_seen(incident) + _on(incident.evidence.get("ranks"))), _done(incident.actions)
    before, after = f"step {incident.step}: ", f"; {_cost(incident)}"
    room = width - len(before) - len(" -> ") - len(after)
    # Half of it for each, unless the other one needs less.
    seen = _cut(seen, max(room - len(done), room // 2))
    return f"{before}{seen} -> {_cut(done, room - len(seen))}{after}"


def _printable(text: str) -> str:
    """Leaves out what would break a line or steer a terminal: names may come from anywhere."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


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
    rows = [row["dataset_index"] for row in _mappings(evidence.get("rows")) if row.get("dataset_index") is not None]
    if cause == Cause.POISON_ROWS and rows:
        return f"{seen}, poison row{'s' if len(rows) > 1 else ''} {_listed(rows)}"
    return f"{seen}, {_CAUSES.get(cause, cause)}"


def _on(ranks: Any) -> str:
    """Which ranks of several it was found on."""
    return f" on rank{'s' * (len(ranks) > 1)} {_listed(ranks)}" if isinstance(ranks, list) and ranks else ""


def _samples(samples: Any) -> str:
    """Samples of the data that cannot be used, by name and type of error: what they raise may quote them."""
    found = _mappings(samples)
    kinds = dict.fromkeys(str(sample.get("error_type")) for sample in found if sample.get("error_type"))
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
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, Sequence) else []


def _listed(names: Sequence[Any]) -> str:
    shown = ", ".join(str(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _done(actions: Iterable[str]) -> str:
    done = dict.fromkeys(actions)
    told = [action for action in done if action not in _ON_THE_WAY] or done
    return ", ".join(_DONE.get(action, action.replace("_", " ")) for action in told) or "only reported"


def _cost(incident: Incident) -> str:
    lost = lost_steps(incident.steps_lost, incident.evidence)
    if incident.steps_repeated:
        lost += f", {incident.steps_repeated} repeated"
    seconds = incident.seconds_lost
    return lost if seconds < 0.05 else f"{lost}, {seconds:.{0 if seconds >= 10 else 1}f} s"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."
