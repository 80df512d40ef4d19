"""Checkpoints as files: their names and places, their size and checksums, and their removal."""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


# In each checkpoint: of the Trainer, which writes it last; the marker of a complete one; what is left of a generation
# cycle.
STATE_FILE = "trainer_state.json"
MARKER_FILE = "healing.json"
GENERATED_FILE = "generated.pt"

# In the output directory, besides the Trainer's own `checkpoint-<step>`.
PINNED_DIR = "last-known-good"
EMERGENCY_DIR = "emergency"
# Checkpoints that are to take the place of one in `emergency/`, or among the Trainer's own.
BESIDE_DIR = os.path.join(EMERGENCY_DIR, "beside")

# Bytes that are read at once.
_PIECE = 1 << 22
_NUMBERED = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, slots=True)
class ModelNames:
    """
    Names of a model's tensors in a checkpoint, each with its shape.

    Args:
        ways (`tuple[Mapping[str, tuple[int, ...]], ...]`):
            As the model knows them, and as they are written where that differs.
        tied (`Mapping[str, frozenset[str]]`):
            The other names of a tensor that has several, of which one is written.
        adapters (`Mapping[str, Mapping[str, tuple[int, ...]]]`):
            Those of each adapter, by its folder.
    """

    ways: tuple[Mapping[str, tuple[int, ...]], ...] = ()
    tied: Mapping[str, frozenset[str]] = field(default_factory=dict)
    adapters: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ZeroJob:
    """
    How a job uses DeepSpeed, as far as its checkpoints depend on it.

    Args:
        processes (`int`, *optional*):
            Ranks that share the optimizer state; `None` if that is not known.
        stage (`int`):
            Of ZeRO.
        bf16 (`bool`):
            Whether it trains in bf16.
        universal (`bool`):
            Whether it is to load a universal checkpoint.
    """

    processes: int | None
    stage: int
    bf16: bool
    universal: bool


def number_of(checkpoint: Path) -> int | None:
    """Returns the step a directory is named after, `None` if its name is not that of a checkpoint."""
    match = _NUMBERED.fullmatch(checkpoint.name)
    return None if match is None else int(match[1])


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """Lists the checkpoints in a folder, each with the step it is named after."""
    if not folder.is_dir():
        return []
    return [(number, entry) for entry in folder.iterdir() if (number := number_of(entry)) is not None]


def files_of(checkpoint: Path) -> list[Path]:
    """Lists the files of a checkpoint except its marker."""
    return sorted(file for file in checkpoint.rglob("*") if file.is_file() and not file.name.startswith(MARKER_FILE))


def size_of(checkpoint: Path) -> int:
    """Returns the bytes that the files of a checkpoint take."""
    return sum(file.stat().st_size for file in files_of(checkpoint))


def unshared_size_of(checkpoint: Path) -> int:
    """Returns the bytes that removing a checkpoint frees: those that no other hard link holds."""
    return sum(status.st_size for file in files_of(checkpoint) if (status := file.stat()).st_nlink == 1)


def crc32_of(file: Path) -> int:
    """Computes the checksum of a file, which is read once; other threads run meanwhile."""
    checksum = 0
    piece = memoryview(bytearray(_PIECE))
    with file.open("rb") as stream:
        while count := stream.readinto(piece):
            checksum = zlib.crc32(piece[:count], checksum)
    return checksum


def share_files(one: Path, other: Path) -> bool:
    """Whether two checkpoints are, in part at least, hard links to the same files."""
    theirs = {(status.st_dev, status.st_ino) for status in (file.stat() for file in files_of(other))}
    return any((status.st_dev, status.st_ino) in theirs for status in (file.stat() for file in files_of(one)))


def remove_checkpoint(checkpoint: Path) -> None:
    """Removes a checkpoint; a process killed in between leaves nothing that looks like one."""
    if not checkpoint.exists():
        return
    gone = checkpoint.with_name(f".{checkpoint.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.rename(gone)
    shutil.rmtree(gone)
