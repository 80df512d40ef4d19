"""Copies of nested state: what is in them, where it came from, how it is put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from self_healing.hf.state import LiveState
from self_healing.rollback.host_memory import AssembledCopy, StateWriter, TensorCopy, leaves, put_back, size_of


def copied(tensor: torch.Tensor) -> TensorCopy:
    return TensorCopy(tensor, tensor.device, False)


def test_leaves_are_named_by_their_place() -> None:
    tensor = torch.ones(2)
    saved = {
        "exp_avg": copied(tensor),
        "step": 3,
        "history": [copied(tensor), {"inner": copied(tensor)}],
        "codes": AssembledCopy(None, {"scale": copied(tensor)}, {}, None, tensor.size(), tensor.stride()),
    }
    names = ["exp_avg", "history[0]", "history[1].inner", "codes.scale"]
    assert [name for name, _ in leaves("", saved)] == names
    assert [name for name, _ in leaves("buffer:", saved)] == [f"buffer:{name}" for name in names]
    assert [name for name, _ in leaves("optimizer:0.", saved)] == [f"optimizer:0.{name}" for name in names]


def test_only_tensors_take_memory() -> None:
    weight = torch.ones(1000)
    one = size_of(LiveState({"weight": weight}, {}, None, {}))
    assert one >= 4000
    optimizer: Any = SimpleNamespace(
        state={weight: {"exp_avg": weight, "step": 3, "all": [weight, "a"], "name": None}}
    )
    assert size_of(LiveState({"weight": weight}, {}, optimizer, {})) == 3 * one


def test_a_copy_knows_where_it_came_from() -> None:
    writer = StateWriter({})
    (kept,) = writer.save([torch.ones(2)], ("weight",), may_be_infinite=True)
    assert kept.device == torch.device("cpu")
    assert kept.may_be_infinite
    assert [each is kept for each, _ in writer.pending()] == [True]
    assert writer.pending() == []


def test_what_is_there_is_written_to_and_what_is_not_is_made_again() -> None:
    saved = {
        "kept": copied(torch.ones(2)),
        "gone": copied(torch.ones(3)),
        "step": 3,
        "pair": (copied(torch.ones(1)), 4),
    }
    there = torch.zeros(2)
    live = {"kept": there, "new": torch.zeros(1), "step": 9, "pair": (torch.zeros(5), 9)}
    back = put_back(live, saved)
    assert back is live
    assert back["kept"] is there
    assert torch.equal(there, torch.ones(2))
    assert torch.equal(back["gone"], torch.ones(3))
    assert back["gone"] is not saved["gone"].host  # type: ignore[union-attr]
    assert "new" not in back
    assert back["step"] == 3
    assert torch.equal(back["pair"][0], torch.ones(1))
    assert back["pair"][1] == 4
