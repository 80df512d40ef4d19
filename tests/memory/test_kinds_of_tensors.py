"""Paged, quantised and offloaded tensors: kept, put back and searched as what they are. What bitsandbytes, torchao and
accelerate make on a GPU is simulated on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import cpu_offload
from conftest import (
    OutputFault,
    adapter_trainer,
    assert_same_weights,
    journal,
    weights,
)
from torch.testing._internal.two_tensor import TwoTensor

from self_healing import HealingConfig, SelfHealingCallback
from self_healing.hf.state import LiveState
from self_healing.rollback.ring import SnapshotRing


class PagedMomentum(torch.optim.Optimizer):
    """Keeps its state as paged optimizers do: in tensors that look like host memory, and are marked."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["state1"] = torch.zeros_like(parameter)
                    state["state1"].is_paged = True
                if not getattr(state["state1"], "is_paged", False):
                    raise TypeError("All input tensors need to be on the same GPU")
                parameter.sub_(state["state1"].mul_(0.9).add_(parameter.grad), alpha=group["lr"])


def stepped(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def quantised(value: float) -> TwoTensor:
    return TwoTensor(torch.full((3, 2), value), torch.full((3, 2), 2 * value))


class TestPaged:
    def state(self) -> tuple[LiveState, PagedMomentum, torch.nn.Parameter]:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = PagedMomentum([parameter])
        return LiveState({"w": parameter.detach()}, {}, optimizer, {}), optimizer, parameter

    def test_state_that_was_dropped_meanwhile_is_paged_again(self) -> None:
        live, optimizer, parameter = self.state()
        ring = SnapshotRing()
        ring.take(live, 0, {})
        ring.initial, ring.candidate = ring.candidate, None
        stepped(optimizer)
        snapshot = ring.take(live, 1, {})
        assert ring.initial is not None
        ring.restore(ring.initial, live)
        assert not optimizer.state
        ring.restore(snapshot, live)
        assert optimizer.state[parameter]["state1"].is_paged
        assert torch.equal(optimizer.state[parameter]["state1"], torch.ones(3))
        stepped(optimizer)


class TestQuantised:
    def test_state_is_put_back_in_place(self) -> None:
        tensor, ring = quantised(1.0), SnapshotRing()
        live = LiveState({"w": tensor}, {}, None, {})
        snapshot = ring.take(live, 0, {})
        inner = tensor.a
        inner.zero_()
        tensor.b.zero_()
        ring.restore(snapshot, live)
        assert tensor.a is inner
        assert torch.equal(inner, torch.full((3, 2), 1.0))
        assert torch.equal(tensor.b, torch.full((3, 2), 2.0))

    def test_state_that_was_dropped_is_made_anew(self) -> None:
        parameter = torch.nn.Parameter(torch.ones(3, 2))
        optimizer = torch.optim.SGD([parameter])
        optimizer.state[parameter]["moment"] = quantised(1.0)
        live, ring = LiveState({"w": parameter.detach()}, {}, optimizer, {}), SnapshotRing()
        snapshot = ring.take(live, 0, {})
        del optimizer.state[parameter]["moment"]
        ring.restore(snapshot, live)
        moment = optimizer.state[parameter]["moment"]
        assert type(moment) is TwoTensor
        assert torch.equal(moment.b, torch.full((3, 2), 2.0))

    def test_state_is_searched(self) -> None:
        tensor = quantised(1.0)
        tensor.b[0, 0] = torch.nan
        assert SnapshotRing().take(LiveState({"w": tensor}, {}, None, {}), 0, {}).nonfinite() == ["w.b"]


class TestOffloaded:
    def trainer(self, directory: Path, tokenizer: Any, **arguments: Any) -> Any:
        """A frozen model half of which accelerate keeps elsewhere, under an adapter."""
        trainer = adapter_trainer(directory, tokenizer, dropout=0.0, max_steps=8, **arguments)
        for layer in trainer.model.get_base_model().model.layers:
            cpu_offload(layer.mlp, execution_device=torch.device("cpu"))
        trainer.model.hf_device_map = {"mlp": "disk", "others": "cpu"}
        return trainer

    def test_weights_are_left_out_of_a_run_that_is_healed(self, tmp_path: Path, tokenizer: Any, caplog: Any) -> None:
        plain = self.trainer(tmp_path / "plain", tokenizer)
        plain.train()
        callback = SelfHealingCallback(HealingConfig(snapshot_interval=5))
        healed = self.trainer(tmp_path / "healed", tokenizer, callbacks=[callback])
        OutputFault(healed.model.get_base_model(), lambda n: n == 9)
        healed.train()

        def trained(trainer: Any) -> dict[str, torch.Tensor]:
            return {name: value for name, value in weights(trainer).items() if not value.is_meta}

        assert_same_weights(trained(healed), trained(plain))
        assert [each["outcome"] for each in journal(tmp_path / "healed", "outcome")] == ["resolved"]
        said = [each.getMessage() for each in caplog.records if "offloaded" in each.getMessage()]
        assert len(said) == 1
        assert "6 tensors" in said[0]
        assert "layers.0.mlp.gate_proj.weight" in said[0]
