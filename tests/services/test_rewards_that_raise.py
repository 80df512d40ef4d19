"""A reward function that raises is asked again, and then for those completions that it does not raise for."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same_weights, grpo_trainer, journal, logged, prompts, quarantined, rloo_trainer, weights

from self_healing import HealingConfig, SelfHealingCallback


COMPLETIONS = 8  # of each call, 4 for each of 2 prompts


class Reward:
    """
    Scores completions, and draws and logs as it does; raises for those that `bad` names by call (from 1), prompt and
    place in the group, or returns None for them.
    """

    __name__ = "judge"

    def __init__(self, bad: Callable[[int, str, int], bool], raises: bool = True) -> None:
        self.bad, self.raises = bad, raises
        self.asked: list[list[str]] = []
        # Call and place of each completion.
        self.seen: dict[str, tuple[int, int]] = {}

    def __call__(
        self, prompts: Any, completions: Any, answer: Any, log_extra: Any, log_metric: Any, **_: Any
    ) -> list[float | None]:
        if completions[0] not in self.seen:
            self.asked.append(completions)
            self.seen |= {each: (len(self.asked), at % 4) for at, each in enumerate(completions)}
        rewards: list[float | None] = []
        noise = float(torch.rand(()))
        for prompt, completion, at in zip(prompts, completions, answer, strict=True):
            call, place = self.seen[completion]
            is_bad = self.bad(call, prompt, place)
            if is_bad and self.raises:
                raise ValueError(f"cannot read {completion!r}")
            rewards.append(None if is_bad else len(set(completion)) + noise + at)
        log_metric("asked", 1.0)
        log_extra("answer", answer)
        return rewards


class AsyncReward(Reward):
    async def __call__(self, **given: Any) -> list[float | None]:  # type: ignore[override]
        return super().__call__(**given)


def rows() -> Any:
    return prompts().map(lambda row, index: {"answer": 0.1 * index}, with_indices=True)


def trained(kind: str, directory: Path, tokenizer: Any, reward: Reward, **config: Any) -> Any:
    arguments = {"max_steps": 3, "log_completions": True, "callbacks": [SelfHealingCallback(HealingConfig(**config))]}
    if kind == "rloo":
        trainer: Any = rloo_trainer(directory, tokenizer, **arguments)
        trainer.train_dataset, trainer.reward_funcs[0] = rows(), reward
    else:
        data = {"train_dataset": rows()}
        trainer = grpo_trainer(directory, tokenizer, reward_funcs=[reward], trainer_kwargs=data, **arguments)
    trainer.train()
    return trainer


def one_of_them(call: int, prompt: str, place: int) -> bool:
    return call == 2 and place == 2


@pytest.mark.parametrize("kind", ["grpo", "async", "rloo"])
def test_completions_that_a_reward_raises_for_are_as_if_it_had_no_value_for_them(
    kind: str, tmp_path: Path, tokenizer: Any
) -> None:
    form = AsyncReward if kind == "async" else Reward
    clean = trained(kind, tmp_path / "clean", tokenizer, form(one_of_them, raises=False))
    reward = form(one_of_them)
    trainer = trained(kind, tmp_path / "run", tokenizer, reward)
    assert_same_weights(weights(trainer), weights(clean))
    assert json.dumps(logged(trainer)) == json.dumps(logged(clean))
    # One in each group of the second call.
    bad = [reward.asked[1][2], reward.asked[1][6]]
    assert [row["preview"] for row in quarantined(tmp_path / "run")] == bad
    [diagnosed] = journal(tmp_path / "run", "diagnosed")
    assert diagnosed["cause"] == f"reward {trainer.reward_funcs[0].__name__}, 2 of 8 completions"
    assert [event["action"] for event in journal(tmp_path / "run", "action")] == ["retry_call", "quarantine_sample"]
    assert [event["outcome"] for event in journal(tmp_path / "run", "outcome")] == ["resolved"]


def test_a_reward_that_raises_once_leaves_no_trace(tmp_path: Path, tokenizer: Any) -> None:
    clean = trained("grpo", tmp_path / "clean", tokenizer, Reward(lambda *_: False))
    failed: list[int] = []
    once = Reward(lambda call, *_: call == 2 and not failed and failed.append(call) is None)
    trainer = trained("grpo", tmp_path / "run", tokenizer, once)
    assert failed == [2]
    assert_same_weights(weights(trainer), weights(clean))
    assert logged(trainer) == logged(clean)
    assert [event["action"] for event in journal(tmp_path / "run", "action")] == ["retry_call"]
    assert not quarantined(tmp_path / "run")


class Cancelled(Reward):
    """As a client whose request was cancelled raises it, which is no `Exception`."""

    kind: type[BaseException] = asyncio.CancelledError
    calls = 0

    def __call__(self, **given: Any) -> list[float | None]:  # type: ignore[override]
        self.calls += 1
        if self.calls == 2:
            raise self.kind
        return super().__call__(**given)


def test_a_reward_that_was_cancelled_is_asked_again(tmp_path: Path, tokenizer: Any) -> None:
    trainer = trained("grpo", tmp_path, tokenizer, Cancelled(lambda *_: False))
    assert trainer.state.global_step == 3
    assert [event["outcome"] for event in journal(tmp_path, "outcome")] == ["resolved"]


def test_a_reward_that_asks_to_end_is_not_asked_again(tmp_path: Path, tokenizer: Any) -> None:
    reward = Cancelled(lambda *_: False)
    reward.kind = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        trained("grpo", tmp_path, tokenizer, reward)
    assert reward.calls == 2


def test_all_completions_of_a_call_may_be_at_fault(tmp_path: Path, tokenizer: Any) -> None:
    trainer = trained("grpo", tmp_path, tokenizer, Reward(lambda call, *_: call == 2), max_bad_fraction=0.1)
    # It still has an answer for one that it answered for before.
    assert (trainer.state.global_step, len(quarantined(tmp_path))) == (3, COMPLETIONS)


class Broken(Reward):
    calls = 0

    def __call__(self, **given: Any) -> list[float | None]:  # type: ignore[override]
        self.calls += 1
        if self.calls > 1:
            raise KeyError("a file that is gone")
        return super().__call__(**given)


def test_a_reward_that_has_no_answers_any_more_is_the_users_to_mend(tmp_path: Path, tokenizer: Any) -> None:
    reward = Broken(lambda *_: False)
    with pytest.raises(KeyError) as caught:
        trained("grpo", tmp_path, tokenizer, reward)
    assert [note.partition(" at")[0] for note in caught.value.__notes__] == ["self_healing: stopped"]
    # One that raises, the same again, and one that it had an answer for.
    assert reward.calls == 1 + 3
    assert not quarantined(tmp_path)


class NoNumber(Reward):
    calls = 0

    def __call__(self, **given: Any) -> list[float | None]:  # type: ignore[override]
        self.calls += 1
        if self.calls == 2:
            raise ValueError("cannot read")
        answers = super().__call__(**given)
        return [math.inf, *answers[1:]] if self.calls == 3 else answers


def test_what_is_answered_after_it_raised_has_to_be_a_number_as_well(tmp_path: Path, tokenizer: Any) -> None:
    trainer = trained("grpo", tmp_path, tokenizer, NoNumber(lambda *_: False))
    assert all(math.isfinite(entry["reward"]) for entry in trainer.state.log_history if "reward" in entry)
    assert "NonFiniteReward" in {event["symptom"] for event in journal(tmp_path, "detected")}


def test_no_more_completions_are_given_up_than_of_the_data(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="cannot read") as caught:
        trained("grpo", tmp_path, tokenizer, Reward(one_of_them), max_bad_fraction=0.01)
    named = "reward judge has raised for 2 completions, more than max_bad_fraction allows."
    assert caught.value.__notes__[0] == named


def test_where_nothing_may_be_left_out_the_error_is_raised(tmp_path: Path, tokenizer: Any) -> None:
    reward = Reward(one_of_them)
    with pytest.raises(ValueError, match="cannot read"):
        trained("grpo", tmp_path, tokenizer, reward, on_bad_sample="raise")
    assert not quarantined(tmp_path)


def test_completions_are_named_without_their_text(tmp_path: Path, tokenizer: Any) -> None:
    trained("grpo", tmp_path, tokenizer, Reward(one_of_them), quarantine_text=False)
    kept = quarantined(tmp_path)
    assert [(row["preview"], row["prompt"], row["error"], row["error_type"]) for row in kept] == [
        (None, None, None, "ValueError")
    ] * 2
    assert len({row["content_hash"] for row in kept}) == 2
    assert "cannot read" not in (tmp_path / "healing_events.jsonl").read_text()
