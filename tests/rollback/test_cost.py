"""What states that can be gone back to cost: in calls, copies, waits and bytes, not by a clock."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import sft_trainer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from self_healing import SelfHealingCallback
from self_healing.hf import state
from self_healing.hf.objective import GENERIC
from self_healing.hf.state import LiveState, Search
from self_healing.hf.step import Control, Recording
from self_healing.rollback import ring as ring_module
from self_healing.rollback.host_memory import TRANSFERS, HostBlock
from self_healing.rollback.ring import KeptBatches, SnapshotRing
from self_healing.rollback.snapshots import size_of, size_to_be
from self_healing.rollback.trusted import TrustedStates
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


def test_places_in_host_memory_are_kept_while_the_tensors_are_of_the_same_kinds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, live = model_and_optimizer()
    ring = SnapshotRing()
    ring.take(live, 1, {})
    monkeypatch.setattr("self_healing.rollback.snapshots.lay_out", lambda *_: pytest.fail("made anew"))
    with torch.no_grad():
        model[0].bias.fill_(torch.nan)
    assert ring.take(live, 2, {}).nonfinite() == ["0.bias"]


# ---- host memory ----


def sparse_model() -> tuple[torch.nn.Module, LiveState]:
    """One whose optimizer has made no state yet, with all that is copied: odd sizes, buffers, settings as tensors."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 71))
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-6)
    optimizer.param_groups[0]["kept"] = torch.ones(3)
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    model.register_buffer("table", torch.ones(11))
    scaler, loss_scaler = {"_scale": torch.ones(1)}, {"cur_scale": torch.ones(1)}
    return model, LiveState(parameters, dict(model.named_buffers()), optimizer, scaler, loss_scaler=loss_scaler)


def step(model: torch.nn.Module, live: LiveState) -> None:
    model(torch.ones(2, next(model.parameters()).shape[1])).sum().backward()
    assert live.optimizer is not None
    live.optimizer.step()


def test_memory_taken_by_a_thread_before_there_is_a_state_of_the_optimizer_is_that_of_the_next_snapshot() -> None:
    model, live = sparse_model()
    ring = SnapshotRing()
    first = ring.take(live, 0, {})
    assert first.nbytes == size_of(live)
    ring.begin_with_candidate()
    ring.reserve(size_to_be(live), CPU)
    assert ring._reserved is not None
    block = ring._reserved[0].result()
    step(model, live)
    second = ring.take(live, 1, {})
    assert second.block is block is not first.block
    assert second.needed == size_of(live) <= block.nbytes


def test_what_a_subclass_of_adam_will_keep_is_not_known_before_it_does() -> None:
    class Lookahead(torch.optim.Adam):
        """With defaults of its own, among which is no `amsgrad`."""

        def __init__(self, params: Any) -> None:
            torch.optim.Optimizer.__init__(self, params, {"lr": 1e-3})

    model, live = sparse_model()
    live = dataclasses.replace(live, optimizer=Lookahead(model.parameters()))
    assert size_to_be(live) is None


def test_memory_that_has_become_too_small_is_given_back() -> None:
    model, live = sparse_model()
    ring = SnapshotRing()
    ring.take(live, 0, {})
    ring.begin_with_candidate()
    step(model, live)
    newest = ring.take(live, 1, {})
    ring.promote()
    ring.forget_initial()
    assert ring.snapshots() == [newest]
    assert ring.lacks_room, "a thread takes that of the next one"
    ring.distrust(newest)
    assert ring.fits(live)
    assert ring.take(live, 2, {}) is newest, "that is large enough, and used again"
    ring.discard()
    live.parameters["more"] = torch.ones(100)
    ring.fits(live)
    assert ring.snapshots() == []


class Stuck:
    """A copy that does not become complete, on a device that is lost."""

    begun: ClassVar[list[Stuck]] = []

    def __init__(self, device: torch.device, work: Callable[[], None]) -> None:
        self.over = threading.Event()
        Stuck.begun.append(self)

    def wait(self) -> None:
        assert self.over.wait(60)

    def join(self) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_nobody_waits_for_a_copy_that_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSFERS, "cpu", Stuck)
    _, live = model_and_optimizer()
    ring = SnapshotRing()
    gone = weakref.ref(ring.take(live, 0, {}).block)
    ring.discard()
    ring.release()
    assert ring.snapshots() == []
    assert gone() is not None, "it may still be written to"
    searched = list[str]()
    monkeypatch.setattr(Search, "add", lambda self, name, *_, **__: searched.append(name))
    Stuck.begun[-1].over.set()
    for _ in range(100):
        if gone() is None:
            break
        time.sleep(0.05)
    assert gone() is None
    assert not searched


class Held:
    """Takes the first large block of host memory in a run when it is told to, and fails or not."""

    def __init__(self, error: Exception | None = None) -> None:
        self.told, self.error, self.taken = threading.Event(), error, 0

    def take(self, device: torch.device, nbytes: int) -> HostBlock:
        self.taken += 1
        if self.taken == 2:
            # After that of the state the run begins with.
            assert self.told.wait(60)
            if self.error is not None:
                raise self.error
        return HostBlock(nbytes)


@pytest.mark.parametrize("error", [None, MemoryError("no memory to pin")], ids=["pinned", "failed"])
def test_the_first_snapshot_waits_a_step_for_memory_that_a_thread_pins(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    held, healing, taken = Held(error), SelfHealingCallback({"snapshot_interval": 2}), list[int]()
    monkeypatch.setattr(ring_module, "_new_block_on", held.take)

    class Telling(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # The callback before this one has just been asked for a snapshot.
            assert healing.run is not None
            candidate = healing.run.rollback.ring.candidate
            taken.extend([] if candidate is None else [candidate.step])
            assert healing.run.rollback.ring._reserved is not None or taken, "taken from the start"
            if state.global_step == 4:
                held.told.set()
                reserved = healing.run.rollback.ring._reserved
                assert reserved is not None
                futures.wait([reserved[0]])

    monkeypatch.setattr(TrustedStates, "_may_wait", True)
    sft_trainer(tmp_path, tokenizer, callbacks=[healing, Telling()], max_steps=6).train()
    assert taken[0] == 5
    assert held.taken == 2


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
