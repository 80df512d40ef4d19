"""A re-entry keeps its hands off what is the user's, and does all that the interrupted call still owed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    TEXTS,
    RaisingAt,
    RaisingForward,
    adapter_trainer,
    assert_same_weights,
    common_arguments,
    is_own,
    logged,
    lost_connection,
    quarantined,
    scaled_half_precision_trainer,
    sft_trainer,
    weights,
)
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from self_healing import SelfHealingCallback, SelfHealingTrainer


HELD_OUT = {"eval_dataset": Dataset.from_dict({"text": ["the model reads", "a row of text"] * 4})}
Arm = Callable[[Any], Any]


def in_forward(*forwards: int) -> Arm:
    return lambda trainer: RaisingForward(trainer.model, lambda forward: forward in forwards, lost_connection)


def in_event(event: str, step: int) -> Arm:
    def arm(trainer: Any) -> RaisingAt:
        callback = RaisingAt(event, step)
        trainer.add_callback(callback)
        return callback

    return arm


class StopAt(TrainerCallback):
    """Asks for the end of the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


PLATEAU = {
    "max_steps": 12,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "factor": 0.1, "threshold": 10.0, "mode": "min"},
    "metric_for_best_model": "eval_loss",
    "trainer_kwargs": HELD_OUT,
}
BEST = {
    "max_steps": 8,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "learning_rate": 1e-2,
    "trainer_kwargs": HELD_OUT,
}
BY_EPOCH = {
    "max_steps": -1,
    "num_train_epochs": 2,
    "logging_strategy": "epoch",
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "trainer_kwargs": HELD_OUT,
    "texts": TEXTS[:36],
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "arm"),
    [
        pytest.param(
            {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 1},
            in_forward(9),
            id="beside a regular checkpoint, under a save limit of one",
        ),
        pytest.param({"max_steps": 6, "save_only_model": True}, in_forward(6), marks=SLOW, id="save_only_model"),
        pytest.param({"max_steps": 8, "ignore_data_skip": True}, in_forward(6), marks=SLOW, id="ignore_data_skip"),
        pytest.param({"max_steps": 12, "callbacks": "stop"}, in_event("on_train_end", 5), id="stop asked for"),
        pytest.param(PLATEAU, in_event("on_evaluate", 4), marks=SLOW, id="schedule that follows the evaluation"),
        pytest.param(BEST, in_event("on_evaluate", 8), id="best model decided by the evaluation"),
        pytest.param(BY_EPOCH, in_event("on_epoch_end", 5), marks=SLOW, id="epoch end"),
        pytest.param(
            {"max_steps": -1, "num_train_epochs": 2, "train_sampling_strategy": "group_by_length"},
            in_forward(23),
            marks=SLOW,
            id="order drawn from the global generator, epoch 2",
        ),
    ],
)
def test_nothing_differs_from_the_run_without_the_fault(
    tmp_path: Path, tokenizer: Any, arguments: dict[str, Any], arm: Arm
) -> None:
    def build(name: str) -> Any:
        callbacks = [StopAt(5)] if arguments.get("callbacks") == "stop" else None
        return sft_trainer(tmp_path / name, tokenizer, **{**arguments, "callbacks": callbacks})

    clean = build("clean")
    expected = clean.train()
    trainer = build("healed")
    fault = arm(trainer)
    output = SelfHealingTrainer(trainer, sleep=lambda _: None).train()

    assert fault.fired == 1
    assert_same_weights(weights(trainer), weights(clean))
    assert logged(trainer) == logged(clean)
    assert output.training_loss == expected.training_loss
    assert output.global_step == expected.global_step
    mine, theirs = (sorted(p.name for p in (tmp_path / name).glob("*")) for name in ("healed", "clean"))
    assert [name for name in mine if not is_own(name) and name != "last-known-good"] == theirs


