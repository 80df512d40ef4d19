"""Trainers of a program that knows nothing of us, healed by `train()` of their class alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    OutputFault,
    RaisingForward,
    assert_same_weights,
    journal,
    lost_connection,
    sft_trainer,
    weights,
)
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import TrainOutput
from trl import SFTTrainer

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.tools.anywhere import entering, hook
from self_healing.tools.anywhere.entering import environment


plain_train = Trainer.train


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this process one that `self-healing run` has started, until the test is over."""

    def run(config: HealingConfig | None = None) -> None:
        monkeypatch.setattr(Trainer, "train", hook.healed(plain_train))
        monkeypatch.setenv(hook.VARIABLE, environment(config)[hook.VARIABLE])
        monkeypatch.delenv("SELF_HEALING_PRESET", raising=False)

    return run


AT_ONCE = HealingConfig(api_retry_base_delay=0.0)


def outcomes(output_dir: Path) -> list[str]:
    return [event["outcome"] for event in journal(output_dir, "outcome")]


def runs(output_dir: Path) -> int:
    return len({event["run"] for event in journal(output_dir, "run_started")})


# ---- healed, and otherwise the same ----


def test_a_step_that_is_not_finite_is_healed(tmp_path: Path, tokenizer: Any, run: Any) -> None:
    run()
    trainer = sft_trainer(tmp_path / "run", tokenizer, max_steps=3)
    fault = OutputFault(trainer.model, lambda forward: forward == 3)
    output = trainer.train()
    assert fault.fired == 1
    assert isinstance(output, TrainOutput)
    assert output.global_step == 3
    assert outcomes(tmp_path / "run") == ["resolved"]
    assert all(torch.isfinite(value).all() for value in trainer.model.state_dict().values())


def test_what_cannot_be_healed_is_raised_unchanged(tmp_path: Path, tokenizer: Any, run: Any) -> None:
    run()
    trainer = sft_trainer(tmp_path / "run", tokenizer, max_steps=3)
    error = KeyError("a mistake in the code")

    def mistake() -> Exception:
        return error

    RaisingForward(trainer.model, lambda forward: forward == 3, mistake)
    with pytest.raises(KeyError) as raised:
        trainer.train()
    assert raised.value is error


# ---- how it is called ----


def test_a_run_resumes_from_where_it_is_told(tmp_path: Path, tokenizer: Any, run: Any) -> None:
    plain = sft_trainer(tmp_path / "run", tokenizer, max_steps=4, save_strategy="steps", save_steps=2)
    plain.train()
    run()
    trainer = sft_trainer(tmp_path / "run", tokenizer, max_steps=6, save_strategy="steps", save_steps=2)
    first: list[int] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            first.append(state.global_step)

    trainer.add_callback(Watch())
    trainer.train(str(tmp_path / "run" / "checkpoint-4"))
    assert first == [4, 5]


def test_a_trial_of_a_hyperparameter_search_is_left_as_it_is(
    tmp_path: Path, tokenizer: Any, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is pruned raises, which is no failure."""
    run()
    trainer = sft_trainer(tmp_path / "run", tokenizer)
    entered = entering.way_in(trainer, plain_train, (), {"trial": {"learning_rate": 1e-3}})
    assert entered.func is plain_train  # type: ignore[attr-defined]
    assert "Trials of a hyperparameter search are not healed" in caplog.text


# ---- trainers of the program's own ----


class Reporting(SFTTrainer):
    """Does something before and after, once for each call of `train()`."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.calls: list[str] = [*getattr(self, "calls", ()), "before"]
        output = super().train(*args, **kwargs)
        self.calls.append("after")
        return output, "theirs"


def test_an_exception_is_healed_by_entering_again_and_what_a_subclass_does_around_train_is_done_once(
    tmp_path: Path, tokenizer: Any, run: Any
) -> None:
    plain = sft_trainer(tmp_path / "plain", tokenizer, max_steps=3)
    plain.train()
    run(AT_ONCE)
    trainer = sft_trainer(tmp_path / "run", tokenizer, max_steps=3, trainer_class=Reporting)
    fault = RaisingForward(trainer.model, lambda forward: forward == 3, lost_connection)
    output, added = trainer.train()
    assert fault.fired == 1
    assert (output.global_step, added) == (3, "theirs")
    assert trainer.calls == ["before", "after"]
    assert_same_weights(weights(trainer), weights(plain))


def test_a_wrapper_of_the_program_is_the_one_that_heals(tmp_path: Path, tokenizer: Any, run: Any) -> None:
    run(HealingConfig.conservative())
    trainer = sft_trainer(tmp_path / "run", tokenizer, max_steps=3, trainer_class=Reporting)
    fault = RaisingForward(trainer.model, lambda forward: forward == 3, lost_connection)
    wrapper = SelfHealingTrainer(trainer, AT_ONCE)
    wrapper.train()
    assert fault.fired == 1
    assert wrapper.config == AT_ONCE
    # Entered again as without us, from its outside.
    assert trainer.calls == ["before", "before", "after"]
    assert runs(tmp_path / "run") == 1


def test_a_callback_of_the_program_keeps_its_settings(
    tmp_path: Path, tokenizer: Any, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run(HealingConfig.conservative())
    callback = SelfHealingCallback(AT_ONCE)
    trainer = sft_trainer(tmp_path / "run", tokenizer, max_steps=3, callbacks=[callback])
    fault = RaisingForward(trainer.model, lambda forward: forward == 3, lost_connection)
    # With the callback alone, this would end the run.
    trainer.train()
    assert fault.fired == 1
    assert callback.config == AT_ONCE
    assert "Its settings are in force" in caplog.text


# ---- failures of ours, and mistakes ----


def test_a_trainer_that_cannot_be_wrapped_trains_plainly(
    tmp_path: Path, tokenizer: Any, run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run()

    def fail(*_: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(SelfHealingTrainer, "__init__", fail)
    assert sft_trainer(tmp_path / "run", tokenizer, max_steps=1).train().global_step == 1
    assert "training goes on without it" in caplog.text
    assert "RuntimeError: ours" in caplog.text


def test_a_preset_there_is_not_ends_the_run_before_its_first_step(
    tmp_path: Path, tokenizer: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set in the process itself: what `self-healing run` sees, it refuses."""
    run()
    monkeypatch.setenv("SELF_HEALING_PRESET", "timid")
    with pytest.raises(ValueError, match="`healing_preset` is 'timid'"):
        sft_trainer(tmp_path / "run", tokenizer, max_steps=1).train()
