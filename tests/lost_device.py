"""The simulation of a device that is lost: from one moment on every tensor operation raises, on whatever device."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback


# As torch 2.8 and later raise it.
LOST = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


class LostDevice(TorchDispatchMode):
    """Every operation raises from [`lose`] on, or once `after` of them have worked."""

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self.lost = False
        self.first: Exception | None = None
        # Where each operation came from.
        self.tried: list[str] = []
        self._left = after

    def lose(self) -> None:
        """From here on it is lost."""
        if not self.lost:
            self.lost = True
            self.__enter__()

    def replace(self) -> None:
        """The process is over; the next one has a device."""
        if self.lost:
            self.lost = False
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left >= 0:
            return func(*args, **(kwargs or {}))
        self.tried.append(f"{func}\n{''.join(traceback.format_stack(limit=12))}")
        error = getattr(torch, "AcceleratorError", RuntimeError)(LOST)
        self.first = self.first or error
        raise error


class LoseDevice(TrainerCallback):
    """Loses a device in one event at one step."""

    def __init__(self, device: LostDevice, event: str, step: int) -> None:
        def handler(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                device.lose()

        setattr(self, event, handler)
