"""Outputs of a model: taken apart, put together, compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .slicing import CannotSplit, Chunk, mapping_like


def merged(
    name: str,
    values: list[Any],
    chunks: list[Chunk],
    number: Callable[[str, list[torch.Tensor]], torch.Tensor],
    knows: int = -1,
) -> Any:
    """
    Merges the outputs for some rows after the other into what the model would have given for all.

    Args:
        name (`str`):
            What the values are called; empty for all there is.
        values (`list`):
            One of each chunk.
        chunks (`list[Chunk]`):
            The chunks.
        number (`Callable[[str, list[torch.Tensor]], torch.Tensor]`):
            Puts together what is one number of each.
        knows (`int`, *optional*, defaults to -1):
            The chunk whose values say what needs gradients: of those that are computed again everything seems to.
    """
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise CannotSplit(f"the model gives another type of `{name}` for some rows than for others")
    if first is None or isinstance(first, (str, bool, int, float)):
        if any(value != first for value in values):
            raise CannotSplit(f"the model gives `{name}`, one value for all rows")
        return first
    if isinstance(first, torch.Tensor):
        together = number(name, values) if first.dim() == 0 else _joined(name, values, chunks)
        return together if values[knows].requires_grad else together.detach()
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            raise CannotSplit("the model gives something for some rows that it does not give for others")
        found = {key: merged(str(key), [value[key] for value in values], chunks, number, knows) for key in first}
        return mapping_like(first, found)
    if isinstance(first, (list, tuple)):
        if any(len(value) != len(first) for value in values):
            raise CannotSplit(f"the model gives lists `{name}` of different lengths")
        parts = [
            merged(
                f"{name}.{place}" if name else str(place), [value[place] for value in values], chunks, number, knows
            )
            for place in range(len(first))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    raise CannotSplit(f"the model gives `{name}`, a {type(first).__name__}")


def _joined(name: str, values: list[torch.Tensor], chunks: list[Chunk]) -> torch.Tensor:
    """One tensor of all rows: (B, ...), or (1, T, ...) of a flattened batch."""
    flat = chunks[0].flat
    filled_up = []
    for value, chunk in zip(values, chunks, strict=True):
        # Predictions of the next token have no entry for a chunk's last one, where the whole batch has one (ignored).
        missing = chunk.shape.rows - value.size(1) if chunk.gap and value.dim() > 1 else chunk.cut
        size = value.size(0)
        fits = size == chunk.rows and (not flat or (value.dim() > 1 and chunk.shape.rows - value.size(1) in (0, 1)))
        if not fits or (missing and value.dim() < 2):
            raise CannotSplit(f"the model gives `{name}` of size {tuple(value.shape)} for {chunk.shape}")
        filled_up.append(
            torch.nn.functional.pad(value, (*(0, 0) * (value.dim() - 2), 0, missing)) if missing else value
        )
    dim = 1 if flat else 0
    if len({(*value.shape[:dim], *value.shape[dim + 1 :]) for value in filled_up}) > 1:
        raise CannotSplit(f"the model gives `{name}` of sizes that depend on the rows it is given")
    return torch.cat(filled_up, dim=dim)


def without_caches(output: Any) -> Any:
    """An output without its cache: keys and values of some rows only are of no use."""
    tensors: list[torch.Tensor] = []
    return filled(flattened(output, tensors), tensors)


def loss_alone(output: Any) -> Any:
    """Of what a model gives with labels, only the loss: the logits are large, and nobody asks for them."""
    if isinstance(output, Mapping) and "loss" in output:
        return {"loss": output["loss"]}
    return output[:1] if isinstance(output, tuple) else output


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a tensor in an output."""

    index: int


def flattened(output: Any, tensors: list[torch.Tensor]) -> Any:
    """The structure of an output, with its tensors taken out."""
    if isinstance(output, torch.Tensor):
        tensors.append(output)
        return _Place(len(tensors) - 1)
    if isinstance(output, Mapping):
        return mapping_like(output, {key: flattened(value, tensors) for key, value in output.items()})
    if isinstance(output, (list, tuple)):
        parts = [flattened(value, tensors) for value in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    if output is None or isinstance(output, (str, bool, int, float)):
        return output
    if "Cache" in type(output).__name__:
        # Keys and values, of which only the chunks could make use.
        return None
    raise CannotSplit(f"the model gives a {type(output).__name__}, of which the rows are not known")


def filled(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(structure, _Place):
        return tensors[structure.index]
    if isinstance(structure, Mapping):
        return mapping_like(structure, {key: filled(value, tensors) for key, value in structure.items()})
    if isinstance(structure, (list, tuple)):
        parts = [filled(value, tensors) for value in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else type(structure)(parts)
    return structure


# No parts of a tensor have fewer elements than this.
_SMALL = 2**14
# Outputs are compared in this many parts, for which several copies of each are made in double precision.
_COMPARED = 256


def parts_of(tensor: torch.Tensor, parts: int) -> Iterator[torch.Tensor]:
    """A tensor in views of at least so many parts of it, so that what is made of one at a time is small beside it."""
    if parts <= 1 or tensor.numel() <= _SMALL:
        yield tensor
        return
    longest = max(range(tensor.dim()), key=tensor.size)
    for half in tensor.chunk(2, longest):
        yield from parts_of(half, -(-parts // 2))


def alike(one: Any, other: Any, looseness: float) -> bool:
    """Whether two outputs agree, up to `looseness` of the largest number in them."""
    first: list[torch.Tensor] = []
    second: list[torch.Tensor] = []
    flattened(one, first)
    flattened(other, second)
    if len(first) != len(second):
        return False
    for left, right in zip(first, second, strict=True):
        if left.shape != right.shape:
            return False
        if left.is_floating_point() and not _tensors_alike(left.detach(), right.detach(), looseness):
            return False
    return True


def furthest(one: Any, other: Any) -> float:
    """Measures how far two outputs of the same sizes lie apart, relative to the largest number in each tensor."""
    first: list[torch.Tensor] = []
    second: list[torch.Tensor] = []
    flattened(one, first)
    flattened(other, second)
    found = [0.0]
    for left, right in zip(first, second, strict=True):
        if right.is_floating_point() and right.numel() and left.shape == right.shape:
            apart = [_largest(part.double() - of.double()) for part, of in _parts_of_both(left, right)]
            scale = _largest_in_parts(right)
            found.append(float(torch.stack(apart).max()) / scale if scale else 0.0)
    return max(found)


def _parts_of_both(left: torch.Tensor, right: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(parts_of(left, _COMPARED), parts_of(right, _COMPARED), strict=True)


def _largest(values: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(values.detach().abs(), nan=0.0, posinf=0.0).max()


def _largest_in_parts(tensor: torch.Tensor) -> float:
    return float(torch.stack([_largest(part) for part in parts_of(tensor, _COMPARED)]).max())


def _tensors_alike(left: torch.Tensor, right: torch.Tensor, looseness: float) -> bool:
    if right.numel() == 0:
        return True
    # In numbers of few bits, rounding alone may be more.
    allowed = max(looseness, 2 * torch.finfo(right.dtype).eps)
    scale = _largest_in_parts(right)
    near = [
        torch.isclose(one.double(), other.double(), rtol=0.0, atol=allowed * scale + 1e-9, equal_nan=True).all()
        for one, other in _parts_of_both(left, right)
    ]
    return bool(torch.stack(near).all())
