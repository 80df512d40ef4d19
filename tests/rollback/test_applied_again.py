"""Steps that come out otherwise when they are applied again: where the fault was in them, or is in the replay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WeightFault, a_few_nans, assert_same_weights, journal, plain_trainer, sft_trainer, weights
from peft import LoraConfig
from transformers import Trainer, TrainerCallback, set_seed

from self_healing import SelfHealingCallback


# ---- the loss was what was noticed ----


@pytest.fixture(scope="module")
def base(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that has learned enough for a layer to matter."""
    trainer = plain_trainer(
        tmp_path_factory.mktemp("base"), tokenizer, max_steps=30, gradient_accumulation_steps=1, learning_rate=3e-3
    )
    trainer.train()
    return trainer.model


def trained(directory: Path, tokenizer: Any, base: Any, adapter: bool, *callbacks: Any) -> dict[str, torch.Tensor]:
    set_seed(1)
    lora = {"peft_config": LoraConfig(target_modules="all-linear", r=4, lora_dropout=0.1)}
    trainer = sft_trainer(
        directory,
        tokenizer,
        model=copy.deepcopy(base),
        callbacks=list(callbacks),
        trainer_kwargs=lora if adapter else {},
        max_steps=70,
        gradient_accumulation_steps=1,
        learning_rate=1e-4,
    )
    trainer.train()
    return weights(trainer)


@pytest.fixture(scope="module")
def unharmed(tokenizer: Any, base: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Any]:
    known = dict[bool, dict[str, torch.Tensor]]()

    def of(adapter: bool) -> dict[str, torch.Tensor]:
        if adapter not in known:
            known[adapter] = trained(tmp_path_factory.mktemp("unharmed"), tokenizer, base, adapter)
        return known[adapter]

    return of


def noise_in(name: str, size: float) -> Callable[[Any], None]:
    def hit(model: Any) -> None:
        random = torch.Generator().manual_seed(0)
        for own, weight in model.named_parameters():
            if name in own and weight.requires_grad:
                weight.add_(size * torch.randn(weight.shape, generator=random))

    return hit


@pytest.mark.parametrize(
    ("adapter", "layer", "size"),
    [(True, "1.mlp.down_proj.lora", 0.3), (False, "1.mlp.down_proj", 0.35), (False, "lm_head", 0.05)],
)
def test_no_step_is_lost_where_a_layer_is_hit_by_noise_that_raises_the_loss_by_a_little(
    adapter: bool, layer: str, size: float, base: Any, unharmed: Any, tmp_path: Path, tokenizer: Any
) -> None:
    callbacks = SelfHealingCallback({"snapshot_interval": 10}), WeightFault(noise_in(layer, size), 58)
    found = trained(tmp_path, tokenizer, base, adapter, *callbacks)
    [again] = [event for event in journal(tmp_path, "action") if event["action"] == "replay_steps"]
    assert again["happened"], again["why"]
    assert_same_weights(found, unharmed(adapter))


# ---- callbacks are not called again ----


class Weighted(Trainer):
    """Multiplies its loss by a number that somebody else sets."""

    weight: Any = 1.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        weight = self.weight(self.state) if callable(self.weight) else self.weight
        return super().compute_loss(*args, **kwargs) * weight


class Schedule(TrainerCallback):
    trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.set(state.global_step)

    def set(self, step: int) -> None: ...


class Rising(Schedule):
    def set(self, step: int) -> None:
        self.trainer.weight = 1 + 1e-5 * step


class Falling(Schedule):
    def set(self, step: int) -> None:
        self.trainer.weight = 1 - 0.02 * step


class Dropout(Schedule):
    def set(self, step: int) -> None:
        for layer in self.trainer.model.model.layers:
            layer.self_attn.attention_dropout = 0.01 * step


class FrozenRows(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model.lm_head.weight.grad is not None:
            model.lm_head.weight.grad[:200] = 0


def struck_by_nan(directory: Path, tokenizer: Any, schedule: TrainerCallback, **config: Any) -> Any:
    callbacks = [schedule, SelfHealingCallback({"snapshot_interval": 5, **config}), WeightFault(a_few_nans, 14)]
    trainer: Any = plain_trainer(
        directory,
        tokenizer,
        trainer_class=Weighted,
        callbacks=callbacks,
        max_steps=24,
        gradient_accumulation_steps=1,
    )
    schedule.trainer = trainer  # type: ignore[attr-defined]
    return trainer


@pytest.mark.parametrize("schedule", [Rising, Falling, Dropout, FrozenRows])
def test_steps_that_a_callback_has_a_part_in_are_lost_and_counted(
    schedule: type[TrainerCallback], tmp_path: Path, tokenizer: Any
) -> None:
    struck_by_nan(tmp_path, tokenizer, schedule()).train()
    [again] = [event for event in journal(tmp_path, "action") if event["action"] == "replay_steps"]
    assert not again["happened"]
    assert "something that callbacks set, which are not called again" in again["why"]
    [outcome] = journal(tmp_path, "outcome")
    # Steps 5 to 14: the newest trusted state is that of step 5.
    assert outcome["steps_lost"] == 10
    assert not any("steps_lost_unknown" in event["evidence"] for event in journal(tmp_path, "diagnosed"))


def test_a_loss_that_goes_by_the_epoch_is_the_same_when_steps_are_applied_again(
    tmp_path: Path, tokenizer: Any
) -> None:
    def by_epoch(state: Any) -> float:
        return 1 + 0.3 * float(state.epoch or 0)

    trainer = struck_by_nan(tmp_path, tokenizer, TrainerCallback())
    trainer.weight = by_epoch
    trainer.train()
    [again] = [event for event in journal(tmp_path, "action") if event["action"] == "replay_steps"]
    assert (again["replayed"], again["apart"]) == (9, 0.0)