MIXED = {"bf16": True, "neftune_noise_alpha": 5.0, "gradient_checkpointing": True}
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (adapter_trainer, MIXED),
        pytest.param(scaled_half_precision_trainer, {}, marks=pytest.mark.slow),
        pytest.param(sft_trainer, COMPILED, marks=pytest.mark.slow),
    ],
    ids=["LoRA, bf16, NEFTune, checkpointing", "fp16 with a scaler", "torch.compile"],
)
def test_the_model_is_prepared_as_it_was_before_the_exception(
    tmp_path: Path, tokenizer: Any, build: Any, arguments: dict[str, Any]
) -> None:
    plain = build(tmp_path / "plain", tokenizer, max_steps=4, **arguments)
    plain.train()
    trainer = build(tmp_path / "healed", tokenizer, max_steps=4, **arguments)
    fault = RaisingAt("on_substep_end", 2)
    trainer.add_callback(fault)
    SelfHealingTrainer(trainer, sleep=lambda _: None).train()
    assert fault.fired == 1
    assert_same_weights(weights(trainer), weights(plain))
    assert number_of_hooks(trainer.model) == number_of_hooks(plain.model)
    assert type(trainer.model_wrapped) is type(plain.model_wrapped)


def number_of_hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_an_emergency_checkpoint_that_fails_takes_no_other_with_it(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=8, save_strategy="steps", save_steps=5)
    RaisingForward(trainer.model, lambda forward: forward == 11, lambda: ValueError("bug"))
    save = trainer._save_optimizer_and_scheduler

    def full_disk(output_dir: str) -> None:
        if Path(output_dir).parent.name == "emergency":
            raise OSError(28, "No space left on device")
        save(output_dir)

    trainer._save_optimizer_and_scheduler = full_disk
    with pytest.raises(ValueError, match="bug"):
        SelfHealingTrainer(trainer).train()
    assert (tmp_path / "checkpoint-5" / "trainer_state.json").is_file()
    assert (tmp_path / "checkpoint-5" / "optimizer.pt").is_file()


# ---- running statistics ----


class Normalised(torch.nn.Module):
    """A small regression network with batch norm and dropout; inputs above 90 make its output NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.last = torch.nn.Linear(16, 1)
        self.fired = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x)
        if self.training:
            bad = x[:, 0] > 90
            self.fired += bool(bad.any())
            hidden = hidden.masked_fill(bad[:, None], float("nan"))
        hidden = self.norm(hidden)
        hidden = torch.nn.functional.dropout(hidden, 0.1, self.training)
        return {"loss": ((self.last(hidden).squeeze(-1) - y) ** 2).mean()}


def regression(output_dir: Path, poison: tuple[int, ...] = (), **more: Any) -> Trainer:
    set_seed(0)
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    targets = inputs.tanh().sum(dim=1)
    for row in poison:
        inputs[row, 0] = 99.0
    return Trainer(
        model=Normalised(),
        args=TrainingArguments(**common_arguments(output_dir, remove_unused_columns=False)),
        train_dataset=[{"x": x, "y": y} for x, y in zip(inputs, targets, strict=True)],
        **more,
    )


def test_a_poison_row_before_batch_norm_is_a_poison_row(tmp_path: Path) -> None:
    trainer = regression(tmp_path, poison=(9,), callbacks=[SelfHealingCallback()])
    trainer.args.max_steps = 8
    trainer.train()
    assert trainer.model.fired
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())
    assert [row["dataset_index"] for row in quarantined(tmp_path)] == [9]


# ---- rows and generation ----


def test_a_finished_run_that_is_resumed_trains_nothing_and_says_so(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = {"max_steps": 5, "save_strategy": "steps", "save_steps": 5}
    finished = sft_trainer(tmp_path, tokenizer, **arguments)
    SelfHealingTrainer(finished).train()
    assert "nothing is trained" not in caplog.text
    trainer = sft_trainer(tmp_path, tokenizer, **arguments)
    output = SelfHealingTrainer(trainer).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))

    assert output.global_step == 5
    assert_same_weights(weights(trainer), weights(finished))
    assert caplog.text.count("Step 5: nothing is trained") == 1
