"""What the loss of some rows counts for is found by experiment, and the step is that of the whole micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    adapter_trainer,
    dpo_trainer,
    grpo_trainer,
    plain_trainer,
    sft_trainer,
)
from test_memory import TooManyRows, assert_same_run, run
from transformers import DataCollatorWithFlattening

from self_healing import SelfHealingCallback, UnrecoverableTrainingError
from self_healing.healers.oom.microbatches import Microbatches


def only_with_gradients() -> bool:
    return not torch.is_grad_enabled()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Microbatches]:
    """All that are made in a test."""
    found: list[Microbatches] = []
    original = Microbatches.__init__

    def note(self: Microbatches, *args: Any) -> None:
        original(self, *args)
        found.append(self)

    monkeypatch.setattr(Microbatches, "__init__", note)
    return found


def healed_as_plain(build: Callable[..., Any], directory: Path, tokenizer: Any, rows: int, **settings: Any) -> Any:
    """A run that has memory for so many rows, and logs and learns what one with enough of it does."""
    # Adam makes much of what rounding leaves of a gradient that is nearly zero.
    settings = {"dropout": 0.0, "max_steps": 3, "optim": "sgd", "learning_rate": 0.1, **settings}
    plain = build(directory / "plain", tokenizer, **settings)
    plain.train()
    healed, memory = run(
        build,
        directory / "healed",
        tokenizer,
        lambda model: TooManyRows(model, rows, unless=only_with_gradients),
        **settings,
    )
    assert memory.fired
    assert_same_run(healed, plain)
    return memory


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("build", "rows", "settings", "rule"),
    [
        pytest.param(plain_trainer, 2, {"items": False}, "labels", id="the Trainer, a mean over labels"),
        pytest.param(grpo_trainer, 2, {"loss_type": "grpo"}, "rows", marks=SLOW, id="GRPO, a mean over rows"),
        pytest.param(grpo_trainer, 2, {"loss_type": "bnpo"}, "labels", id="GRPO, a mean over tokens"),
        pytest.param(adapter_trainer, 2, {}, "one", id="LoRA, of whose tensors half have no gradient yet"),
    ],
)
def test_the_weight_that_reproduces_loss_and_gradients_is_used(
    tmp_path: Path, tokenizer: Any, made: Any, build: Any, rows: int, settings: dict[str, Any], rule: str
) -> None:
    settings = dict(settings)
    if build is adapter_trainer:
        build = no_dropout_of_adapters
    if not settings.pop("items", True):
        build = without_items
    memory = healed_as_plain(build, tmp_path, tokenizer, rows, **settings)
    (passes,) = made
    assert passes._rules == [rule]
    assert passes._sizes.in_passes is False
    assert memory.seen[-1] == rows


def no_dropout_of_adapters(*args: Any, **settings: Any) -> Any:
    trainer = adapter_trainer(*args, **settings)
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return trainer


def without_items(*args: Any, **settings: Any) -> Any:
    trainer = plain_trainer(*args, **settings)
    trainer.model_accepts_loss_kwargs = False
    return trainer


@pytest.mark.parametrize(
    ("build", "rows", "settings"),
    [
        pytest.param(
            grpo_trainer,
            2,
            {"top_entropy_quantile": 0.5},
            marks=SLOW,
            id="GRPO with a quantile of the batch",
        ),
        pytest.param(sft_trainer, 1, {}, marks=SLOW, id="one row, of which nothing is learned"),
        pytest.param(dpo_trainer, 2, {}, id="one pair"),
        pytest.param(
            grpo_trainer,
            2,
            {"reward_funcs": lambda completions, **_: [1.0] * len(completions)},
            id="GRPO with rewards that are all equal, and so without a gradient",
        ),
    ],
)
def test_without_such_a_weight_nothing_is_weighed(
    tmp_path: Path, tokenizer: Any, made: Any, build: Any, rows: int, settings: dict[str, Any]
) -> None:
    healed_as_plain(build, tmp_path, tokenizer, rows, **settings)
    (passes,) = made
    assert passes._rules == []
    assert passes._sizes.pieces == 1


def test_a_model_that_normalises_over_the_batch_is_not_computed_in_passes(tmp_path: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()])
    trainer.model.norm_of_batches = torch.nn.BatchNorm1d(3)
    TooManyRows(trainer.model, 2)
    with pytest.raises(UnrecoverableTrainingError, match="batch normalisation"):
        trainer.train()


def test_sequences_of_a_flattened_batch_stay_whole(tmp_path: Path, tokenizer: Any, made: Any) -> None:
    class TooManyTokens(TooManyRows):
        def _look(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            super()._look(module, args, {"input_ids": kwargs["input_ids"].T})

    def build(*args: Any, **settings: Any) -> Any:
        trainer = plain_trainer(*args, **settings)
        trainer.train_dataset = trainer.train_dataset.remove_columns(["attention_mask", "labels"])
        trainer.data_collator = DataCollatorWithFlattening()
        return trainer

    plain = build(tmp_path / "plain", tokenizer, dropout=0.0)
    plain.train()
    # Four sequences of 24 tokens.
    healed, memory = run(build, tmp_path / "healed", tokenizer, lambda model: TooManyTokens(model, 50), dropout=0.0)
    assert memory.fired
    assert set(memory.seen[-4:]) == {48}
    assert_same_run(healed, plain)
    assert made[0]._rules == ["one"]
