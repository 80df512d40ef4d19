"""One rank fails while the others wait for it in a collective that does not return: all end within seconds."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import journal
from started_ranks import StruckRanks

from self_healing.journal.step_log import read_step_log


# From the fault to the end of the last rank, in seconds.
BOUND = 10.0
# A hang is noticed after four seconds, and left after one more.
SOON = {"hang_floor_seconds": 4.0, "GRACE_SECONDS": 1.0, "LEARNING_STEPS": 1, "launcher_restarts": "yes"}


class Job(StruckRanks):
    """Two ranks, one of which fails."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, 2, "ending_together.py", **options)

    def end_of(self, rank: int, within: float = 60.0) -> tuple[int, float]:
        """Waits for the end of a rank, and gives its exit code and how long after the fault that was."""
        struck = self.struck()
        code = self.processes[rank].wait(timeout=within)
        return code, time.time() - struck

    def postmortem(self, rank: int) -> Any:
        name = "postmortem.json" if rank == 0 else f"postmortem.rank{rank}.json"
        return json.loads((self.directory / name).read_text())

    def result(self, rank: int) -> Any:
        return json.loads((self.directory / f"results.{rank}.json").read_text())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    begun: list[Job] = []

    def start(**options: Any) -> Job:
        begun.append(Job(tmp_path / "run", **options))
        return begun[-1]

    yield start
    for each in begun:
        each.end()


@pytest.mark.heals("exception", "ddp", partly="ends the job; the next start goes on, from memory where it can")
def test_an_exception_ends_the_rank_that_waits_for_the_one_it_came_on(job: Any) -> None:
    # It keeps its connections: as with NCCL, nothing tells the other rank.
    two = job(fault="exception", stays=True, config={"launcher_restarts": "yes"})
    code, seconds = two.end_of(0)
    assert code == 75
    assert seconds < BOUND
    left = two.postmortem(0)
    assert left["ranks"]["first_failure"]["rank"] == 1
    assert left["verdict"].startswith("rank 1 failed first; it failed after step 3: ValueError: only here")
    # What it waited in.
    assert left["ranks"]["positions"]["0"]["collective"] in ("all_gather", "backward, with its reduction of gradients")
    (stacks,) = (two.directory / "hangs").iterdir()
    assert "(the training thread)" in stacks.read_text()
    (steps,) = two.directory.glob("healing_steps-*.bin")
    assert [row.step for row in read_step_log(steps)[1]] == [0, 1, 2]
    faulty = two.postmortem(1)
    assert faulty["error"]["message"] == "only here"
    assert "Rank 0: waits in" in faulty["ranks"]["where_they_were"]
    (incident,) = journal(two.directory, "diagnosed")
    assert (incident["failure"], incident["cause"]) == ("process_died", "rank 1: user_code")


@pytest.mark.slow
def test_a_rank_that_exits_in_the_middle_of_the_run_ends_the_others_with_its_code(job: Any) -> None:
    two = job(fault="exit", stays=True, config={"launcher_restarts": "yes"})
    code, seconds = two.end_of(0)
    assert (code, seconds < BOUND) == (3, True)
    assert two.postmortem(0)["verdict"].startswith("rank 1 failed first; it failed after step 3: SystemExit: 3")


@pytest.mark.slow
def test_a_stopped_rank_that_goes_on_ends_as_well(job: Any) -> None:
    two = job(fault="stop", config={"launcher_restarts": "yes"})
    assert two.end_of(0)[0] == 75
    os.kill(two.processes[1].pid, signal.SIGCONT)
    assert two.processes[1].wait(timeout=30) != 0


@pytest.mark.slow
def test_what_a_broken_connection_tells_of_first_is_not_the_first_failure(job: Any) -> None:
    two = job(fault="crash")
    assert [two.end_of(rank)[0] for rank in (0, 1)] == [1, -9]
    left = two.postmortem(0)
    assert left["failure"] == "process_died"
    assert left["verdict"].startswith("rank 1 failed first; it was last heard of after step ")
    assert "; here: RuntimeError: " in left["verdict"]


