"""What a look at the data and the weights finds before the first step, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TRAINERS, tiny_model
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model

from self_healing.healers.inspection import Inspection, check_data_quality, check_model_init


def kinds(inspection: Inspection) -> dict[str, list[int | str]]:
    return {finding.kind: finding.examples for finding in inspection.findings}


def row(number: int, **changes: Any) -> dict[str, Any]:
    ids = [3 + number, 4, 5, 6]
    return {"input_ids": ids, "labels": ids, **changes}


def rows_with(bad: dict[int, dict[str, Any]], size: int = 12) -> list[dict[str, Any]]:
    return [row(number, **bad.get(number, {})) for number in range(size)]


# ---- data: what is found ----


@pytest.mark.parametrize("as_dataset", [Dataset.from_list, list], ids=["datasets", "list"])
def test_rows_without_tokens_are_found(as_dataset: Any) -> None:
    nothing = {"input_ids": [], "labels": []}
    found = check_data_quality(as_dataset(rows_with({2: nothing, 7: nothing})))
    assert kinds(found) == {"empty_rows": [2, 7], "duplicates": [7]}
    assert found.findings[0].severity == "error"
    assert (found.findings[0].count, found.findings[0].total) == (2, 12)


@pytest.mark.parametrize("column", ["prompt_ids", "chosen_ids", "rejected_ids", "completion_ids"])
def test_each_part_of_a_row_needs_tokens(column: str) -> None:
    assert kinds(check_data_quality([{column: [1, 2]}, {column: []}])) == {"empty_rows": [1]}


@pytest.mark.parametrize("column", ["text", "prompt", "completion", "chosen", "rejected"])
@pytest.mark.parametrize("blank", ["", " \n\t", []])
def test_text_that_is_blank_is_found(column: str, blank: Any) -> None:
    assert kinds(check_data_quality([{column: "words"}, {column: blank}])) == {"empty_rows": [1]}


def test_rows_with_all_labels_masked_are_found() -> None:
    found = check_data_quality(rows_with({5: {"labels": [-100] * 4}}))
    assert kinds(found) == {"all_labels_masked": [5]}


@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks"])
def test_masks_of_zeros_are_found(mask: str) -> None:
    ids = {"input_ids": [1, 2, 3]}
    found = check_data_quality([{**ids, mask: [0, 1, 1]}, {**ids, mask: [0, 0, 0]}])
    assert kinds(found) == {"all_labels_masked": [1]}


def test_a_completion_behind_max_length_is_found() -> None:
    late = {"labels": [-100, -100, -100, 6]}
    assert check_data_quality(rows_with({4: late})).clean
    assert check_data_quality(rows_with({4: late}), max_length=4).clean
    found = check_data_quality(rows_with({4: late}), max_length=3)
    assert kinds(found) == {"all_labels_masked": [4]}
    assert "max_length" in found.findings[0].message


def test_a_prompt_that_fills_max_length_is_found() -> None:
    pairs = [{"prompt_ids": [1] * (2 + n), "chosen_ids": [2], "rejected_ids": [3]} for n in range(3)]
    assert check_data_quality(pairs).clean
    assert kinds(check_data_quality(pairs, max_length=4)) == {"all_labels_masked": [2]}


@pytest.mark.parametrize("wrong", [100, -1])
@pytest.mark.parametrize("column", ["input_ids", "prompt_ids", "KL_completion_ids"])
def test_ids_outside_the_vocabulary_are_found(column: str, wrong: int) -> None:
    bad = rows_with({9: {column: [4, wrong, 5, 6]}})
    found = check_data_quality(bad, vocabulary=100)
    assert kinds(found) == {"ids_out_of_vocabulary": [9]}
    assert str(wrong) in found.findings[0].message


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        [0.5, float("inf")],
        [[0.5], [1.0, float("-inf")]],
        np.array([0.5, np.nan], dtype=np.float32),
        torch.tensor([[float("nan")]], dtype=torch.bfloat16),
        {"inner": [1, 2.0, float("nan")]},
        [None, float("nan")],
    ],
    ids=["scalar", "list", "ragged", "numpy", "bfloat16", "nested", "after None"],
)
def test_numbers_that_are_not_finite_are_found(value: Any) -> None:
    found = check_data_quality(rows_with({6: {"advantages": value}}))
    assert kinds(found) == {"nonfinite_floats": [6]}
    assert '"advantages"' in found.findings[0].message


def test_repeats_are_counted_once_for_each_row_after_the_first() -> None:
    found = check_data_quality([row(n % 4) for n in range(12)])
    (repeats,) = found.findings
    assert (repeats.kind, repeats.count, repeats.examples) == ("duplicates", 8, [4, 5, 6, 7, 8])
    assert repeats.severity == "warning"


class Torn(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 130:
            raise OSError("image file is truncated")
        return row(index)


def test_a_row_that_cannot_be_loaded_is_named_with_its_error() -> None:
    found = check_data_quality(Torn())
    assert kinds(found) == {"unreadable_rows": [130]}
    assert "OSError: image file is truncated" in found.findings[0].message
    assert found.looked_at == 300


# ---- data: how it is read ----


class Recording(Torn):
    def __init__(self, size: int) -> None:
        self.size, self.read = size, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return row(index)


def test_a_huge_dataset_is_sampled_evenly() -> None:
    dataset = Recording(1_000_000)
    assert check_data_quality(dataset, max_rows=500).looked_at == 500
    assert [index // 2000 for index in sorted(dataset.read)] == list(range(500))


def test_a_stream_is_read_from_its_beginning_and_can_be_read_again() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from rows_with({3: {"labels": [-100] * 4}})

    dataset = IterableDataset.from_generator(rows)
    found = check_data_quality(dataset)
    assert kinds(found) == {"all_labels_masked": [3]}
    assert found.looked_at == 12
    assert list(dataset) == rows_with({3: {"labels": [-100] * 4}})


class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    def __init__(self, breaks_at: int = -1) -> None:
        self.given, self.closed, self.breaks_at = 0, 0, breaks_at

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            for number in range(10**9):
                if number == self.breaks_at:
                    raise ConnectionError("reset by peer")
                self.given += 1
                yield row(number)
        finally:
            self.closed += 1


def test_a_stream_that_breaks_is_reported_at_the_row() -> None:
    found = check_data_quality(Stream(breaks_at=4))
    assert kinds(found) == {"unreadable_rows": [4]}
    assert found.looked_at == 5


def test_an_iterator_is_refused_rather_than_consumed() -> None:
    rows = iter([row(0), row(1)])
    with pytest.raises(TypeError, match="would be missing"):
        check_data_quality(rows)
    assert next(rows) == row(0)


@pytest.mark.parametrize("wrong", [None, {"train": [row(0)]}, 3])
def test_what_has_no_rows_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError):
        check_data_quality(wrong)


@pytest.mark.parametrize("name", TRAINERS)
def test_what_healthy_trainers_train_on_is_clean_but_for_repeats(tmp_path: Path, tokenizer: Any, name: str) -> None:
    trainer = TRAINERS[name](tmp_path / "run", tokenizer)
    found = check_data_quality(trainer.train_dataset, vocabulary=len(tokenizer), max_length=64)
    assert found.looked_at == len(trainer.train_dataset) == 64
    assert set(kinds(found)) <= {"duplicates"}


# ---- models ----


def test_a_healthy_model_is_clean(tokenizer: Any) -> None:
    model = tiny_model(tokenizer)
    found = check_model_init(model)
    assert found.clean, str(found)
    assert found.looked_at == len(list(model.parameters())) + len(list(model.buffers()))


@pytest.mark.parametrize("kind", [{}, {"use_dora": True}, {"init_lora_weights": False}])
def test_a_healthy_model_with_a_new_adapter_is_clean(tokenizer: Any, kind: dict[str, Any]) -> None:
    settings = LoraConfig(target_modules=["q_proj", "down_proj", *([] if kind else ["embed_tokens"])], r=4, **kind)
    found = check_model_init(get_peft_model(tiny_model(tokenizer), settings))
    assert found.clean, str(found)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_found(tokenizer: Any, value: float, dtype: torch.dtype) -> None:
    model = tiny_model(tokenizer).to(dtype)
    with torch.no_grad():
        model.model.norm.weight[3] = value
        model.model.layers[1].mlp.up_proj.weight[2, 2] = value
    found = check_model_init(model)
    assert kinds(found) == {"nonfinite_tensors": ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]}
    assert found.findings[0].severity == "error"


def test_matrices_of_zeros_are_found(tokenizer: Any) -> None:
    model = tiny_model(tokenizer)
    torch.nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    found = check_model_init(model)
    assert kinds(found) == {"all_zero_tensors": ["model.layers.0.self_attn.o_proj.weight"]}
    assert found.findings[0].severity == "warning"


@pytest.mark.parametrize(("factor", "odd"), [(1e3, True), (20.0, False), (1 / 200, False), (1e-4, True)])
def test_a_matrix_of_another_size_than_the_rest_is_found(tokenizer: Any, factor: float, odd: bool) -> None:
    model = tiny_model(tokenizer)
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight *= factor
    expected = {"wildly_scaled_tensors": ["model.layers.1.mlp.gate_proj.weight"]} if odd else {}
    assert kinds(check_model_init(model)) == expected


# ---- what it says ----
