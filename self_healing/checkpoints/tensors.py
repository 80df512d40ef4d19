"""Reads files with tensors: that they are whole, as they were written, and finite."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .marker import crc32_of


# Numbers that are looked at once.
_CHUNK = 1 << 22

# ---- findings ----


class Unusable(Exception):
    """Carries the reason why a checkpoint cannot be resumed from."""


@dataclass(slots=True)
class Findings:
    """What is said of a checkpoint that can be used: its step, not looked at, warned of, missing parts of ranks."""

    step: int = 0
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turns an exception of reading a file into the reason against its checkpoint."""
    try:
        yield
    except Unusable:
        raise
    except Exception as error:
        raise Unusable(f"{file.name} cannot be read ({in_short(error)})") from None


def in_short(error: Exception) -> str:
    """Describes an error in one line."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}"


def json_object_in(file: Path) -> dict[str, Any]:
    """Reads a JSON object; anything else in the file is a `ValueError`."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def few(names: Collection[str]) -> str:
    """Names the first, and says how many more there are."""
    first, *rest = sorted(names)
    return f"{first} and {len(rest)} more" if rest else first


# ---- files ----


def check_checksum(file: Path, expected: int) -> None:
    """Compares a file with what was written."""
    with reading(file):
        found = crc32_of(file)
    if found != expected:
        raise Unusable(
            f"{file.name} is not what was written (its checksum differs: damaged at rest; if it was changed on "
            "purpose, remove healing.json beside it)"
        )


def check_weights(file: Path, findings: Findings) -> None:
    """Refuses a file with weights, of safetensors or of torch, that is torn or not finite."""
    if file.suffix != ".safetensors":
        _refuse_bad(first_bad(load_archive(file, findings), "", masks=True), file)
        return
    with reading(file):
        try:
            with safe_open(file, framework="pt", device="cpu") as stored:
                names = (name for name in stored.keys() if is_bad(stored.get_tensor(name), masks=True))  # noqa: SIM118
                _refuse_bad(next(names, None), file)
        except SafetensorError as error:
            raise Unusable(f"{file.name} is truncated or damaged ({error})") from None


def check_optimizer(file: Path, findings: Findings) -> None:
    """Refuses a file with optimizer state that is torn or not finite."""
    loaded = load_archive(file, findings)
    if isinstance(loaded, Mapping) and "state" in loaded:
        # Among the settings Inf may be meant: Prodigy's growth_rate is.
        settings = first_bad(loaded.get("param_groups"), "param_groups", inf=True)
        _refuse_bad(first_bad(loaded["state"], "state") or settings, file)
    else:
        _refuse_bad(first_bad(loaded, "state"), file)


def _refuse_bad(name: str | None, file: Path) -> None:
    if name is not None:
        raise Unusable(f"{name} in {file.name} holds NaN or Inf")


def load_archive(file: Path, findings: Findings | None = None) -> Any:
    """Loads a torch archive, whose tensors stay on the disk; `None`, with a note, if other classes are in it."""
    with reading(file):
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError:
            if findings is not None:
                findings.notes.append(
                    f"{file.name} could not be scanned, because it holds objects of other classes than torch's"
                )
            return None


# ---- finite ----


def first_bad(value: Any, name: str, masks: bool = False, inf: bool = False) -> str | None:
    """Finds the first value within nested ones that is not finite; returns its name."""
    if isinstance(value, torch.Tensor):
        return name if is_bad(value, masks, inf) else None
    if isinstance(value, float):
        return name if math.isnan(value) or (math.isinf(value) and not inf) else None
    if isinstance(value, Mapping):
        inner: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list | tuple):
        inner = list(enumerate(value))
    else:
        return None
    found = (first_bad(each, f"{name}.{key}" if name else str(key), masks, inf) for key, each in inner)
    return next((bad for bad in found if bad is not None), None)


def is_bad(tensor: torch.Tensor, masks: bool = False, inf: bool = False) -> bool:
    """Whether a tensor holds NaN or Inf; in pieces, so that it needs no memory of its own."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return False
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        try:
            low, high = (float(extreme) for extreme in (chunk.float() if chunk.itemsize == 1 else chunk).aminmax())
        except NotImplementedError:
            # Packed numbers of 4 bits, which have no NaN.
            return False
        if math.isnan(low):
            return True
        if not inf and (high == math.inf or (low == -math.inf and not (masks and _is_mask(chunk)))):
            return True
    return False


def _is_mask(chunk: torch.Tensor) -> bool:
    return bool((chunk == 0).any()) and bool(((chunk == 0) | (chunk == -math.inf)).all())
