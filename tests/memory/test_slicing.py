"""Which part of each argument belongs to some rows of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from self_healing.memory.splitting import CallShape, CannotSplit
from self_healing.memory.splitting.slicing import main_input, picked_rows, rows_of, sequences_of, shape_of_call


TOTAL = 3
ROWS = [slice(1, 3), [1, 2]]


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(int(torch.tensor(shape).prod())).reshape(shape)


@pytest.mark.parametrize("rows", ROWS)
def test_what_has_an_entry_for_each_row_is_cut(rows: Any) -> None:
    tokens = numbers(3, 4)
    assert torch.equal(rows_of(tokens, TOTAL, rows), tokens[1:])
    assert rows_of(["a", "b", "c"], TOTAL, rows) == ["b", "c"]
    assert torch.equal(rows_of({"inner": tokens}, TOTAL, rows)["inner"], tokens[1:])
    assert torch.equal(rows_of((tokens, None), TOTAL, rows)[0], tokens[1:])
    assert torch.equal(rows_of(Pair(tokens, tokens), TOTAL, rows).right, tokens[1:])


@pytest.mark.parametrize("rows", ROWS)
def test_what_belongs_to_no_row_stays(rows: Any) -> None:
    for value in (None, "text", True, 3, 0.5, torch.float32):
        assert rows_of(value, TOTAL, rows) is value
    assert rows_of(torch.tensor(3.0), TOTAL, rows) == 3.0
    # Shared by all rows, whatever their number.
    assert rows_of(numbers(5), TOTAL, rows).shape == (5,)
    assert rows_of(numbers(1, 4), TOTAL, rows).shape == (1, 4)


def test_what_has_another_number_of_entries_cannot_be_cut() -> None:
    with pytest.raises(CannotSplit, match="`pixel_values` has 7 entries for 3 rows"):
        rows_of(numbers(7, 2), TOTAL, slice(1, 3), "pixel_values")
    with pytest.raises(CannotSplit, match="is a object"):
        rows_of(object(), TOTAL, slice(1, 3), "cache")


def test_positions_in_time_height_and_width_are_cut_along_their_rows() -> None:
    positions = numbers(3, 3, 4)
    assert torch.equal(rows_of(positions, TOTAL, slice(0, 1), "position_ids"), positions[:, :1])
    assert rows_of(numbers(3, 1, 4), TOTAL, slice(0, 1), "position_ids").shape == (3, 1, 4)


def test_rows_from_anywhere_are_a_chunk_of_their_own() -> None:
    tokens = numbers(3, 4)
    chunk = picked_rows((tokens,), {"labels": tokens}, CallShape("train", 3, 4), [2, 0])
    assert torch.equal(chunk.args[0], tokens[[2, 0]])
    assert torch.equal(chunk.kwargs["labels"], tokens[[2, 0]])
    assert (chunk.rows, chunk.shape) == (2, CallShape("train", 2, 4))


def test_the_size_of_a_call_is_that_of_its_main_input() -> None:
    assert shape_of_call("train", (), {"use_cache": True, "input_ids": numbers(3, 4)}) == CallShape("train", 3, 4)
    assert shape_of_call("train", (numbers(3),), {}) == CallShape("train", 3, 1)
    assert shape_of_call("train", ({"input_ids": numbers(2, 5)},), {}) == CallShape("train", 2, 5)
    assert shape_of_call("train", (torch.tensor(1.0),), {"use_cache": True}) is None
    assert main_input((numbers(3),), {"input_ids": numbers(2, 5)}).shape == (2, 5)  # type: ignore[union-attr]


def test_a_flattened_batch_counts_by_its_tokens() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    flat = {"input_ids": numbers(1, 5), "position_ids": positions}
    assert sequences_of((), flat) is not None
    assert shape_of_call("train", (), flat) == CallShape("train", 5, 1)
    assert shape_of_call("generate", (), flat) == CallShape("generate", 1, 5)
    assert sequences_of((), {"input_ids": numbers(2, 5), "position_ids": positions}) is None
