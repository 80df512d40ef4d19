"""A dry run leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    TEXTS,
    TRAINERS,
    RaisingForward,
    adapter_trainer,
    assert_same_weights,
    logged,
    plain_trainer,
    scaled_half_precision_trainer,
    sft_trainer,
    slowly,
    tiny_model,
    weights,
)
from transformers import TrainerCallback

from self_healing import SelfHealingTrainer


@pytest.mark.parametrize("name", ["SFTTrainer", "GRPOTrainer", *slowly("Trainer", "DPOTrainer")])
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
    assert report.data is not None
    assert {finding.kind for finding in report.data.findings} <= {"duplicates"}
    assert report.model is not None
    assert report.model.clean
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


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        pytest.param(
            sft_trainer, {"bf16": True, "neftune_noise_alpha": 5.0}, id="bf16 and NEFTune", marks=pytest.mark.slow
        ),
        pytest.param(scaled_half_precision_trainer, {}, id="fp16 with a scaler"),
        pytest.param(
            adapter_trainer, {"bf16": True, "gradient_checkpointing": True}, id="LoRA", marks=pytest.mark.slow
        ),
        pytest.param(sft_trainer, {"torch_compile": True}, id="torch.compile", marks=pytest.mark.slow),
    ],
)
def test_training_after_a_dry_run_is_prepared_as_without_one(
    tmp_path: Path, tokenizer: Any, build: Any, arguments: dict[str, Any]
) -> None:
    plain = build(tmp_path / "plain", tokenizer, max_steps=4, **arguments)
    plain.train()
    # Shapes that were compiled for one trainer would decide what is compiled for the next.
    torch._dynamo.reset()
    trainer = build(tmp_path / "healed", tokenizer, max_steps=4, **arguments)
    wrapper = SelfHealingTrainer(trainer)
    wrapper.dry_run(2)
    wrapper.train()
    assert_same_weights(weights(trainer), weights(plain))
    assert type(trainer.model_wrapped) is type(plain.model_wrapped)
    scaler = trainer.accelerator.scaler
    assert scaler is None or scaler.state_dict() == plain.accelerator.scaler.state_dict()


def test_a_model_that_cannot_be_put_back_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="sharded"):
        SelfHealingTrainer(trainer).dry_run(1)


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer)
    trainer.args.optim = "galore_adamw_layerwise"
    with pytest.raises(ValueError, match="cannot undo what galore_adamw_layerwise updates in the backward pass"):
        SelfHealingTrainer(trainer).dry_run(1)


def test_it_says_what_is_wrong_with_the_training_rows_and_the_weights(tmp_path: Path, tokenizer: Any) -> None:
    model = tiny_model(tokenizer)
    torch.nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
    trainer = sft_trainer(tmp_path, tokenizer, texts=[*TEXTS[:3], "", *TEXTS[3:8]], model=model)
    report = SelfHealingTrainer(trainer).dry_run(1)
    assert report.data is not None
    assert report.model is not None
    assert [(finding.kind, finding.examples) for finding in report.data.findings] == [("empty_rows", [3])]
    assert [finding.kind for finding in report.model.findings] == ["all_zero_tensors"]
    assert report.finite


def test_a_stream_is_looked_at_and_then_trained_on_from_its_beginning(tmp_path: Path, tokenizer: Any) -> None:
    def streaming_trainer(directory: str) -> Any:
        trainer = plain_trainer(tmp_path / directory, tokenizer)
        trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
        return trainer

    plain = streaming_trainer("plain")
    plain.train()
    healed = streaming_trainer("healed")
    report = SelfHealingTrainer(healed).dry_run(2)
    assert report.data is not None
    assert report.data.looked_at == len(TEXTS)
    healed.train()
    assert_same_weights(weights(healed), weights(plain))
