"""
The inputs of a model call, cut into chunks of rows.

Shape suffixes: B rows of a batch, T tokens, S segments of a flattened batch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...batch_layout import Layout, segments_of, select_rows
from ...call_shape import CallShape, Kind


# Trimmed lengths are rounded up to this, for kernels that like it and so that few new shapes come up.
LENGTH_STEP = 8
IGNORED_LABEL = -100
# In the order in which they say how many rows a call has.
_MAIN_INPUTS = (
    "input_ids",
    "inputs_embeds",
    "decoder_input_ids",
    "input_values",
    "input_features",
    "pixel_values",
    "inputs",
)
# Arguments whose first dimension is never that of the rows, and those with one entry per token: (B, T), (B, T, D).
_OF_NO_ROW = frozenset({"num_items_in_batch", "logits_to_keep", "cache_position"})
# What an earlier call has left for this one, as transformers names it: the second from 5.24 on.
_CACHES = ("past_key_values", "cache", "cache_params", "past_buckets_states", "mems")
_BY_TOKEN = frozenset(
    {"input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids", "labels", "shift_labels"}
)


class CannotSplit(Exception):
    """A model call cannot be split by rows; the message says why, for the journal."""


@dataclass(slots=True)
class Chunk:
    """
    Some of the rows of a call.

    Args:
        args (`tuple`), kwargs (`dict`):
            Its arguments.
        rows (`int`):
            How many rows; 1 for a part of a flattened batch.
        shape ([`CallShape`]):
            Its size.
        cut (`int`, *optional*, defaults to 0):
            Columns of padding that were cut off on the right.
        flat (`bool`, *optional*, defaults to `False`):
            Whether it is a part of a flattened batch.
        gap (`bool`, *optional*, defaults to `False`):
            Whether another part of the flattened batch follows.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    shape: CallShape
    cut: int = 0
    flat: bool = False
    gap: bool = False


def main_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor that says how many rows a model call has; `None` if it has none."""
    named = [kwargs.get(name) for name in _MAIN_INPUTS]
    for value in (*named, *args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value
        if isinstance(value, Mapping):
            inner = main_input((), value)
            if inner is not None:
                return inner
    return None


def goes_on(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is given the cache of an earlier one, which holds all rows and grows in it."""
    named = any(not isinstance(kwargs.get(name), bool | None) for name in _CACHES)
    return named or any(hasattr(value, "get_seq_length") for value in (*args, *kwargs.values()))


def sequences_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Layout | None:
    """The sequences of a flattened batch, (1, T); `None` if it is not one."""
    main = main_input(args, kwargs)
    if main is None or main.size(0) != 1 or main.dim() < 2:
        # Positions that all rows share.
        return None
    return segments_of(kwargs)


def shape_of_call(kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallShape | None:
    """The size of a model call; `None` if there is no tensor in it."""
    main = main_input(args, kwargs)
    if main is None:
        return None
    if kind != "generate" and sequences_of(args, kwargs) is not None:
        return CallShape(kind, main.size(1), 1)
    return CallShape(kind, main.size(0), main.size(1) if main.dim() > 1 else 1)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)


def rows_of(value: Any, total: int, rows: slice | list[int], name: str = "") -> Any:
    """The part of an argument that belongs to some rows; what belongs to no row stays."""
    return _part(value, total, rows, name)


def picked_rows(args: Sequence[Any], kwargs: Mapping[str, Any], shape: CallShape, rows: Sequence[int]) -> Chunk:
    """A chunk of rows from anywhere."""
    picked, total = list(rows), shape.rows
    return Chunk(
        tuple(_part(value, total, picked, "") for value in args),
        {name: _part(value, total, picked, name) for name, value in kwargs.items()},
        len(picked),
        dataclasses.replace(shape, rows=len(picked)),
    )


