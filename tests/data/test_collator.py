"""Samples that a collator cannot put into a batch, and batches in which no token counts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quarantined
from test_data import Rows, guarded, known, names
from test_streams import STREAMS
from torch.utils.data import DataLoader
from transformers import default_data_collator

from self_healing.healers.data.datasets import GuardedCollator
from self_healing.healers.data.guard import Guard
from self_healing.healers.data.streams import GuardedStream


class Popping:
    """A collator that takes its samples apart, and raises for some of them."""

    def __init__(self, bad: Any, times: int = 10**9) -> None:
        self.bad, self.times = bad, times

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        numbers = []
        for sample in samples:
            numbers.append(sample.pop("number"))
            if numbers[-1] in self.bad and self.times > 0:
                self.times -= 1
                raise ValueError(f"ragged: {numbers[-1]}")
        return torch.tensor(numbers)


@pytest.mark.parametrize("times", [1, 10**9])
def test_a_collator_may_take_its_samples_apart(tmp_path: Path, times: int) -> None:
    data = guarded(Rows([{"number": number} for number in range(32)]), tmp_path)
    collate = GuardedCollator(Popping({5}, times), data.guard, data)
    batch = collate(data.__getitems__([4, 5, 6, 7]))
    rows = quarantined(tmp_path)
    if times == 1:
        assert not rows
        assert batch.tolist() == [4, 5, 6, 7]
    else:
        assert [(row["dataset_index"], row["error"]) for row in rows] == [(5, "ragged: 5")]
        assert batch.tolist() == [4, rows[0]["replaced_by"], 6, 7]


@pytest.mark.parametrize("batch", [[4, 5], [5, 4]])
def test_of_two_samples_that_do_not_fit_the_odd_one_is_meant(tmp_path: Path, batch: list[int]) -> None:
    data = guarded(Rows([{"input_ids": [1] * (3 if number == 5 else 2)} for number in range(32)]), tmp_path)
    collate = GuardedCollator(default_data_collator, data.guard, data)
    assert collate(data.__getitems__(batch))["input_ids"].shape == (2, 2)
    assert names(tmp_path) == [5]


class Picky:
    """A collator that raises for some samples, alone or in company."""

    def __init__(self, bad: Any, alone: bool = True) -> None:
        self.bad, self.alone = bad, alone

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        found = [sample for sample in samples if sample["number"] in self.bad]
        if found and (self.alone or len(samples) > 1):
            raise ValueError(f"ragged: {found[0]['number']}")
        return torch.tensor([sample["number"] for sample in samples])


@pytest.mark.parametrize("alone", [True, False])
def test_the_sample_a_collator_raises_for_is_found(tmp_path: Path, alone: bool) -> None:
    data = guarded(Rows([{"number": number} for number in range(32)]), tmp_path)
    collate = GuardedCollator(Picky({5}, alone), data.guard, data)
    batch = collate(data.__getitems__([4, 5, 6, 7]))
    (row,) = quarantined(tmp_path)
    assert (row["dataset_index"], row["problem"], row["preview"]) == (5, "collation", "{'number': 5}")
    assert batch.tolist() == [4, row["replaced_by"], 6, 7]
    assert collate(data.__getitems__([5])).tolist() == [row["replaced_by"]]


@pytest.mark.parametrize("alone", [True, False])
def test_a_stream_fills_the_batch_with_what_comes_next(tmp_path: Path, alone: bool) -> None:
    guard = Guard(known(tmp_path), seed=7)
    stream = GuardedStream(STREAMS["mapped"](), guard)
    collate = GuardedCollator(Picky({5, 31} if alone else {5}, alone), guard, stream)
    batches = [batch.tolist() for batch in DataLoader(stream, batch_size=4, collate_fn=collate)]
    assert batches[1] == [4, 8, 6, 7]
    assert sorted(itertools.chain(*batches)) == [number for number in range(32) if number not in collate.wrapped.bad]
    assert {(row["shard"], row["stream_ordinal"]) for row in quarantined(tmp_path)} == {
        (0, number) for number in collate.wrapped.bad
    }


def test_on_request_the_error_of_the_collator_names_the_sample(tmp_path: Path) -> None:
    data = guarded(Rows([{"number": number} for number in range(32)]), tmp_path, names_only=True)
    collate = GuardedCollator(Picky({5}), data.guard, data)
    with pytest.raises(ValueError, match="ragged: 5") as caught:
        collate(data.__getitems__([4, 5, 6, 7]))
    assert caught.value.__notes__ == ["self_healing: raised by the collator, for the sample with index 5."]
    assert not quarantined(tmp_path)
