"""What a look at the data and the weights finds before the first step, and what it leaves alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TRAINERS, tiny_model
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model

from self_healing.healers import inspection as model_checks
from self_healing.healers import inspection as row_reading
from self_healing.healers.inspection import Finding, Inspection, check_data_quality, check_model_init


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


def test_a_row_of_the_end_token_alone_is_empty() -> None:
    assert kinds(check_data_quality(rows_with({3: {"input_ids": [1], "labels": [1]}}))) == {"empty_rows": [3]}


@pytest.mark.parametrize("column", ["prompt_ids", "chosen_ids", "rejected_ids", "completion_ids"])
def test_each_part_of_a_row_needs_tokens(column: str) -> None:
    assert kinds(check_data_quality([{column: [1, 2]}, {column: []}])) == {"empty_rows": [1]}


@pytest.mark.parametrize("column", ["text", "prompt", "completion", "chosen", "rejected"])
@pytest.mark.parametrize("blank", ["", " \n\t", []])
def test_text_that_is_blank_is_found(column: str, blank: Any) -> None:
    assert kinds(check_data_quality([{column: "words"}, {column: blank}])) == {"empty_rows": [1]}


def test_a_column_that_only_other_rows_use_is_not_empty() -> None:
    assert check_data_quality([{"text": "words", "messages": None}, {"text": None, "messages": [{"a": "b"}]}]).clean


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


def test_labels_outside_the_vocabulary_are_found_and_masked_ones_are_not() -> None:
    bad = rows_with({1: {"labels": [-100, 4, 5, 6]}, 2: {"labels": [-100, 4, 100, 6]}})
    assert kinds(check_data_quality(bad, vocabulary=100)) == {"ids_out_of_vocabulary": [2]}


def test_ids_are_only_judged_when_the_vocabulary_is_known() -> None:
    assert check_data_quality(rows_with({9: {"input_ids": [4, 10**6, -5, 6]}})).clean


def test_positions_and_classes_are_no_token_ids() -> None:
    rows = [{"input_ids": [n], "position_ids": [500], "user_id": 500, "labels": 500} for n in range(5)]
    assert check_data_quality(rows, vocabulary=100).clean


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


def test_a_missing_number_is_not_a_nan() -> None:
    assert check_data_quality(Dataset.from_list(rows_with({6: {"score": 0.5}, 7: {"score": None}}))).clean


def test_numbers_are_checked_in_rows_without_names() -> None:
    pairs = [(torch.tensor([1.0, number]), number) for number in range(4)] + [(torch.tensor([float("nan"), 0.0]), 9)]
    assert kinds(check_data_quality(pairs)) == {"nonfinite_floats": [4]}


def test_repeats_are_counted_once_for_each_row_after_the_first() -> None:
    found = check_data_quality([row(n % 4) for n in range(12)])
    (repeats,) = found.findings
    assert (repeats.kind, repeats.count, repeats.examples) == ("duplicates", 8, [4, 5, 6, 7, 8])
    assert repeats.severity == "warning"


def test_fewer_repeats_than_one_in_a_hundred_are_not_worth_a_word() -> None:
    assert check_data_quality([row(n) for n in range(200)] + [row(0)]).clean
    assert kinds(check_data_quality([row(n) for n in range(98)] + [row(0)])) == {"duplicates": [98]}


def test_rows_that_differ_only_in_structure_are_not_repeats() -> None:
    assert check_data_quality(
        [{"a": [[1], [2]]}, {"a": [[1, 2]]}, {"a": [1, 2]}, {"a": "12"}, {"a": ["1", "2"]}]
    ).clean


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


def test_in_a_batch_that_raises_the_other_rows_are_still_checked() -> None:
    def transform(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if 20 in batch["number"]:
            raise ValueError("no such file")
        return {"input_ids": [[] if number == 21 else [number, 1] for number in batch["number"]]}

    dataset = Dataset.from_dict({"number": list(range(40))}).with_transform(transform)
    assert kinds(check_data_quality(dataset)) == {"unreadable_rows": [20], "empty_rows": [21]}


def test_five_rows_are_named_and_the_others_counted() -> None:
    (found,) = check_data_quality(rows_with({n: {"labels": [-100] * 4} for n in range(1, 9)})).findings
    assert found.examples == [1, 2, 3, 4, 5]
    assert found.count == 8
    assert "8 of 12 rows (66.67%)" in found.message
    assert "rows 1, 2, 3, 4, 5 and 3 more" in found.message


# ---- data: how it is read ----


@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_the_format_of_a_dataset_does_not_matter(form: str | None) -> None:
    bad = rows_with({2: {"labels": [-100] * 4}, 3: {"input_ids": [100, 4, 5, 6]}})
    found = check_data_quality(Dataset.from_list(bad).with_format(form), vocabulary=100)
    assert kinds(found) == {"all_labels_masked": [2], "ids_out_of_vocabulary": [3]}


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


def test_a_sample_does_not_keep_step_with_the_data() -> None:
    dataset = Recording(100_000)
    check_data_quality(dataset, max_rows=1000)
    assert len({index % 100 for index in dataset.read}) > 90


def test_slow_storage_ends_the_check_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_reading, "_TIME_LIMIT", 0.0)
    dataset = Recording(10_000)
    assert 0 < check_data_quality(dataset).looked_at == len(dataset.read) < 100


def test_whenever_the_check_ends_it_has_seen_rows_from_everywhere() -> None:
    dataset = Recording(8_000)
    check_data_quality(dataset)
    assert sorted(dataset.read) == list(range(8_000))
    assert {index // 1000 for index in dataset.read[:1024]} == set(range(8))


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


def test_of_an_endless_stream_only_the_first_rows_are_read() -> None:
    stream = Stream()
    assert check_data_quality(stream).looked_at == 1000 == stream.given
    assert check_data_quality(stream, max_rows=7).looked_at == 7
    assert stream.closed == 2


def test_an_iterator_that_somebody_is_reading_stays_where_it_is() -> None:
    stream = Stream()
    reading = iter(stream)
    assert next(reading) == row(0)
    check_data_quality(stream, max_rows=5)
    assert next(reading) == row(1)


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


@pytest.mark.parametrize("numbers", [{"max_rows": 0}, {"vocabulary": -1}, {"max_length": 0}])
def test_numbers_that_make_no_sense_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        check_data_quality([row(0)], **numbers)


class Random(Recording):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return row(index, noise=[random.random(), float(np.random.rand()), float(torch.rand(()))])


class RandomStream(Stream):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            for number in range(10**6):
                yield Random(1)[number]
        finally:
            torch.rand(1)


@pytest.mark.parametrize("dataset", [Random(20), RandomStream()], ids=["indexed", "streamed"])
def test_the_random_states_stay_as_they_are(dataset: Any) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    check_data_quality(dataset, max_rows=20)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


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


def test_an_adapter_that_has_barely_learned_is_clean(tokenizer: Any) -> None:
    model = get_peft_model(tiny_model(tokenizer), LoraConfig(target_modules=["q_proj"], r=4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1e-9)
    assert check_model_init(model).clean


def test_an_adapter_of_which_both_factors_are_zero_is_found(tokenizer: Any) -> None:
    model = get_peft_model(tiny_model(tokenizer), LoraConfig(target_modules=["q_proj"], r=4))
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    torch.nn.init.zeros_(layer.lora_A["default"].weight)
    (found,) = check_model_init(model).findings
    assert found.kind == "all_zero_tensors"
    assert [name.split(".q_proj.")[1] for name in map(str, found.examples)] == [
        "lora_A.default.weight",
        "lora_B.default.weight",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_common_beginnings_of_wide_layers_are_clean(dtype: torch.dtype) -> None:
    wide = torch.nn.Sequential(torch.nn.Embedding(16, 4096), *(torch.nn.Linear(4096, 16) for _ in range(4)))
    assert check_model_init(wide.to(dtype)).clean


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


def test_in_buffers_infinity_is_a_mask_and_nan_is_not(tokenizer: Any) -> None:
    model = tiny_model(tokenizer)
    model.register_buffer("causal", torch.full((4, 4), float("-inf")).triu(1))
    assert check_model_init(model).clean
    model.register_buffer("cache", torch.tensor([0.0, float("nan")]))
    assert kinds(check_model_init(model)) == {"nonfinite_tensors": ["cache"]}


def test_matrices_of_zeros_are_found(tokenizer: Any) -> None:
    model = tiny_model(tokenizer)
    torch.nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    found = check_model_init(model)
    assert kinds(found) == {"all_zero_tensors": ["model.layers.0.self_attn.o_proj.weight"]}
    assert found.findings[0].severity == "warning"


def test_zeros_that_are_a_usual_beginning_are_clean(tokenizer: Any) -> None:
    model = tiny_model(tokenizer)
    model.cls_token = torch.nn.Parameter(torch.zeros(1, 1, 32))
    model.relative_position_bias_table = torch.nn.Parameter(torch.zeros(9, 2))
    model.scores = torch.nn.Parameter(torch.zeros(8))
    assert check_model_init(model).clean


@pytest.mark.parametrize(("factor", "odd"), [(1e3, True), (20.0, False), (1 / 200, False), (1e-4, True)])
def test_a_matrix_of_another_size_than_the_rest_is_found(tokenizer: Any, factor: float, odd: bool) -> None:
    model = tiny_model(tokenizer)
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight *= factor
    expected = {"wildly_scaled_tensors": ["model.layers.1.mlp.gate_proj.weight"]} if odd else {}
    assert kinds(check_model_init(model)) == expected


def test_embeddings_may_be_larger_but_not_by_any_amount(tokenizer: Any) -> None:
    model = tiny_model(tokenizer)
    with torch.no_grad():
        model.model.embed_tokens.weight *= 300
    assert check_model_init(model).clean
    with torch.no_grad():
        model.model.embed_tokens.weight *= 10
    assert kinds(check_model_init(model)) == {"wildly_scaled_tensors": ["model.embed_tokens.weight"]}


def test_one_huge_value_is_found_in_a_model_too_small_to_compare(tokenizer: Any) -> None:
    model = torch.nn.Linear(300, 300)
    with torch.no_grad():
        model.weight[0, 0] = 1.1e4
    assert kinds(check_model_init(model)) == {"wildly_scaled_tensors": ["weight"]}


def test_what_cannot_be_judged_is_left_out() -> None:
    model = torch.nn.ParameterDict(
        {
            "quantised": torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False),
            "eight_bits": torch.nn.Parameter(torch.zeros(8, 8).to(torch.float8_e4m3fn), requires_grad=False),
            "elsewhere": torch.nn.Parameter(torch.empty(8, 8, device="meta")),
            "other_rank": torch.nn.Parameter(torch.empty(0, 8)),
        }
    )
    found = check_model_init(model)
    assert found.clean
    assert found.looked_at == 0


def test_a_model_is_read_and_not_changed(tokenizer: Any) -> None:
    model = tiny_model(tokenizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_model_init(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_parts_of_a_large_tensor_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "_ELEMENTS_AT_ONCE", 50)
    tensor = torch.randn(33, 7)
    tensor[30, 2] = -9.0
    largest, norm = model_checks._largest_and_norm(tensor)
    assert largest == 9.0
    assert norm == pytest.approx(float(tensor.norm()))


# ---- what it says ----


def test_it_says_so_when_nothing_is_wrong() -> None:
    assert str(check_data_quality([row(0)])) == "1 row looked at: nothing wrong."


def test_errors_come_before_warnings_in_what_a_person_reads() -> None:
    lines = str(check_data_quality([row(0), row(0), row(1, labels=[-100] * 4)])).splitlines()
    assert lines[0] == "3 rows looked at:"
    assert lines[1].startswith("  error: 1 of 3 rows (33.33%) has no label to learn from")
    assert lines[2].startswith("  warning: 1 of 3 rows (33.33%) has exactly the content of an earlier row: row 1.")


def test_it_can_be_written_as_json() -> None:
    found = check_data_quality([row(0), row(1, labels=[-100] * 4)])
    read = json.loads(json.dumps(found.to_dict()))
    assert (read["clean"], read["looked_at"]) == (False, 2)
    assert Finding(**read["findings"][0]) == found.findings[0]
