"""`quarantine_text=False`: what was left out is named by its place and a hash, and its text is written nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import POISON_WORD, TEXTS, PoisonToken, is_own, plain_trainer, quarantined, sft_trainer
from test_data import BAD, Counted, Rows, rows_of
from test_streams import mapped_stream

from self_healing import HealingConfig, SelfHealingCallback
from self_healing.healers.data.quarantine import BadSample, Quarantine


# What the samples of test_data raise.
MESSAGE = "cannot decode"


def silent(**settings: Any) -> SelfHealingCallback:
    return SelfHealingCallback(HealingConfig(quarantine_text=False, **settings))


def assert_written_nowhere(text: str, output_dir: Path, log: str) -> None:
    files = [path for path in output_dir.rglob("*") if path.is_file() and "tokenizer" not in path.name]
    ours = [path for path in files if is_own(path.relative_to(output_dir)) or path.name == "trainer_state.json"]
    assert {"healing_events.jsonl", "quarantine.jsonl", "trainer_state.json"} <= {path.name for path in ours}
    assert [path.name for path in ours if text.encode() in path.read_bytes()] == []
    assert text not in log


def test_poison_rows_are_named_without_their_text(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [f"{text} {POISON_WORD}" if index == 5 else text for index, text in enumerate(TEXTS)]
    saved = {"save_strategy": "steps", "save_steps": 8, "max_steps": 8}
    trainer = sft_trainer(tmp_path, tokenizer, texts=texts, callbacks=[silent()], **saved)
    PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    trainer.train()
    (row,) = quarantined(tmp_path)
    assert (row["dataset_index"], row["preview"], row["prompt"], len(row["content_hash"])) == (5, None, None, 64)
    assert not (tmp_path / "incidents").exists()
    assert_written_nowhere(POISON_WORD, tmp_path, caplog.text)


@pytest.mark.parametrize(
    "kind",
    ["map-style", pytest.param("stream", marks=pytest.mark.slow), pytest.param("mapped", marks=pytest.mark.slow)],
)
def test_samples_that_raise_are_named_without_what_they_raise(
    kind: str, tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(tokenizer, tmp_path)
    trainer = plain_trainer(tmp_path / "run", tokenizer, callbacks=[silent()], save_strategy="steps", save_steps=8)
    data = {"map-style": Rows, "stream": Counted}.get(kind)
    trainer.train_dataset = mapped_stream(rows) if data is None else data(rows, BAD)
    trainer.args.max_steps = 8
    trainer.train()
    found = quarantined(tmp_path / "run")
    assert len(found) == len(BAD)
    assert all(row["error_type"] == "ValueError" and row["error"] == "" and row["preview"] is None for row in found)
    assert len({row["text_hash"] for row in found}) == len(BAD)
    assert_written_nowhere(MESSAGE, tmp_path / "run", caplog.text)


def test_a_sample_that_loads_at_the_second_attempt_is_told_of_by_type(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    known = Quarantine(tmp_path, keep_text=False).watch("a run", "some data")
    known.loaded_on_retry("sample 5", ValueError(MESSAGE))
    assert known.retried == ["sample 5 (ValueError)"]
    assert MESSAGE not in caplog.text


def test_samples_of_unknown_place_are_told_apart_without_text(tmp_path: Path) -> None:
    known = Quarantine(tmp_path, keep_text=False).watch("a run", "some data")
    for text in ("one", "another"):
        known.add(BadSample("loading", "ValueError", f"{MESSAGE} {text}", preview=text))
    assert len(known.blocked) == 2
    assert MESSAGE not in str(known.blocked)
