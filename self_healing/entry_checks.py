"""Looks at what `train()` begins with, before the first step: output directory, checkpoint, weights, rate, sums."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

from .checkpoints.choice import CheckpointError, check_resumed, find_trusted_checkpoint, refuse_unwritable
from .failures.recipes import FAILURE_RECIPES, Action, FailureType, UnrecoverableTrainingError
from .hf.adapter import Instrument
from .ranks import votes
from .run.record import new_run_id
from .run.run import RunContext
from .system import processes


logger = logging.getLogger("self_healing")


def begin_run(args: Any) -> str:
    """Sees that checkpoints can be written."""
    refuse_unwritable(args)
    return votes.from_first_rank("a run begins", new_run_id, args.device)


def refuse_damaged_checkpoint(context: RunContext, checkpoint: Path) -> None:
    """Looks at the checkpoint that was resumed from: the Trainer takes the newest, whatever it lacks."""
    refused: list[CheckpointError] = []

    def look() -> tuple[str | None, str | None]:
        try:
            return check_resumed(checkpoint, str(context.instrument.trainer.args.output_dir)), None
        except CheckpointError as error:
            refused.append(error)
            return None, str(error)

    device = context.instrument.view.device
    told, reason = votes.looked_up_by_first_rank("the checkpoint can be resumed from", look, device)
    if reason is not None:
        context.journal.event("checkpoint_passed_over", context.step, path=str(checkpoint), reason=reason)
        raise refused[0] if refused else CheckpointError(reason)
    if told is not None and processes.is_first_rank():
        logger.warning("Resuming from %s anyway: %s.", checkpoint, told)


def refuse_nonfinite_weights(context: RunContext, resumed_from: str | None) -> bool:
    """Ends a run that would begin with weights or an optimizer state that are not finite: no step can heal them."""
    instrument = context.instrument
    found = instrument.view.nonfinite_tensors()
    if not votes.any_rank("what training begins with is not finite", bool(found), instrument.view.device):
        return True
    step, names = instrument.view.step, ", ".join(found[:5]) or "on another rank"
    origin = "the model was given" if resumed_from is None else f"resumed from {resumed_from}"
    incident = context.journal.open(step, "nonfinite_weights", {"tensors": found[:20], "from": resumed_from})
    context.journal.diagnosed(incident, FailureType.CORRUPTED_STATE, "corrupted from the start", {})
    text = f"The weights or the optimizer state that training would begin with are not finite ({names}; {origin})."
    if context.config.on_nonfinite == "warn":
        logger.warning("%s Training goes on anyway, because on_nonfinite='warn'.", text)
        context.journal.closed(incident, "reported")
        return False
    trusted = find_trusted_checkpoint(str(instrument.trainer.args.output_dir))
    context.journal.closed(incident, "fatal")
    advice = (
        "Please load other weights: there is no trusted checkpoint in the output_dir."
        if trusted is None
        else f"Please resume from the newest one that can be trusted: "
        f"trainer.train(resume_from_checkpoint={trusted!r}), with a trainer that was built anew."
    )
    raise UnrecoverableTrainingError(f"{text} {advice}", failure=FailureType.CORRUPTED_STATE)


def refuse_wrong_sums(context: RunContext) -> None:
    """Ends a run on several ranks that cannot sum up what all of them know, or not in time."""
    device, seconds = context.instrument.view.device, context.config.collective_timeout_check_seconds
    if processes.world_size() == 1 or seconds == 0:
        return
    began = time.monotonic()
    try:
        changed = votes.changed_in_sum(seconds, device)
    except RuntimeError as error:
        if time.monotonic() - began < seconds:
            raise
        what = f"The ranks have not summed up known numbers within {seconds:g} s"
        advice = "Look at the network between them (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)."
        raise _refused(context, FailureType.HANG, what, advice) from error
    if votes.any_rank("a sum is wrong", bool(changed), device):
        named = "; ".join(f"rank {rank}: what it sends arrives changed" for rank in changed) or "seen by another rank"
        what = f"A rank of this job gives wrong results ({named})"
        advice = FAILURE_RECIPES[FailureType.WRONG_RESULTS].advice
        raise _refused(context, FailureType.WRONG_RESULTS, what, advice, wrong_ranks=changed)
    if processes.is_first_rank():
        took = round(time.monotonic() - began, 3)
        context.journal.event("ranks_checked", context.step, ranks=processes.world_size(), seconds=took)


def _refused(
    context: RunContext, failure: FailureType, what: str, advice: str, **evidence: Any
) -> UnrecoverableTrainingError:
    journal = context.journal
    incident = journal.open(context.step, failure.value, evidence)
    journal.diagnosed(incident, failure, what[0].lower() + what[1:], {})
    journal.acted(incident, Action.STOP.value)
    journal.closed(incident, "fatal")
    journal.dealt_with(incident)
    return UnrecoverableTrainingError(
        f"{what}, so nothing is trained. {advice} `self-healing doctor` under the same launcher shows all ranks; "
        "collective_timeout_check_seconds=0 trains without this check.",
        failure=failure,
    )


def tell_of_offloaded(instrument: Instrument) -> None:
    """Warns that offloaded tensors are neither searched nor kept."""
    offloaded = instrument.view.offloaded_tensors()
    if offloaded:
        logger.warning(
            "%d tensors of the model are offloaded (%s%s): what they hold is brought to the device for each call. "
            "They are not searched for NaN and Inf, and are in no snapshot; everything else is.",
            len(offloaded),
            ", ".join(offloaded[:5]),
            ", ..." if len(offloaded) > 5 else "",
        )


def warn_about_the_rate(instrument: Instrument, checkpoint: str | None) -> None:
    """Warns that a learning rate in the arguments has no effect on a run that is resumed."""
    asked, kept = float(instrument.trainer.args.learning_rate), instrument.view.initial_rate
    if kept is not None and not math.isclose(asked, kept, rel_tol=1e-6):
        logger.warning(
            "learning_rate=%g has no effect: a resume takes the rate from the checkpoint, %g. For another rate, "
            "begin a new run from the weights of %s.",
            asked,
            kept,
            checkpoint or "a checkpoint",
        )
