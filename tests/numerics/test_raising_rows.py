"""Rows that raise in the model: told from code that raises, named, left out, and not met again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    TEXTS,
    dpo_trainer,
    encoded_rows,
    journal,
    plain_trainer,
    quarantined,
    sft_trainer,
    slowly,
    weights,
)
from datasets import Dataset

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer, UnrecoverableTrainingError


BAD = (5, 17, 40)


def spoiled(tokenizer: Any, key: str, value: Any, bad: Any = BAD) -> Dataset:
    def spoil(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {**row, key: [row[key][0], value, *row[key][2:]]} if index in bad else row

    return encoded_rows(tokenizer).map(spoil, with_indices=True)


def trained(output_dir: Path, tokenizer: Any, dataset: Any, config: Any = None, **arguments: Any) -> Any:
    trainer = plain_trainer(
        output_dir,
        tokenizer,
        trainer_kwargs={"train_dataset": dataset},
        callbacks=[SelfHealingCallback(config)],
        **{"max_steps": 8, **arguments},
    )
    trainer.train()
    return trainer


def assert_left_out(output_dir: Path, *, steps_lost: int = 0) -> None:
    assert {row["dataset_index"] for row in quarantined(output_dir)} == set(BAD)
    outcomes = journal(output_dir, "outcome")
    assert {(each["failure"], each["outcome"]) for each in outcomes} == {("bad_data", "resolved")}
    assert sum(each["steps_lost"] for each in outcomes) == steps_lost


@pytest.mark.parametrize(
    ("key", "value"), [("input_ids", 10**6), ("input_ids", -7), ("labels", 10**6)], ids=["id", "negative", "label"]
)
def test_a_row_out_of_range_is_left_out(tmp_path: Path, tokenizer: Any, key: str, value: int) -> None:
    trainer = trained(tmp_path, tokenizer, spoiled(tokenizer, key, value))
    assert trainer.state.global_step == 8
    assert_left_out(tmp_path)
    assert {each["symptom"] for each in journal(tmp_path, "detected")} == {"IndexError"}
    assert all(row["raises"].startswith("IndexError: ") for row in quarantined(tmp_path))


def test_what_is_trained_is_the_step_without_the_row(tmp_path: Path, tokenizer: Any) -> None:
    arguments = {"dropout": 0.0, "max_steps": 4, "gradient_accumulation_steps": 4}
    dataset = spoiled(tokenizer, "input_ids", 10**6)
    data = {"trainer_kwargs": {"train_dataset": dataset}}
    reference = plain_trainer(tmp_path / "reference", tokenizer, **arguments, **data)
    collate = reference.data_collator
    reference.data_collator = lambda rows: collate([row for row in rows if 10**6 not in row["input_ids"]])
    reference.train()
    healed = trained(tmp_path / "healed", tokenizer, dataset, **arguments)
    assert quarantined(tmp_path / "healed")
    for name, value in weights(reference).items():
        torch.testing.assert_close(weights(healed)[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_a_batch_of_one_row_is_told_from_code_by_an_earlier_batch(tmp_path: Path, tokenizer: Any) -> None:
    one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 64}
    trained(tmp_path, tokenizer, spoiled(tokenizer, "input_ids", 10**6), **one)
    assert_left_out(tmp_path, steps_lost=3)


def test_later_epochs_and_a_resumed_run_do_not_meet_the_row_again(tmp_path: Path, tokenizer: Any) -> None:
    dataset = spoiled(tokenizer, "input_ids", 10**6)
    arguments = {"save_strategy": "steps", "save_steps": 8, "max_steps": 16}
    trained(tmp_path, tokenizer, dataset, **arguments)
    resumed = plain_trainer(
        tmp_path, tokenizer, trainer_kwargs={"train_dataset": dataset}, **{**arguments, "max_steps": 24}
    )
    SelfHealingTrainer(resumed).train(resume_from_checkpoint="auto")
    assert_left_out(tmp_path)
    assert len(journal(tmp_path, "detected")) == len(BAD)


class Refusing:
    """Raises in the forward for rows that begin with certain tokens, as a model does that looks at its inputs."""

    def __init__(self, model: Any, tokens: Any, error: Callable[[], Exception]) -> None:
        self.tokens, self.error = torch.tensor(tokens), error
        model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if bool(torch.isin(kwargs["input_ids"], self.tokens).any()):
            raise self.error()


@pytest.mark.parametrize("kind", [ValueError, *slowly(RuntimeError)])
def test_whatever_the_model_raises_for_a_row_of_sft(tmp_path: Path, tokenizer: Any, kind: Any) -> None:
    texts = [f"{text} xylophone" if index in BAD else text for index, text in enumerate(TEXTS)]
    trainer = sft_trainer(tmp_path, tokenizer, texts=texts, max_steps=8, callbacks=[SelfHealingCallback()])
    Refusing(trainer.model, tokenizer.convert_tokens_to_ids(["xylophone"]), lambda: kind("a shape that is wrong"))
    trainer.train()
    assert_left_out(tmp_path)


def test_a_pair_of_dpo(tmp_path: Path, tokenizer: Any) -> None:
    trainer = dpo_trainer(tmp_path, tokenizer, max_steps=8, poisoned=BAD, callbacks=[SelfHealingCallback()])
    Refusing(trainer.model, tokenizer.convert_tokens_to_ids(["xylophone"]), lambda: ValueError("no such word"))
    trainer.train()
    assert_left_out(tmp_path)


# ---- what is not a row's ----


def raised_by(tmp_path: Path, tokenizer: Any, refuse: Callable[[int, int], bool], **arguments: Any) -> tuple[Any, int]:
    """Trains with a model that raises for a forward (its number, its rows); the error, and how many it raised."""
    trainer = plain_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], **arguments)
    counted, errors = [0], []

    def look(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        counted[0] += 1
        if refuse(counted[0], len(kwargs["input_ids"])):
            errors.append(ValueError("a bug"))
            raise errors[-1]

    trainer.model.register_forward_pre_hook(look, with_kwargs=True)
    with pytest.raises(ValueError, match="a bug") as caught:
        trainer.train()
    assert caught.value is errors[0]
    assert [note.partition(" at")[0] for note in caught.value.__notes__] == ["self_healing: stopped"]
    assert not quarantined(tmp_path)
    return trainer, len(errors)


@pytest.mark.parametrize(("since", "most"), [(4, 3), (1, 6)], ids=["later", "at the start"])
def test_an_error_that_all_rows_raise_comes_out_at_once(tmp_path: Path, tokenizer: Any, since: int, most: int) -> None:
    trainer, times = raised_by(
        tmp_path, tokenizer, lambda number, _: number >= since, per_device_train_batch_size=16, max_steps=4
    )
    assert times <= most
    assert trainer.state.global_step == (since - 1) // 2


@pytest.mark.parametrize(
    "refuse", [lambda number, _: number == 4, lambda number, rows: number >= 4 and rows > 2], ids=["once", "together"]
)
def test_an_error_that_no_row_raises_by_itself_comes_out(tmp_path: Path, tokenizer: Any, refuse: Any) -> None:
    raised_by(tmp_path, tokenizer, refuse)


def test_no_row_is_looked_for_where_the_training_step_may_have_moved_weights(tmp_path: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(
        tmp_path,
        tokenizer,
        callbacks=[SelfHealingCallback()],
        trainer_kwargs={"train_dataset": spoiled(tokenizer, "input_ids", 10**6)},
    )
    plain = trainer.training_step
    trainer.training_step = lambda *args, **kwargs: plain(*args, **kwargs)
    with pytest.raises(IndexError):
        trainer.train()
    assert not quarantined(tmp_path)


# ---- as it is asked for ----


def test_where_no_row_may_be_left_out_the_error_names_it(tmp_path: Path, tokenizer: Any) -> None:
    dataset = spoiled(tokenizer, "input_ids", 10**6)
    with pytest.raises(IndexError) as caught:
        trained(tmp_path, tokenizer, dataset, HealingConfig(on_bad_sample="raise"))
    note, _ = caught.value.__notes__
    assert note.startswith("self_healing: raised in the model, by the sample with index ")
    assert int(note.rstrip(".").rsplit(" ", 1)[1]) in BAD


def test_too_many_rows_that_raise_end_the_run(tmp_path: Path, tokenizer: Any) -> None:
    dataset = spoiled(tokenizer, "input_ids", 10**6, bad=range(0, 64, 3))
    with pytest.raises(UnrecoverableTrainingError, match="rows of the last 100 steps were dropped"):
        trained(tmp_path, tokenizer, dataset, HealingConfig(max_bad_fraction=0.02))


def test_the_message_is_not_kept_where_text_is_not(tmp_path: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(HealingConfig(quarantine_text=False))])
    token = encoded_rows(tokenizer)[5]["input_ids"][0]
    Refusing(trainer.model, [token], lambda: ValueError("quotes a secret"))
    trainer.train()
    assert quarantined(tmp_path)
    assert not any("secret" in path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
