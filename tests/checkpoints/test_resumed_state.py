"""What a resumed run writes into its state is what the uninterrupted one writes, apart from times."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import OutputFault, sft_trainer
from transformers import Trainer

from self_healing import SelfHealingCallback, SelfHealingTrainer


SAVING = {"save_strategy": "steps", "save_steps": 4}
TIMES = ("runtime", "per_second", "seconds_lost")


def without_times(content: Any) -> Any:
    if isinstance(content, dict):
        kept = {name: value for name, value in content.items() if not name.endswith(TIMES)}
        return {name: without_times(value) for name, value in kept.items()}
    return [without_times(each) for each in content] if isinstance(content, list) else content


def state_in(checkpoint: Path) -> Any:
    return without_times(json.loads((checkpoint / "trainer_state.json").read_text()))


def train(trainer: Trainer, wrapped: bool, **kwargs: Any) -> None:
    (SelfHealingTrainer(trainer) if wrapped else trainer).train(**kwargs)


@pytest.mark.parametrize(
    ("wrapped", "fault"),
    [pytest.param(False, None, marks=pytest.mark.slow), (True, 2)],
    ids=["callback alone", "wrapper, healed"],
)
def test_the_state_of_a_resumed_run_is_that_of_the_uninterrupted_one(
    tmp_path: Path, tokenizer: Any, wrapped: bool, fault: int | None
) -> None:
    def build() -> Trainer:
        trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[SelfHealingCallback()], max_steps=8, **SAVING)
        OutputFault(trainer.model, lambda _: trainer.state.global_step == fault)
        return trainer

    uninterrupted = build()
    train(uninterrupted, wrapped)
    expected = state_in(tmp_path / "run" / "checkpoint-8")
    shutil.rmtree(tmp_path / "run" / "checkpoint-8")

    resumed = build()
    train(resumed, wrapped, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert state_in(tmp_path / "run" / "checkpoint-8") == expected
    # As text: a NaN is not equal to itself.
    resumed_log, log = (json.dumps(without_times(each.state.log_history)) for each in (resumed, uninterrupted))
    assert json.loads(resumed_log) == json.loads(log)
