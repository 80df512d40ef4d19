"""Reckons what a run has cost and may still cost: where its wall time went, and what is left of its budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from ..failures import Action
from ..journal.step_log import StepRow
from .records import AttemptRow, Budget, Goodput, IncidentStory
from .steps import branches
from .values import is_count, is_finite


def goodput(
    rows: Sequence[StepRow],
    incidents: Sequence[IncidentStory],
    attempts: Sequence[AttemptRow],
    began: float | None,
    until: float | None,
    step: int,
) -> Goodput | None:
    """
    Reckons where the wall time of a run went.

    Args:
        rows (`Sequence[StepRow]`):
            Its step log; without one only steps are counted.
        incidents (`Sequence[IncidentStory]`), attempts (`Sequence[AttemptRow]`):
            Of the run.
        began (`float`, *optional*), until (`float`, *optional*):
            Its beginning and end, or now; in seconds since the epoch.
        step (`int`):
            Optimizer steps finished.

    Returns:
        `None` if it is not known when it began.
    """
    if began is None or until is None:
        return None
    wall = max(until - began, 0.0)
    missing = sum(incident.steps_lost for incident in incidents)
    if not rows:
        repeated = sum(incident.steps_repeated for incident in incidents)
        return Goodput(wall, 0.0, 0.0, 0.0, 0.0, wall, None, max(step - missing, 0), step + repeated)
    kept, discarded = branches(rows)
    usual = _usual(rows)
    computed = sum(row.steps for row in kept)
    skipped = sum(row.skipped for row in kept)
    # Those of a state that was gone back from are in no row as such.
    gone_back = min(max(missing - skipped, 0), computed - skipped)
    in_kept = sum(_busy(row, usual) * (row.steps - row.skipped) for row in kept)
    of_gone_back = gone_back * in_kept / max(computed - skipped, 1)
    again = [row for stretch in discarded for row in stretch]
    not_in_weights = sum(_busy(row, usual) * row.skipped for row in kept) + of_gone_back
    not_in_weights += sum(_busy(row, usual) * row.steps for row in again)
    left = wall
    # What was measured more closely comes first: the parts are to add up.
    down = _take(left, _between(attempts))
    useful = _take(left := left - down, in_kept - of_gone_back)
    lost = _take(left := left - useful, not_in_weights)
    healing = _take(left := left - lost, sum(incident.seconds_lost for incident in incidents))
    return Goodput(
        wall=wall,
        useful=useful,
        lost_steps=lost,
        healing=healing,
        down=down,
        other=left - healing,
        share=useful / wall if wall > 0 else None,
        steps_useful=computed - skipped - gone_back,
        steps_done=computed + sum(row.steps for row in again),
    )


def steps_missing(rows: Sequence[StepRow], incidents: Sequence[IncidentStory]) -> int:
    """
    Counts the steps that are known not to be in the weights: skipped, or of a state that was gone back from. A step
    that is not in the step log is none of them: the last second of a process that was killed is not written down.

    Args:
        rows (`Sequence[StepRow]`), incidents (`Sequence[IncidentStory]`):
            Of the run.
    """
    # What is still open has lost nothing yet as far as the incident says.
    return max(sum(row.skipped for row in branches(rows)[0]), sum(incident.steps_lost for incident in incidents))


def _take(left: float, wanted: float) -> float:
    return min(max(wanted, 0.0), left)


def _usual(rows: Sequence[StepRow]) -> float:
    known = [row.busy for row in rows if math.isfinite(row.busy)]
    return median(known) if known else 0.0


def _busy(row: StepRow, usual: float) -> float:
    # Not known where something was healed in the step.
    return row.busy if math.isfinite(row.busy) else usual


def _between(attempts: Sequence[AttemptRow]) -> float:
    return sum(
        max(after.began - before.ended, 0.0)
        for before, after in pairwise(attempts)
        if before.ended is not None and after.began is not None
    )


def budgets(
    limits: Mapping[str, Any], incidents: Sequence[IncidentStory], recovery: Mapping[str, Any], step: int
) -> list[Budget]:
    """
    Reckons what is left of the budgets of a run.

    Args:
        limits (`Mapping[str, Any]`):
            Settings that limit something, as the run began with them.
        incidents (`Sequence[IncidentStory]`):
            Of the run.
        recovery (`Mapping[str, Any]`):
            What its record says of budget and learning rate; empty if there is no record.
        step (`int`):
            Optimizer steps finished.
    """
    found: list[Budget] = []
    window = _whole(limits.get("skip_window"))
    lately = [each for each in incidents if window is None or each.step > step - window]
    skips = [each for each in lately if Action.SKIP_STEP in each.actions and Action.ROLL_BACK not in each.actions]
    attempts, refund = _whole(limits.get("max_recovery_attempts")), _whole(limits.get("budget_refund_steps"))
    if attempts is not None:
        known = recovery.get("budget")
        used = _whole(known.get("used")) if isinstance(known, Mapping) else None
        failed_at = _whole(known.get("failed_at")) if isinstance(known, Mapping) else None
        if used is None:
            used, failed_at = _recoveries(incidents, refund)
        if failed_at is not None and refund is not None and step >= failed_at + refund:
            used = 0
        again = "" if refund is None else f" Full again {refund} steps beyond the last failure."
        found.append(
            Budget(
                "recoveries without progress",
                "max_recovery_attempts",
                used,
                attempts,
                f"How often the run is brought back without progress before it ends.{again}",
            )
        )
    share = limits.get("max_skipped_fraction")
    if window is not None and share is not None and is_finite(share):
        found.append(
            Budget(
                "steps left out",
                "max_skipped_fraction",
                len(skips),
                share * window,
                f"Of the last {window} steps; when more of them were left out, the run ends.",
            )
        )
    spikes = _whole(limits.get("max_spike_skips"))
    if window is not None and spikes is not None:
        used = sum(each.symptom in ("co_spike", "gradient_spike", "gradient_explosion") for each in skips)
        found.append(
            Budget(
                "steps left out for a spike",
                "max_spike_skips",
                used,
                spikes,
                f"Of the last {window} steps; further spikes are clipped, and the run goes on.",
            )
        )
    reductions = _whole(limits.get("max_lr_reductions"))
    if reductions is not None:
        rate = recovery.get("learning_rate")
        used = _whole(rate.get("reductions")) if isinstance(rate, Mapping) else None
        if used is None:
            used = sum(each.actions.count(Action.REDUCE_LEARNING_RATE) for each in incidents)
        found.append(
            Budget(
                "reductions of the learning rate",
                "max_lr_reductions",
                used,
                reductions,
                "How often the rate may be reduced; a failure after that ends the run.",
            )
        )
    return found


def _recoveries(incidents: Sequence[IncidentStory], refund: int | None) -> tuple[int, int | None]:
    """Attempts as the budget counts them: each is one more, unless the run has come far beyond the last failure."""
    used, failed_at = 0, None
    brought_back = {Action.ROLL_BACK, Action.RESUME, Action.WAIT_AND_RESUME}
    for incident in incidents:
        if not brought_back & {*incident.actions}:
            continue
        if failed_at is not None and refund is not None and incident.step >= failed_at + refund:
            used = 0
        used, failed_at = used + 1, max(incident.step, failed_at or 0)
    return used, failed_at


def _whole(value: Any) -> int | None:
    return value if is_count(value) else None
