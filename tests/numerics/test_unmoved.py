"""Weights that no step moves, though there are gradients and a learning rate, are reported once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import journal, plain_trainer, sft_trainer, tiny_model
from transformers import TrainerCallback

from self_healing import SelfHealingCallback


class Idle(torch.optim.AdamW):
    """An optimizer whose step is never taken, and which says nothing of it."""

    def step(self, closure: Any = None) -> None:
        pass


class Clears(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer.zero_grad()


class PutsBack(TrainerCallback):
    """Copies the weights it began with over those that were trained, after each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for weight, first in zip(model.parameters(), self.first, strict=True):
                weight.copy_(first)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.first = [weight.detach().clone() for weight in model.parameters()]


def idle(directory: Path, tokenizer: Any) -> Any:
    model = tiny_model(tokenizer)
    optimizer = Idle(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return plain_trainer(
        directory, tokenizer, model=model, trainer_kwargs={"optimizers": (optimizer, schedule)}, **LONG
    )


def rounded_away(directory: Path, tokenizer: Any) -> Any:
    return sft_trainer(directory, tokenizer, model=tiny_model(tokenizer).bfloat16(), learning_rate=1e-12, **LONG)


LONG: dict[str, Any] = {"max_steps": 33, "gradient_accumulation_steps": 1}
STILL: dict[str, Callable[[Path, Any], Any]] = {
    "idle": idle,
    "rounded away": rounded_away,
    "cleared": lambda directory, tokenizer: sft_trainer(directory, tokenizer, callbacks=[Clears()], **LONG),
    "put back": lambda directory, tokenizer: sft_trainer(directory, tokenizer, callbacks=[PutsBack()], **LONG),
}


@pytest.mark.parametrize("kind", STILL)
def test_weights_that_no_step_moves_are_reported_once(kind: str, tmp_path: Path, tokenizer: Any) -> None:
    trainer = STILL[kind](tmp_path, tokenizer)
    trainer.add_callback(SelfHealingCallback())
    trainer.train()
    assert trainer.state.global_step == LONG["max_steps"]
    [found] = journal(tmp_path, "detected")
    assert (found["step"], found["symptom"]) == (20, "weights_unmoved")
    assert [event["outcome"] for event in journal(tmp_path, "outcome")] == ["reported"]


MOVING: dict[str, Callable[[Path, Any], Any]] = {
    "lora": lambda directory, tokenizer: sft_trainer(directory, tokenizer, **LONG, trainer_kwargs=lora()),
    "rising rate": lambda directory, tokenizer: sft_trainer(
        directory, tokenizer, model=tiny_model(tokenizer).bfloat16(), learning_rate=1e-10, warmup_steps=33, **LONG
    ),
    "no rate": lambda directory, tokenizer: sft_trainer(directory, tokenizer, learning_rate=0.0, **LONG),
}


def lora() -> dict[str, Any]:
    return {"peft_config": pytest.importorskip("peft").LoraConfig(r=4, target_modules="all-linear")}


@pytest.mark.parametrize("kind", MOVING)
def test_nothing_is_said_of_weights_that_move_or_have_no_reason_to(kind: str, tmp_path: Path, tokenizer: Any) -> None:
    trainer = MOVING[kind](tmp_path, tokenizer)
    trainer.add_callback(SelfHealingCallback())
    trainer.train()
    assert "weights_unmoved" not in [event["symptom"] for event in journal(tmp_path, "detected")]
