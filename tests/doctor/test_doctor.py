"""A machine before a run: what is told of it, and what will not work."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from self_healing.cli import app
from self_healing.doctor import machine as machine_module
from self_healing.doctor.coverage import Setting, Shown, coverage_of
from self_healing.doctor.doctor import Checkup, check_up, judge, size_in_words
from self_healing.doctor.machine import Device, Machine, Place, look_at_machine, look_at_place
from self_healing.doctor.tables import print_checkup
from self_healing.launcher import launch_of


GIB = 1 << 30
WELL = Machine(
    python="3.11.7",
    system="Linux",
    cores=8,
    libraries={"torch": "2.13.0", "transformers": "5.23.0", "trl": "1.16.0", "deepspeed": None},
    memory_free=64 * GIB,
    memory_total=128 * GIB,
    shared_memory=8 * GIB,
)
PLACE = Place(path="out", free=500 * GIB)
TORCHRUN = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "3"}
REQUIREMENTS = ["torch>=2.6", "transformers<6,>=5.4", 'trl>=1.16; extra == "trl"']


def setting(**environment: str) -> Setting:
    return Setting.of(launch_of(environment), environment)


def judged(machine: Machine = WELL, place: Place = PLACE, **environment: str) -> Checkup:
    return judge(machine, place, setting(**(TORCHRUN | environment)), REQUIREMENTS)


# ---- what is judged ----


def test_a_machine_that_is_well_has_no_problems() -> None:
    found = judged()
    assert found.problems == []
    assert found.works


@pytest.mark.parametrize(
    ("machine", "place", "environment", "severity", "told"),
    [
        (replace(WELL, libraries={"torch": "2.5.1"}), PLACE, {}, "problem", "torch 2.5.1 is installed"),
        (
            replace(WELL, libraries={"transformers": "4.57.0"}),
            PLACE,
            {},
            "problem",
            "transformers 4.57.0 is installed",
        ),
        (replace(WELL, libraries={"torch": None}), PLACE, {}, "problem", "torch is not installed"),
        (replace(WELL, libraries={"trl": None}), PLACE, {}, "warning", "TRL is not installed"),
        (replace(WELL, libraries={"trl": "0.9"}), PLACE, {}, "problem", "trl 0.9 is installed"),
        (replace(WELL, device=Device(driver="550.54")), PLACE, {}, "problem", "sees no device"),
        (
            replace(WELL, device=Device(kind="cuda", names=["V100"], bf16=False)),
            PLACE,
            {},
            "warning",
            "V100 does not compute in bfloat16",
        ),
        (replace(WELL, device=Device(kind="cuda", names=["A", "B"])), PLACE, {}, "warning", "nn.DataParallel"),
        (
            replace(WELL, device=Device(kind="cuda", names=["A"], free=GIB, total=80 * GIB)),
            PLACE,
            {},
            "warning",
            "1.0 GiB of 80.0 GiB of device memory are free",
        ),
        (WELL, replace(PLACE, why_not_writable="PermissionError"), {}, "problem", "out cannot be written"),
        (WELL, replace(PLACE, free=GIB, checkpoint_bytes=2 * GIB), {}, "problem", "1.0 GiB are free in out"),
        (WELL, replace(PLACE, free=3 * GIB, checkpoint_bytes=2 * GIB), {}, "warning", "3.0 GiB are free in out"),
        (WELL, replace(PLACE, hard_links=False), {}, "warning", "no hard links"),
        (replace(WELL, memory_free=GIB), replace(PLACE, checkpoint_bytes=GIB), {}, "warning", "two snapshots"),
        (replace(WELL, shared_memory=64 << 20), PLACE, {}, "warning", "/dev/shm has 64.0 MiB"),
        (WELL, PLACE, {"ACCELERATE_USE_DEEPSPEED": "true"}, "warning", "only watched with NVMe offload and stage 0"),
        (WELL, PLACE, {"TORCHELASTIC_MAX_RESTARTS": "0"}, "warning", "torchrun will not start this job again"),
        (replace(WELL, ignored_signals=["SIGTERM"]), PLACE, {}, "warning", "SIGTERM is ignored"),
        (replace(WELL, unknown={"driver": "OSError: gone"}), PLACE, {}, "warning", "determined (OSError: gone)"),
    ],
)
def test_what_is_wrong_is_told_with_what_to_do(
    machine: Machine, place: Place, environment: dict[str, str], severity: str, told: str
) -> None:
    found = judged(machine, place, **environment)
    assert len(found.problems) == 1, found.problems
    assert told in found.problems[0].what
    assert found.problems[0].severity == severity
    assert found.works == (severity == "warning")


def test_a_process_that_nobody_starts_again_is_told_so() -> None:
    found = judge(WELL, PLACE, setting(), REQUIREMENTS)
    assert [problem.what for problem in found.problems] == [
        "No launcher was found: a process that is killed, or hangs in native code, is not started again."
    ]


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, True),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, False),
        ({"WORLD_SIZE": "1"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, False),
    ],
)
def test_ranks_that_would_find_the_addresses_of_those_before_them_are_told_so(
    environment: dict[str, str], told: bool
) -> None:
    found = judged(**{"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", **environment})
    assert any("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in problem.to_do for problem in found.problems) is told


def test_problems_come_before_warnings() -> None:
    found = judged(replace(WELL, libraries={"trl": None}), replace(PLACE, why_not_writable="no"))
    assert [problem.severity for problem in found.problems] == ["problem", "warning"]


# ---- what is healed ----


@pytest.mark.parametrize(
    ("environment", "engine", "ranks", "sharded"),
    [
        ({}, None, 1, False),
        ({"WORLD_SIZE": "4"}, None, 4, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, None, 2, False),
        ({"WORLD_SIZE": "many"}, None, 1, False),
        ({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"}, None, 2, True),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed", 1, False),
        ({"ACCELERATE_USE_MEGATRON_LM": "1"}, "Megatron-LM", 1, False),
        ({"PJRT_DEVICE": "TPU"}, "XLA", 1, False),
    ],
)
def test_how_a_run_is_started_is_read_from_the_environment(
    environment: dict[str, str], engine: str | None, ranks: int, sharded: bool
) -> None:
    found = setting(**environment)
    assert (found.engine, found.ranks, found.sharded) == (engine, ranks, sharded)
    assert found.by_accelerate == any(name.startswith("ACCELERATE") for name in environment)


@pytest.mark.parametrize(
    ("environment", "device", "columns"),
    [
        ({}, "cpu", ["callback", "wrapper"]),
        ({}, "cuda", ["callback", "wrapper", "one GPU"]),
        ({"WORLD_SIZE": "2"}, "cuda", ["DDP"]),
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}, "cuda", ["FSDP2"]),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "cuda", ["DeepSpeed"]),
        ({"PJRT_DEVICE": "TPU"}, "xla", ["XLA"]),
    ],
)
def test_the_columns_are_those_of_how_the_run_is_started(
    environment: dict[str, str], device: str, columns: list[str]
) -> None:
    assert {tuple(row.shown) for row in coverage_of(setting(**environment), device)} == {tuple(columns)}


def test_under_an_engine_that_no_test_runs_nothing_is_shown_to_be_healed() -> None:
    assert {row.shown["XLA"].state for row in coverage_of(setting(PJRT_DEVICE="TPU"))} == {"not shown"}


def test_what_a_launcher_heals_is_not_healed_without_one() -> None:
    def killed(found: Setting) -> Shown:
        return next(row.shown["wrapper"] for row in coverage_of(found) if row.fault == "killed")

    assert killed(setting(**TORCHRUN)).state == "healed"
    assert killed(setting()).state == "no launcher"
    assert killed(setting(**TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "0"})).state == "no launcher"


def test_what_is_healed_in_part_is_said_below_the_table() -> None:
    terminal = io.StringIO()
    print_checkup(judged(), Console(file=terminal, width=80))
    assert "in part (2) │ healed " in terminal.getvalue()
    assert "\n(2) refused before the first step; the newest good one is named\n" in terminal.getvalue()


# ---- what is looked at ----


def test_this_machine_is_looked_at_without_a_failure() -> None:
    found = look_at_machine()
    assert found.unknown == {}
    assert found.libraries["torch"]
    assert found.memory_free
    assert found.memory_total


def test_probes_that_raise_are_told_and_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any) -> Any:
        raise OSError("strange")

    for name in ("_device", "_driver", "_memory", "_shared_memory", "_ignored_signals", "_version"):
        monkeypatch.setattr(machine_module, name, raises)
    found = look_at_machine()
    assert found.unknown == dict.fromkeys(
        ("driver", "device", "memory", "libraries", "shared memory", "signals"), "OSError: strange"
    )
    checkup = judge(found, PLACE, setting(), REQUIREMENTS)
    print_checkup(checkup, Console(file=io.StringIO()))


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    found = look_at_place(tmp_path / "a" / "b")
    assert not found.exists
    assert found.why_not_writable is None
    assert found.hard_links
    assert found.free
    assert list(tmp_path.iterdir()) == []


def test_a_script_stands_for_its_directory_and_the_largest_checkpoint_counts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    for number, size in ((1, 10), (2, 30), (3, 20)):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}" / "model.safetensors").write_bytes(b"x" * size)
    found = look_at_place(script)
    assert (found.path, found.exists, found.checkpoint_bytes) == (str(tmp_path), True, 30)


def test_a_directory_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert look_at_place(tmp_path / "file" / "run").why_not_writable is not None


@pytest.mark.parametrize(
    ("count", "words"), [(None, "not known"), (0, "0 bytes"), (1023, "1023 bytes"), (64 << 20, "64.0 MiB")]
)
def test_sizes_are_put_into_words(count: int | None, words: str) -> None:
    assert size_in_words(count) == words


# ---- the command ----


def test_the_command_prints_facts_and_what_is_healed(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)], env={"COLUMNS": "120"} | dict.fromkeys(TORCHRUN))
    assert result.exit_code == 0, result.output
    for told in ("transformers", "host memory", "What is healed here", "Preemption: SIGTERM, SIGUSR1"):
        assert told in result.stdout


def test_the_command_prints_json(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    told = json.loads(result.stdout)
    assert told["works"]
    assert told["machine"]["libraries"]["torch"]
    assert told["coverage"][0]["shown"]["callback"] == {"state": "healed", "what": None}


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


def test_check_up_reads_the_environment_it_is_given(tmp_path: Path) -> None:
    found = check_up(tmp_path, TORCHRUN | {"WORLD_SIZE": "4"})
    assert found.setting.ranks == 4
    assert found.setting.launch.launcher == "torchrun"
