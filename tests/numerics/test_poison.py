"""Rows that are non-finite by themselves: found by bisection, named, dropped, and the rest renormalised exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    POISON_WORD,
    TEXTS,
    OutputFault,
    PoisonToken,
    assert_same_weights,
    dpo_trainer,
    journal,
    kto_trainer,
    losses,
    quarantined,
    reward_trainer,
    sft_trainer,
    slowly,
    weights,
)
from datasets import IterableDataset
from transformers import TrainerCallback

from self_healing import SelfHealingCallback


POISONED = (5, 17, 40)


def poisoned_texts() -> list[str]:
    return [f"{text} {POISON_WORD}" if index in POISONED else text for index, text in enumerate(TEXTS)]


class PoisonedLoss:
    """The loss is NaN for a batch that holds a certain token, and the model's outputs are not."""

    def __init__(self, trainer: Any, token: int) -> None:
        self.fired = 0
        self._compute_loss, self._token = trainer.compute_loss, token
        trainer.compute_loss = self._spoiled

    def _spoiled(self, model: Any, inputs: Any, **kwargs: Any) -> torch.Tensor:
        bad = bool((inputs["input_ids"] == self._token).any())
        self.fired += bad
        loss: torch.Tensor = self._compute_loss(model, inputs, **kwargs)
        return loss * float("nan") if bad else loss


