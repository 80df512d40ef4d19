"""Ranks that do not answer, or are slower than the others, are named while they train: in processes that do."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from started_ranks import StruckRanks


LIMIT = 10.0
# Of a busy machine, in which a thread has to wait for its turn.
SLACK = 5.0


class Job(StruckRanks):
    """Ranks, one of which does not answer for a while, or is slower."""

    def __init__(self, directory: Path, ranks: int, **options: Any) -> None:
        options = {"config": {"collective_timeout_check_seconds": LIMIT}, **options}
        super().__init__(directory, ranks, "unlike_ranks.py", **options)

    def events(self, rank: int, symptom: str) -> list[dict[str, Any]]:
        """What a rank has written down of the incidents of a kind."""
        path = self.directory / ("healing_events.jsonl" if rank == 0 else f"healing_events.rank{rank}.jsonl")
        with contextlib.suppress(FileNotFoundError):
            told = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            ids = {each["incident"] for each in told if each.get("symptom") == symptom}
            return [each for each in told if each.get("incident") in ids]
        return []


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Any]:
    jobs: list[Job] = []

    def start(ranks: int, **options: Any) -> Job:
        jobs.append(Job(tmp_path / "run", ranks, **options))
        return jobs[-1]

    yield start
    for each in jobs:
        each.end()


def test_a_rank_none_of_whose_threads_runs_is_named_and_one_that_is_slower(begun: Any) -> None:
    two = begun(2, fault="gil", slow_from=4, seconds=0.1, steps=60)
    assert two.join() == [0, 0], two.log(0)
    detected, diagnosed, *_, outcome = two.events(0, "silent_rank")
    assert detected["evidence"]["rank"] == 1
    assert detected["time"] - two.struck() < LIMIT + SLACK
    assert diagnosed["cause"] == "rank 1 is silent"
    assert "none of its threads gets to run" in diagnosed["evidence"]["diagnosis"]
    assert outcome["outcome"] == "self_recovered"
    # That rank has not run meanwhile, and blames nobody.
    assert two.events(1, "silent_rank") == []
    detected, diagnosed, *_, outcome = two.events(0, "slow_rank")
    assert (detected["evidence"]["rank"], detected["evidence"]["part"]) == (1, "forward")
    assert detected["evidence"]["factor"] > 1.3
    # By the comparison before, which may lie some steps back.
    assert 0 < detected["evidence"]["since_step"] < 60
    assert (diagnosed["failure"], outcome["outcome"]) == ("slow_rank", "reported")
    assert two.events(1, "slow_rank") == []


@pytest.mark.slow
def test_a_rank_on_another_machine_whose_process_is_stopped_is_named(begun: Any) -> None:
    two = begun(2, fault="stop", elsewhere=True)
    for _ in range(1200):
        if two.events(0, "silent_rank"):
            break
        time.sleep(0.1)
    detected, diagnosed, *_ = two.events(0, "silent_rank")
    assert detected["time"] - two.struck() < LIMIT + SLACK
    assert (detected["evidence"]["rank"], diagnosed["cause"]) == (1, "rank 1 is silent")
    assert "It is on another machine" in diagnosed["evidence"]["diagnosis"]


@pytest.mark.slow
def test_of_four_ranks_the_silent_one_is_named_by_the_one_that_listens_to_it(begun: Any) -> None:
    four = begun(4, fault="gil", rank=2)
    assert four.join() == [0, 0, 0, 0], four.log(0)
    named = {rank: [each["evidence"]["rank"] for each in four.events(rank, "silent_rank")[:1]] for rank in range(4)}
    assert named == {0: [], 1: [2], 2: [], 3: []}
    assert [four.events(rank, "slow_rank") for rank in range(4)] == [[], [], [], []]
