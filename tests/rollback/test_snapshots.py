"""States in host memory: taken, trusted, and put back into the very tensors they came from."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from conftest import tiny_model
from torch import nn
from transformers import Adafactor

from self_healing.hf.state import LiveState, live_state_of
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


def test_a_module_in_the_state_of_an_optimizer_comes_back_with_its_parameters() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    kept = optimizer.state[model[0].weight]["projector"] = nn.Linear(2, 2)
    kept.bias.requires_grad_(False)
    before = {name: value.clone() for name, value in kept.state_dict().items()}
    ring = SnapshotRing()
    snapshot = trusted(ring, live(model, optimizer), 0)
    with torch.no_grad():
        kept.weight.fill_(float("nan"))
    ring.restore(snapshot, live(model, optimizer))

    found = optimizer.state[model[0].weight]["projector"]
    assert {name: each.requires_grad for name, each in found.named_parameters()} == {"weight": True, "bias": False}
    torch.testing.assert_close(found.state_dict(), before, rtol=0, atol=0)


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


def test_a_buffer_whose_shape_has_changed_comes_back_as_it_was() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    model[0].register_buffer("table", torch.arange(4.0))
    ring = SnapshotRing()

    def state() -> LiveState:
        return LiveState(dict(model.named_parameters()), dict(model.named_buffers()), None, {}, model=model)

    snapshot = ring.take(state(), 0, {})
    model[0].table = torch.zeros(6)
    ring.restore(snapshot, state())
    assert torch.equal(model[0].table, torch.arange(4.0))
    assert list(dict(model.named_buffers())) == list(snapshot.buffers)

    model[0].weight = nn.Parameter(torch.ones(5))
    with pytest.raises(ValueError, match=r"0.weight was torch.float32 of \(3,\) when the snapshot was taken"):
        ring.restore(snapshot, state())


class TestRing:
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


@pytest.mark.skipif(not psutil.LINUX, reason="where the kernel says what is resident")
def test_the_pages_of_the_next_snapshot_are_taken_before_it_is_copied() -> None:
    """On a GPU all launches wait for pages that are missing when memory is pinned: seconds."""
    ring, nbytes = SnapshotRing(), 256 << 20
    before = psutil.Process().memory_info().rss
    ring.reserve(nbytes, torch.device("cpu"))
    while ring.reserving:
        time.sleep(0.01)
    assert psutil.Process().memory_info().rss - before > 0.9 * nbytes
