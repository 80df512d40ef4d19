"""Adaptive clipping inside a real trainer: what the optimizer is handed, and what it costs a run that needs none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GradientFault, assert_same_weights, sft_trainer, slowly, weights
from transformers import TrainerCallback

from self_healing import HealingConfig, SelfHealingCallback
from self_healing.healers.numerics.clipping import ZClip


RUN = {"max_steps": 42, "gradient_accumulation_steps": 1, "learning_rate": 1e-3}
CLIP = {"zclip_mode": "clip", "on_spike": "warn"}


class Handed(TrainerCallback):
    """The norm of the gradient that the optimizer is handed in each step; 0 for a step that was left out."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.norms: list[float] = []
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gradients = [p.grad for p in self.trainer.model.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0)


def pre_clip_norms(trainer: Any) -> list[float]:
    return [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


def limits(norms: list[float], ceiling: float, **arguments: Any) -> list[float]:
    """What each step may have at most, from the norms the Trainer logs (which are those before clipping)."""
    statistic = ZClip(**arguments)
    found = []
    for norm in norms:
        limit = statistic.decide(norm).limit
        found.append(min(limit or math.inf, ceiling))
    return found


@pytest.mark.parametrize("ceiling", [8.0, *slowly(1.0)], ids=["ceiling between", "ceiling below"])
def test_the_norm_handed_to_the_optimizer_never_exceeds_the_threshold(
    tmp_path: Path, tokenizer: Any, ceiling: float
) -> None:
    config = HealingConfig(**CLIP)
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(config)], max_grad_norm=ceiling, **RUN)
    GradientFault(trainer.model, lambda n: n in (28, 34, 40), value=30.0)
    handed = Handed(trainer)
    trainer.train()
    norms = pre_clip_norms(trainer)
    allowed = limits(norms, ceiling)
    clipped = [
        step for step, (norm, limit) in enumerate(zip(norms, allowed, strict=True)) if limit < min(norm, ceiling)
    ]
    assert {27, 33, 39} <= set(clipped) or ceiling == 1.0
    assert len(handed.norms) == len(norms) == 42
    for step, (norm, limit) in enumerate(zip(handed.norms, allowed, strict=True)):
        assert norm <= limit * (1 + 1e-5), step
    for step in clipped:
        assert handed.norms[step] == pytest.approx(allowed[step], rel=1e-4)


def test_observing_clips_nothing_and_says_what_it_would_clip(tmp_path: Path, tokenizer: Any) -> None:
    def run(name: str, callbacks: list[Any]) -> Any:
        trainer = sft_trainer(tmp_path / name, tokenizer, callbacks=callbacks, max_grad_norm=1e6, **RUN)
        GradientFault(trainer.model, lambda n: n == 40, value=30.0)
        trainer.train()
        return trainer

    plain = run("plain", [])
    observed = run("observed", [SelfHealingCallback(HealingConfig(on_spike="warn"))])
    assert_same_weights(weights(observed), weights(plain))
    told = [entry for entry in observed.state.log_history if "healing/zclip_clipped" in entry]
    would = {entry["step"]: entry["healing/zclip_would_clip"] for entry in told}
    assert sum(entry["healing/zclip_clipped"] for entry in told) == 0
    assert would[40] == 1
    assert sum(would.values()) < 10


def test_the_statistic_survives_a_resume_exactly(tmp_path: Path, tokenizer: Any) -> None:
    arguments = {**RUN, "save_strategy": "steps", "save_steps": 30, "max_grad_norm": 1e6}
    config = HealingConfig(zclip_mode="clip", zclip_z_threshold=0.5)
    whole = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(config)], **arguments)
    whole.train()
    resumed = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(config)], **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-30"))
    assert_same_weights(weights(resumed), weights(whole))
