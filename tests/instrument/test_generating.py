"""Weights that are not finite are noticed before rows are generated with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OutputFault, WeightFault, grpo_trainer, journal, prompts
from transformers import TrainerCallback

from self_healing import HealingConfig, SelfHealingCallback
from self_healing.checkpoints.marker import CHECKSUMS
from self_healing.system.files import GENERATED_FILE, MARKER_FILE


AFTER, STEPS = 3, 6


def one_nan(model: Any) -> None:
    model.lm_head.weight[0, 0] = torch.nan


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
    trainer, finite = trainer_of(tmp_path, tokenizer, WeightFault(one_nan, AFTER))
    trainer.train()
    assert trainer.state.global_step == STEPS
    # Not in the step after it, which is left out.
    assert finite == [True] * (STEPS - 1)
    outcomes = [(event["failure"], event["outcome"]) for event in journal(tmp_path, "outcome")]
    assert outcomes == [("corrupted_state", "resolved")]


def test_nor_is_anything_for_an_evaluation(tmp_path: Path, tokenizer: Any) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": AFTER, "per_device_eval_batch_size": 4}
    evaluated |= {"trainer_kwargs": {"eval_dataset": prompts().take(4)}}
    trainer, finite = trainer_of(tmp_path, tokenizer, WeightFault(one_nan, AFTER), arguments=evaluated)
    trainer.train()
    assert all(finite)
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [AFTER, STEPS]
    outcomes = [(event["failure"], event["outcome"]) for event in journal(tmp_path, "outcome")]
    assert outcomes == [("corrupted_state", "resolved")]


def test_rows_of_a_cycle_that_cannot_be_read_are_named_and_generated_anew(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    saving = {"steps_per_generation": 2, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer_of(tmp_path, tokenizer, arguments=saving)[0].train()
    rows = tmp_path / "checkpoint-1" / GENERATED_FILE
    rows.write_bytes(bytes(rows.stat().st_size))
    # As of a process that was killed before it knew the checksums, which do not let it be resumed from.
    marker = json.loads((rows.parent / MARKER_FILE).read_text())
    (rows.parent / MARKER_FILE).write_text(json.dumps({**marker, CHECKSUMS: {}}))
    resumed, finite = trainer_of(tmp_path, tokenizer, arguments=saving)
    resumed.train(resume_from_checkpoint=str(rows.parent))
    assert (resumed.state.global_step, len(finite)) == (2, 1)
    assert f"{rows} cannot be read" in caplog.text


def test_tokens_that_are_generated_once_more_are_not_counted_once_more(tmp_path: Path, tokenizer: Any) -> None:
    plain = grpo_trainer(tmp_path / "plain", tokenizer, max_steps=4)
    plain.train()
    trainer = grpo_trainer(tmp_path / "healed", tokenizer, callbacks=[SelfHealingCallback()], max_steps=4)
    OutputFault(trainer.model, lambda forward: 3 <= forward < 14)
    trainer.train()
    assert [event["symptom"] for event in journal(tmp_path / "healed", "detected")] == ["nonfinite_loss"]
    assert trainer.state.num_input_tokens_seen == plain.state.num_input_tokens_seen
