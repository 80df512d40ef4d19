"""
Collectives of a healthy run on two processes: one more per step with the callback, and a few per run; and the calls of
Python that a step has more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_distributed import on_two_processes


# Beyond those of the plain trainer. Each one more in a step is one more wait for the slowest process.
PER_STEP = {"c10d::allreduce_": 1}
PER_STEP_BY_QUESTION = {"the step": 1}
# Of a run of five steps: each of these is one operation, and what the first rank tells the others one more.
PER_RUN = {"c10d::allreduce_": 15, "c10d::broadcast_": 1}
PER_RUN_BY_QUESTION = {
    "output_dir cannot be written": 1,
    "a run begins": 1,
    "what training begins with is not finite": 1,
    "there is no memory for a snapshot": 1,
    # And the numbers, in one reduction.
    "known numbers are summed up": 1,
    "a sum is wrong": 1,
    "healing is attached": 1,
    # The first and the last of them also compare the weights.
    "the step": 5,
    "the state at the end is not finite": 1,
    "news at the end": 1,
}
# In the mean over the steps from the ninth to the 24th, of two micro-batches each.
CALLS = 444


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_two_processes(Path(tmp_path_factory.mktemp("collectives")), script="collectives.py")


def added(rank: dict[str, Any], part: str) -> dict[str, float]:
    healed, plain = rank["healed"][part], rank["plain"][part]
    counts = {name: healed.get(name, 0) - plain.get(name, 0) for name in healed | plain}
    return {name: count for name, count in counts.items() if count}


def test_a_healthy_step_takes_one_collective_more(results: list[dict[str, Any]]) -> None:
    for rank in results:
        # First what can be read.
        assert added(rank, "per_step_by_question") == PER_STEP_BY_QUESTION
        assert added(rank, "per_step") == PER_STEP


def test_a_healthy_run_takes_as_many_collectives_as_before(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert added(rank, "run_by_question") == PER_RUN_BY_QUESTION
        assert added(rank, "run") == PER_RUN


def test_a_healthy_step_takes_no_more_calls_than_it_did(results: list[dict[str, Any]]) -> None:
    assert max(rank["calls"] for rank in results) <= CALLS
