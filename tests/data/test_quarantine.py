"""What is in quarantine stays out: in later epochs, after a resume, in other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import POISON_WORD, TEXTS, PoisonToken, assert_same_weights, quarantined, sft_trainer, weights
from test_data import BAD, EPOCH, Rows, guarded, names, rows_of, trainer_on
from transformers import set_seed

from self_healing import SelfHealingCallback
from self_healing.healers.data.guard import candidates
from self_healing.healers.data.quarantine import (
    POISON,
    BadSample,
    Quarantine,
)


ROW = {"dataset_index": 5, "segment": None, "stream_ordinal": None, "content_hash": "a hash"}


@pytest.mark.parametrize("kind", ["poison", "raising"])
def test_a_resume_does_not_touch_what_is_quarantined(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    rows = rows_of(tokenizer, tmp_path)
    if kind == "poison":
        rows[5]["input_ids"][0] = tokenizer.convert_tokens_to_ids(POISON_WORD)
    data = Rows(rows, () if kind == "poison" else (5,))
    arguments = {"max_steps": 2 * EPOCH, "save_strategy": "steps", "save_steps": EPOCH}
    first = trainer_on(data, tmp_path, tokenizer, **arguments)
    PoisonToken(first.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    first.train()
    assert 5 in names(tmp_path)
    once = data.asked.count(5)

    second = trainer_on(data, tmp_path, tokenizer, **arguments)
    PoisonToken(second.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{EPOCH}"))
    assert data.asked.count(5) == once
    assert_same_weights(weights(second), weights(first))


def test_a_run_that_goes_on_reads_what_its_earlier_process_wrote(tmp_path: Path) -> None:
    Quarantine(tmp_path).watch("run 1", "data").add(BadSample("loading", "ValueError", "no", dataset_index=5))
    assert set(Quarantine(tmp_path).watch("run 1", "data").blocked) == {5}
    assert not Quarantine(tmp_path).watch("run 2", "data").blocked
    assert not Quarantine(tmp_path).watch("run 1", "other data").blocked


def test_a_row_that_was_dropped_in_a_later_step_comes_again(tmp_path: Path) -> None:
    first = Quarantine(tmp_path)
    first.watch("run", "data")
    first.add([ROW], 7, 0.5, "incident")
    again = Quarantine(tmp_path)
    assert not again.watch("run", "data", step=7).blocked
    again.add([ROW], 7, 0.5, "another incident")
    assert len(again.path.read_text().splitlines()) == 1
    assert Quarantine(tmp_path).watch("run", "data", step=8).blocked == {5: POISON}


def test_the_quarantine_survives_its_checkpoint(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    quarantine.watch("run", "data").blocked.update({5: "no", "0:3@1": "no"})
    again = Quarantine(tmp_path / "elsewhere")
    again.load_state_dict(quarantine.state_dict())
    assert again.blocked == quarantine.blocked


def test_findings_that_cannot_be_written_do_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "quarantine.jsonl").mkdir()
    data = guarded(Rows([{"number": number} for number in range(32)], BAD), tmp_path)
    assert len(data.__getitems__([4, 5])) == 2
    assert set(data.guard.known.blocked) == {5}


def test_a_poison_row_is_that_of_the_sample_that_was_used(tmp_path: Path, tokenizer: Any) -> None:
    set_seed(0)
    instead = next(candidates(5, 64, seed=7))
    texts = [f"{text} {POISON_WORD}" if index == instead else text for index, text in enumerate(TEXTS)]
    trainer = sft_trainer(tmp_path, tokenizer, texts=texts, max_steps=EPOCH, callbacks=[SelfHealingCallback()])
    trainer.train_dataset = Rows(trainer.train_dataset, {5})
    PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    trainer.train()
    found = [row["dataset_index"] for row in quarantined(tmp_path) if "content_hash" in row]
    assert found == [instead]
