"""Copies of a CUDA device's state: nobody waits for them, and what is written to meanwhile is noticed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from self_healing.hf.state import LiveState, Search
from self_healing.rollback.host_memory import TRANSFERS, Transfer
from self_healing.rollback.ring import SnapshotRing
from self_healing.rollback.snapshots import size_to_be


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Slow(Transfer):
    """A copy that begins half a second late."""

    def __init__(self, device: torch.device, work: Callable[[], None]) -> None:
        def late() -> None:
            torch.cuda._sleep(10**9)
            work()

        super().__init__(device, late)


@pytest.fixture
def live() -> Iterator[LiveState]:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 512, device="cuda")).sum().backward()
    optimizer.step()
    yield LiveState({name: each.detach() for name, each in model.named_parameters()}, {}, optimizer, {})
    torch.cuda.synchronize()


@pytest.fixture
def never_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_the_training_thread_waits_for_no_copy(live: LiveState, request: pytest.FixtureRequest) -> None:
    ring = SnapshotRing()
    ring.take(live, 1, {})
    ring.promote()
    request.getfixturevalue("never_waiting")
    snapshot = ring.take(live, 2, {})
    ring.join()
    assert snapshot.nonfinite() == []
    assert snapshot.held_up() < 1.0


@pytest.mark.parametrize("joined", [False, True])
def test_weights_written_to_without_a_trace_while_they_are_copied(
    live: LiveState, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRANSFERS, "cuda", Slow)
    ring, weight = SnapshotRing(), live.parameters["0.weight"]
    snapshot = ring.take(live, 1, {})
    if joined:
        ring.join()
    weight.data.mul_(2)
    assert snapshot.nonfinite() == []
    assert snapshot.torn is not joined
    # Asking for it orders later work after it, too.
    assert snapshot.held_up() > 0.1


def test_a_thread_pins_the_memory_of_the_next_snapshot(live: LiveState) -> None:
    ring = SnapshotRing()
    ring.take(live, 1, {})
    ring.promote()
    ring.reserve(size_to_be(live), torch.device("cuda", torch.cuda.current_device()))
    assert ring._reserved is not None
    block = ring._reserved[0].result()
    snapshot = ring.take(live, 2, {})
    assert snapshot.block is block
    assert all(kept.host.is_pinned() for _, kept in snapshot.copies())


def test_a_search_waits_once_for_each_dtype_when_it_is_asked(live: LiveState, never_waiting: None) -> None:
    search = Search()
    for name, each in live.parameters.items():
        search.add(name, each, inf=True)
        search.add(f"half of {name}", each.bfloat16().fill_(-math.inf), inf=False)
    torch.cuda.set_sync_debug_mode("default")
    live.parameters["3.bias"][7] = math.nan
    assert search.nonfinite() == ["3.bias"]
