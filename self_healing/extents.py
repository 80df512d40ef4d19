"""Searches tensors for NaN and Inf: each in place, with one wait for the device however many there are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch


# Elements that are converted or laid out again at a time, where that has to be.
_AT_A_TIME = 1 << 22
# Packed 4-bit numbers have no NaN, and no arithmetic of their own either.
_ALWAYS_FINITE = frozenset({getattr(torch, "float4_e2m1fn_x2", None)})


@dataclass(frozen=True, slots=True)
class Extent:
    """The smallest and the largest value of a tensor, NaN if it holds one."""

    low: torch.Tensor
    high: torch.Tensor


@torch.no_grad()
def extent_of(tensor: torch.Tensor) -> Extent | None:
    """Finds the extent of a tensor, or of this rank's part of one; `None` where nothing could be NaN or Inf."""
    found = [torch.aminmax(part) for part in _parts(tensor)]
    if not found:
        return None
    if len(found) == 1:
        return Extent(*found[0])
    lows, highs = zip(*found, strict=True)
    return Extent(torch.stack(lows).min(), torch.stack(highs).max())


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields parts of a tensor that can be searched in place."""
    tensor = tensor.detach()
    if hasattr(tensor, "__tensor_flatten__"):
        # Sharded, or quantised: its inner tensors. Its own arithmetic is a collective, or copies all of it. A DTensor
        # names its device mesh among them.
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for each in inner:
            if isinstance(each, torch.Tensor):
                yield from _parts(each)
        return
    if tensor.is_sparse:
        tensor = tensor._values()
    known = tensor.is_floating_point() or tensor.is_complex()
    if not known or tensor.is_meta or tensor.numel() == 0 or tensor.dtype in _ALWAYS_FINITE:
        return
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    # A transposed weight is contiguous in another order of its dimensions.
    tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    # 8-bit floats have no arithmetic of their own.
    converted = torch.bfloat16 if tensor.element_size() == 1 else tensor.dtype
    if tensor.is_contiguous() and converted == tensor.dtype:
        yield tensor
        return
    for part in _pieces(tensor):
        yield part.to(converted)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields views of a tensor, none of them large."""
    if tensor.numel() <= _AT_A_TIME:
        yield tensor
        return
    longest = max(range(tensor.dim()), key=tensor.size)
    for half in tensor.tensor_split(2, dim=longest):
        yield from _pieces(half)


@dataclass(slots=True)
class Search:
    """Searches several tensors for NaN and Inf together."""

    _looked_at: list[tuple[str, bool]] = field(default_factory=list)
    _extents: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = field(default_factory=dict)
    _places: dict[tuple[torch.device, torch.dtype], list[int]] = field(default_factory=dict)
    _bad: set[int] = field(default_factory=set)

    def add(self, name: str, value: torch.Tensor | Extent | float | None, inf: bool) -> None:
        """Adds a value to the search."""
        place = len(self._looked_at)
        self._looked_at.append((name, inf))
        extent = extent_of(value) if isinstance(value, torch.Tensor) else value
        if isinstance(extent, Extent):
            kind = extent.low.device, extent.low.dtype
            self._extents.setdefault(kind, []).extend((extent.low, extent.high))
            self._places.setdefault(kind, []).append(place)
        elif isinstance(extent, float) and _is_bad(extent, extent, inf):
            self._bad.add(place)

    def nonfinite(self) -> list[str]:
        """Returns the names of values that are not finite, each once. Waits once for each device and dtype."""
        bad = set(self._bad)
        for kind, extents in self._extents.items():
            ends = torch.stack(extents).tolist()
            for place, low, high in zip(self._places[kind], ends[::2], ends[1::2], strict=True):
                if _is_bad(low, high, self._looked_at[place][1]):
                    bad.add(place)
        return list(dict.fromkeys(self._looked_at[place][0] for place in sorted(bad)))


def _is_bad(low: float, high: float, inf: bool) -> bool:
    return math.isnan(low) or (inf and not (math.isfinite(low) and math.isfinite(high)))
