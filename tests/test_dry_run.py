"""A dry run leaves no trace."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TRAINERS, RaisingForward, assert_same_weights, logged, sft_trainer, weights
from transformers import TrainerCallback

from self_healing import SelfHealingTrainer


@pytest.mark.parametrize("name", TRAINERS)
def test_training_after_a_dry_run_is_training_without_one(tmp_path: Path, tokenizer: Any, name: str) -> None:
    plain = TRAINERS[name](tmp_path / "plain", tokenizer, max_steps=4)
    plain.train()
    trainer = TRAINERS[name](tmp_path / "healed", tokenizer, max_steps=4)
    wrapper = SelfHealingTrainer(trainer)
    report = wrapper.dry_run(2)
    wrapper.train()
    assert report.steps == 2
    assert len(report.losses) == 2
    assert report.finite
    assert report.seconds_per_step > 0
    assert_same_weights(weights(trainer), weights(plain))
    assert logged(trainer) == logged(plain)


def test_it_writes_no_file_and_tells_no_callback(tmp_path: Path, tokenizer: Any) -> None:
    told: list[str] = []

    class Listener(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            told.append("step")

    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[Listener()], save_strategy="steps", save_steps=1)
    SelfHealingTrainer(trainer).dry_run()
    assert not told
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_an_optimizer_of_the_users_keeps_its_state(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler.step()
    trainer.model.zero_grad()
    trainer.optimizer, trainer.lr_scheduler = optimizer, scheduler
    before = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict(), weights(trainer)))
    SelfHealingTrainer(trainer).dry_run(3)
    assert trainer.optimizer is optimizer
    state = optimizer.state_dict()
    for index, moments in before[0]["state"].items():
        for key, value in moments.items():
            assert torch.equal(state["state"][index][key], value)
    assert state["param_groups"] == before[0]["param_groups"]
    assert scheduler.state_dict() == before[1]
    assert_same_weights(weights(trainer), before[2])


def test_an_exception_in_it_leaves_no_trace_either(tmp_path: Path, tokenizer: Any) -> None:
    plain = sft_trainer(tmp_path / "plain", tokenizer)
    plain.train()
    trainer = sft_trainer(tmp_path / "healed", tokenizer)
    fault = RaisingForward(trainer.model, lambda forward: forward == 4, lambda: ValueError("bug"))
    with pytest.raises(ValueError, match="bug"):
        SelfHealingTrainer(trainer).dry_run(3)
    fault.handle.remove()
    SelfHealingTrainer(trainer).train()
    assert_same_weights(weights(trainer), weights(plain))


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_a_number_of_steps_that_makes_no_sense_is_refused(tmp_path: Path, tokenizer: Any, steps: Any) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SelfHealingTrainer(sft_trainer(tmp_path, tokenizer)).dry_run(steps)