@pytest.mark.slow
@pytest.mark.heals("hang", "ddp", partly="ends the job; the next start goes on, from memory where it can")
def test_a_hang_on_one_rank_is_named_by_all_and_ends_them(job: Any) -> None:
    two = job(fault="hang", config=SOON)
    assert [two.end_of(rank)[0] for rank in (0, 1)] == [75, 75]
    for rank in (0, 1):
        verdict = two.postmortem(rank)["verdict"]
        assert "rank 1" in verdict
        assert "time.sleep(FOREVER)" in verdict
    assert "Rank 0: waits in" in two.postmortem(1)["ranks"]["where_they_were"]
    written = [json.loads(line) for path in two.directory.glob("*.jsonl") for line in path.read_text().splitlines()]
    hangs = [event for event in written if event["kind"] == "diagnosed" and event["failure"] == "hang"]
    assert hangs
    assert all(event["evidence"]["ranks_waited_for"] == [1] for event in hangs)


@pytest.mark.slow
def test_a_rank_that_stops_training_alone_ends_both_with_the_place_of_each(job: Any) -> None:
    two = job(fault="stops_alone", step=5, steps=12, after=100.0, config=SOON | {"snapshots": False})
    code, seconds = two.end_of(0)
    assert (code, seconds < 60.0) == (75, True)
    assert "Nothing moves after step 5: the ranks wait in different collectives" in two.log(0)
    assert "The bug is ours" not in two.log(0) + two.log(1)


@pytest.mark.slow
@pytest.mark.heals("service", "ddp")
def test_a_rank_that_asks_a_service_again_is_waited_for(job: Any) -> None:
    two = job(fault="busy", busy_seconds=12, config=SOON)
    assert two.join() == [0, 0]
    assert [two.result(rank)["steps"] for rank in (0, 1)] == [6, 6]
    assert not (two.directory / "hangs").exists()


@pytest.mark.slow
def test_nobody_is_given_up_when_training_has_ended(job: Any) -> None:
    # One of the two is busy for a while, and the other one waits for it.
    two = job(after=8.0, config=SOON)
    assert two.join() == [0, 0]
    for rank in (0, 1):
        assert "failed first" not in two.log(rank)


@pytest.mark.slow
def test_a_job_that_was_stopped_as_a_whole_goes_on(job: Any) -> None:
    two = job(steps=40, config=SOON)
    while not (two.directory / "checkpoint-4").exists():
        assert two.processes[0].poll() is None, two.log(0)
        time.sleep(0.1)
    for number, pause in ((signal.SIGSTOP, 15.0), (signal.SIGCONT, 0.0)):
        for rank in two.processes:
            os.kill(rank.pid, number)
        time.sleep(pause)
    assert two.join() == [0, 0]
    assert [two.result(rank)["steps"] for rank in (0, 1)] == [40, 40]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("leaves out a layer", "find_unused_parameters=True"),
        ("returns early", "rank 1 has sent no gradients"),
    ],
)
def test_a_rank_whose_gradients_do_not_reach_the_others_says_why_and_is_named_by_them(
    job: Any, way: str, reason: str
) -> None:
    two = job(fault=way)
    assert two.join() == [1, 1]
    assert reason in two.postmortem(1)["error"]["message"]
    first = two.postmortem(0)["ranks"]["first_failure"]
    assert (first["rank"], first["step"]) == (1, 3)
    assert reason in two.postmortem(0)["verdict"]


@pytest.mark.slow
def test_a_step_in_which_no_rank_sends_gradients_is_a_step_like_any_other(job: Any) -> None:
    two = job(fault="returns early", rank=None)
    assert two.join() == [0, 0]
    assert [two.result(rank)["steps"] for rank in (0, 1)] == [6, 6]
    assert journal(two.directory, "detected") == []
