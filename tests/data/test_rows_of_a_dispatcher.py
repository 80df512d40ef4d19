"""Rows are named by their places in the data where the first rank loads for all (`dispatch_batches`)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from conftest import POISON_WORD, TEXTS, PoisonToken, build_tokenizer, plain_trainer, quarantined
from datasets import Dataset
from forked_pairs import run_pair
from torch.utils.data import DataLoader
from transformers import set_seed

from self_healing import SelfHealingCallback
from self_healing.hf.batches import Layout
from self_healing.hf.dataloader import DataPosition
from self_healing.hf.objective import objective_named


_POISONED = (5, 17, 30, 44)


def _named(rows: int, skipped: int = 0, **loading: Any) -> list[list[Any]]:
    """For each micro-batch of an epoch, of samples that are their own numbers: which they are, and as which named."""
    configuration = DataLoaderConfiguration(dispatch_batches=True, use_seedable_sampler=True, **loading)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    loader = accelerator.prepare(DataLoader(torch.arange(rows), batch_size=4, shuffle=True))
    trainer: Any = SimpleNamespace(
        accelerator=accelerator,
        args=SimpleNamespace(gradient_accumulation_steps=1, ignore_data_skip=False),
        callback_handler=SimpleNamespace(train_dataloader=loader),
        state=SimpleNamespace(global_step=skipped),
        train_dataset=range(rows),
    )
    position = DataPosition(trainer, objective_named("sft"))
    position.watch()
    position.epoch_begins()
    found = []
    for batch in skip_first_batches(loader, skipped) if skipped else loader:
        position.share(1)
        layout = Layout("rows", len(batch))
        found.append([batch.tolist(), [source.dataset_index for source in position.sources(layout, 0, ())]])
        position.advance([batch])
    position.release()
    return found


def _train(directory: Path) -> None:
    tokenizer = build_tokenizer()
    set_seed(1234)

    def encoded(index: int) -> dict[str, list[int]]:
        # Before what is cut off.
        text = f"{POISON_WORD} {TEXTS[index]}" if index in _POISONED else TEXTS[index]
        ids = (tokenizer(text)["input_ids"] + [tokenizer.pad_token_id] * 24)[:24]
        return {"input_ids": ids, "labels": ids}

    trainer = plain_trainer(
        directory / "run",
        tokenizer,
        callbacks=[SelfHealingCallback()],
        trainer_kwargs={"train_dataset": Dataset.from_list([encoded(index) for index in range(len(TEXTS))])},
        accelerator_config={"dispatch_batches": True},
        ddp_backend="gloo",
    )
    PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    trainer.train()


def _on_two_ranks(directory: Path, rank: int) -> dict[str, Any]:
    named = {
        "even": _named(32),
        "one batch over": _named(36),
        "a part of a batch over": _named(30),
        "resumed": _named(32, skipped=2),
        "split": _named(30, split_batches=True),
    }
    _train(directory)
    return named


def test_rows_that_the_first_rank_loads_for_another_one_are_named_as_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise accelerate has each of them take all cores.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ranks = run_pair(tmp_path, _on_two_ranks)["ranks"]
    for rank in ranks:
        for case in ("even", "one batch over", "a part of a batch over", "resumed", "split"):
            assert rank[case], case
            for rows, named in rank[case]:
                # Wrong ones never.
                assert named in (rows, [None] * len(rows)), case
        assert all(rows == named for case in ("even", "resumed") for rows, named in rank[case])
        assert all(rows == named for rows, named in rank["one batch over"][:-1])
    # Each of them once: it is replaced from then on, whichever rank it was on.
    found = quarantined(tmp_path / "run")
    assert sorted(row["dataset_index"] for row in found) == list(_POISONED)
    assert {row["rank"] for row in found} == {0, 1}
