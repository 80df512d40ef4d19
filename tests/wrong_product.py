"""A device that computes wrong, in place of one that does."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class WrongProduct(TorchDispatchMode):
    """One element of the products of matrices is not what it should be: of all of them, or of the last ones alone."""

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self.left = after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and result.is_floating_point():
            self.left -= 1
            if self.left < 0:
                result[77, 401] += 1
        return result
