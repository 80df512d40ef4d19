"""Checks directories of `torch.distributed.checkpoint`, which all ranks have written together: whole and finite."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .findings import Findings, Unusable, reading
from .tensors import first_bad


# Written by the first rank when all others have said that they are done.
_METADATA = ".metadata"
# What it is made of (torch 2.13); anything else in a pickle could be code.
_CLASSES = frozenset(
    {
        *(("torch", name) for name in ("Size", "device")),
        ("torch.serialization", "_get_layout"),
        *(("pathlib", name) for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    }
)


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is none of the classes it is made of")


def check_shards(folder: Path, findings: Findings, masks: bool = False) -> None:
    """
    Refuses a directory in which the part of a rank is missing, torn, changed or not finite.

    Args:
        folder (`Path`):
            The directory.
        findings ([`Findings`]):
            Gets what could not be looked at.
        masks (`bool`, *optional*, defaults to `False`):
            Whether a tensor of 0 and -Inf only is fine.
    """
    if not (folder / _METADATA).is_file():
        raise Unusable(f"{folder.name}/{_METADATA} is missing: it is written last, when all ranks have written theirs")
    with reading(folder / _METADATA), (folder / _METADATA).open("rb") as stream:
        try:
            stored = _Metadata(stream).load().storage_data
        except pickle.UnpicklingError as error:
            findings.notes.append(f"{folder.name} was not scanned ({error})")
            return
    by_file: dict[str, list[tuple[str, Any]]] = {}
    for index, place in stored.items():
        by_file.setdefault(str(place.relative_path), []).append((str(index.fqn), place))
    for name, entries in sorted(by_file.items()):
        file = folder / name
        if not file.is_file():
            raise Unusable(f"{folder.name}/{name} is missing ({_METADATA} names it): the part of one rank")
        size, needed = file.stat().st_size, max(place.offset + place.length for _, place in entries)
        if size < needed:
            raise Unusable(f"{folder.name}/{name} is truncated: {size} bytes, {_METADATA} says {needed}")
        for tensor, value in _values(file, entries):
            if first_bad(value, tensor, masks) is not None:
                raise Unusable(f"{tensor} in {folder.name}/{name} holds NaN or Inf")


def _values(file: Path, entries: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields the tensors of a file, one after the other; settings of an optimizer may well be Inf."""
    with reading(file), file.open("rb") as stream:
        for name, place in sorted(entries, key=lambda entry: int(entry[1].offset)):
            stream.seek(place.offset)
            content = stream.read(place.length)
            if getattr(place, "transform_descriptors", None) or not content.startswith(b"PK\x03\x04"):
                # Compressed, or in another format: that its bytes are there is all there is to see.
                continue
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                if (torn := archive.testzip()) is not None:
                    raise ValueError(f"{name} is not what was written (its checksum differs in {torn})")
            try:
                value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            except pickle.UnpicklingError:
                continue
            if isinstance(value, torch.Tensor):
                yield name, value
