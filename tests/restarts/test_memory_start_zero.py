"""Under ZeRO a job that is started again goes on from the partitions that each rank has left in shared memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import journal

from self_healing.rollback import shared_memory
from self_healing.rollback.shared_memory import directory_of


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed (`make test-deepspeed`)"),
    pytest.mark.skipif(not shared_memory.ROOT.is_dir(), reason="the system has no shared memory as files"),
]
SCRIPT = Path(__file__).parents[1] / "restarted_zero.py"


class Job:
    """A job on two ranks; the process that starts it has imported everything."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self.directory = directory
        self._process = process

    def start(self, start: int, stages: tuple[int, int], precision: str, fault: str, **options: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"start": start, "stages": stages, "precision": precision, "fault": fault, **options}
        self._process.stdin.write(json.dumps({"directory": str(self.directory), **request}) + "\n")
        self._process.stdin.flush()
        outcome: dict[str, Any] = json.loads(self._process.stdout.readline())
        return outcome

    def fail_and_go_on(
        self, stage: int, precision: str, fault: str = "sigkill", then: int | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """Starts it twice, the first time to be struck; gives what the ranks have come to."""
        stages = stage, then or stage
        failed = self.start(0, stages, precision, fault, **options)
        assert not failed["hung"]
        assert 0 not in failed["codes"], self.log()
        done = self.start(1, stages, precision, fault, **options)
        assert done["codes"] == [0, 0], self.log()
        assert not directory_of(self.directory / "run").exists()
        return list(done["ranks"])

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("log.*.txt")))

    def began_at(self) -> list[int]:
        return [event["step"] for event in journal(self.directory / "run", "run_started")]

    def resumed_from_memory(self) -> list[int]:
        return [event["step"] for event in journal(self.directory / "run", "resumed_from_memory")]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with (tmp_path_factory.mktemp("jobs") / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)


@pytest.fixture
def job(process: subprocess.Popen[str], tmp_path: Path) -> Iterator[Job]:
    yield Job(process, tmp_path / "job")
    shutil.rmtree(directory_of(tmp_path / "job" / "run"), ignore_errors=True)


@pytest.mark.parametrize(
    ("stage", "precision", "fault", "goes_on_at"),
    [
        *((stage, precision, "sigkill", 3) for stage in (1, 2, 3) for precision in ("fp32", "bf16")),
        (2, "fp16", "sigkill", 3),
        (3, "bf16", "hang", 3),
        # Each rank leaves its part of the last finished step, also the one that waits for the rank that failed.
        *((stage, precision, "exception", 5) for stage in (1, 2, 3) for precision in ("fp32", "bf16")),
    ],
)
def test_ranks_go_on_from_the_step_that_all_of_them_have(
    job: Job, stage: int, precision: str, fault: str, goes_on_at: int
) -> None:
    ranks = job.fail_and_go_on(stage, precision, fault)
    assert job.resumed_from_memory() == [goes_on_at], job.log()
    for rank in ranks:
        assert rank["healed"] == rank["plain"]
    # Each has its own partition.
    assert ranks[0]["healed"]["state"] != ranks[1]["healed"]["state"]


@pytest.mark.parametrize("stage", [2, 3])
def test_so_does_an_adapter(job: Job, stage: int) -> None:
    ranks = job.fail_and_go_on(stage, "bf16", "exception", lora=True)
    assert job.resumed_from_memory() == [5], job.log()
    assert [rank["healed"] == rank["plain"] for rank in ranks] == [True, True]


def test_partitions_of_another_stage_are_passed_over_for_what_is_on_disk(job: Job) -> None:
    job.fail_and_go_on(1, "fp32", then=2)
    assert job.began_at() == [0, 0]
    why = "partitioning was ZeRO-1 in torch.float32, and is ZeRO-2 in torch.float32"
    assert (job.directory / "log.0.txt").read_text().count(why) == 1
    assert not job.resumed_from_memory()


def test_where_deepspeed_could_not_load_that_either_it_is_said_what_to_do(job: Job) -> None:
    stages, options = (2, 3), {"precision": "fp32", "fault": "exception", "save_steps": 4}
    assert 0 not in job.start(0, stages, **options)["codes"]
    refused = job.start(1, stages, **options)
    assert refused["codes"] == [1, 1], job.log()
    for rank in refused["ranks"]:
        assert "checkpoint-4 is whole, and this job cannot go on from it: it was written by 2" in rank["error"]
        assert "under ZeRO-2, and this job has 2 processes under ZeRO-3" in rank["error"]


def test_with_offload_a_job_goes_on_from_disk(job: Job) -> None:
    job.fail_and_go_on(2, "bf16", offloads=True, save_steps=4)
    assert job.began_at() == [0, 4]
    assert not job.resumed_from_memory()


def test_beside_other_frozen_weights_a_job_begins_anew_with_another_engine(job: Job) -> None:
    """ZeRO-3 splits what is not trained as well: `train()` is left on all ranks, and entered again."""
    ranks = job.fail_and_go_on(3, "bf16", lora=True, drawn_anew=True)
    assert job.began_at() == [0, 0]
    assert "weights that are not trained" in job.log()
    assert [rank["healed"]["steps"] for rank in ranks] == [rank["plain"]["steps"] for rank in ranks]
