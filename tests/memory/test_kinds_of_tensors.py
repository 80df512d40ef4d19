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
from self_healing.hf.state import LiveState, WeightSearch
from self_healing.rollback.host_memory import TensorCopy
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
        ring.begin_with_candidate()
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


class Projector:
    """What GaLore and APOLLO keep of a parameter: an object with tensors in it."""

    def __init__(self, parent: Any) -> None:
        self.rank, self.parent = 4, parent
        self.ortho_matrix = [torch.full((3, 2), 1.0), torch.full((2, 3), 2.0)]


class TestInObjects:
    def test_tensors_are_copied_to_host_memory_and_put_back(self) -> None:
        parameter = torch.nn.Parameter(torch.ones(3, 2))
        optimizer = torch.optim.SGD([parameter])
        projector = optimizer.state[parameter]["projector"] = Projector(None)
        projector.parent = projector
        ring = SnapshotRing()
        snapshot = ring.take(LiveState({"w": parameter.detach()}, {}, optimizer, {}), 0, {})
        kept = snapshot.states[0][1]["projector"]
        assert [type(each) for each in kept.ortho_matrix] == [TensorCopy, TensorCopy]
        assert snapshot.block is not None
        assert all(snapshot.block.offset_of(each.host) is not None for each in kept.ortho_matrix)
        for _ in range(2):
            for each in optimizer.state[parameter]["projector"].ortho_matrix:
                each.zero_()
            ring.restore(snapshot, LiveState({"w": parameter.detach()}, {}, optimizer, {}))
            found = optimizer.state[parameter]["projector"]
            assert (found.rank, found.parent) == (4, found)
            assert torch.equal(found.ortho_matrix[0], torch.full((3, 2), 1.0))
            assert torch.equal(found.ortho_matrix[1], torch.full((2, 3), 2.0))


class TestSearchedAgainAndAgain:
    """Weights are looked at before each generation, and are listed once."""

    def searched(self) -> tuple[Any, WeightSearch]:
        model = torch.nn.Module()
        model.first, model.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        search = WeightSearch(model)
        assert search.finds_nothing()
        return model, search

    def test_a_layer_in_the_place_of_another_one_is_searched(self) -> None:
        model, search = self.searched()
        was = id(model.second)
        del model.second
        # One of these takes its memory, and its `id` with that, if nobody holds it.
        made = [torch.nn.Linear(2, 2) for _ in range(100)]
        model.second = next((each for each in made if id(each) == was), made[0])
        model.second.weight.data.fill_(torch.nan)
        assert not search.finds_nothing()

    def test_infinity_is_wrong_in_a_parameter_from_when_it_is_trained(self) -> None:
        model, search = self.searched()
        model.second.weight.requires_grad_(False).fill_(-torch.inf)
        assert search.finds_nothing()
        model.second.weight.requires_grad_(True)
        assert not search.finds_nothing()

    def test_what_was_emptied_meanwhile_is_left_out(self) -> None:
        model, search = self.searched()
        model.first.weight.data = torch.empty(0)
        assert search.finds_nothing()
        model.second.bias.data.fill_(torch.nan)
        assert not search.finds_nothing()


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
