"""Gradients of a computation that is thrown away reach no later update, wherever FSDP2 keeps them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from self_healing.hf.state import discard_gradients, gradients_of, named_gradients_of


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def two_layers(policy: MixedPrecisionPolicy | None = None, sharded: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    if sharded:
        mesh = init_device_mesh("cpu", (1,))
        for module in (*model, model):
            fully_shard(module, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return model


def backward(model: nn.Sequential, rows: int = 2, synchronise: bool = True) -> None:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(synchronise)
    model(torch.arange(rows * 4.0).view(rows, 4)).float().sum().backward()


def local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def assert_same_gradients(model: nn.Sequential, other: nn.Sequential) -> None:
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(local(parameter.grad), local(twin.grad))


POLICIES = {
    "one precision": MixedPrecisionPolicy(),
    "reduced in another precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_unreduced_gradients_that_are_discarded_reach_no_update(policy: MixedPrecisionPolicy) -> None:
    model, twin = two_layers(policy), two_layers(policy)
    backward(model, rows=3, synchronise=False)
    discard_gradients(model)
    for each in (model, twin):
        backward(each)
    assert_same_gradients(model, twin)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_unreduced_gradients_are_seen(policy: MixedPrecisionPolicy) -> None:
    model = two_layers(policy)
    backward(model, synchronise=False)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(gradients_of(model)) == 4
    assert [name for name, _ in named_gradients_of(model)] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    discard_gradients(model)
    assert gradients_of(model) == []


@pytest.mark.usefixtures("alone")
@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot begin again after a forward that raised"
)
def test_a_forward_that_raised_leaves_nothing_behind() -> None:
    model, twin = two_layers(), two_layers()

    def fail(*_: object) -> None:
        raise RuntimeError("only once")

    hook = model[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="only once"):
        backward(model)
    hook.remove()
    discard_gradients(model)
    for each in (model, twin):
        backward(each)
    assert_same_gradients(model, twin)


@pytest.mark.usefixtures("alone")
def test_nothing_is_there_to_discard_before_the_first_forward() -> None:
    model = two_layers()
    discard_gradients(model)
    assert gradients_of(model) == []


def test_a_model_whose_zero_grad_fills_with_zeros_has_none_left() -> None:
    class Filling(nn.Linear):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none=False)

    model = Filling(4, 1)
    model(torch.ones(1, 4)).sum().backward()
    discard_gradients(model)
    assert all(parameter.grad is None for parameter in model.parameters())
