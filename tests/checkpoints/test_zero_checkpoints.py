"""Checkpoints that DeepSpeed has written itself are vetted, kept, passed over, and gone on from bit for bit."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_distributed import on_two_processes

from self_healing.checkpoints.choice import vet_all


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed (`make test-deepspeed`)"),
]

SCRIPT = "zero_checkpoints.py"


@pytest.fixture(scope="module", params=["1-bf16", "2-fp32", "3-bf16"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"zero-{request.param}-")


@pytest.fixture(scope="module")
def results(directory: Path) -> list[dict[str, Any]]:
    parts = ("torn", "preempted")
    return on_two_processes(directory, *job_of(directory), *parts, script=SCRIPT)


def job_of(directory: Path) -> tuple[str, str]:
    stage, precision = directory.name.split("-")[1:3]
    return stage, precision


def part_of(checkpoint: Path, rank: int) -> Path:
    (file,) = checkpoint.rglob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return file


@pytest.mark.heals("damaged_checkpoint", "deepspeed")
def test_one_that_is_torn_on_one_rank_is_passed_over_bit_for_bit(results: list[Any], directory: Path) -> None:
    for rank in results:
        for what in ("state", "losses", "steps"):
            assert rank["torn"][what] == rank["undisturbed"][what]
    assert "checkpoint_passed_over" in results[0]["torn"]["events"]
    assert "checkpoint_passed_over" not in results[0]["undisturbed"]["events"]
    told = "\n".join(results[0]["torn"]["told"])
    assert "checkpoint-4 is passed over: " in told
    assert part_of(directory / "torn" / "checkpoint-2", 1).name in told


@pytest.mark.heals("preemption", "deepspeed")
def test_what_is_written_at_sigterm_is_gone_on_from_bit_for_bit(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["asked_to_leave"]["stopped"] == "143"
        assert rank["preempted"]["state"] == rank["never_preempted"]["state"]


def test_a_job_of_another_size_is_told_how_to_go_on_before_the_first_step(results: list[Any], directory: Path) -> None:
    (result,) = on_two_processes(directory, *job_of(directory), "other_job", script=SCRIPT, processes=1)
    told = result["other_job"]
    assert "checkpoint-6 is whole, and this job cannot go on from it: it was written by 2 processes" in told
    command = re.search(r"convert it \(python (-m [^)]+)\)", told)
    assert command is not None
    subprocess.run([sys.executable, *command[1].split()], check=True, timeout=120)
    (result,) = on_two_processes(directory, *job_of(directory), "converted", script=SCRIPT, processes=1)
    assert (result["torn"]["steps"][0], result["torn"]["finite"]) == (8, True)
    (verdict,) = [each for each in vet_all(directory / "torn") if each.path.endswith("/checkpoint-6")][:1]
    assert verdict.usable


def test_what_is_written_after_an_exception_is_gone_on_from_bit_for_bit(results: list[Any], directory: Path) -> None:
    # Of a job of one process: with several, the others may not be able to save.
    (result,) = on_two_processes(directory, *job_of(directory), "raised", script=SCRIPT, processes=1)
    assert result["left"] == ["raised/checkpoint-3"]
    assert any("goes on from" in line and "checkpoint-3 (step 3)" in line for line in result["raised"]["told"])
    assert result["raised"]["state"] == result["never_raised"]["state"]
