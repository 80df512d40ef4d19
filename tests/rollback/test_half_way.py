"""A `training_step` of the user's own that an exception has left half-way, with weights that it has moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Adversarial, RaisingForward, assert_same_weights, journal, lost_connection, plain_trainer, weights
from safetensors.torch import load_file
from transformers import Trainer, set_seed

from self_healing import Incident, SelfHealingTrainer


# Two forwards a step: the second one of step 8, with moved weights, and of the first.
SECOND, FIRST = 18, 2


def trainer_of(directory: Path, tokenizer: Any, **arguments: Any) -> Trainer:
    set_seed(3)
    settings = {"max_steps": 12, "gradient_accumulation_steps": 1, **arguments}
    return plain_trainer(directory, tokenizer, trainer_class=Adversarial, **settings)


@pytest.fixture(scope="module")
def unharmed(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = trainer_of(tmp_path_factory.mktemp("unharmed"), tokenizer, save_strategy="steps", save_steps=8)
    trainer.train()
    return trainer


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")


def not_a_number() -> Exception:
    return FloatingPointError("the loss is nan")


def struck(
    directory: Path, tokenizer: Any, at: Callable[[int], bool], error: Any, **arguments: Any
) -> tuple[Trainer, list[Incident]]:
    trainer = trainer_of(directory, tokenizer, **arguments)
    RaisingForward(trainer.model, at, error)
    healer = SelfHealingTrainer(trainer, sleep=lambda seconds: None)
    healer.train()
    assert healer._run is not None
    return trainer, healer._run.journal.incidents


@pytest.mark.parametrize("error", [lost_connection, out_of_memory, not_a_number])
def test_the_steps_since_a_trusted_state_are_applied_again(
    error: Any, unharmed: Trainer, tmp_path: Path, tokenizer: Any
) -> None:
    trainer, [incident] = struck(tmp_path, tokenizer, lambda forward: forward == SECOND, error)
    assert_same_weights(weights(trainer), weights(unharmed))
    assert incident.steps_lost == incident.steps_repeated == 0
    assert "steps_lost_unknown" not in incident.evidence
    [made] = journal(tmp_path, "made_anew")
    assert (made["to_step"], made["replayed"], made["repeats"]) == (0, 8, "bitwise")


@pytest.mark.parametrize("error", [lost_connection, out_of_memory, not_a_number])
def test_in_the_first_step_the_weights_are_those_that_the_run_began_with(
    error: Any, unharmed: Trainer, tmp_path: Path, tokenizer: Any
) -> None:
    trainer, [incident] = struck(tmp_path, tokenizer, lambda forward: forward == FIRST, error)
    assert_same_weights(weights(trainer), weights(unharmed))
    assert "steps_lost_unknown" not in incident.evidence


def test_experiments_that_raise_leave_no_moved_weights_behind(
    unharmed: Trainer, tmp_path: Path, tokenizer: Any
) -> None:
    # The step itself, and the first time that it is computed again, after 16 forwards of the steps before.
    raising = {SECOND, SECOND + 16 + 2}
    trainer, [incident] = struck(tmp_path, tokenizer, raising.__contains__, not_a_number)
    assert_same_weights(weights(trainer), weights(unharmed))
    assert incident.steps_lost == 0


def test_the_checkpoint_after_an_exception_of_the_user_is_that_of_the_last_step(
    unharmed: Trainer, tmp_path: Path, tokenizer: Any
) -> None:
    with pytest.raises(ValueError, match="a mistake"):
        struck(tmp_path, tokenizer, lambda forward: forward == SECOND, lambda: ValueError("a mistake"))
    saved, name = tmp_path / "checkpoint-8", "model.safetensors"
    assert_same_weights(load_file(saved / name), load_file(Path(unharmed.args.output_dir, saved.name, name)))


def down_for_a_while(forward: int) -> bool:
    return SECOND <= forward < SECOND + 4


def test_where_they_cannot_be_applied_again_the_steps_since_a_checkpoint_are_done_again(
    unharmed: Trainer, tmp_path: Path, tokenizer: Any
) -> None:
    trainer, [incident, *_] = struck(
        tmp_path, tokenizer, down_for_a_while, lost_connection, save_strategy="steps", save_steps=6
    )
    assert_same_weights(weights(trainer), weights(unharmed))
    assert (incident.steps_lost, incident.steps_repeated) == (0, 2)
    assert "steps_lost_unknown" not in incident.evidence


def test_without_one_it_is_told_that_the_steps_lost_are_not_known(
    unharmed: Trainer, tmp_path: Path, tokenizer: Any
) -> None:
    _, [incident, *_] = struck(tmp_path, tokenizer, down_for_a_while, lost_connection)
    assert "may have moved weights" in incident.evidence["steps_lost_unknown"]