def _part(value: Any, total: int, rows: slice | list[int], name: str) -> Any:
    if name in _OF_NO_ROW or value is None or isinstance(value, (str, bool, int, float, torch.dtype)):
        return value
    if isinstance(value, torch.Tensor):
        return _part_of_tensor(value, total, rows, name)
    if isinstance(value, list) and len(value) == total:
        return value[rows] if isinstance(rows, slice) else [value[row] for row in rows]
    if isinstance(value, Mapping):
        return mapping_like(value, {key: _part(inner, total, rows, str(key)) for key, inner in value.items()})
    if isinstance(value, (list, tuple)):
        parts = [_part(inner, total, rows, name) for inner in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    raise CannotSplit(f"`{name or 'an input'}` is a {type(value).__name__}, of which the rows are not known")


def _part_of_tensor(value: torch.Tensor, total: int, rows: slice | list[int], name: str) -> torch.Tensor:
    if name == "position_ids" and value.dim() == 3:
        # Positions in time, height and width: (3, B, T), even where there are 3 rows.
        return value[:, rows].contiguous() if value.size(1) == total else value
    if value.dim() > 0 and value.size(0) == total:
        return value[rows]
    if value.dim() > 1 and value.size(0) != 1:
        raise CannotSplit(
            f"`{name or 'an input'}` has {value.size(0)} entries for {total} rows: it is not known which belong "
            "to which (images laid out by patch)"
        )
    return value


def mapping_like(like: Mapping[str, Any], content: dict[str, Any]) -> Any:
    """A dictionary, or an output class of transformers, of the same type."""
    make: Any = type(like)
    return make(**content) if dataclasses.is_dataclass(like) else make(content)


def used_lengths(kwargs: Mapping[str, Any], rows: int) -> list[int] | None:
    """
    Finds where the padding on the right of each row begins, by attention mask and labels; `None` if it is not known,
    or if something in the call is in the way of cutting it off. One device sync.
    """
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.size(0) != rows:
        return None
    used = mask != 0  # (B, T)
    for name, value in kwargs.items():
        if name in _OF_NO_ROW or value is None or isinstance(value, (str, bool, int, float)):
            continue
        if name not in _BY_TOKEN or not isinstance(value, torch.Tensor) or mask.shape[1] not in value.shape[1:]:
            return None
        if name.endswith("labels"):
            used = used | (value != IGNORED_LABEL)
    if kwargs.get("logits_to_keep") is not None:
        return None
    places = torch.arange(1, mask.size(1) + 1, device=mask.device)
    return [int(last) for last in (used * places).amax(1).tolist()]


def trimmed(value: Any, name: str, keep: int) -> Any:
    """An argument without the padding on its right; contiguous, as it was: some views ask for that."""
    if name not in _BY_TOKEN or not isinstance(value, torch.Tensor):
        return value
    if name == "position_ids" and value.dim() == 3:
        return value[:, :, :keep].contiguous()
    return value[:, :keep].contiguous()


def segment_chunks(
    shape: CallShape, allowed: int, args: tuple[Any, ...], kwargs: dict[str, Any], segments: Layout
) -> list[Chunk]:
    """Groups of whole sequences of at most `allowed` tokens, and of at least one sequence."""
    if args:
        raise CannotSplit("a flattened batch with positional arguments")
    labels, starts = kwargs.get("labels"), segments.starts
    inner = list(starts[1:-1])
    if isinstance(labels, torch.Tensor) and inner and bool((labels[0, inner] != IGNORED_LABEL).any()):
        raise CannotSplit("sequences of a flattened batch predict the first token of the next one")
    groups: list[list[int]] = []
    filled = allowed
    for segment in range(segments.rows):
        tokens = starts[segment + 1] - starts[segment]
        if filled + tokens > allowed:
            groups.append([])
            filled = 0
        groups[-1].append(segment)
        filled += tokens
    last = len(groups) - 1
    return [segment_chunk(shape, kwargs, segments, group, place < last) for place, group in enumerate(groups)]


def segment_chunk(
    shape: CallShape, kwargs: Mapping[str, Any], segments: Layout, group: Sequence[int], gap: bool
) -> Chunk:
    """Some sequences of a flattened batch; with `gap`, others follow."""
    tokens = sum(segments.starts[segment + 1] - segments.starts[segment] for segment in group)
    part = select_rows(kwargs, segments, group)
    return Chunk((), part, 1, dataclasses.replace(shape, rows=tokens), flat=True, gap=gap)


def spans(total: int, at_a_time: int) -> list[tuple[int, int]]:
    """First row and the one after the last of each chunk: of even sizes, so that none is a mere rest."""
    return parts(total, -(-total // at_a_time))


def parts(total: int, count: int) -> list[tuple[int, int]]:
    """The same, for a number of chunks."""
    bounds = [total * index // count for index in range(count + 1)]
    return list(itertools.pairwise(bounds))
