"""States in host memory: taken, trusted, and put back into the very tensors they came from."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Adafactor

from self_healing.hf.state import LiveState, live_state_of
from self_healing.rollback.host_memory import HostBlock, copies_of, size_of
from self_healing.rollback.ring import SnapshotRing


class NestedState(torch.optim.Optimizer):
    """Momentum kept the way 8-bit optimizers keep it: integers and scales in a dictionary of their own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["moment"] = {"codes": torch.zeros_like(p, dtype=torch.int8), "scale": torch.zeros(())}
                    state["history"] = [torch.zeros(())]
                moment = state["moment"]
                average = 0.9 * moment["codes"] * moment["scale"] + p.grad
                moment["scale"].copy_(average.abs().max() / 127)
                moment["codes"].copy_((average / moment["scale"]).round())
                state["step"] += 1
                state["history"][0].add_(1)
                p.sub_(group["lr"] * moment["codes"] * moment["scale"])


class ScheduleFree(torch.optim.Optimizer):
    """Keeps its averaging in the parameter groups, and other weights for evaluation, as schedulefree does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0, "weight_sum": 0.0, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("optimizer is not in train mode")
            group["k"] += 1
            group["weight_sum"] += group["lr"]
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("z", p.clone()).sub_(p.grad, alpha=group["lr"])
                    p.lerp_(self.state[p]["z"], 1 / group["k"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adamw-foreach-amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True, amsgrad=True),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
    "adafactor": lambda params: Adafactor(params, lr=1e-2, relative_step=False, scale_parameter=False),
    "8-bit-style": NestedState,
    "schedule-free": ScheduleFree,
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        batch, target = torch.randn(16, 6, generator=generator), torch.randn(16, 3, generator=generator)
        loss = (model(batch) - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def live(model: nn.Module, optimizer: torch.optim.Optimizer) -> LiveState:
    parameters = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    return LiveState(parameters, dict(model.named_buffers()), optimizer, {})


def trusted(ring: SnapshotRing, state: LiveState, step: int) -> Any:
    snapshot = ring.take(state, step, {})
    ring.promote()
    return snapshot


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 3], ids=["before the first step", "in mid-run"])
def test_training_goes_on_from_a_restored_state_as_it_did_the_first_time(name: str, steps_before: int) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, steps_before, seed=1)
    ring = SnapshotRing()
    snapshot = trusted(ring, live(model, optimizer), steps_before)

    first = train(model, optimizer, 4, seed=2)
    train(model, optimizer, 3, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    ring.restore(snapshot, live(model, optimizer))

    assert train(model, optimizer, 4, seed=2) == first


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "adafactor", "8-bit-style"])
def test_restoring_keeps_the_identity_of_every_tensor(name: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 2, seed=1)
    ring = SnapshotRing()
    snapshot = trusted(ring, live(model, optimizer), 2)

    def tensors(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return [tensor for inner in values for tensor in tensors(inner)]

    train(model, optimizer, 2, seed=2)
    before = [*model.parameters(), *model.buffers(), *tensors(dict(optimizer.state))]
    places = [tensor.data_ptr() for tensor in before]
    ring.restore(snapshot, live(model, optimizer))

    after = [*model.parameters(), *model.buffers(), *tensors(dict(optimizer.state))]
    assert all(one is other for one, other in zip(after, before, strict=True))
    assert [tensor.data_ptr() for tensor in after] == places


def test_the_schedule_goes_on_where_it_is() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, eps=1e-6)
    ring = SnapshotRing()
    snapshot = trusted(ring, live(model, optimizer), 0)
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    optimizer.param_groups[0]["eps"] = 0.5
    ring.restore(snapshot, live(model, optimizer))

    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.5)
    assert optimizer.param_groups[0]["eps"] == 1e-6


def test_of_a_lora_model_only_what_is_trained_is_copied(tokenizer: Any) -> None:
    base = tiny_model(tokenizer)
    whole = sum(parameter.nbytes for parameter in base.parameters())
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    state = live(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
    ring = SnapshotRing()
    snapshot = ring.take(state, 0, {})

    assert 0 < len(snapshot.parameters) == sum(parameter.requires_grad for parameter in model.parameters())
    assert snapshot.nbytes < whole / 10


def test_a_tied_weight_is_copied_once(tokenizer: Any) -> None:
    class Holder:
        model = tiny_model(tokenizer, tie_word_embeddings=True)
        optimizer = torch.optim.AdamW(model.parameters())
        ref_model = None

        class accelerator:
            scaler = None

    state = live_state_of(Holder())
    assert "lm_head.weight" not in state.parameters
    ring = SnapshotRing()
    snapshot = trusted(ring, state, 0)
    with torch.no_grad():
        Holder.model.lm_head.weight.zero_()
    ring.restore(snapshot, live_state_of(Holder()))

    assert Holder.model.lm_head.weight is Holder.model.model.embed_tokens.weight
    assert float(Holder.model.lm_head.weight.detach().abs().sum()) > 0


def test_a_reference_model_that_follows_is_part_of_the_state(tokenizer: Any) -> None:
    class Holder:
        model = tiny_model(tokenizer)
        ref_model = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters())

        class args:
            sync_ref_model = True

        class accelerator:
            scaler = None

    assert any(name.startswith("ref_model.") for name in live_state_of(Holder()).parameters)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_named(value: float) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1, seed=1)
    with torch.no_grad():
        model[3].bias[1] = value
        optimizer.state[model[0].weight]["exp_avg"][0, 0] = value
    snapshot = SnapshotRing().take(live(model, optimizer), 1, {})

    assert snapshot.nonfinite() == ["3.bias", "optimizer:0.exp_avg"]


def test_an_infinity_in_a_buffer_may_be_a_mask() -> None:
    model = network()
    model.register_buffer("mask", torch.full((3, 3), -float("inf")).triu(1))
    snapshot = SnapshotRing().take(live(model, torch.optim.SGD(model.parameters(), lr=0.1)), 0, {})
    assert snapshot.nonfinite() == []

    model.mask[0, 0] = float("nan")
    snapshot = SnapshotRing().take(live(model, torch.optim.SGD(model.parameters(), lr=0.1)), 0, {})
    assert snapshot.nonfinite() == ["buffer:mask"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64])
def test_every_kind_of_number_can_be_scanned(dtype: torch.dtype) -> None:
    buffer = torch.ones(4).to(dtype)
    state = LiveState({"weight": buffer}, {}, None, {})
    assert SnapshotRing().take(state, 0, {}).nonfinite() == []
    bad = torch.tensor([1.0, float("nan"), 2.0, 3.0]).to(dtype)
    assert SnapshotRing().take(LiveState({"weight": bad}, {}, None, {}), 0, {}).nonfinite() == ["weight"]


class TestRing:
    def state(self) -> LiveState:
        model = network()
        return live(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def test_a_candidate_that_was_not_promoted_is_replaced(self) -> None:
        ring, state = SnapshotRing(), self.state()
        first = ring.take(state, 1, {})
        assert ring.take(state, 2, {}) is first
        assert ring.trusted == []

    def test_keeps_two_generations_and_uses_their_memory_again(self) -> None:
        ring, state = SnapshotRing(), self.state()
        for step in range(6):
            trusted(ring, state, step)
        assert [snapshot.step for snapshot in ring.trusted] == [4, 5]
        three = 3 * size_of(state)
        ring.take(state, 6, {})
        assert ring.nbytes == three

    def test_memory_is_allocated_once(self) -> None:
        ring, state = SnapshotRing(), self.state()
        for step in range(4):
            trusted(ring, state, step)
        assert not ring.take(state, 4, {}).allocated

    def test_its_buffers_lie_together_and_not_among_what_is_allocated_in_between(self) -> None:
        state = LiveState({f"w{n}": torch.zeros(100) for n in range(50)}, {}, None, {})
        snapshot = SnapshotRing().take(state, 0, {})
        addresses = sorted(copied.host.data_ptr() for copied in snapshot.parameters.values())
        assert {later - earlier for earlier, later in pairwise(addresses)} == {448}  # 400 bytes in lines of 64

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.tensor(3.0),
            torch.empty(0, 4),
            torch.tensor([True, False]),
            torch.arange(6, dtype=torch.int64),
            torch.randn(5, dtype=torch.bfloat16),
            torch.randn(5).to(torch.float8_e4m3fn),
            torch.randn(3, dtype=torch.complex64),
            torch.randn(4, 6).t(),
            torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            torch.randn(1, 5).expand(3, 5),
            torch.randn(8, 8)[::2, ::2],
            torch.randn(5 * 2**20),
        ],
        ids=[
            *("0-d", "empty", "bool", "integer", "bfloat16", "8-bit float", "complex", "transposed", "channels last"),
            *("expanded", "every second", "large"),
        ],
    )
    def test_any_kind_of_tensor_is_kept_as_it_was(self, tensor: torch.Tensor) -> None:
        state = LiveState({"before": torch.ones(3)}, {"it": tensor, "after": torch.ones(3)}, None, {})
        kept = SnapshotRing().take(state, 0, {}).buffers
        host = kept["it"].host
        assert (host.shape, host.dtype) == (tensor.shape, tensor.dtype)
        assert host.stride() == torch.empty_like(tensor).stride()
        assert torch.equal(host.double(), tensor.double()) if not host.is_complex() else torch.equal(host, tensor)
        assert torch.equal(kept["after"].host, torch.ones(3))

    def test_memory_of_a_copy_that_failed_is_used_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ring, state = SnapshotRing(), self.state()
        ring.take(state, 0, {})
        before = ring.nbytes

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        with monkeypatch.context() as patch:
            patch.setattr("self_healing.rollback.host_memory.extent_of", fail)
            with pytest.raises(torch.OutOfMemoryError):
                ring.take(state, 1, {})
        assert not ring.take(state, 2, {}).allocated
        assert ring.nbytes == before

    def test_a_state_that_has_grown_takes_only_what_is_missing(self) -> None:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        ring = SnapshotRing()
        trusted(ring, live(model, optimizer), 0)
        before = ring.nbytes
        ring._spare = [ring.trusted.pop()]
        train(model, optimizer, 1, seed=1)
        state = live(model, optimizer)
        assert before < ring.take(state, 1, {}).nbytes == size_of(state)

    @pytest.mark.parametrize("drop", ["shrink", "discard", "distrust", "forget_initial"])
    def test_what_was_kept_with_a_state_goes_with_it(self, drop: str) -> None:
        ring, state = SnapshotRing(), self.state()
        batch = torch.ones(3)
        ring.take(state, 0, {"control": batch} if drop == "forget_initial" else {})
        ring.begin_with_candidate()
        ring.take(state, 1, {"control": batch} if drop in ("shrink", "distrust") else {})
        ring.promote()
        trusted(ring, state, 2)
        ring.take(state, 3, {"control": batch} if drop == "discard" else {})
        kept = weakref.ref(batch)
        del batch
        getattr(ring, drop)(*([ring.trusted[0]] if drop == "distrust" else []))
        assert kept() is None

    def test_distrust_drops_a_state_and_every_newer_one(self) -> None:
        ring, state = SnapshotRing(), self.state()
        for step in range(2):
            trusted(ring, state, step)
        ring.distrust(ring.trusted[1])
        assert [snapshot.step for snapshot in ring.trusted] == [0]

    def test_where_memory_is_short_a_generation_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ring, state = SnapshotRing(), self.state()
        for step in range(2):
            trusted(ring, state, step)
        monkeypatch.setattr("self_healing.rollback.ring.free_host_memory", lambda: 0)
        assert not ring.fits(state)
        assert ring.shrink()
        assert ring.fits(state)
        trusted(ring, state, 3)
        assert [snapshot.step for snapshot in ring.trusted] == [3]
        assert not SnapshotRing().fits(state)

    def test_release_gives_everything_back(self) -> None:
        ring, state = SnapshotRing(), self.state()
        trusted(ring, state, 0)
        ring.take(state, 1, {})
        ring.release()
        assert ring.nbytes == 0


class Pinning:
    """A kind of device that copies at once; what it was asked to pin, and whether that was mapped when it let go."""

    def __init__(self, can: bool = True) -> None:
        self.can = can
        self.pinned: dict[int, int] = {}
        self.let_go: list[bool] = []

    def stream(self, device: torch.device) -> Any:
        return self

    def start(self, work: Callable[[], None]) -> Any:
        work()
        return self

    def wait(self) -> float:
        return 0.0

    def join(self) -> None: ...

    def pin(self, address: int, nbytes: int) -> bool:
        if self.can:
            self.pinned[address] = nbytes
        return self.can

    def unpin(self, address: int) -> None:
        del self.pinned[address]
        self.let_go.append(is_mapped(address))


def is_mapped(address: int) -> bool:
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")


class TestPinnedMemory:
    def state(self) -> LiveState:
        # 129.5 MiB in miniature: blocks of powers of two would be 256.
        return LiveState({"weight": torch.randn(259, 128), "bias": torch.randn(3)}, {}, None, {})

    @linux
    def test_is_one_block_of_the_size_of_the_state(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pinning = Pinning()
        monkeypatch.setattr("self_healing.rollback.snapshots.copies_of", {"cpu": pinning}.get)
        state = self.state()
        ring = SnapshotRing()
        ring.take(state, 0, {})
        (nbytes,) = pinning.pinned.values()
        assert nbytes == ring.nbytes == size_of(state) == 259 * 128 * 4 + 64

    @linux
    def test_is_let_go_of_before_it_is_unmapped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pinning = Pinning()
        monkeypatch.setattr("self_healing.rollback.snapshots.copies_of", {"cpu": pinning}.get)
        ring = SnapshotRing()
        ring.take(self.state(), 0, {})
        (address,) = pinning.pinned
        ring.release()
        assert (pinning.let_go, is_mapped(address)) == ([True], False)

    def test_that_cannot_be_had_is_ordinary_memory(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("self_healing.rollback.snapshots.copies_of", {"cpu": Pinning(can=False)}.get)
        state = self.state()
        with caplog.at_level("INFO", logger="self_healing"):
            snapshot = SnapshotRing().take(state, 0, {})
        assert torch.equal(snapshot.parameters["weight"].host, state.parameters["weight"])
        assert "could not be pinned" in caplog.text

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs CUDA to fail")
    def test_neither_is_it_where_cuda_fails(self) -> None:
        assert not HostBlock(4096, copies_of("cuda")).pinned

    @linux
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_is_not_there_in_a_data_loader_worker(self) -> None:
        block = HostBlock(1 << 16)
        address = block.like(torch.empty(8)).data_ptr()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, bytes([is_mapped(address)]))
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 1) == b"\0"
        assert is_mapped(address)
