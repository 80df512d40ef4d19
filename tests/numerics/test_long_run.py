"""Every fault there is, once, in one long run that nobody looks after."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import every_fault, job_log, job_result, start_job

from self_healing.tools.chaos.faults import KINDS, parse_fault
from self_healing.tools.chaos.rehearsal import survived


pytestmark = pytest.mark.slow

STEPS = 480
SEEDS = (0, 1, 2)
FAULTS = every_fault(slow="1")
CONFIG = {
    "api_retry_base_delay": 0.1,
    "api_retry_max_delay": 0.5,
    "hang_floor_seconds": 3.0,
    "GRACE_SECONDS": 3.0,
    # Sixteen faults in one run, thirty steps from one to the next.
    "REFUND_STEPS": 20,
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The held-out losses of runs in which nothing goes wrong."""
    directory = tmp_path_factory.mktemp("undisturbed")
    found = []
    for seed in SEEDS:
        job = directory / f"seed-{seed}"
        assert start_job(job, {}, {"long": True, "steps": STEPS, "seed": seed}) == 0
        # At this learning rate gradients spike now and then, and are clipped; nothing else happens by itself.
        assert {incident["failure"] for incident in job_result(job)["incidents"]} <= {"gradient_spike"}
        found.append(job_result(job)["held_out"])
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_survived(
    tmp_path: Path, until_it_ends: Callable[..., list[int]], undisturbed: list[float], seed: int
) -> None:
    job = tmp_path / "job"
    codes = until_it_ends(job, 12, long=True, steps=STEPS, seed=seed, faults=FAULTS, config=CONFIG)
    assert codes[-1] == 0, job_log(job)[-3000:]
    result: dict[str, Any] = job_result(job)
    assert result["steps"] == STEPS
    told = survived(tmp_path / "job.chaos.jsonl", job)
    assert {parse_fault(strike.fault).kind for strike in told if strike.effect} == set(KINDS)
    assert [strike for strike in told if not strike.survived] == []
    bound = max(0.05 * statistics.mean(undisturbed), 2 * statistics.stdev(undisturbed))
    assert result["held_out"] <= statistics.mean(undisturbed) + bound
