"""`check_device`: whether a device computes what is exact on every device, and how fast."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


# Side of the matrices on a CPU and on an accelerator, and of what is summed up in bfloat16, which is exact up to 256.
_ON_CPU, _ON_ACCELERATOR, _IN_BFLOAT16 = 512, 2048, 256
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """
    What a device did.

    Args:
        wrong (`bool`):
            Whether a result was not what it has to be.
        seconds (`float`):
            What one product of two matrices took, the fastest of several.
        flops (`float`):
            Operations of that product.
        error (`str`, *optional*):
            What it raised, if it gave no result.
    """

    wrong: bool
    seconds: float
    flops: float
    error: str | None = None


def check_device(device: torch.device, seconds: float = 0.05) -> DeviceCheck:
    """
    Multiplies matrices of small whole numbers, whose product is exact in whatever order it is summed up, in TF32 as
    well. Draws no random numbers, and changes no setting. Never raises.

    Args:
        device (`torch.device`):
            The device.
        seconds (`float`, *optional*, defaults to 0.05):
            How long to go on; three times at least.
    """
    side = _ON_CPU if device.type == "cpu" else _ON_ACCELERATOR
    flops = 2.0 * side**3
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            took, wrong = _multiply(device, torch.float32, side, side, 8, seconds)
            if device.type != "cpu":
                wrong |= _multiply(device, torch.bfloat16, side, _IN_BFLOAT16, 1, 0.0)[1]
    except Exception as error:
        return DeviceCheck(False, 0.0, flops, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
    return DeviceCheck(wrong, took, flops)


def _multiply(
    device: torch.device, dtype: torch.dtype, side: int, inner: int, largest: int, seconds: float
) -> tuple[float, bool]:
    """Gives the shortest time of a product, and whether one was wrong."""
    left, right = _numbers(side, inner, 7, 13, largest), _numbers(inner, side, 11, 5, largest)
    # Each element of the product counts, with a factor of its own column, in one number of its row.
    factors = torch.arange(side, device="cpu") % 7 + 1
    expected = left @ (right @ factors)
    first, second = left.to(device, dtype), right.to(device, dtype)
    shortest, wrong, times, began = float("inf"), False, 0, time.perf_counter()
    found: torch.Tensor | None = None
    while times < _FEWEST or time.perf_counter() - began < seconds:
        _synchronize(device)
        now = time.perf_counter()
        product = first @ second
        _synchronize(device)
        shortest, times = min(shortest, time.perf_counter() - now), times + 1
        if found is None:
            found = product
            wrong = not torch.equal(product.cpu().double().to(torch.int64) @ factors, expected)
        else:
            wrong |= not torch.equal(product, found)
    return shortest, wrong


def _numbers(rows: int, columns: int, down: int, across: int, largest: int) -> torch.Tensor:
    """Whole numbers from `-largest` to `largest` that repeat neither by rows nor by columns."""
    row, column = torch.arange(rows, device="cpu")[:, None], torch.arange(columns, device="cpu")
    return (row * down + column * across + row * column) % (2 * largest + 1) - largest


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
