"""What states that can be gone back to cost: in calls, copies, waits and bytes, not by a clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from self_healing.hf import state
from self_healing.hf.objective import GENERIC
from self_healing.hf.state import LiveState, Search
from self_healing.hf.step import Control, Recording
from self_healing.rollback import ring as ring_module
from self_healing.rollback.ring import KeptBatches, SnapshotRing
from self_healing.system.random_state import RandomState


CPU = torch.device("cpu")


class Operations(TorchDispatchMode):
    """Counts operations of the thread that enters it, and how many tensors are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        self.seen[name] += 1
        self.copied += len(args[0]) if name == "_foreach_copy_" else name == "copy_"
        return func(*args, **(kwargs or {}))


def model_and_optimizer() -> tuple[torch.nn.Module, LiveState]:
    model = torch.nn.Sequential(*(torch.nn.Linear(80, 80) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 80)).sum().backward()
    optimizer.step()
    return model, LiveState({name: each.detach() for name, each in model.named_parameters()}, {}, optimizer, {})


def test_small_tensors_are_copied_together_and_nothing_is_searched_by_the_training_thread() -> None:
    _, live = model_and_optimizer()
    with Operations() as operations:
        snapshot = SnapshotRing().take(live, 1, {})
    # 20 weights with two moments each; their biases and step counters in one piece.
    assert operations.copied == 3 * 20 + 1
    assert operations.seen["aminmax"] == operations.seen["_local_scalar_dense"] == 0
    assert snapshot.nonfinite() == []
    assert {name for name, _ in snapshot.copies()} >= {"19.bias", "optimizer:0.step", "optimizer:39.exp_avg"}


# ---- the search on a device ----


def test_a_device_is_searched_in_one_launch_and_one_wait_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "ONE_BY_ONE", set())
    search = Search()
    with Operations() as operations:
        for number in range(40):
            search.add(f"weight {number}", torch.full((3, 2), float(number)), inf=True)
            search.add(f"half {number}", torch.zeros(4, dtype=torch.bfloat16).fill_(-torch.inf), inf=False)
        search.add("poisoned", torch.tensor([torch.nan, -torch.inf]), inf=False)
        search.add("overflown", torch.tensor([[1.0, torch.inf]]).t(), inf=True)
        search.add("empty", torch.empty(0), inf=True)
        search.add("integers", torch.arange(3), inf=True)
        search.add("8-bit", torch.tensor([torch.nan]).to(torch.float8_e4m3fn), inf=True)
        assert search.nonfinite() == ["poisoned", "overflown", "8-bit"]
    assert operations.seen["_foreach_norm"] == 2
    assert operations.seen["aminmax"] == 1, "8-bit floats alone"


# ---- the tape of steps ----


class MadeUpStep:
    """A step whose batch takes so many bytes, or that cannot be applied again."""

    objective = GENERIC

    def __init__(self, step: int, nbytes: int = 10, recordable: bool = True) -> None:
        self.step, self.recordable = step, recordable
        self.calls: list[Any] = [torch.zeros(nbytes, dtype=torch.uint8)]

    def recording(self, control: Control) -> Recording | None:
        return Recording(self.step, control, RandomState.capture(), [], 1.0, []) if self.recordable else None


@pytest.mark.parametrize("gap", [{"recordable": False}, {"nbytes": 100}], ids=["cannot be applied", "is too large"])
def test_nothing_is_recorded_behind_a_gap_until_the_next_snapshot(
    gap: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_module, "_LARGEST_TAPE", 50)
    batches = KeptBatches()

    def keep(step: Any) -> list[int]:
        batches.keep(step, 1.0, early=False)
        return [each.step for each in batches.tape]

    assert keep(MadeUpStep(0)) == [], "there is nothing to apply it to"
    batches.record()
    assert keep(MadeUpStep(1)) == [1]
    assert keep(MadeUpStep(2)) == [1, 2]
    assert keep(MadeUpStep(3, **gap)) == []
    assert keep(MadeUpStep(4)) == []
    batches.record()
    for step in range(5, 10):
        keep(MadeUpStep(step))
    assert batches.recorded(range(5, 10)) is not None
    batches.keep_only(range(8, 10))
    assert keep(MadeUpStep(10)) == [8, 9, 10]


def test_batches_are_given_up_where_memory_runs_out_and_kept_again_later() -> None:
    batches = KeptBatches()
    batches.record()
    batches.keep(MadeUpStep(0), 1.0, early=True)
    assert batches.free(of_host=True, device=CPU, snapshots=[]) == 10
    assert not batches.tape
    assert not batches.first_steps
    batches.record()
    batches.keep(MadeUpStep(1), 1.0, early=False)
    assert batches.recorded(range(1, 2)) is not None
