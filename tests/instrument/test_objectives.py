"""How batches fall into rows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from self_healing.hf.batches import layout_of, select_rows
from self_healing.hf.objective import Objective


SFT = Objective("sft")

sequences = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=2, max_size=5)


def flattened(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([{"input_ids": row} for row in rows])


@settings(deadline=None)
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


def test_images_laid_out_by_patch_belong_to_no_row() -> None:
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "pixel_values": torch.zeros(17, 8)}
    assert layout_of(batch, SFT) is None
