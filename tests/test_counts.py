"""What healing adds to a healthy step, counted: it must not grow."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
counts = importlib.import_module("counts")

# By accumulation: of a step that generates no rows, and of GRPO, where weights and logits are looked at in each cycle,
# which takes tens of thousands of calls itself.
CALLS, KERNELS, SYNCHRONISATIONS = {1: 96, 8: 160}, 8, {1: -1, 8: -15}
GENERATING: dict[str, Any] = {"calls": {1: 316, 8: 582}, "kernels": 20, "synchronisations": 2}
QUICK = {("sft", "fp32", 1), ("sft", "fp32", 8), ("grpo", "fp32", 1)}


@pytest.mark.parametrize(
    ("kind", "precision", "accumulation"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in counts.cases()],
)
def test_a_healthy_step_costs_no_more_than_it_did(kind: str, precision: str, accumulation: int) -> None:
    added = counts.added(kind, precision, accumulation)
    generates = kind == "grpo"
    assert added["synchronisations"] <= SYNCHRONISATIONS[accumulation] + generates * GENERATING["synchronisations"]
    assert added["kernels"] <= KERNELS + generates * GENERATING["kernels"]
    assert added["calls"] <= CALLS[accumulation] + generates * GENERATING["calls"][accumulation]
