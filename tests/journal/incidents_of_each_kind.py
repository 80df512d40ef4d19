"""An incident of each kind, with what they hold in real runs."""

from __future__ import annotations

from typing import Any

from self_healing import Action, FailureType, Incident
from self_healing.failures.recipes import Cause


SECRET = "the text of a sample"


def incident(
    step: int,
    symptom: str,
    failure: FailureType | None,
    cause: str,
    *actions: Action,
    outcome: str = "resolved",
    **fields: Any,
) -> Incident:
    return Incident(
        f"20260101-000000-abcdef-{step:03d}",
        step,
        symptom,
        failure,
        cause,
        actions=[action.value for action in actions],
        outcome=outcome,
        **fields,
    )


A, F = Action, FailureType
_ROWS = {"rows": [{"dataset_index": 964, "preview": SECRET}, {"dataset_index": None, "preview": SECRET}]}
_SAMPLE = {"problem": "loading", "error_type": "UnicodeDecodeError", "error": SECRET, "dataset_index": 42}

EACH_KIND = (
    incident(30, "nonfinite_loss", F.NONFINITE_TRANSIENT, Cause.TRANSIENT, A.USE_REEXECUTED_STEP, seconds_lost=0.2),
    incident(
        *(60, "nonfinite_loss", F.NONFINITE_POISON_ROWS, Cause.POISON_ROWS, A.QUARANTINE_ROWS, A.DROP_ROWS),
        evidence=_ROWS,
        seconds_lost=0.6,
    ),
    incident(
        *(71, "nonfinite_gradient", F.NONFINITE_NUMERICAL, Cause.NUMERICAL, A.SKIP_STEP),
        steps_lost=1,
        seconds_lost=1.2,
    ),
    incident(75, "nonfinite_loss", F.NONFINITE_UNDIAGNOSED, Cause.NOT_LOOKED_FOR, A.SKIP_STEP, steps_lost=1),
    incident(
        *(0, "nonfinite_loss", F.NONFINITE_FROM_THE_START, Cause.PRECISION),
        *(A.CHECK_MODEL_INIT, A.CHECK_DATA_QUALITY, A.STOP),
        outcome="fatal",
        seconds_lost=3.4,
    ),
    incident(
        *(108, "nonfinite_state", F.CORRUPTED_STATE, Cause.CORRUPTED_STATE, A.ROLL_BACK, A.REPLAY_STEPS),
        seconds_lost=12.3,
    ),
    incident(*(109, "replicas_differ", F.REPLICAS_DIFFER, "weights of rank 3 differ", A.ROLL_BACK, A.REPLAY_STEPS)),
    incident(109, "nonfinite_copy", F.CORRUPTED_COPY, "NaN/Inf in BEMACallback.running_model", outcome="reported"),
    incident(120, "gradient_spike", F.SPIKE_TRANSIENT, Cause.TRANSIENT, A.USE_REEXECUTED_STEP, seconds_lost=0.2),
    incident(149, "co_spike", F.GRADIENT_SPIKE, Cause.SAME_AGAIN, A.SKIP_STEP, steps_lost=1, seconds_lost=0.2),
    incident(150, "loss_spike", F.LOSS_SPIKE, "one step", A.HOLD_CHECKPOINTS),
    incident(
        *(163, "divergence", F.DIVERGENCE, Cause.WEIGHTS),
        *(A.HOLD_CHECKPOINTS, A.ROLL_BACK, A.SKIP_STEP, A.REDUCE_LEARNING_RATE),
        changes={"reduce_learning_rate": [1.0, 0.00092]},
        steps_lost=12,
        seconds_lost=65.0,
    ),
    incident(170, "divergence", F.HARDER_DATA, Cause.HARDER_DATA, outcome="reported"),
    incident(
        *(180, "divergence", F.LEARNING_RATE, Cause.WEIGHTS, A.ROLL_BACK, A.EMERGENCY_CHECKPOINT, A.STOP),
        outcome="fatal",
    ),
    incident(190, "slow_rise", F.SLOW_RISE, Cause.UNKNOWN, outcome="reported"),
    incident(200, "steps_missing", F.NOT_TRAINED, "most steps are not in the weights", A.STOP, outcome="fatal"),
    incident(220, "vanishing_gradient", F.VANISHING_GRADIENT, Cause.UNKNOWN, A.CHECK_MODEL_INIT, outcome="reported"),
    incident(20, "dead_loss", F.DEAD_LOSS, Cause.UNKNOWN, A.CHECK_DATA_QUALITY, A.STOP, outcome="fatal"),
    incident(230, "never_learned", F.NEVER_LEARNED, Cause.UNKNOWN, outcome="reported"),
    incident(240, "rule:kl_high", F.RED_FLAG, "kl high", outcome="reported", severity="warning"),
    incident(
        *(250, "out_of_memory", F.OUT_OF_MEMORY, "out of device memory in backward", A.FREE_MEMORY, A.SPLIT_BATCH),
        changes={"split_batch": [4, 2]},
        seconds_lost=0.9,
    ),
    incident(
        *(260, "bad_sample", F.BAD_DATA, f"sample 42 (UnicodeDecodeError: {SECRET})"),
        *(A.RETRY_CALL, A.QUARANTINE_SAMPLE, A.REPLACE_SAMPLE),
        evidence={"samples": [_SAMPLE]},
    ),
    incident(
        *(270, "ConnectionError", F.NETWORK, "network", A.EMERGENCY_CHECKPOINT, A.WAIT_AND_RESUME), seconds_lost=4.1
    ),
    incident(
        *(280, "NonFiniteReward", F.NONFINITE_REWARD, "reward function 'judge'", A.RETRY_CALL, A.GO_ON_WITHOUT),
        outcome="unresolved",
    ),
    incident(290, "HTTPError", F.REPORTING, "the tracker wandb", A.RETRY_CALL, A.GO_ON_WITHOUT),
    incident(
        *(300, "OSError", F.DISK, "a checkpoint could not be written", A.REMOVE_PARTIAL_CHECKPOINT, A.GO_ON_WITHOUT),
    ),
    incident(
        *(310, "hang", F.HANG, "nothing moves in 'data'"),
        *(A.WRITE_STACKS, A.INTERRUPT, A.EMERGENCY_CHECKPOINT, A.RESUME),
        seconds_lost=121.0,
    ),
    incident(0, "wrong_results", F.WRONG_RESULTS, "rank 3 computes wrong results", A.STOP, outcome="fatal"),
    incident(320, "process_died", F.PROCESS_DIED, "killed, or crashed in native code", A.RESUME, steps_repeated=9),
    incident(330, "preempted", F.PREEMPTED, "SIGTERM", A.SAVE_AND_LEAVE),
    incident(340, "AcceleratorError", F.DEVICE, "device", A.EXIT_FOR_RESTART, outcome="open"),
    incident(350, "KeyboardInterrupt", F.INTERRUPTED, "interrupted", A.STOP, outcome="fatal"),
    incident(360, "ValueError", F.USER_CODE, "user code", A.EMERGENCY_CHECKPOINT, A.STOP, outcome="fatal"),
)
