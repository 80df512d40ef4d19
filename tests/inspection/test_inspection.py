"""What a look at the data and the weights finds before the first step, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TRAINERS, slowly, tiny_model
from datasets import IterableDataset
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

MASKED = {"labels": [-100] * 4}
NAN = float("nan")


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (rows_with({2: {"input_ids": [], "labels": []}}), {"empty_rows": [2]}),
        ([{"chosen_ids": [1, 2]}, {"chosen_ids": []}], {"empty_rows": [1]}),
        ([{"prompt": "words"}, {"prompt": " \n\t"}], {"empty_rows": [1]}),
        (rows_with({5: MASKED}), {"all_labels_masked": [5]}),
        ([{"input_ids": [1], "completion_mask": [each]} for each in (1, 0)], {"all_labels_masked": [1]}),
        ([{"prompt_ids": [1] * (2 + n), "chosen_ids": [2]} for n in range(3)], {"all_labels_masked": [2]}),
        (rows_with({9: {"KL_completion_ids": [4, 100, 5, 6]}}), {"ids_out_of_vocabulary": [9]}),
        (rows_with({9: {"input_ids": [4, -1, 5, 6]}}), {"ids_out_of_vocabulary": [9]}),
        (rows_with({6: {"advantages": [[0.5], [1.0, float("-inf")]]}}), {"nonfinite_floats": [6]}),
        (rows_with({6: {"advantages": np.array([0.5, np.nan])}}), {"nonfinite_floats": [6]}),
        (rows_with({6: {"advantages": torch.tensor([NAN], dtype=torch.bfloat16)}}), {"nonfinite_floats": [6]}),
        (rows_with({6: {"advantages": {"inner": [None, NAN]}}}), {"nonfinite_floats": [6]}),
    ],
)
def test_what_is_wrong_with_a_row_is_found(rows: list[dict[str, Any]], found: dict[str, list[int]]) -> None:
    assert kinds(check_data_quality(rows, vocabulary=100, max_length=4)) == found


def test_a_completion_behind_max_length_is_found() -> None:
    late = {"labels": [-100, -100, -100, 6]}
    assert check_data_quality(rows_with({4: late})).clean
    assert check_data_quality(rows_with({4: late}), max_length=4).clean
    found = check_data_quality(rows_with({4: late}), max_length=3)
    assert kinds(found) == {"all_labels_masked": [4]}
    assert "max_length" in found.findings[0].message


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


def test_an_iterator_is_refused_rather_than_consumed() -> None:
    rows = iter([row(0), row(1)])
    with pytest.raises(TypeError, match="would be missing"):
        check_data_quality(rows)
    assert next(rows) == row(0)


@pytest.mark.parametrize("name", ["SFTTrainer", "DPOTrainer", *slowly("Trainer", "KTOTrainer", "RewardTrainer")])
def test_what_healthy_trainers_train_on_is_clean_but_for_repeats(tmp_path: Path, tokenizer: Any, name: str) -> None:
    trainer = TRAINERS[name](tmp_path / "run", tokenizer)
    found = check_data_quality(trainer.train_dataset, vocabulary=len(tokenizer), max_length=64)
    assert found.looked_at == len(trainer.train_dataset) == 64
    assert set(kinds(found)) <= {"duplicates"}


# ---- models ----


@pytest.mark.parametrize("kind", [{}, {"use_dora": True}, {"init_lora_weights": False}])
def test_a_healthy_model_with_a_new_adapter_is_clean(tokenizer: Any, kind: dict[str, Any]) -> None:
    settings = LoraConfig(target_modules=["q_proj", "down_proj", *([] if kind else ["embed_tokens"])], r=4, **kind)
    found = check_model_init(get_peft_model(tiny_model(tokenizer), settings))
    assert found.clean, str(found)


def test_weights_that_are_not_finite_or_all_zero_are_found(tokenizer: Any) -> None:
    model = tiny_model(tokenizer).to(torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
        model.model.layers[1].mlp.up_proj.weight[2, 2] = float("inf")
    torch.nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    found = check_model_init(model)
    assert kinds(found) == {
        "nonfinite_tensors": ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"],
        "all_zero_tensors": ["model.layers.0.self_attn.o_proj.weight"],
    }
    assert [each.severity for each in found.findings] == ["error", "warning"]


@pytest.mark.parametrize(("factor", "odd"), [(1e3, True), (20.0, False), (1 / 200, False), (1e-4, True)])
def test_a_matrix_of_another_size_than_the_rest_is_found(tokenizer: Any, factor: float, odd: bool) -> None:
    model = tiny_model(tokenizer)
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight *= factor
    expected = {"wildly_scaled_tensors": ["model.layers.1.mlp.gate_proj.weight"]} if odd else {}
    assert kinds(check_model_init(model)) == expected
