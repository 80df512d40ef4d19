"""The figures of `benchmarks/detectors.py` that the defaults have to hold, and what the detectors cost a step."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from self_healing.hf.objective import BY_CLASS_NAME


ROOT = Path(__file__).parents[2]


def load_benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("detectors_benchmark", ROOT / "benchmarks" / "detectors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


benchmark_module = load_benchmark()
CURVES = benchmark_module.healthy_curves()
COMMITTED = json.loads((ROOT / "benchmarks" / "results" / "detectors.json").read_text())


@pytest.fixture(scope="module")
def bank() -> list[Any]:
    """50,000 bootstrap steps, as many of each curve."""
    rng = np.random.default_rng(0)
    return [each for curve in CURVES for each in benchmark_module.resamples(curve, 12_500, rng)]


class TestFalseAlarms:
    @pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
    def test_there_is_none_on_a_healthy_curve(self, curve: Any) -> None:
        assert benchmark_module.alarms(curve, benchmark_module.Ours()) == []

    def test_there_is_none_on_the_healthy_grpo_curve(self) -> None:
        (curve,) = benchmark_module.healthy_curves(objective="grpo")
        ours = benchmark_module.Ours(apply=BY_CLASS_NAME["GRPOTrainer"].detectors)
        assert benchmark_module.alarms(curve, ours) == []

    @pytest.mark.slow
    def test_there_is_at_most_one_in_fifty_thousand_bootstrap_steps(self, bank: list[Any]) -> None:
        steps = sum(len(curve.losses) for curve in bank)
        found = sum(len(benchmark_module.alarms(curve, benchmark_module.Ours())) for curve in bank)
        assert steps >= 50_000
        assert found <= steps / 50_000

    def test_curves_that_nothing_was_tuned_on(self) -> None:
        found = benchmark_module.held_out()
        healthy = {name: each["alarms"] for name, each in found.items() if name.startswith("healthy")}
        assert len(healthy) == 14
        # One gradient of 3,500 steps in one run stands out; a person looking at the curve would say so, too.
        assert {name: alarms for name, alarms in healthy.items() if alarms} == {
            "healthy_sft_llama3_8b_mob_per_step": [371]
        }
        assert found["broken_sft_qlora_poludmik_every10"]["alarms"] == [20]


class TestActingAlarms:
    def test_there_is_none_on_a_public_run_on_unshuffled_data(self) -> None:
        run = benchmark_module.read_curve(benchmark_module.UNSHUFFLED)
        assert len(run.losses) == 19_073
        assert benchmark_module.acting_alarms([run])["alarms"] == 0

    @pytest.mark.parametrize(
        "simulation",
        [
            pytest.param(each, id=each.name, marks=[] if position % 5 == 1 else [pytest.mark.slow])
            for position, each in enumerate(benchmark_module.SIMULATIONS)
        ],
    )
    @pytest.mark.slow
    def test_the_committed_figures_of_simulated_runs_are_those_of_the_code(self, simulation: Any) -> None:
        found = benchmark_module.unshuffled([0], [simulation])[simulation.name]
        assert found["alarms"] == COMMITTED["acting"][simulation.name]["by_run"][0]


class TestPower:
    @pytest.mark.parametrize(
        ("name", "least"),
        [("spike +3", 0.85), ("shift +0.5", 0.85), ("ramp 0.01/step", 0.85), ("NaN", 1.0), ("gradient × 10", 0.95)],
    )
    def test_faults_are_noticed_in_time(self, name: str, least: float) -> None:
        (fault,) = [fault for fault in benchmark_module.FAULTS if fault.name == name]
        shares = benchmark_module.power(CURVES, benchmark_module.Ours, fault)
        assert fmean(shares.values()) >= least

    def test_the_committed_figures_are_those_of_the_code(self) -> None:
        (fault,) = [fault for fault in benchmark_module.FAULTS if fault.name == "ramp 0.01/step"]
        assert benchmark_module.power(CURVES, benchmark_module.Ours, fault) == pytest.approx(
            COMMITTED["ours"]["power_by_curve"][fault.name]
        )
        assert COMMITTED["held_out"] == benchmark_module.held_out()
