"""Checks files with tensors: that they are whole, as they were written, and finite."""

from __future__ import annotations

import json
import math
import pickle
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..checkpoint_files import crc32_of
from .findings import Unusable, reading
from .foreign_objects import load_foreign


# Numbers that are looked at once.
_CHUNK = 1 << 22
# Bytes that are read at once.
_PIECE = 1 << 24
# Types in safetensors that can hold NaN, and that torch has; of the others (F4, F6) there is no NaN.
_FLOATING = {
    name: dtype
    for name, called in {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "C64": "complex64",
    }.items()
    if isinstance(dtype := getattr(torch, called, None), torch.dtype)
}


def check_checksum(file: Path, expected: int, found: int | None = None) -> None:
    """
    Compares a file with what was written.

    Args:
        file (`Path`):
            The file.
        expected (`int`):
            Its checksum in the marker.
        found (`int`, *optional*):
            The checksum of what is there, if the file has been read already.
    """
    with reading(file):
        found = crc32_of(file) if found is None else found
    if found != expected:
        raise Unusable(
            f"{file.name} is not what was written (its checksum differs: damaged at rest; if it was changed on "
            "purpose, remove healing.json beside it)"
        )


# ---- safetensors ----


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file, and the bytes of the file that it takes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: Path) -> list[StoredTensor]:
    """Reads the tensors of a safetensors file in the order they lie in it; refuses one of the wrong length."""
    size = file.stat().st_size
    with reading(file), file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or 8 + length > size:
            raise Unusable(f"{file.name} is truncated: {size} bytes do not even hold its header")
        header = json.loads(stream.read(length))
        tensors = [
            StoredTensor(
                name, entry["dtype"], tuple(entry["shape"]), *(8 + length + at for at in entry["data_offsets"])
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
        tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    whole = max((tensor.end for tensor in tensors), default=8 + length)
    if size != whole:
        what = "is truncated" if size < whole else "has more in it than it should"
        raise Unusable(f"{file.name} {what}: {size} bytes, its header says {whole}")
    return tensors


def check_safetensors(file: Path, expected: int | None) -> None:
    """
    Reads a safetensors file once: every tensor finite, every byte what was written.

    Args:
        file (`Path`):
            The file.
        expected (`int`, *optional*):
            Its checksum in the marker.
    """
    tensors = read_header(file)
    # Checks what the header says against itself: no hole, no overlap, each tensor as long as its shape asks for.
    with reading(file), safe_open(file, framework="pt", device="cpu"):
        pass
    bad: str | None = None
    with reading(file), file.open("rb") as stream:
        checksum = zlib.crc32(stream.read(tensors[0].begin if tensors else -1))
        buffer = memoryview(bytearray(_PIECE))
        for tensor in tensors:
            for piece in _pieces(stream, tensor.end - tensor.begin, buffer):
                if expected is not None:
                    checksum = zlib.crc32(piece, checksum)
                if bad is None and tensor.dtype in _FLOATING and _holds_bad(piece, _FLOATING[tensor.dtype]):
                    bad = tensor.name
    if bad is not None:
        raise Unusable(f"{bad} in {file.name} holds NaN or Inf")
    if expected is not None:
        check_checksum(file, expected, checksum)


def _pieces(stream: BufferedReader, length: int, buffer: memoryview) -> Iterator[memoryview]:
    """Yields the next bytes of a file, in pieces that are gone when the next one is asked for."""
    while length > 0:
        piece = buffer[: min(length, len(buffer))]
        if stream.readinto(piece) != len(piece):
            raise EOFError("it ends too early")
        yield piece
        length -= len(piece)


def _holds_bad(piece: memoryview, dtype: torch.dtype) -> bool:
    return is_bad(torch.frombuffer(piece, dtype=dtype), masks=True)


# ---- torch archives ----


def check_archive(file: Path, expected: int | None) -> None:
    """
    Reads a torch archive through: against its checksum in the marker, or else every member against its own.

    Args:
        file (`Path`):
            The file.
        expected (`int`, *optional*):
            Its checksum in the marker.
    """
    if file.stat().st_size == 0:
        raise Unusable(f"{file.name} is empty")
    if expected is not None:
        check_checksum(file, expected)
        return
    with reading(file):
        with file.open("rb") as stream:
            if stream.read(4) != b"PK\x03\x04":
                # The format of torch before 1.6 has no checksums: that it loads is all there is to see.
                load_foreign(file)
                return
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                # torch.serialization.set_crc32_options(False) writes zeros.
                if member.CRC:
                    _read_through(archive, member)


def _read_through(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    with archive.open(member) as stream:
        while stream.read(_CHUNK):
            pass


def load_archive(file: Path, doubts: list[str] | None = None) -> Any:
    """
    What is in a torch archive; `None` if that cannot be known without running code from it.

    Args:
        file (`Path`):
            The file.
        doubts (`list[str]`, *optional*):
            Gets a line if it is so.
    """
    with reading(file):
        with file.open("rb") as stream:
            mapped = stream.read(4) == b"PK\x03\x04"
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError:
            if doubts is not None:
                doubts.append(
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
    """
    Whether a tensor holds NaN or Inf; in pieces, so that it needs no memory of its own.

    Args:
        tensor (`torch.Tensor`):
            Of any type; integers are never bad.
        masks (`bool`, *optional*, defaults to `False`):
            Whether a tensor of 0 and -Inf only is fine: a causal mask kept as a buffer.
        inf (`bool`, *optional*, defaults to `False`):
            Whether only NaN is bad.
    """
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
            # Packed 4-bit numbers, which have no NaN.
            return False
        if math.isnan(low):
            return True
        if not inf and (high == math.inf or (low == -math.inf and not (masks and _is_mask(chunk)))):
            return True
    return False


def _is_mask(chunk: torch.Tensor) -> bool:
    return bool((chunk == 0).any()) and bool(((chunk == 0) | (chunk == -math.inf)).all())
