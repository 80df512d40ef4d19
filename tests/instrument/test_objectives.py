"""How batches fall into rows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from self_healing.hf.batches import content_hash, layout_of, select_rows
from self_healing.hf.objective import Objective


SFT = Objective("sft")
DPO = Objective("dpo", paired=True)

sequences = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=2, max_size=5)


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    return DataCollatorForLanguageModeling(pad_token_id=0)([{"input_ids": row} for row in rows])


def flattened(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([{"input_ids": row} for row in rows])


@given(sequences, st.data())
def test_segments_that_stay_are_what_the_collator_makes_of_them_alone(
    rows: list[list[int]], data: st.DataObject
) -> None:
    keep = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, unique=True).map(sorted))
    batch = flattened(rows)
    layout = layout_of(batch, SFT)
    assert layout is not None
    assert (layout.kind, layout.rows) == ("segments", len(rows))
    selected, expected = select_rows(batch, layout, keep), flattened([rows[row] for row in keep])
    assert selected.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(selected[key], value), key
            assert selected[key].dtype == value.dtype, key
        else:
            assert selected[key] == value, key


@given(sequences)
def test_a_row_has_one_hash_whatever_it_is_padded_to(rows: list[list[int]]) -> None:
    together, alone = padded(rows), padded(rows[:1])
    layout, single = layout_of(together, SFT), layout_of(alone, SFT)
    assert layout is not None
    assert single is not None
    assert content_hash(together, layout, 0) == content_hash(alone, single, 0)
    if rows[0] != rows[1]:
        assert content_hash(together, layout, 0) != content_hash(together, layout, 1)


def test_a_pair_is_a_chosen_row_and_its_rejected_one() -> None:
    batch = {
        "input_ids": torch.arange(12).view(6, 2),
        "ref_chosen_logps": torch.arange(3.0),
        "beta": torch.tensor(0.1),
    }
    layout = layout_of(batch, DPO)
    assert layout is not None
    assert (layout.kind, layout.rows) == ("pairs", 3)
    selected = select_rows(batch, layout, [0, 2])
    assert selected["input_ids"].tolist() == [[0, 1], [4, 5], [6, 7], [10, 11]]
    assert selected["ref_chosen_logps"].tolist() == [0.0, 2.0]
    assert selected["beta"] is batch["beta"]


def test_images_laid_out_by_patch_belong_to_no_row() -> None:
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "pixel_values": torch.zeros(17, 8)}
    assert layout_of(batch, SFT) is None


def test_what_is_not_a_batch_has_no_rows() -> None:
    assert layout_of([{"prompt": "a"}], SFT) is None
    assert layout_of({"text": "a"}, SFT) is None
    assert layout_of({"input_ids": torch.zeros(3, 2)}, DPO) is None
