"""Compares the names of stored tensors with those of the model that is to be trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..checkpoint_files import ModelNames
from .expected_files import ADAPTERS
from .findings import Findings, Unusable, few
from .tensors import read_header


# Characters of a name that may have changed while its file can still be read.
_CHANGED_CHARACTERS = 3


def check_names(
    checkpoint: Path, weights: list[Path], model: ModelNames, may_be_damaged: bool, findings: Findings
) -> None:
    """
    Compares the names of stored tensors with those of the model: one that the model does not know is not loaded, and
    the Trainer goes on with what the model has.

    A name is damaged if the model has a tensor of that shape and nearly that name, which is missing. Where the bytes
    are known to be what was written, or many names differ, it is the model that is another one: that is said only.
    """
    adapters = [(folder, (names,), True) for folder, names in model.adapters.items()]
    for folder, ways, adapter in [("", model.ways, False), *adapters]:
        files = [
            file
            for file in weights
            if file.parent == checkpoint / folder
            and file.suffix == ".safetensors"
            and (file.name in ADAPTERS) == adapter
        ]
        if not files or not ways:
            continue
        found = {tensor.name: tensor.shape for file in files for tensor in read_header(file)}
        missing, unknown = min((_differences(found, way, model.tied) for way in ways), key=lambda each: len(each[0]))
        damaged = [
            (name, other)
            for name in unknown
            for other in missing
            if missing[other] == found[name] and _nearly_equal(name, other)
        ]
        if damaged and may_be_damaged and 2 * len(damaged) < len(found):
            name, other = damaged[0]
            raise Unusable(
                f"{name} in {files[0].name} is {other} in the model: the name is damaged, and a resume would silently "
                "go on with what the model has there"
            )
        if missing:
            findings.doubts.append(
                f"the model has tensors that are not in it and keep the values they have: {few(missing)}"
            )


def _differences(
    found: Mapping[str, tuple[int, ...]], way: Mapping[str, tuple[int, ...]], tied: Mapping[str, frozenset[str]]
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Lists the tensors of the model that are not there, and those there that the model does not know."""
    missing = {
        name: shape
        for name, shape in way.items()
        if name not in found and not any(other in found for other in tied.get(name, ()))
    }
    return missing, [name for name in found if name not in way]


def _nearly_equal(name: str, other: str) -> bool:
    changed = sum(one != another for one, another in zip(name, other, strict=False))
    return len(name) == len(other) and changed <= _CHANGED_CHARACTERS
