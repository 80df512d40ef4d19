"""What makes a sample bad that raises nothing."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import quarantined
from datasets import Dataset

from self_healing.healers.data.guard import Guard
from self_healing.healers.data.quarantine import Quarantine, is_empty
from self_healing.healers.data.streams import GuardedStream


@pytest.mark.parametrize("ids", [[], (), np.empty(0), torch.empty(0), torch.empty(1, 0)])
@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_sequence_of_length_0_is_a_problem(kind: Any, ids: Any) -> None:
    assert is_empty(kind(input_ids=ids))


@pytest.mark.parametrize(
    "sample",
    [
        {"input_ids": [1]},
        {"input_ids": torch.ones(1)},
        {"input_ids": torch.tensor(1)},
        {"input_ids": None},
        {"input_ids": "text"},
        {"text": ""},
        {},
        [],
        None,
    ],
)
def test_other_samples_are_none(sample: Any) -> None:
    assert not is_empty(sample)


@pytest.mark.parametrize("kind", ["torch", "datasets"])
def test_a_stream_leaves_out_an_empty_sequence(tmp_path: Path, kind: str) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(rows)

    rows: list[dict[str, Any]] = [{"input_ids": [] if number == 5 else [number]} for number in range(8)]
    stream = Stream() if kind == "torch" else Dataset.from_list(rows).to_iterable_dataset()
    known = Quarantine(tmp_path).watch("a run", "some data")
    given = list(GuardedStream(stream, Guard(known, seed=7)))
    assert given == [row for row in rows if row["input_ids"]]
    (row,) = quarantined(tmp_path)
    assert (row["problem"], row["stream_ordinal"], row["attempts"]) == ("empty", 5, 1)
    assert row["error"] == "a sequence of length 0"
