"""Loads torch archives with objects of other libraries' classes, without importing those or running their code."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals


# What DeepSpeed 0.19.8 writes, for the format of torch before 1.6, which cannot be asked.
_OF_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class ForeignObject(list[Any]):
    """Stands for an object of another library's class: what that was made of, and nothing that acts."""

    # As pickle makes one, without `__init__`.
    def __new__(cls, *parts: Any) -> ForeignObject:
        made = super().__new__(cls)
        made.extend(parts)
        return made

    def __init__(self, *parts: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.append(state)


def load_foreign(file: Path) -> Any:
    """
    Loads a torch archive as `torch.load(weights_only=True)` does, with a [`ForeignObject`] in the place of each object
    that this would refuse. Tensors stay on the disk until they are read, where the format allows it.

    Args:
        file (`Path`):
            The file.

    Raises:
        pickle.UnpicklingError: For what cannot be loaded so.
    """
    mapped = zipfile.is_zipfile(file)
    names = get_unsafe_globals_in_checkpoint(str(file)) if mapped else _OF_DEEPSPEED
    with safe_globals([_stand_in(*name.rpartition(".")[::2]) for name in names]):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


def _stand_in(module: str, name: str) -> type[ForeignObject]:
    return type(name, (ForeignObject,), {"__module__": module, "__qualname__": name})
