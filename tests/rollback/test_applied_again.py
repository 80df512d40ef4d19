"""Steps that come out otherwise when they are applied again: where the fault was in them, or is in the replay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WeightFault, assert_same_weights, journal, plain_trainer, sft_trainer, weights
from peft import LoraConfig
from transformers import set_seed

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
