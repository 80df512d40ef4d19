"""Numbers that are not finite before any update has changed the weights: named for what they are, and the run ends."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    POISON_WORD,
    TEXTS,
    TRAINERS,
    OutputFault,
    PoisonToken,
    encoded_rows,
    journal,
    plain_trainer,
    quarantined,
    sft_trainer,
    tiny_config,
)
from transformers import LlamaForCausalLM

from self_healing import (
    SelfHealingCallback,
    UnrecoverableTrainingError,
)
from self_healing.report.reading import read_run


def ending(trainer: Any, output_dir: Path) -> dict[str, Any]:
    """The postmortem of a run that ends by itself."""
    with pytest.raises(UnrecoverableTrainingError):
        trainer.train()
    return json.loads((output_dir / "postmortem.json").read_text())


def test_nan_in_the_very_first_forward_ends_the_run_at_once(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()])
    OutputFault(trainer.model, strike=lambda _: True)
    told = ending(trainer, tmp_path)
    assert told["step"] == 0
    assert told["failure"] == "nonfinite_from_the_start"
    assert "neither the learning rate" in told["verdict"]
    assert "model.norm (LlamaRMSNorm" in told["verdict"]
    assert len(told["chain"]) == 1


class WithFeature(LlamaForCausalLM):
    """Adds a column of numbers to its loss."""

    def forward(self, input_ids: Any = None, labels: Any = None, feature: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        output.loss = output.loss + feature.mean()
        return output


def nan_in_a_column(output_dir: Path, tokenizer: Any) -> Any:
    rows = encoded_rows(tokenizer).map(lambda row: {"feature": math.nan})
    model, data = WithFeature(tiny_config(tokenizer)), {"train_dataset": rows}
    return plain_trainer(output_dir, tokenizer, model=model, trainer_kwargs=data, callbacks=[SelfHealingCallback()])


def nan_in_a_module(output_dir: Path, tokenizer: Any) -> Any:
    trainer = plain_trainer(output_dir, tokenizer, callbacks=[SelfHealingCallback()])
    OutputFault(trainer.model, strike=lambda _: True)
    return trainer


def nan_in_the_loss(output_dir: Path, tokenizer: Any) -> Any:
    trainer = plain_trainer(output_dir, tokenizer, callbacks=[SelfHealingCallback()])
    trainer.compute_loss_func = lambda outputs, labels, **_: outputs.logits.float().mean() * math.nan
    return trainer


@pytest.mark.parametrize(
    ("build", "cause", "said", "not_said"),
    [
        (nan_in_a_column, "data", ("(feature)", "leave the column out"), ("fp16", "log(0)", "masked")),
        (nan_in_a_module, "model", ("model.norm", "fp16"), ("column", "masked")),
        (nan_in_the_loss, "loss or labels", ("all masked", "log(0) or"), ("fp16", "column")),
    ],
)
def test_what_to_do_is_about_what_was_found(
    tmp_path: Path, tokenizer: Any, build: Any, cause: str, said: tuple[str, ...], not_said: tuple[str, ...]
) -> None:
    told = ending(build(tmp_path, tokenizer), tmp_path)
    (incident,) = told["chain"]
    assert (incident["cause"], incident["steps_lost"]) == (cause, 0)
    advised = " ".join(f"{step.text} {step.why}" for step in read_run(tmp_path).next_steps)
    for text in (f"{told['verdict']} {told['what_to_do']}", advised):
        assert [each for each in said if each not in text] == []
        assert [each for each in not_said if each in text] == []


def test_a_rate_that_has_changed_nothing_is_not_blamed(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], learning_rate=0.0)
    OutputFault(trainer.model, strike=lambda _: trainer.state.global_step >= 1)
    told = ending(trainer, tmp_path)
    assert told["failure"] == "nonfinite_from_the_start"
    assert not journal(tmp_path, "noticed")
    # An earlier batch was finite with the same weights: it might have passed.
    assert [incident["step"] for incident in told["chain"]] == [1, 2, 3]


def test_rows_that_are_bad_by_themselves_are_left_out_of_the_first_step(tmp_path: Path, tokenizer: Any) -> None:
    texts = [f"{POISON_WORD} {text}" if index < 4 else text for index, text in enumerate(TEXTS)]
    trainer = sft_trainer(
        tmp_path,
        tokenizer,
        texts=texts,
        train_sampling_strategy="sequential",
        gradient_accumulation_steps=1,
        callbacks=[SelfHealingCallback()],
    )
    PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    trainer.train()
    assert {row["dataset_index"] for row in quarantined(tmp_path)} == {0, 1, 2, 3}
    assert trainer.state.global_step == 6


def test_what_is_finite_without_mixed_precision_is_blamed_on_it(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, bf16=True, callbacks=[SelfHealingCallback()])
    narrow = "cpu"
    OutputFault(
        trainer.model,
        strike=lambda _: True,
        change=lambda hidden: hidden * torch.nan if torch.is_autocast_enabled(narrow) else hidden,
    )
    told = ending(trainer, tmp_path)
    assert told["chain"][0]["cause"] == "precision"
    assert "without mixed precision the same step is finite" in told["verdict"]


def test_a_policy_that_cannot_even_generate_is_not_blamed_on_the_rate(tmp_path: Path, tokenizer: Any) -> None:
    trainer = TRAINERS["GRPOTrainer"](tmp_path, tokenizer, callbacks=[SelfHealingCallback()])
    trainer.model.model.norm.register_forward_hook(lambda module, inputs, output: output * torch.nan)
    told = ending(trainer, tmp_path)
    assert told["failure"] == "nonfinite_from_the_start"
    assert told["chain"][-1]["evidence"]["first_nonfinite_names"] == ["model.norm"]
