"""A job that is started again goes on from the snapshots that its killed process has left in shared memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from conftest import Starter, job_result, journal

from self_healing import shared_memory
from self_healing.shared_memory import directory_of


pytestmark = pytest.mark.skipif(not shared_memory.ROOT.is_dir(), reason="the system has no shared memory as files")
RANKS = Path(__file__).parents[1] / "restarted_ranks.py"
STORE: Any = torch.distributed.TCPStore
CLOSE = {"snapshot_interval": 2, "snapshot_verify_steps": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, starter: Starter) -> dict[str, Any]:
    output_dir = tmp_path_factory.mktemp("plain") / "job"
    assert starter.start(output_dir, {}, {}) == 0
    return job_result(output_dir)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "job"
    shutil.rmtree(directory_of(tmp_path / "job"), ignore_errors=True)


def resumed_from_memory(output_dir: Path) -> list[int]:
    return [event["step"] for event in journal(output_dir, "resumed_from_memory")]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "kept"), [(7, 6), (9, 8)], ids=["in mid-epoch", "where an epoch begins"])
def test_a_killed_job_goes_on_from_memory_and_ends_bitwise_equal(
    job: Path, plain: dict[str, Any], until_it_ends: Callable[..., list[int]], step: int, kept: int
) -> None:
    options = {"config": {**CLOSE, "resume_from_memory": True}, "arguments": {"save_steps": 5}}
    codes = until_it_ends(job, 2, fault="sigkill", step=step, **options)
    assert codes == [-9, 0]
    assert resumed_from_memory(job) == [kept]
    assert job_result(job)["weights"] == plain["weights"]
    assert job_result(job)["losses"] == plain["losses"]
    (incident,) = job_result(job)["incidents"]
    assert incident["steps_repeated"] == step - kept
    assert not directory_of(job).exists()


class Ranks:
    """
    Two ranks, started as torchrun does, whose store is served here.

    Args:
        directory (`Path`):
            Of the run.
        options:
            Of the script.
    """

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory, self._options = directory, options

    def start(self, restarts: int) -> list[int]:
        """Starts them and waits for their end; gives their exit codes."""
        store = STORE("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        launcher = {
            "TORCHELASTIC_RUN_ID": "job",
            "TORCHELASTIC_RESTART_COUNT": restarts,
            "TORCHELASTIC_MAX_RESTARTS": 3,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "OMP_NUM_THREADS": 1,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        ranks = []
        for rank in range(2):
            place = launcher | {"RANK": rank, "LOCAL_RANK": rank}
            with (self.directory / f"log.{restarts}.{rank}").open("w") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(RANKS), str(self.directory), json.dumps(self._options)],
                        env=os.environ | {name: str(value) for name, value in place.items()},
                        stdout=log,
                        stderr=log,
                    )
                )
        try:
            return [rank.wait(timeout=180) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()

    def log(self) -> str:
        return "\n".join(f"==== {log.name}\n{log.read_text()[-6000:]}" for log in sorted(self.directory.glob("log.*")))

    def results(self) -> list[dict[str, Any]]:
        return [json.loads((self.directory / f"results.{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "fault", "at", "goes_on_at"),
    [
        ("ddp", "exception", 5, 5),
        ("ddp", "sigkill", 5, 3),
        ("ddp", "callback", 7, 7),
        ("fsdp2", "exception", 5, 5),
        ("fsdp2", "sigkill", 8, 6),
        ("fsdp2 full", "exception", 5, 5),
    ],
    ids=lambda value: str(value),
)
def test_ranks_go_on_from_the_step_that_all_of_them_have(
    tmp_path: Path, strategy: str, fault: str, at: int, goes_on_at: int
) -> None:
    states = "FULL_STATE_DICT" if strategy.endswith("full") else "SHARDED_STATE_DICT"
    ranks = Ranks(tmp_path, strategy=strategy.split()[0], fault=fault, at=at, states=states)
    try:
        codes = ranks.start(0)
        assert 0 not in codes, ranks.log()
        assert ranks.start(1) == [0, 0], ranks.log()
        assert resumed_from_memory(tmp_path / "run") == [goes_on_at], ranks.log()
        assert not directory_of(tmp_path / "run").exists()
    finally:
        shutil.rmtree(directory_of(tmp_path / "run"), ignore_errors=True)
    for result in ranks.results():
        assert result["steps"] == 10
        assert result["sharded"] == (strategy != "ddp")
        assert result["weights"] == result["plain_weights"]
        assert result["losses"] == result["plain_losses"]
    record = json.loads((tmp_path / "run" / "healing_run.json").read_text())
    assert record["attempts"][0]["last_step"] - record["attempts"][1]["first_step"] == at - goes_on_at
