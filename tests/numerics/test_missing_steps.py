"""Which steps are in the weights at the end of a run, and that one most of whose steps are not has failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import OutputFault, journal, sft_trainer, slowly
from transformers import TrainerCallback

from self_healing import SelfHealingCallback, SelfHealingTrainer, UnrecoverableTrainingError


def always(forward: int) -> bool:
    return True


class Stopping(TrainerCallback):
    """Ends the run long before its last step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


@pytest.mark.parametrize("wrapped", [True, *slowly(False)], ids=["wrapper", "callback alone"])
def test_a_run_most_of_whose_steps_do_not_count_has_failed_however_short(
    tmp_path: Path, tokenizer: Any, wrapped: bool
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], max_steps=3)
    OutputFault(trainer.model, lambda _: trainer.state.global_step > 0)
    with pytest.raises(UnrecoverableTrainingError, match="only 1 of its 3 steps are in the weights") as raised:
        (SelfHealingTrainer(trainer) if wrapped else trainer).train()
    assert raised.value.failure == "not_trained"
    assert (tmp_path / "postmortem.json").is_file()
    # The trainer is its plain self again.
    assert "training_step" not in vars(trainer)


def test_a_hopeless_learning_rate_ends_a_short_run_with_an_error(tmp_path: Path, tokenizer: Any) -> None:
    arguments = {"max_steps": 24, "gradient_accumulation_steps": 1, "learning_rate": 1e9}
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], **arguments)
    with pytest.raises(UnrecoverableTrainingError):
        trainer.train()
    cuts = [event["scale"] for event in journal(tmp_path, "action") if event["action"] == "reduce_learning_rate"]
    # Each failure lies in the hold of the cut before it, short as that is.
    assert cuts == [0.5, 0.125, 0.5**7][: len(cuts)]
    assert len(cuts) >= 2


def test_a_run_half_of_whose_steps_count_is_warned_about_and_returns(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], max_steps=4)
    OutputFault(trainer.model, lambda _: trainer.state.global_step in (1, 3))
    trainer.train()
    assert "2 of 4 steps are not in the weights" in caplog.text


def test_a_run_that_is_stopped_early_has_not_failed(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(), Stopping()], max_steps=50)
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_resume_none_of_whose_steps_count_has_failed(tmp_path: Path, tokenizer: Any) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 4}
    sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], max_steps=4, **arguments).train()
    resumed = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], max_steps=5, **arguments)
    OutputFault(resumed.model, always)
    with pytest.raises(UnrecoverableTrainingError, match=r"4 of its 5 steps .* none of the 1 since step 4 among them"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
