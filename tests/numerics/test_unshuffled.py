"""Data that come in an order: the loss rises where they are harder, and nothing is done about it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import assert_same_weights, journal, weights
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

from self_healing import HealingConfig, SelfHealingCallback


ROWS, FEATURES = 512, 8


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1), torch.nn.Flatten(0)
        )

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layers(inputs[0]), labels[0])}


class InOrder(Dataset[dict[str, torch.Tensor]]):
    """A batch in each item; how hard it is, is the part of the loss that no weights bring down."""

    def __init__(self, levels: list[float], seed: int) -> None:
        self.levels, self.seed = levels, seed

    def __len__(self) -> int:
        return len(self.levels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + index)
        inputs = torch.randn(ROWS, FEATURES, generator=generator)
        noise = torch.randn(ROWS, generator=generator)
        return {"inputs": inputs, "labels": torch.sin(inputs.sum(1)) + math.sqrt(self.levels[index]) * noise}


class InTurns(Dataset[dict[str, torch.Tensor]]):
    """Batches of two functions, one of them for 30 to 80 steps and then the other: either is forgotten meanwhile."""

    def __init__(self, steps: int, seed: int) -> None:
        self.seed = seed
        generator = torch.Generator().manual_seed(seed)
        self.kinds: list[int] = []
        while len(self.kinds) < steps:
            turn = int(torch.randint(30, 81, (1,), generator=generator))
            self.kinds += [0 if not self.kinds else 1 - self.kinds[-1]] * turn
        self.weights = 0.7 * torch.randn(2, FEATURES, generator=generator) / math.sqrt(FEATURES)

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + index)
        inputs = torch.randn(256, FEATURES, generator=generator)
        noise = 0.3 * torch.randn(256, generator=generator)
        return {"inputs": inputs, "labels": inputs @ self.weights[self.kinds[index]] + noise}


def trained(
    directory: Path, data: InOrder | InTurns, steps: int, callback: SelfHealingCallback | None = None
) -> Trainer:
    set_seed(data.seed)
    arguments = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=1,
        max_steps=steps,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=500,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=Regression(), args=arguments, train_dataset=data, callbacks=callback and [callback])
    trainer.train()
    return trainer


def assert_left_alone(
    directory: Path, data: InOrder | InTurns, steps: int, config: HealingConfig | None = None
) -> Counter[str]:
    """Weights are the plain trainer's, bitwise; returns how often which symptom was looked into."""
    plain = trained(directory / "plain", data, steps)
    watched = trained(directory / "watched", data, steps, SelfHealingCallback(config))
    assert watched.state.global_step == steps
    assert_same_weights(weights(watched), weights(plain))
    done = {event["action"] for event in journal(directory / "watched", "action")}
    assert done <= {"hold_checkpoints"}
    assert {event["failure"] for event in journal(directory / "watched", "outcome")} <= {"harder_data", "slow_rise"}
    assert [event["steps_lost"] for event in journal(directory / "watched", "outcome") if event["steps_lost"]] == []
    return Counter(event["symptom"] for event in journal(directory / "watched", "detected"))


class TestHarderData:
    """35 hard steps and 14 easy ones, after which the run is over."""

    @pytest.mark.parametrize(
        "config",
        [
            HealingConfig.conservative(),
            pytest.param(HealingConfig(on_divergence="warn"), marks=pytest.mark.slow),
            pytest.param(HealingConfig(), marks=pytest.mark.slow),
        ],
        ids=["conservative", "warn", "default"],
    )
    @pytest.mark.parametrize("harder", [1.5, pytest.param(4.0, marks=pytest.mark.slow)])
    def test_a_run_that_meets_them_goes_through(self, tmp_path: Path, config: HealingConfig, harder: float) -> None:
        levels = [1.0] * 120 + [harder] * 35 + [1.0] * 14
        seen = assert_left_alone(tmp_path, InOrder(levels, seed=0), len(levels), config)
        assert seen
        assert [event["failure"] for event in journal(tmp_path / "watched", "outcome")] == ["harder_data"]


def test_what_is_forgotten_for_another_kind_is_not_taken_for_worse_weights(tmp_path: Path) -> None:
    seen = assert_left_alone(tmp_path, InTurns(800, seed=4), 90, HealingConfig(snapshot_interval=10))
    assert seen["divergence"], "nothing was tried out"
    (found,) = (event for event in journal(tmp_path / "watched", "diagnosed") if event["failure"] == "harder_data")
    # The weights the run began with are much better on this batch, and as much worse on the one before it.
    same_batch = found["evidence"]["same_batch"]
    assert same_batch["weights of step 0"]["loss"] < 0.5 * found["evidence"]["loss_now"]
