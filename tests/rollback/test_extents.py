"""NaN and Inf are found without a copy of what is searched, and without waiting for the device tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OutputFault, sft_trainer, tiny_model
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from self_healing import SelfHealingCallback
from self_healing.healers.numerics.nonfinite import NonfiniteHealer
from self_healing.hf.engine import nonfinite_in
from self_healing.hf.state import _AT_A_TIME, Search, extent_of, nonfinite_tensors


class Seen(TorchDispatchMode):
    """Counts waits for the device, and notes the most memory that one operation took for a result of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, each.untyped_storage().nbytes())
        return result


def trained(layers: int, tokenizer: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = tiny_model(tokenizer, num_hidden_layers=layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def found(tensor: torch.Tensor, inf: bool = True) -> bool:
    search = Search()
    search.add("x", tensor, inf)
    return search.nonfinite() == ["x"]


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t(),
    "every other column": lambda tensor: tensor.repeat_interleave(2, dim=1)[:, ::2],
    "a number": lambda tensor: tensor[1, 1],
    "of two tensors": lambda tensor: TwoTensor(torch.zeros_like(tensor), tensor),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_is_found_in_any_tensor(dtype: torch.dtype, layout: str) -> None:
    tensor = torch.zeros(3, 4).to(dtype)
    assert not found(LAYOUTS[layout](tensor))
    tensor[1, 1] = float("nan")
    assert found(LAYOUTS[layout](tensor))


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_an_inf_counts_where_it_is_not_meant(value: float) -> None:
    tensor = torch.tensor([0.0, value])
    assert found(tensor, inf=True)
    assert not found(tensor, inf=False)


def test_the_largest_double_is_finite() -> None:
    assert not found(torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64))


@pytest.mark.parametrize(
    "tensor", [torch.zeros(0), torch.zeros(3, dtype=torch.int64), torch.zeros(3, device="meta")], ids=str
)
def test_what_holds_no_numbers_to_look_at_has_no_extent(tensor: torch.Tensor) -> None:
    assert extent_of(tensor) is None


def test_names_come_in_the_order_of_the_model(tokenizer: Any) -> None:
    model, optimizer = trained(2, tokenizer)
    model.model.layers[0].mlp.to(torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data[0, 0] = float("nan")
    assert nonfinite_tensors(model, optimizer) == [f"model.layers.{n}.mlp.down_proj.weight" for n in (0, 1)]


def test_a_search_waits_equally_often_however_many_tensors_there_are(tokenizer: Any) -> None:
    waits = []
    for layers in (1, 4):
        model, optimizer = trained(layers, tokenizer)
        with Seen() as seen:
            assert nonfinite_tensors(model, optimizer) == []
        waits.append(seen.waits)
    assert waits[0] == waits[1] <= 1


@pytest.mark.parametrize("layout", ["as it is", "transposed", "every other column"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_search_takes_no_memory_of_the_size_of_what_it_looks_at(dtype: torch.dtype, layout: str) -> None:
    tensor = LAYOUTS[layout](torch.zeros(4, 2 * _AT_A_TIME, dtype=dtype))
    with Seen() as seen:
        assert not found(tensor)
    assert seen.largest <= 2 * _AT_A_TIME < tensor.nbytes


def test_a_look_at_outputs_takes_no_memory_of_their_size() -> None:
    logits = torch.full((64, 4096), -torch.inf)
    logits[:, 0] = 1.0
    with Seen() as seen:
        assert nonfinite_in({"masked": logits, "bad": logits[:, :1] * torch.nan}) == ["bad"]
    assert seen.largest < logits.nbytes // 8


@pytest.mark.parametrize("strike", [lambda n: n == 3, lambda n: n > 2], ids=["transient", "lasting"])
def test_a_diagnosis_waits_equally_often_however_many_tensors_there_are(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, strike: Callable[[int], bool]
) -> None:
    waits: list[int] = []
    diagnose = NonfiniteHealer._diagnose

    def counting(judge: Any, window: Any) -> Any:
        with Seen() as seen:
            found = diagnose(judge, window)
        waits.append(seen.waits)
        return found

    monkeypatch.setattr(NonfiniteHealer, "_diagnose", counting)
    for layers in (1, 4):
        model = tiny_model(tokenizer, num_hidden_layers=layers)
        trainer = sft_trainer(
            tmp_path / str(layers), tokenizer, model=model, callbacks=[SelfHealingCallback()], max_steps=2
        )
        OutputFault(trainer.model, strike)
        trainer.train()
    assert waits[0] == waits[-1] > 0
