"""The traceback of an error of the user's shows the user's code and the Trainer's, and says where the run stands."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import RaisingAt, RaisingForward, encoded_rows, grpo_trainer, lost_connection, plain_trainer
from transformers import Trainer

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer, UnrecoverableTrainingError


# A lost connection is the user's where there is nothing left to be tried, and a sample where none is replaced.
GIVES_UP = HealingConfig(
    max_recovery_attempts=0, api_retry_attempts=2, api_retry_base_delay=0.01, on_bad_sample="raise"
)


def failing(*_: Any, **__: Any) -> Any:
    raise KeyError("a mistake")


def unreachable(*_: Any, **__: Any) -> Any:
    try:
        failing()
    except KeyError:
        raise lost_connection() from None


def in_the_model(directory: Path, tokenizer: Any) -> Trainer:
    trainer = plain_trainer(directory, tokenizer)
    RaisingForward(trainer.model, lambda forward: forward == 5, lambda: KeyError("a mistake"))
    return trainer


def in_a_callback(directory: Path, tokenizer: Any) -> Trainer:
    return plain_trainer(directory, tokenizer, callbacks=[RaisingAt("on_log", 2)])


def in_the_collator(directory: Path, tokenizer: Any) -> Trainer:
    trainer = plain_trainer(directory, tokenizer)
    trainer.data_collator = failing
    return trainer


def in_an_evaluation(directory: Path, tokenizer: Any, **arguments: Any) -> Trainer:
    given = {"eval_dataset": encoded_rows(tokenizer).select(range(8)), "compute_metrics": failing}
    return plain_trainer(directory, tokenizer, eval_strategy="steps", eval_steps=2, **arguments, trainer_kwargs=given)


def before_the_first_step(directory: Path, tokenizer: Any) -> Trainer:
    return in_an_evaluation(directory, tokenizer, eval_on_start=True)


def in_a_reward(directory: Path, tokenizer: Any) -> Trainer:
    return grpo_trainer(directory, tokenizer, reward_funcs=failing)


def in_a_reward_that_is_asked_again(directory: Path, tokenizer: Any) -> Trainer:
    return grpo_trainer(directory, tokenizer, reward_funcs=unreachable)


PLACES: list[Callable[[Path, Any], Trainer]] = [
    *(in_the_model, in_a_callback, in_the_collator, in_an_evaluation, before_the_first_step, in_a_reward),
    in_a_reward_that_is_asked_again,
]


def in_between(error: BaseException | None) -> list[str]:
    """What lies between the user's call and the user's mistake, of an exception and of those it came from."""
    if error is None:
        return []
    modules = [str(frame.f_globals["__name__"]) for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [name for name in modules if name.partition(".")[0] in ("self_healing", "tenacity")]
    return own + in_between(error.__cause__ or error.__context__)


@pytest.mark.parametrize("place", PLACES)
def test_shows_nothing_of_the_callback(place: Callable[[Path, Any], Trainer], tmp_path: Path, tokenizer: Any) -> None:
    trainer = place(tmp_path, tokenizer)
    trainer.add_callback(SelfHealingCallback(GIVES_UP))
    with pytest.raises((KeyError, ConnectionError)) as caught:
        trainer.train()
    # Before the first step `_evaluate` itself is what is wrapped.
    assert len(in_between(caught.value)) <= (2 if place is before_the_first_step else 0)
    assert any(f"stopped at step {trainer.state.global_step} of" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("place", PLACES)
def test_shows_one_call_of_the_wrapper(place: Callable[[Path, Any], Trainer], tmp_path: Path, tokenizer: Any) -> None:
    trainer = place(tmp_path, tokenizer)
    with pytest.raises((KeyError, ConnectionError, UnrecoverableTrainingError)) as caught:
        SelfHealingTrainer(trainer, GIVES_UP).train()
    ended_by = caught.value.__cause__ if isinstance(caught.value, UnrecoverableTrainingError) else caught.value
    assert len(in_between(ended_by)) <= 1
    assert any(f"stopped at step {trainer.state.global_step}" in note for note in caught.value.__notes__)
    written = json.loads((tmp_path / "postmortem.json").read_text(encoding="utf-8"))["error"]["traceback"]
    assert not [line for line in written if "/self_healing/" in line or "/tenacity/" in line]
