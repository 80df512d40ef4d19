"""NaN and Inf are found without a copy of what is searched, and without waiting for the device tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from self_healing.hf.state import _AT_A_TIME, Search


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


@pytest.mark.parametrize("layout", ["as it is", "transposed", "every other column"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_search_takes_no_memory_of_the_size_of_what_it_looks_at(dtype: torch.dtype, layout: str) -> None:
    tensor = LAYOUTS[layout](torch.zeros(4, 2 * _AT_A_TIME, dtype=dtype))
    with Seen() as seen:
        assert not found(tensor)
    assert seen.largest <= 2 * _AT_A_TIME < tensor.nbytes
