"""Finds the files that a resume reads, and refuses a checkpoint that lacks one."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from .deepspeed import is_of_deepspeed
from .findings import Findings, Unusable, few, json_object_in, reading
from .tensors import check_archive, read_header
from .trainer_files import check_mapping


_SENTINEL = "checkpoint-is-incomplete.txt"
_SINGLE = ("model.safetensors", "pytorch_model.bin")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_OF_RANK = re.compile(r"rng_state_(\d+)\.pth")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def check_directory(checkpoint: Path) -> None:
    """Refuses what is no directory, or one in which nothing was written to its end."""
    if not checkpoint.exists():
        raise Unusable("does not exist")
    if not checkpoint.is_dir():
        raise Unusable("is not a directory")
    if not any(checkpoint.iterdir()):
        raise Unusable("is empty")
    if (checkpoint / _SENTINEL).exists():
        raise Unusable(f"{_SENTINEL} is there: the process was killed while it wrote this checkpoint")


def weight_files(checkpoint: Path, findings: Findings) -> list[Path]:
    """Lists the files with weights that a resume reads; what lies beside them is noted."""
    files = [file for name in _SINGLE if (file := checkpoint / name).is_file()]
    whole = next(iter(files), None)
    files += [file for name in ADAPTERS if (file := checkpoint / name).is_file()]
    # PEFT keeps every adapter but the default one in a folder of its own.
    files += [file for name in ADAPTERS for file in sorted(checkpoint.glob(f"*/{name}"))]
    for index in _indexes(checkpoint):
        if whole is None:
            files += _shards(index)
        else:
            findings.notes.append(f"{index.name} was not looked at, because a resume reads {whole.name}")
    files += sorted(checkpoint.glob("pytorch_model_fsdp*.bin"))
    if not files and not is_of_deepspeed(checkpoint) and not sharded_weights(checkpoint):
        raise Unusable("no weights: there is no model.safetensors, adapter_model.safetensors or other file with them")
    return files


def sharded_weights(checkpoint: Path) -> list[Path]:
    """Lists the directories with weights that all ranks have written together."""
    return _folders(checkpoint, "pytorch_model_fsdp_*")


def sharded_optimizers(checkpoint: Path) -> list[Path]:
    """Lists the directories with optimizer state that all ranks have written together."""
    return _folders(checkpoint, "optimizer_*")


def _indexes(checkpoint: Path) -> list[Path]:
    return [index for name in _INDEXES if (index := checkpoint / name).is_file()]


def _shards(index: Path) -> list[Path]:
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        if not (index.parent / name).is_file():
            raise Unusable(f"{name} is missing ({index.name} names it)")
    return [index.parent / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    with reading(index):
        return {str(name): str(file) for name, file in json_object_in(index)["weight_map"].items()}


def check_indexes(checkpoint: Path, weights: list[Path]) -> None:
    """Refuses shards without a tensor that their index names: those of another set of weights may lie among them."""
    for index in _indexes(checkpoint):
        named = _weight_map(index)
        shards = [checkpoint / file for file in set(named.values())]
        if not all(shard in weights and shard.suffix == ".safetensors" for shard in shards):
            continue
        held = {tensor.name for shard in shards for tensor in read_header(shard)}
        if gone := sorted(named.keys() - held):
            raise Unusable(f"{few(gone)} of {index.name} is in none of its shards")


def _folders(checkpoint: Path, pattern: str) -> list[Path]:
    return sorted(folder for folder in checkpoint.glob(pattern) if folder.is_dir() and any(folder.iterdir()))


def other_archives(
    checkpoint: Path, findings: Findings, ranks: int = 1, here: Collection[int] | None = None
) -> tuple[list[Path], list[Path]]:
    """
    Lists the torch archives beside the weights, and refuses a checkpoint without optimizer or schedule.

    Args:
        checkpoint (`Path`):
            The directory.
        findings ([`Findings`]):
            Gets the parts of ranks that are missing.
        ranks (`int`, *optional*, defaults to 1):
            How many processes it was written by at least, if by several.
        here (`Collection[int]`, *optional*):
            Those that write to this disk, where others have disks of their own.

    Returns:
        Those of the optimizer, and the others.
    """
    deepspeed = is_of_deepspeed(checkpoint)
    patterns = ("optimizer.pt", "optimizer.bin", "optimizer.pt_*", "rank*-of-*-optimizer.pt")
    optimizers = [file for pattern in patterns for file in sorted(checkpoint.glob(pattern)) if file.is_file()]
    if not optimizers and not sharded_optimizers(checkpoint) and not deepspeed:
        raise Unusable("optimizer.pt is missing: no optimizer state, a resume would silently start with fresh moments")
    scheduler = checkpoint / "scheduler.pt"
    if not scheduler.is_file() and not deepspeed:
        raise Unusable("scheduler.pt is missing: a resume would silently start the learning rate's schedule anew")
    random_states = [file for file in sorted(checkpoint.glob("rng_state*.pth")) if _is_whole(file, findings)]
    if not random_states:
        findings.doubts.append("no rng_state.pth, so a resume draws other random numbers")
    findings.missing += _missing_parts(random_states, ranks, here)
    others = [scheduler, checkpoint / "scaler.pt", checkpoint / "training_args.bin"]
    return optimizers, [*(file for file in others if file.is_file()), *random_states]


def _is_whole(random_state: Path, findings: Findings) -> bool:
    """Whether a random state can be read. If not it is taken for missing, which a resume gets over."""
    try:
        check_archive(random_state, None)
        check_mapping(random_state)
    except Unusable as reason:
        findings.doubts.append(f"{reason}, and is taken for missing: the resume is not bitwise")
        return False
    return True


def _missing_parts(random_states: list[Path], ranks: int, here: Collection[int] | None) -> list[str]:
    """
    Names the random states of ranks that had not written theirs when they were killed: the first rank writes the state
    of the Trainer, last of all, without waiting for them.
    """
    numbers = {int(match[1]) for file in random_states if (match := _OF_RANK.fullmatch(file.name)) is not None}
    if not numbers:
        return []
    # One process alone writes rng_state.pth.
    wanted: Collection[int] = range(max(max(numbers) + 1, ranks, 2))
    if here is not None and numbers.issubset(here):
        # Not where machines share a disk all the same.
        wanted = here
    return [f"rng_state_{number}.pth" for number in wanted if number not in numbers]
