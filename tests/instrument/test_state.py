"""What the callback remembers survives checkpoint and resume."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    OutputFault,
    RaisingForward,
    assert_same_weights,
    journal,
    logged,
    losses,
    plain_trainer,
    sft_trainer,
    tiny_model,
    weights,
)
from transformers import Trainer, TrainerCallback

from self_healing import (
    HealingConfig,
    SelfHealingCallback,
    SelfHealingTrainer,
    UnrecoverableTrainingError,
)


def live_callback(trainer: Any) -> SelfHealingCallback:
    (callback,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, SelfHealingCallback)]
    return callback


@pytest.mark.parametrize(
    ("wrapped", "restore"),
    [pytest.param(False, False, marks=pytest.mark.slow), (True, True)],
    ids=["callback", "wrapper, rebuilt"],
)
def test_skips_before_a_resume_count_after_it(tmp_path: Path, tokenizer: Any, restore: bool, wrapped: bool) -> None:
    # Without an attempt to go back, patience is the end.
    config = HealingConfig(nan_patience=3, max_recovery_attempts=0)
    arguments = {"max_steps": 12, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 4}

    def build() -> Any:
        return sft_trainer(
            tmp_path,
            tokenizer,
            callbacks=[SelfHealingCallback(config)],
            restore_callback_states_from_checkpoint=restore,
            **arguments,
        )

    first = build()
    OutputFault(first.model, strike=lambda _: first.state.global_step in (2, 3))
    raised = RaisingForward(first.model, lambda _: first.state.global_step == 5, lambda: ValueError("the end"))
    with pytest.raises(ValueError, match="the end"):
        first.train()
    assert raised.fired
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["SelfHealingCallback"]["args"]["config"]["nan_patience"] == 3

    second = build()
    given = live_callback(second)
    fault = OutputFault(second.model, strike=lambda _: second.state.global_step == 4)
    with pytest.raises(UnrecoverableTrainingError, match="3 steps in a row"):
        (SelfHealingTrainer(second) if wrapped else second).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-4")
        )
    assert fault.fired
    assert (live_callback(second) is given) is not restore


def test_the_wrapper_finds_the_live_callback_after_a_reentry(tmp_path: Path, tokenizer: Any) -> None:
    arguments = {"max_steps": 8, "restore_callback_states_from_checkpoint": True}
    clean = sft_trainer(tmp_path / "clean", tokenizer, **arguments)
    clean.train()
    trainer = sft_trainer(tmp_path / "healed", tokenizer, **arguments)
    wrapper = SelfHealingTrainer(trainer, HealingConfig(nan_patience=5), sleep=lambda _: None)
    first = live_callback(trainer)
    connection = RaisingForward(trainer.model, lambda forward: forward in (5, 9), lambda: ConnectionError("gone"))
    nan = OutputFault(trainer.model, strike=lambda forward: forward == 13)
    wrapper.train()
    assert (connection.fired, nan.fired) == (2, 1)
    assert live_callback(trainer) is not first
    assert live_callback(trainer).config.nan_patience == 5
    assert_same_weights(weights(trainer), weights(clean))
    assert logged(trainer) == logged(clean)
    assert [incident["failure"] for incident in wrapper.get_report().incidents] == [
        "network",
        "network",
        "nonfinite_transient",
    ]


def test_a_run_resumed_in_a_new_process_goes_on_logging_where_the_old_one_stopped(
    tmp_path: Path, tokenizer: Any
) -> None:
    arguments = {"max_steps": 12, "logging_steps": 5}
    clean = sft_trainer(tmp_path / "clean", tokenizer, **arguments)
    expected = clean.train()
    first = sft_trainer(tmp_path / "run", tokenizer, **arguments)
    RaisingForward(first.model, lambda _: first.state.global_step == 7, lambda: ValueError("the end"))
    with pytest.raises(ValueError, match="the end"):
        SelfHealingTrainer(first).train()
    second = sft_trainer(tmp_path / "run", tokenizer, **arguments)
    output = SelfHealingTrainer(second).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-7"))
    assert_same_weights(weights(second), weights(clean))
    assert logged(second) == logged(clean)
    assert output.training_loss == expected.training_loss


def test_added_to_a_run_that_began_without_it(tmp_path: Path, tokenizer: Any) -> None:
    arguments = {"max_steps": 8, "save_strategy": "steps", "save_steps": 3}
    plain = sft_trainer(tmp_path, tokenizer, **arguments)
    plain.train()
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], **arguments)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same_weights(weights(trainer), weights(plain))
    assert losses(trainer) == losses(plain)
    assert journal(tmp_path, "run_started")[-1]["resumed_from"] == str(tmp_path / "checkpoint-3")


class KeepsLogits(Trainer):
    """Keeps the logits of a forward until the next one begins."""

    kept, outlived = None, 0
    last = staticmethod(lambda: None)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.kept = None
        self.outlived += self.last() is not None
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self.kept = outputs.logits.detach()
        self.last = weakref.ref(self.kept)
        return (loss, outputs) if return_outputs else loss


def test_nothing_that_a_trainer_gives_back_is_kept_alive(tmp_path: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(
        tmp_path, tokenizer, trainer_class=KeepsLogits, callbacks=[SelfHealingCallback()], max_steps=6
    )
    trainer.train()
    assert trainer.last() is not None
    assert trainer.outlived == 0


class Outlived(TrainerCallback):
    """Notes what of the run before is still there when the next one begins."""

    def __init__(self) -> None:
        self.before: list[weakref.ref[Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gc.collect()
        self.alive = [type(each()).__name__ for each in self.before if each() is not None]

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        self.before = [weakref.ref(model), weakref.ref(optimizer.optimizer)]


@pytest.mark.parametrize("wrapped", [False, True])
def test_model_and_optimizer_of_a_run_that_is_over_are_not_kept(tmp_path: Path, tokenizer: Any, wrapped: bool) -> None:
    outlived = Outlived()
    trainer = plain_trainer(tmp_path, tokenizer, callbacks=[outlived, SelfHealingCallback()], max_steps=3)
    trainer.model_init = lambda: tiny_model(tokenizer)
    for _ in range(2):
        (SelfHealingTrainer(trainer) if wrapped else trainer).train()
    assert len(outlived.before) == 2
    assert outlived.alive == []
