"""Weights that are not finite are noticed before rows are generated with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import grpo_trainer, journal, prompts
from transformers import TrainerCallback

from self_healing import HealingConfig, SelfHealingCallback
from self_healing.hf.view import TrainerView


AFTER, STEPS = 3, 6


class TurnNan(TrainerCallback):
    """One weight is NaN after a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == AFTER:
            model.lm_head.weight.data[0, 0] = torch.nan


def trainer_of(
    tmp_path: Path, tokenizer: Any, *callbacks: TrainerCallback, arguments: dict[str, Any] | None = None, **config: Any
) -> tuple[Any, list[bool]]:
    """A trainer, and whether the weights were finite each time that it generated with them."""
    close = {"snapshot_interval": 1, "snapshot_verify_steps": 1}
    healing = SelfHealingCallback(HealingConfig(**{**close, **config}))
    arguments = {"max_steps": STEPS, "gradient_accumulation_steps": 1, **(arguments or {})}
    trainer = grpo_trainer(tmp_path, tokenizer, callbacks=[healing, *callbacks], **arguments)
    original, finite = trainer.model.generate, list[bool]()

    def generate(*args: Any, **kwargs: Any) -> Any:
        finite.append(all(bool(torch.isfinite(each).all()) for each in trainer.model.parameters()))
        return original(*args, **kwargs)

    trainer.model.generate = generate
    return trainer, finite


def test_nothing_is_generated_with_weights_that_are_not_finite(tmp_path: Path, tokenizer: Any) -> None:
    trainer, finite = trainer_of(tmp_path, tokenizer, TurnNan())
    trainer.train()
    assert trainer.state.global_step == STEPS
    # Not in the step after it, which is left out.
    assert finite == [True] * (STEPS - 1)
    outcomes = [(event["failure"], event["outcome"]) for event in journal(tmp_path, "outcome")]
    assert outcomes == [("corrupted_state", "resolved")]


def test_nor_is_anything_for_an_evaluation(tmp_path: Path, tokenizer: Any) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": AFTER, "per_device_eval_batch_size": 4}
    evaluated |= {"trainer_kwargs": {"eval_dataset": prompts().take(4)}}
    trainer, finite = trainer_of(tmp_path, tokenizer, TurnNan(), arguments=evaluated)
    trainer.train()
    assert all(finite)
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [AFTER, STEPS]
    outcomes = [(event["failure"], event["outcome"]) for event in journal(tmp_path, "outcome")]
    assert outcomes == [("corrupted_state", "resolved")]


def test_where_steps_are_not_healed_rows_are_generated_all_the_same(tmp_path: Path, tokenizer: Any) -> None:
    trainer, finite = trainer_of(tmp_path, tokenizer, TurnNan(), on_nonfinite="warn")
    with pytest.raises(RuntimeError, match="probability tensor"):
        trainer.train()
    assert finite == [True] * AFTER + [False]


def test_a_search_that_fails_does_not_end_the_run(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(view: TrainerView) -> list[str]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(TrainerView, "nonfinite_weights", fail)
    trainer, finite = trainer_of(tmp_path, tokenizer)
    trainer.train()
    assert finite == [True] * STEPS
    assert "has switched itself off" in caplog.text
