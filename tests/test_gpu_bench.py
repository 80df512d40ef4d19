"""What is run on a GPU, gone through on the CPU with tiny sizes: it must not fail there of a typo."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
gpu = importlib.import_module("gpu")
gpu_parts = importlib.import_module("gpu_parts")


# Of each part one case that runs on a CPU; those that start processes of their own are slow.
QUICK = {
    "repeats": "heals in fp32",
    "memory": "lm",
    "vocabulary": "152k tokens",
    "side_stream": "harder data, slow copies",
    "replay": "learning rate 0.001",
    "precision": "sdpa",
    "compile": "default",
    "syncs": "sft",
    "overhead": "0.5B",
    "first_steps": "0.5B",
}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run_case(part: str, case: str, device: str) -> dict[str, Any]:
    found = gpu_parts.outcome(gpu_parts.PARTS[part][case], device, tiny=True)
    if "skipped" in found:
        pytest.skip(found["skipped"])
    return found


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda script: script.stem)
def test_a_benchmark_finds_what_it_takes_from_the_package(script: Path) -> None:
    taken = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("self_healing")
        for alias in node.names
    ]
    for module, name in taken:
        exec(f"from {module} import {name}")


def test_the_parts_are_those_there_are() -> None:
    assert tuple(gpu_parts.PARTS) == gpu.PARTS


@pytest.mark.slow
@pytest.mark.parametrize(("part", "case"), QUICK.items())
def test_a_part_can_be_rehearsed(part: str, case: str) -> None:
    found = run_case(part, case, "cpu")
    assert "error" not in found, found["traceback"]
    assert found["shown"] is not False, found


# Left to `make bench-gpu`: those that start processes of their own, for minutes, and those of memory, most of which is
# there always where a model is tiny.
ON_DEVICE = [
    (part, case)
    for part in gpu.PARTS
    for case in gpu_parts.PARTS[part]
    if part not in ("lost_device", "distributed", "memory", "vocabulary", "limits_sft", "limits_dpo", "limits_grpo")
]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("part", "case"), ON_DEVICE)
def test_a_case_shows_what_it_has_to_on_the_device(part: str, case: str) -> None:
    found = run_case(part, case, "cuda")
    assert "error" not in found, found["traceback"]
    assert found["shown"] is not False, found


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A part of three cases that only say that they ran."""
    ran: list[str] = []

    def case(name: str) -> Any:
        return lambda setting: ran.append(name) or {"shown": True}

    monkeypatch.setitem(gpu_parts.PARTS, "syncs", {name: case(name) for name in ("one", "two", "three")})
    return ran


def test_a_part_that_was_cut_off_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = counted(monkeypatch)
    before = {"cases": {"one": {"begun": 2}, "two": {"begun": 1}, "three": {"shown": True}}}
    (tmp_path / "gpu_syncs.json").write_text(json.dumps(before))
    found = gpu_parts.run_part("syncs", tmp_path, "cpu", tiny=True)
    # What has ended its process twice would end it again.
    assert ran == ["two"]
    assert "its process was ended twice" in found["cases"]["one"]["error"]
    assert found["complete"]
    assert {"device", "date", "versions"} <= found.keys()


def test_what_a_case_raises_is_its_result_and_the_next_one_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(setting: Any) -> dict[str, Any]:
        raise ValueError("a typo")

    monkeypatch.setitem(gpu_parts.PARTS, "syncs", {"one": fail, "two": lambda setting: {"shown": True}})
    found = gpu_parts.run_part("syncs", tmp_path, "cpu", tiny=True)
    assert found["cases"]["one"]["error"] == "ValueError: a typo"
    assert found["cases"]["two"]["shown"] is True
