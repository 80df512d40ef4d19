"""`self-healing doctor` as one of several ranks: one table, and an exit code on all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from started_ranks import StartedRanks

from self_healing.doctor.coverage import Setting
from self_healing.doctor.doctor import judge
from self_healing.doctor.job import Job, RankRow, is_in_job
from self_healing.doctor.machine import Machine, Place
from self_healing.launcher import launch_of


def doctor(directory: Path, fault: str, *options: str) -> list[tuple[int, str, str]]:
    """Exit code, what was printed, and the whole log of each of two ranks."""
    ranks = StartedRanks(directory / "logs", 2, "looked_at_job.py", fault, "doctor", directory, *options, COLUMNS=120)
    try:
        codes = ranks.join(180)
    finally:
        ranks.end()
    return [(code, ranks.printed(rank), ranks.log(rank)) for rank, code in enumerate(codes)]


def test_a_rank_that_computes_wrong_is_named_in_one_table_and_all_exit_with_1(tmp_path: Path) -> None:
    first, second = doctor(tmp_path, "wrong")
    assert (first[0], second[0]) == (1, 1), first[2] + second[2]
    assert second[1] == ""
    assert "problem: Rank 1 on " in first[1]
    assert "its device computes wrong results" in first[1]
    lines = [line.rstrip() for line in first[1].splitlines()]
    rows = [line.split("│")[1:-1] for line in lines if line.endswith(("right   │", "wrong   │"))]
    assert [[cells[0].strip(), cells[-1].strip()] for cells in rows] == [["0", "right"], ["1", "wrong"]]
    assert all(float(cell) > 0 for cells in rows for cell in (cells[3], cells[4], cells[6]))


@pytest.mark.slow
def test_ranks_that_are_well_are_measured_and_written_as_json(tmp_path: Path) -> None:
    first, second = doctor(tmp_path, "none", "--json")
    assert (first[0], second[0], second[1]) == (0, 0, ""), first[2] + second[2]
    job = json.loads(first[1])["job"]
    assert [row["rank"] for row in job["rows"]] == [0, 1]
    assert all(row["teraflops"] > 0 and row["memory"] > 0 and row["neighbours"] > 0 for row in job["rows"])
    assert (job["wrong"], job["missing"], job["error"]) == ({}, [], None)
    assert job["all_reduce"] > 0


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    (code, printed, _), _ = doctor(tmp_path, "missing")
    assert code == 1
    assert "problem: Rank 1 of 2 did not come" in printed


def test_one_process_alone_is_no_job() -> None:
    meeting = {"RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    assert is_in_job({**meeting, "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert not is_in_job({**meeting, "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    # A shell in the pod of a job that runs.
    assert not is_in_job({**meeting, "WORLD_SIZE": "2"})
    assert not is_in_job({"WORLD_SIZE": "2", "RANK": "0"})
    assert not is_in_job({})


def test_a_rank_that_is_far_slower_than_the_others_is_a_warning_and_an_error_is_a_problem() -> None:
    rows = [RankRow(rank, "node", "H100", 50.0, 2000.0, 50.0, 100.0) for rank in range(4)]
    rows[2] = RankRow(2, "node", "H100", 10.0, 2000.0, 40.0, 20.0)
    found = judge(Machine(), Place(path="."), Setting(launch_of({}), 4), [], Job(2, 4, rows))
    told = [problem.what for problem in found.problems if problem.what.startswith("Rank")]
    assert told == [
        "Rank 2 reaches 10 TFLOP/s in a product of matrices, the others 50.",
        "Rank 2 reaches 20 GB/s with the ranks next to it, the others 100.",
    ]
    assert found.works
    failed = judge(Machine(), Place(path="."), Setting(launch_of({}), 4), [], Job(0, 4, error="Timeout: of rank 3"))
    assert not failed.works
    assert "could not be looked at together: Timeout: of rank 3." in failed.problems[0].what