class Gradients(TrainerCallback):
    """Keeps the gradients handed to the optimizer, step by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        self.steps.append(
            {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
        )


@pytest.mark.heals("poison_rows", "callback")
def test_exactly_the_poison_rows_are_named_and_the_run_goes_on(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, texts=poisoned_texts(), max_steps=8, callbacks=[SelfHealingCallback()])
    fault = PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    trainer.train()

    assert fault.fired
    assert trainer.state.global_step == 8
    rows = quarantined(tmp_path)
    assert {row["dataset_index"] for row in rows} == set(POISONED)
    assert all(POISON_WORD in row["preview"] for row in rows)
    assert all(len(row["content_hash"]) == 64 for row in rows)
    assert all(row["segment"] is None and row["stream_ordinal"] is None and row["prompt"] is None for row in rows)
    assert all(event["steps_lost"] == 0 for event in journal(tmp_path, "outcome"))
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())
    assert all(torch.isfinite(torch.tensor(losses(trainer))))


@pytest.mark.parametrize(
    ("only_in_the_loss", "most_rows"),
    [pytest.param(False, 6, id="seen in a module's output"), pytest.param(True, 3 * 64, id="in the loss alone")],
)
def test_a_poison_row_is_found_for_little_more_than_computing_the_step_again(
    tmp_path: Path, tokenizer: Any, only_in_the_loss: bool, most_rows: int
) -> None:
    rows, computed = 64, list[int]()
    token = tokenizer.convert_tokens_to_ids(POISON_WORD)

    class Struck(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not fault.fired:
                computed.clear()

    poisoned = [f"{TEXTS[0]} {POISON_WORD}", *TEXTS * 3]
    arguments = {"texts": poisoned, "per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(), Struck()], max_steps=1, **arguments)
    trainer.train_dataset = trainer.train_dataset.select(range(rows))
    fault: Any = PoisonedLoss(trainer, token) if only_in_the_loss else PoisonToken(trainer.model, token)
    trainer.model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: computed.append(len(inputs[0])))
    trainer.train()

    assert len(quarantined(tmp_path)) == 1
    # Struck, again, and without the row; between these, what finds it.
    assert computed[:2] == [rows, rows]
    assert computed[-1] == rows - 1
    assert sum(computed[2:-1]) <= most_rows


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(lambda hidden: iter([hidden]), id="an iterator, which can be gone through once"),
        pytest.param(lambda hidden: [hidden.new_empty(8, 2, device="meta"), hidden], id="a tensor without numbers"),
    ],
)
def test_a_module_may_give_what_cannot_be_looked_at(tmp_path: Path, tokenizer: Any, given: Any) -> None:
    class Giving(torch.nn.Module):
        def __init__(self, block: torch.nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, hidden: torch.Tensor) -> Any:
            return given(self.block(hidden))

    class Taking(Giving):
        def forward(self, hidden: torch.Tensor) -> Any:
            return list(self.block(hidden))[-1]

    trainer = sft_trainer(tmp_path, tokenizer, texts=poisoned_texts(), max_steps=8, callbacks=[SelfHealingCallback()])
    layer = trainer.model.model.layers[0]
    layer.mlp = Taking(Giving(layer.mlp))
    PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    trainer.train()

    assert {row["dataset_index"] for row in quarantined(tmp_path)} == set(POISONED)
    assert not journal(tmp_path, "healing_off")


@pytest.mark.parametrize(
    ("computations", "spoiled"),
    [(9, slice(None)), (12, slice(None)), (2, [0]), (3, [0]), (4, [0]), (5, [0]), (9, [0])],
)
def test_rows_are_not_to_blame_for_a_fault_that_lasts_while_they_are_searched(
    tmp_path: Path, tokenizer: Any, computations: int, spoiled: Any
) -> None:
    def spoil(hidden: torch.Tensor) -> torch.Tensor:
        bad = torch.zeros(len(hidden), 1, 1, dtype=torch.bool)
        bad[spoiled] = True
        return hidden.masked_fill(bad, float("nan"))

    arguments = {"max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "dropout": 0.0}
    plain = sft_trainer(tmp_path / "plain", tokenizer, **arguments)
    plain.train()
    healed = sft_trainer(tmp_path / "healed", tokenizer, callbacks=[SelfHealingCallback()], **arguments)
    fault = OutputFault(healed.model, lambda number: 4 <= number < 4 + computations, spoil)
    healed.train()

    assert fault.fired == computations
    assert not quarantined(tmp_path / "healed")
    assert_same_weights(weights(healed), weights(plain))


def test_the_gradient_is_that_of_the_batch_without_the_poison_rows(tmp_path: Path, tokenizer: Any) -> None:
    token = tokenizer.convert_tokens_to_ids(POISON_WORD)
    arguments = {"texts": poisoned_texts(), "dropout": 0.0, "max_steps": 3, "gradient_accumulation_steps": 4}
    reference_gradients = Gradients()
    reference = sft_trainer(tmp_path / "reference", tokenizer, callbacks=[reference_gradients], **arguments)
    collate, dropped = reference.data_collator, []

    def collate_without(examples: list[Any]) -> dict[str, Any]:
        batch = collate(examples)
        keep = [row for row in range(len(examples)) if token not in batch["input_ids"][row]]
        dropped.extend(set(range(len(examples))) - set(keep))
        return {key: value[keep] for key, value in batch.items()}

    reference.data_collator = collate_without
    reference.train()

    gradients = Gradients()
    trainer = sft_trainer(tmp_path / "healed", tokenizer, callbacks=[SelfHealingCallback(), gradients], **arguments)
    fault = PoisonToken(trainer.model, token)
    trainer.train()

    assert fault.fired
    assert dropped
    assert len(gradients.steps) == len(reference_gradients.steps) == 3
    for actual, expected in zip(gradients.steps, reference_gradients.steps, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-7, msg=name)
    assert losses(trainer) == pytest.approx(losses(reference), rel=1e-5)


def test_packed_sequences_are_named_by_position_and_segment(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(
        tmp_path,
        tokenizer,
        texts=poisoned_texts(),
        packing=True,
        max_length=48,
        max_steps=3,
        gradient_accumulation_steps=1,
        callbacks=[SelfHealingCallback()],
    )
    token = tokenizer.convert_tokens_to_ids(POISON_WORD)
    _spoil_segments(trainer, token)
    trainer.train()
    rows = quarantined(tmp_path)
    assert rows
    for row in rows:
        example = trainer.train_dataset[row["dataset_index"]]
        start = sum(example["seq_lengths"][: row["segment"]])
        segment = example["input_ids"][start : start + example["seq_lengths"][row["segment"]]]
        assert token in segment


def _spoil_segments(trainer: Any, token: int) -> None:
    """Hidden states become NaN for the sequence that holds the token, as a real poison sequence would be."""
    seen: dict[str, torch.Tensor] = {}

    def see(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen["ids"], seen["positions"] = kwargs["input_ids"], kwargs["position_ids"]

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not torch.is_grad_enabled() or "ids" not in seen:
            return None
        segment = (seen["positions"] == 0).cumsum(dim=1)  # (1, T)
        bad = segment[seen["ids"] == token]
        spoiled = torch.isin(segment, bad)
        return output.masked_fill(spoiled[..., None], float("nan")) if bool(spoiled.any()) else None

    trainer.model.model.register_forward_pre_hook(see, with_kwargs=True)
    trainer.model.model.norm.register_forward_hook(spoil)


def test_a_stream_names_the_ordinal(tmp_path: Path, tokenizer: Any) -> None:
    texts = poisoned_texts()

    def stream() -> Iterator[dict[str, str]]:
        yield from ({"text": text} for text in texts)

    trainer = sft_trainer(
        tmp_path,
        tokenizer,
        dataset=IterableDataset.from_generator(stream),
        max_steps=6,
        callbacks=[SelfHealingCallback()],
    )
    fault = PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    trainer.train()
    assert fault.fired
    rows = quarantined(tmp_path)
    assert [row["stream_ordinal"] for row in rows] == list(POISONED)
    assert all(row["dataset_index"] is None for row in rows)


@pytest.mark.parametrize("build", [dpo_trainer, *slowly(kto_trainer, reward_trainer)])
def test_preference_rows_are_named_by_position(tmp_path: Path, tokenizer: Any, build: Any) -> None:
    trainer = build(tmp_path, tokenizer, max_steps=8, poisoned=POISONED, callbacks=[SelfHealingCallback()])
    token = tokenizer.convert_tokens_to_ids(POISON_WORD)
    expected = {
        index
        for index, row in enumerate(trainer.train_dataset)
        if any(token in value for key, value in row.items() if key.endswith("_ids") and not key.startswith("KL"))
    }
    assert expected == set(POISONED)
    fault = PoisonToken(trainer.model, token)
    trainer.train()
    assert fault.fired
    assert {row["dataset_index"] for row in quarantined(tmp_path)} == expected
    assert trainer.state.global_step == 8
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())


def test_a_batch_of_one_bad_row_is_told_from_a_broken_model_by_an_earlier_batch(
    tmp_path: Path, tokenizer: Any
) -> None:
    trainer = sft_trainer(
        tmp_path,
        tokenizer,
        texts=poisoned_texts(),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        max_steps=64,
        callbacks=[SelfHealingCallback()],
    )
    fault = PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    trainer.train()
    assert fault.fired
    assert {row["dataset_index"] for row in quarantined(tmp_path)} == set(POISONED)
    assert [event["steps_lost"] for event in journal(tmp_path, "outcome")] == [1, 1, 1]
    assert trainer.state.log_history[-1]["healing/skipped_steps"] == 3
