"""Runs whose kernels do not repeat bitwise, simulated: what is healed by computing again is healed there, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import (
    OutputFault,
    WeightFault,
    a_few_nans,
    journal,
    sft_trainer,
)
from noise import kernel_noise

from self_healing import SelfHealingCallback


# Of one element: what atomic sums in single precision do, and what one step of the last place of a bfloat16 does.
LEVELS = [
    pytest.param(False, 1e-4, id="fp32-1e-4", marks=pytest.mark.slow),
    pytest.param(True, 4e-3, id="bf16-4e-3"),
]


# ---- healthy runs ----


@pytest.mark.parametrize(("bf16", "eps"), LEVELS)
def test_a_healthy_noisy_run_is_left_alone(tmp_path: Path, tokenizer: Any, bf16: bool, eps: float) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, bf16=bf16, max_steps=20, callbacks=[SelfHealingCallback()])
    with kernel_noise(trainer.model, eps) as noise:
        trainer.train()
    assert noise.backwards > 0
    assert not journal(tmp_path, "detected")
    assert not journal(tmp_path, "action")


# ---- whether a step repeats ----


def repeats(output_dir: Path) -> list[str]:
    return [event["repeats"] for event in journal(output_dir, "repeats")]


@pytest.mark.parametrize(("bf16", "eps"), LEVELS)
def test_a_noisy_step_is_told_to_be_within_noise(tmp_path: Path, tokenizer: Any, bf16: bool, eps: float) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, bf16=bf16, callbacks=[SelfHealingCallback()])
    OutputFault(trainer.model, strike=lambda forward: forward == 4)
    with kernel_noise(trainer.model, eps):
        trainer.train()
    [told] = journal(tmp_path, "repeats")
    [outcome] = journal(tmp_path, "outcome")
    assert told["repeats"] == "within noise"
    assert 0.01 * eps < told["gradient"] < 10 * eps
    assert outcome["failure"] == "nonfinite_transient"
    assert outcome["outcome"] == "resolved"
    assert outcome["steps_lost"] == 0


def with_a_counter(trainer: Any) -> None:
    """A loss that is weighted by how often it was computed, which nobody can put back."""
    loss, calls = trainer.compute_loss, 0

    def weighted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return loss(*arguments, **named) * (1 + 0.05 * (0.618034 * calls % 1))

    trainer.compute_loss = weighted


def test_a_state_that_nobody_can_put_back_is_no_noise(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, bf16=False, callbacks=[SelfHealingCallback()])
    with_a_counter(trainer)
    OutputFault(trainer.model, strike=lambda forward: forward == 3)
    trainer.train()
    assert repeats(tmp_path) == ["beyond noise"]
    assert "something keeps state that is not restored" in caplog.text


# ---- going back, and applying the steps since then again ----


# The snapshot of step 20 is trusted by then, and that of step 40 not yet.
GOES_BACK = {"snapshot_interval": 20}
FAULT, TRUSTED = 43, 20
ANOTHER_STEP = "as if more than weights, optimizer and data made it up"
LONG = {"max_steps": 50, "lr_scheduler_type": "constant", "bf16": True, "gradient_accumulation_steps": 1}


def replays(output_dir: Path) -> list[dict[str, Any]]:
    return [event for event in journal(output_dir, "action") if event["action"] == "replay_steps"]


def steps_lost(output_dir: Path) -> list[int]:
    return [event["steps_lost"] for event in journal(output_dir, "outcome")]


def test_noisy_steps_are_applied_again(tmp_path: Path, tokenizer: Any) -> None:
    callbacks = [SelfHealingCallback(GOES_BACK), WeightFault(a_few_nans, FAULT)]
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=callbacks, learning_rate=1e-2, **LONG)
    with kernel_noise(trainer.model, 1e-3):
        trainer.train()
    [replay] = replays(tmp_path)
    assert replay["happened"]
    assert replay["replayed"] == FAULT - TRUSTED
    assert replay["repeats"] == "within noise"
    assert steps_lost(tmp_path) == [0]


def test_steps_that_come_out_otherwise_are_refused_in_noise(tmp_path: Path, tokenizer: Any) -> None:
    written = WeightFault(lambda model: model.lm_head.weight.mul_(1.3), 30)
    callbacks = [SelfHealingCallback(GOES_BACK), written, WeightFault(a_few_nans, FAULT)]
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=callbacks, **LONG)
    with kernel_noise(trainer.model, 1e-3):
        trainer.train()
    [replay] = replays(tmp_path)
    assert not replay["happened"]
    assert ANOTHER_STEP in replay["why"]
    assert steps_lost(tmp_path) == [FAULT + 1 - TRUSTED]
