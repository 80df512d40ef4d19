"""A run in which nothing goes wrong is the plain trainer's run, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import TEXTS, TRAINERS, assert_same_weights, journal, logged, sft_trainer, slowly, weights
from datasets import Dataset

from self_healing import SelfHealingCallback, SelfHealingTrainer


# The others are of their kinds.
EVERY_DAY = ("Trainer", "SFTTrainer", "DPOTrainer", "GRPOTrainer")


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> tuple[Any, Any]:
    plain = sft_trainer(tmp_path_factory.mktemp("plain"), tokenizer, max_steps=20)
    return plain, plain.train()


@pytest.mark.parametrize("wrapped", [False, True], ids=["callback", "wrapper"])
def test_weights_and_logs_are_those_of_the_plain_trainer(
    tmp_path: Path, tokenizer: Any, plain_run: tuple[Any, Any], wrapped: bool
) -> None:
    plain, expected_output = plain_run
    healed = sft_trainer(
        tmp_path / "healed", tokenizer, max_steps=20, callbacks=None if wrapped else [SelfHealingCallback()]
    )
    output = (SelfHealingTrainer(healed) if wrapped else healed).train()

    assert_same_weights(weights(healed), weights(plain))
    assert logged(healed) == logged(plain)
    assert output.training_loss == expected_output.training_loss
    assert {event["kind"] for event in journal(tmp_path / "healed")} == {"run_started", "snapshots", "run_ended"}


@pytest.mark.parametrize("name", [*EVERY_DAY, *slowly(*(each for each in TRAINERS if each not in EVERY_DAY))])
def test_attached_to_any_trainer_it_changes_nothing(tmp_path: Path, tokenizer: Any, name: str) -> None:
    plain = TRAINERS[name](tmp_path / "plain", tokenizer, max_steps=3)
    plain.train()
    healed = TRAINERS[name](tmp_path / "healed", tokenizer, max_steps=3, callbacks=[SelfHealingCallback()])
    healed.train()

    assert_same_weights(weights(healed), weights(plain))
    assert logged(healed) == logged(plain)
    assert not journal(tmp_path / "healed", "action")


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 1},
        {"max_grad_norm": 0.01},
        {"dataloader_num_workers": 2},
        {"packing": True, "max_length": 32},
        {"padding_free": True, "max_length": None},
        {"logging_steps": 500},
        {"num_train_epochs": 2, "max_steps": -1, "gradient_accumulation_steps": 3},
        {"eval_strategy": "steps", "eval_steps": 2},
        *slowly(
            {"max_grad_norm": 0.0},
            {"logging_nan_inf_filter": False},
            {"optim": "adafactor"},
            {"neftune_noise_alpha": 5.0},
            {"lr_scheduler_type": "cosine", "warmup_steps": 2},
        ),
    ],
    ids=lambda arguments: ",".join(f"{key}={value}" for key, value in arguments.items()),
)
def test_settings_a_user_may_choose_change_nothing(tmp_path: Path, tokenizer: Any, arguments: dict[str, Any]) -> None:
    def build(name: str, **more: Any) -> Any:
        evaluation = {"eval_dataset": Dataset.from_dict({"text": TEXTS[:8]})} if "eval_strategy" in arguments else {}
        return sft_trainer(tmp_path / name, tokenizer, trainer_kwargs=evaluation, **more, **arguments)

    plain = build("plain")
    plain.train()
    healed = build("healed", callbacks=[SelfHealingCallback()])
    healed.train()
    assert_same_weights(weights(healed), weights(plain))
    assert logged(healed) == logged(plain)


def test_the_trainer_is_given_back_as_it_was(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer)
    before, accelerator_before = set(vars(trainer)), set(vars(trainer.accelerator))
    SelfHealingTrainer(trainer).train()
    wrapped = {"get_batch_samples", "training_step", "log", "_prepare_inputs", "_self_healing_run"}
    assert not wrapped & (set(vars(trainer)) - before)
    assert "clip_grad_norm_" not in set(vars(trainer.accelerator)) - accelerator_before
    sampler = trainer.callback_handler.train_dataloader.batch_sampler
    assert type(sampler).__qualname__ == type(sampler).__name__
    assert not trainer.optimizer.optimizer._optimizer_step_pre_hooks


def test_a_second_train_starts_clean(tmp_path: Path, tokenizer: Any) -> None:
    plain = sft_trainer(tmp_path / "plain", tokenizer)
    plain.train()
    plain.train()
    healed = sft_trainer(tmp_path / "healed", tokenizer)
    wrapper = SelfHealingTrainer(healed)
    wrapper.train()
    wrapper.train()
    assert_same_weights(weights(healed), weights(plain))
    assert len({event["run"] for event in journal(tmp_path / "healed")}) == 2
    assert wrapper.get_report().healthy
