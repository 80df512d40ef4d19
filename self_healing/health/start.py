"""Looks at every rank before the first step: a wrong one ends the run before hours are lost, a slow one is named."""

from __future__ import annotations

import logging
import socket
import time

from .. import consensus
from ..exceptions import UnrecoverableTrainingError
from ..failures import FAILURE_RECIPES, Action, FailureType
from ..run.context import RunContext
from .device_check import check_device
from .ranks_check import RanksCheck, RanksExchange


logger = logging.getLogger("self_healing")

# A device may be busy with something else for a moment: one that looks slow is looked at again so many times.
_AGAIN = 2


def check_ranks_at_start(run: RunContext) -> None:
    """
    Has the device of every rank compute something with a known result, and the ranks reduce known numbers. Takes less
    than a second, draws no random numbers. Collective.

    Args:
        run ([`RunContext`]):
            The run.

    Raises:
        UnrecoverableTrainingError: On all ranks, if one is wrong.
    """
    device, began = run.instrument.view.device, time.perf_counter()
    found = _look(run)
    for _ in range(_AGAIN):
        # All know the same.
        if found.wrong or not found.slow:
            break
        found = _look(run)
    if consensus.any_rank("a rank is wrong", bool(found.wrong), device):
        _refuse(run, found)
    if not consensus.is_first_rank():
        return
    for rank in found.failed if len(found.failed) < len(found.seconds) else ():
        logger.warning("The device of rank %d could not be checked; its own log says why.", rank)
    for rank, factor in found.slow.items():
        logger.warning(
            "Rank %d multiplies matrices %.1f times slower than the others (%.1f ms, median %.1f ms): look at the "
            "clocks of its device, and at what else runs there. All ranks wait for it in every step.",
            rank,
            factor,
            1e3 * found.seconds[rank],
            1e3 * found.seconds[rank] / factor,
        )
    run.journal.event(
        "ranks_checked",
        run.step,
        ranks=len(found.seconds),
        seconds=round(time.perf_counter() - began, 3),
        matmul_ms=[round(1e3 * min(found.seconds), 3), round(1e3 * max(found.seconds), 3)],
        all_reduce_ms=round(1e3 * found.all_reduce, 3),
    )


def _look(run: RunContext) -> RanksCheck:
    device = run.instrument.view.device
    own = check_device(device)
    if own.wrong or own.error is not None:
        logger.warning(
            "The device %s of rank %d on %s %s.",
            device,
            run.journal.rank,
            socket.gethostname(),
            "computes wrong results" if own.wrong else f"could not be checked: {own.error}",
        )
    prepared: list[RanksExchange] = []

    def prepare() -> tuple[()]:
        prepared.append(RanksExchange(own, device))
        return ()

    consensus.sum_over_ranks("devices are checked", prepare, device)
    # All are here, and nothing can come between.
    return prepared[0].run()


def _refuse(run: RunContext, found: RanksCheck) -> None:
    named = "; ".join(f"rank {rank}: {what}" for rank, what in sorted(found.wrong.items())) or "seen by another rank"
    failure = FailureType.WRONG_RESULTS
    incident = run.journal.open(run.step, "wrong_results", {"wrong_ranks": sorted(found.wrong)})
    run.journal.diagnosed(incident, failure, named, {})
    run.journal.acted(incident, Action.STOP.value)
    run.journal.closed(incident, "fatal")
    run.journal.dealt_with(incident)
    raise UnrecoverableTrainingError(
        f"A rank of this job gives wrong results ({named}), so nothing is trained. {FAILURE_RECIPES[failure].advice} "
        "`self-healing doctor` under the same launcher shows all ranks; collective_timeout_check_seconds=0 trains "
        "without this check.",
        failure=failure,
    )
