"""A machine before a run: what is told of it, and what will not work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from started_ranks import StartedRanks
from typer.testing import CliRunner
from wrong_product import WrongProduct

from self_healing.tools.cli import app
from self_healing.tools.doctor import Setting, coverage_of, judge
from self_healing.tools.doctor_machine import Disk, Machine, check_device


GIB = 1 << 30
# What is not looked at is not judged: what is installed here fits.
WELL = Machine(python="3.11.7", system="Linux", cores=8, memory_free=64 * GIB, shared_memory=8 * GIB)
DISK = Disk("out", free=500 * GIB)
TORCHRUN = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "3"}


# ---- what is judged ----


@pytest.mark.parametrize(
    ("machine", "disk", "environment", "severity", "told"),
    [
        (replace(WELL, libraries={"torch": "2.5.1"}), DISK, {}, "problem", "torch 2.5.1 is installed"),
        (replace(WELL, libraries={"torch": None}), DISK, {}, "problem", "torch is not installed"),
        (replace(WELL, driver="550.54"), DISK, {}, "problem", "sees no device"),
        (replace(WELL, error="RuntimeError: gone"), DISK, {}, "problem", "looked at (RuntimeError: gone)"),
        (WELL, replace(DISK, why_not_writable="PermissionError"), {}, "problem", "out cannot be written"),
        (WELL, replace(DISK, free=GIB, checkpoint_bytes=2 * GIB), {}, "problem", "1.0 GiB are free in out"),
        (WELL, replace(DISK, free=3 * GIB, checkpoint_bytes=2 * GIB), {}, "warning", "3.0 GiB are free in out"),
        (replace(WELL, shared_memory=64 << 20), DISK, {}, "warning", "/dev/shm has 0.1 GiB"),
        (WELL, DISK, {"TORCHELASTIC_MAX_RESTARTS": "0"}, "warning", "torchrun will not start this job again"),
    ],
)
def test_what_is_wrong_is_told(
    machine: Machine, disk: Disk, environment: dict[str, str], severity: str, told: str
) -> None:
    assert judge(WELL, DISK, Setting.of(TORCHRUN)).problems == []
    found = judge(machine, disk, Setting.of(TORCHRUN | environment))
    assert len(found.problems) == 1, found.problems
    assert told in found.problems[0].what
    assert found.problems[0].severity == severity
    assert found.works == (severity == "warning")


# ---- what is healed ----


@pytest.mark.parametrize(
    ("environment", "device", "columns"),
    [
        ({}, "cpu", ["callback", "wrapper"]),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, "cuda", ["DDP"]),
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}, "cuda", ["FSDP2"]),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "cuda", ["DeepSpeed"]),
        ({"PJRT_DEVICE": "TPU"}, "xla", ["XLA"]),
    ],
)
def test_the_columns_are_those_of_how_the_run_is_started(
    environment: dict[str, str], device: str, columns: list[str]
) -> None:
    assert {tuple(row["shown"]) for row in coverage_of(Setting.of(environment), device)} == {tuple(columns)}


@pytest.mark.parametrize(
    ("environment", "state"),
    [(TORCHRUN, "healed"), ({}, "no launcher"), (TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "0"}, "no launcher")],
)
def test_what_a_launcher_heals_is_not_healed_without_one(environment: dict[str, str], state: str) -> None:
    rows = {row["fault"]: row["shown"]["wrapper"]["state"] for row in coverage_of(Setting.of(environment))}
    assert rows["killed"] == state


# ---- what is looked at ----


# ---- the command ----


def test_the_command_prints_facts_and_what_is_healed(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)], env={"COLUMNS": "120"} | dict.fromkeys(TORCHRUN))
    assert result.exit_code == 0, result.output
    for told in ("transformers", "host memory", "What is healed here", "Preemption: SIGTERM, SIGUSR1"):
        assert told in result.stdout
    assert (
        "\n(2) refused before the first step, with the newest good one; what the Trainer cannot load it raises on\n"
        in result.stdout
    )


def test_the_command_prints_json(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    told = json.loads(result.stdout)
    assert told["works"]
    assert told["machine"]["libraries"]["torch"]
    assert told["coverage"][0]["shown"]["callback"] == {"state": "healed"}


def test_the_command_fails_where_something_will_not_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "file" / "run")], env={"COLUMNS": "120"})
    assert result.exit_code == 1
    assert "cannot be written" in result.stdout


@pytest.mark.parametrize("absolute", [False, True])
def test_the_command_refuses_a_directory_that_would_have_to_be_made_in_one_there_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absolute: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = (tmp_path if absolute else Path()) / "no-such-directory" / "run"
    result = CliRunner().invoke(app, ["doctor", str(directory)])
    assert result.exit_code == 2
    assert f"{directory} does not exist, and neither does {directory.parent}" in result.stderr
    # A run makes its own.
    assert CliRunner().invoke(app, ["doctor", str(directory.parent)]).exit_code == 0


CPU = torch.device("cpu")


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
    rows = [line.split()[1 :: len(line.split()) - 2] for line in first[1].splitlines() if line.startswith("rank ")]
    assert [(row[0], line_ends) for row, line_ends in zip(rows, ("right", "WRONG"), strict=True)] == [
        ("0", "right"),
        ("1", "WRONG"),
    ]


@pytest.mark.slow
def test_ranks_that_are_well_are_written_as_json(tmp_path: Path) -> None:
    first, second = doctor(tmp_path, "none", "--json")
    assert (first[0], second[0], second[1]) == (0, 0, ""), first[2] + second[2]
    job = json.loads(first[1])["job"]
    assert [row["rank"] for row in job["rows"]] == [0, 1]
    assert (job["wrong"], job["missing"], job["error"]) == ({}, [], None)


# ---- a device ----


def test_one_element_that_is_wrong_now_and_then_is_found_and_nothing_is_drawn() -> None:
    before = torch.random.get_rng_state()
    assert check_device(CPU) == (False, None)
    with WrongProduct(2):
        assert check_device(CPU) == (True, None)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_device_that_raises_is_not_called_wrong() -> None:
    with mock.patch.object(torch.Tensor, "to", side_effect=RuntimeError("CUDA out of memory\nand more")):
        assert check_device(CPU) == (False, "RuntimeError: CUDA out of memory")
