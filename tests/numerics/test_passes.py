"""Poison rows where a `training_step` computes its micro-batch more than once: left out in every pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import POISON_WORD, TEXTS, PoisonToken, journal, losses, quarantined, sft_trainer
from trl import SFTTrainer

from self_healing import SelfHealingCallback


POISONED = (5, 17, 40)


class Adversarial(SFTTrainer):
    """Computes the same micro-batch twice, the second time with weights that are moved and put back."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, dict(inputs), *args, **kwargs)
        weights = model.get_input_embeddings().weight
        with torch.no_grad():
            weights.add_(0.01)
        super().training_step(model, dict(inputs), *args, **kwargs)
        with torch.no_grad():
            weights.sub_(0.01)
        return loss


class Consistent(SFTTrainer):
    """Adds a second forward over what it was given, which it does not prepare."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, dict(inputs), *args, **kwargs)
        self.accelerator.backward(0.1 * model(input_ids=inputs["input_ids"]).logits.pow(2).mean())
        return loss


class InHalves(SFTTrainer):
    """Computes its micro-batch in two halves."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = len(inputs["input_ids"])
        halves = [range(0, (rows + 1) // 2), range((rows + 1) // 2, rows)]
        computed = [{key: value[list(half)] for key, value in inputs.items()} for half in halves if half]
        return sum(super(InHalves, self).training_step(model, half, *args, **kwargs) for half in computed)


@pytest.mark.parametrize("kind", [Adversarial, Consistent, InHalves])
def test_exactly_the_poison_rows_are_left_out(tmp_path: Path, tokenizer: Any, kind: Any) -> None:
    texts = [f"{text} {POISON_WORD}" if index in POISONED else text for index, text in enumerate(TEXTS)]
    arguments = {"texts": texts, "max_steps": 8, "trainer_class": kind}
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], **arguments)
    fault = PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    trainer.train()
    assert fault.fired
    assert {row["dataset_index"] for row in quarantined(tmp_path)} == set(POISONED)
    assert [event["steps_lost"] for event in journal(tmp_path, "outcome")] == [0, 0, 0]
    assert all(torch.isfinite(torch.tensor(losses(trainer))))
