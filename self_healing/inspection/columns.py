"""Columns of a row as numpy arrays, text and plain structure: what checks read, flatten and hash."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def columns_of(content: Any) -> dict[str, Any]:
    """Plain values of a row by column; of a sequence by place."""
    if isinstance(content, Mapping):
        return {str(name): _plain(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return {f"item {place}": _plain(value) for place, value in enumerate(content)}
    return {"the row": _plain(content)}


def _plain(value: Any) -> Any:
    """Converts numbers to numpy arrays and structure to lists and dictionaries; leaves the rest as it is."""
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (int, float, np.number)):
            try:
                array = np.asarray(value)
            except (ValueError, OverflowError):
                array = None
            if array is not None and array.dtype.kind in "biuf":
                return array
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return value


def _plain_tensor(value: torch.Tensor) -> Any:
    try:
        value = value.detach().to("cpu")
        # numpy has neither bfloat16 nor float8.
        return (value.float() if value.dtype.is_floating_point and value.dtype.itemsize < 4 else value).numpy()
    except (RuntimeError, TypeError):
        return value


def _arrays(value: Any) -> Iterator[np.ndarray]:
    """Yields every array of numbers in a plain value."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc":
            yield value
    elif isinstance(value, (int, float, np.number)):
        yield np.asarray(value)
    elif isinstance(value, list):
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _arrays(item)


def flatten(value: Any) -> np.ndarray:
    """All numbers of a plain value, of shape (N)."""
    arrays = [array.reshape(-1) for array in _arrays(value)]
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)


def is_finite(value: Any) -> bool:
    """Whether a plain value holds neither NaN nor Inf."""
    return all(array.dtype.kind not in "fc" or bool(np.isfinite(array).all()) for array in _arrays(value))


def digest_of(columns: Mapping[str, Any]) -> bytes | None:
    """Hashes the content of a row; `None` if it holds what cannot be pickled."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        _feed(digest, dict(columns))
    except Exception:
        return None
    return digest.digest()


def _feed(digest: hashlib.blake2b, value: Any) -> None:
    if isinstance(value, np.ndarray):
        digest.update(f"array {value.dtype} {value.shape} ".encode())
        digest.update(value.tobytes())
    elif isinstance(value, list):
        digest.update(f"list {len(value)} ".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, dict):
        digest.update(f"dict {len(value)} ".encode())
        for name in sorted(value):
            _feed(digest, name)
            _feed(digest, value[name])
    elif isinstance(value, str):
        encoded = value.encode("utf-8", "surrogatepass")
        digest.update(f"text {len(encoded)} ".encode())
        digest.update(encoded)
    else:
        # Images and the like: equal content may look different here, but never the other way round.
        pickled = pickle.dumps(value)
        digest.update(f"object {len(pickled)} ".encode())
        digest.update(pickled)
