"""What strikes while memory is being healed: a NaN, another out-of-memory error, an exception."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    journal,
    lost_connection,
    sft_trainer,
)
from test_memory import BUILDERS, TooManyRows, assert_same_run, out_of_memory, run
from trl import SFTTrainer

from self_healing import HealingConfig, SelfHealingTrainer


class StrikingCalls:
    """Changes what the model gives in some of its calls, counted from the first one that is split."""

    def __init__(self, model: Any, rows: int, strike: Callable[[int], bool], change: Callable[[Any], Any]) -> None:
        # Generation is left whole: split, it draws other tokens.
        self.memory = TooManyRows(model, rows, unless=lambda: not torch.is_grad_enabled())
        self.calls, self.fired = 0, 0
        self._rows, self._strike, self._change = rows, strike, change
        model.model.norm.register_forward_hook(self._hook)

    def _hook(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not module.training or output.shape[0] > self._rows:
            return None
        self.calls += 1
        if not self._strike(self.calls):
            return None
        self.fired += 1
        return self._change(output)


def nan(output: torch.Tensor) -> torch.Tensor:
    return output * math.nan


class OwnLoss(SFTTrainer):
    """With a loss that nobody knows: parts of its batches are computed again in the backward pass."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


class TestFaultsInASplitBatch:
    """A fault of the device that strikes one piece says nothing about splitting."""

    @pytest.mark.parametrize(
        ("name", "call", "change"),
        [
            pytest.param("SFTTrainer", 1, nan, id="SFT, NaN in a piece"),
            pytest.param("DPOTrainer", 4, nan, id="DPO, NaN in the last piece"),
            pytest.param("own loss", 3, nan, id="computed again, NaN the second time"),
        ],
    )
    def test_is_computed_again(
        self, tmp_path: Path, tokenizer: Any, name: str, call: int, change: Callable[[Any], Any]
    ) -> None:
        build = {"own loss": partial(sft_trainer, trainer_class=OwnLoss), **BUILDERS}[name]
        plain = build(tmp_path / "plain", tokenizer, dropout=0.0)
        plain.train()
        healed, fault = run(
            build,
            tmp_path / "healed",
            tokenizer,
            lambda model: StrikingCalls(model, 2, lambda number: number == call, change),
            dropout=0.0,
        )
        assert fault.fired == 1
        assert_same_run(healed, plain)
        assert sum(outcome["steps_lost"] for outcome in journal(tmp_path / "healed", "outcome")) == 0
        assert "not_split" not in json.dumps(journal(tmp_path / "healed"))


def runs_out(output: torch.Tensor) -> torch.Tensor:
    raise out_of_memory(len(output))


def raises(output: torch.Tensor) -> torch.Tensor:
    raise lost_connection()


def healed_by_the_wrapper(
    build: Callable[..., Any],
    directory: Path,
    tokenizer: Any,
    fault: Callable[[Any], Any],
    config: HealingConfig | None = None,
    **arguments: Any,
) -> tuple[Any, Any]:
    trainer = build(directory, tokenizer, **arguments)
    struck = fault(trainer)
    SelfHealingTrainer(trainer, config, sleep=lambda seconds: None).train()
    return trainer, struck


def assert_nothing_lost(directory: Path) -> None:
    outcomes = journal(directory, "outcome")
    assert outcomes
    assert [outcome["steps_lost"] for outcome in outcomes] == [0] * len(outcomes)


class TestWhileASplitBatchIsComputed:
    @pytest.mark.parametrize("change", [runs_out, raises])
    @pytest.mark.parametrize(
        ("name", "call"),
        [
            ("SFTTrainer", 1),
        ],
    )
    def test_no_step_is_lost(
        self, tmp_path: Path, tokenizer: Any, name: str, call: int, change: Callable[[Any], Any]
    ) -> None:
        build = {"own loss": partial(sft_trainer, trainer_class=OwnLoss), **BUILDERS}[name]
        plain = build(tmp_path / "plain", tokenizer, dropout=0.0)
        plain.train()
        healed, fault = healed_by_the_wrapper(
            build,
            tmp_path / "healed",
            tokenizer,
            lambda trainer: StrikingCalls(trainer.model, 2, lambda number: number == call, change),
            dropout=0.0,
        )
        assert fault.fired == 1
        assert_same_run(healed, plain)
        assert_nothing_lost(tmp_path / "healed")
