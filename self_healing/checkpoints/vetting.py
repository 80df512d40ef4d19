"""Judges whether a directory can be resumed from, by what is in it and by nothing else."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, TrainerState

from ..system import processes
from ..system.files import MARKER_FILE, STATE_FILE
from .deepspeed import check_deepspeed, is_of_deepspeed
from .marker import CHECKSUMS, load_marker, number_of
from .tensors import (
    Findings,
    Unusable,
    check_checksum,
    check_optimizer,
    check_weights,
    few,
    in_short,
    json_object_in,
    load_archive,
    reading,
)


_SENTINEL = "checkpoint-is-incomplete.txt"
# Of `torch.distributed.checkpoint`; written by the first rank when all others have said that they are done.
_METADATA = ".metadata"
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer.pt_*", "rank*-of-*-optimizer.pt")
_OF_RANK = re.compile(r"rng_state_(\d+)\.pth")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of a checkpoint."""

    path: str
    step: int | None
    usable: bool
    reason: str
    standing: str
    doubts: tuple[str, ...] = ()
    whole: bool = True


def vet(checkpoint: Path) -> Verdict:
    """Looks at all that a resume would read: that it is there, whole, what was written, and finite. Never raises."""
    marker = load_marker(checkpoint)
    standing = "unmarked" if marker is None else str(marker["standing"])
    findings = Findings()
    refusal = _refusal(lambda: _examine(checkpoint, marker, findings))
    if refusal is not None:
        return Verdict(str(checkpoint), number_of(checkpoint), False, refusal, standing)
    if findings.missing:
        what = "is missing" if len(findings.missing) == 1 else "are missing"
        findings.doubts.insert(
            0,
            f"{few(findings.missing)} {what}: not every process had written its part, and draws other random numbers",
        )
    whole = not findings.missing
    reason = "; ".join(["complete"] * whole + [*findings.notes, *findings.doubts])
    return Verdict(str(checkpoint), findings.step, True, reason, standing, tuple(findings.doubts), whole)


def vet_weights(checkpoint: Path) -> str | None:
    """Says why the weights of a checkpoint cannot be loaded, for a caller that loads nothing else."""
    checksums = (load_marker(checkpoint) or {}).get(CHECKSUMS, {})

    def examine() -> None:
        weights, findings = _weight_files(checkpoint), Findings()
        for file in weights:
            check_weights(file, findings)
        weights += sorted(checkpoint.glob("pytorch_model_fsdp_*/*"))
        if is_of_deepspeed(checkpoint):
            # Which loads the best model by the same files.
            check_deepspeed(checkpoint, None, findings)
            weights += sorted(checkpoint.glob("*/*.pt"))
        for file in weights:
            if (expected := checksums.get(str(file.relative_to(checkpoint)))) is not None:
                check_checksum(file, expected)

    return _refusal(examine)


def breach_of_marker(checkpoint: Path) -> str | None:
    """Names the first file that is gone, of another length or changed since the marker was written, if any is."""
    marker = load_marker(checkpoint)
    return None if marker is None else _refusal(lambda: _check_marker(checkpoint, marker))


def _refusal(look: Callable[[], None]) -> str | None:
    """What speaks against a checkpoint; what the file system or a torn file makes a reader raise does as well."""
    try:
        look()
    except Unusable as refusal:
        return str(refusal)
    except Exception as error:
        return f"cannot be read ({in_short(error)})"
    return None


def _examine(checkpoint: Path, marker: Mapping[str, Any] | None, findings: Findings) -> None:
    """Looks at everything in a checkpoint; what is cheap to see comes first."""
    _check_directory(checkpoint)
    findings.step = _finished_steps(checkpoint)
    weights, optimizers = _weight_files(checkpoint), _optimizer_files(checkpoint)
    _check_random_states(checkpoint, findings, processes.world_size() if marker is None else 1)
    if marker is not None:
        if marker["standing"] == "suspect":
            incident = f" (incident {marker['incident']})" if marker.get("incident") else ""
            raise Unusable(f"written in a stretch that was rolled back or went bad{incident}")
        _check_sizes(checkpoint, marker)
    elif (checkpoint / MARKER_FILE).is_file():
        findings.doubts.append(f"its marker {MARKER_FILE} cannot be read, so it is judged without it")
    _check_configs(checkpoint)
    for file in weights:
        check_weights(file, findings)
    for file in optimizers:
        check_optimizer(file, findings)
    if marker is None and any(checkpoint.glob(f"*/{_METADATA}")):
        findings.notes.append("its sharded parts were not read through")
    if is_of_deepspeed(checkpoint):
        check_deepspeed(checkpoint, findings.step, findings)
    for name in ("scheduler.pt", "scaler.pt"):
        if (checkpoint / name).is_file():
            load_archive(checkpoint / name, findings)
    if marker is not None:
        if CHECKSUMS not in marker:
            findings.notes.append(f"its bytes were not compared, because {MARKER_FILE} has no checksums")
        _check_checksums(checkpoint, marker)


# ---- what the marker says ----


def _check_sizes(checkpoint: Path, marker: Mapping[str, Any]) -> None:
    for name, expected in marker["files"].items():
        file = checkpoint / name
        if not file.is_file():
            raise Unusable(f"{name} is gone; the marker {MARKER_FILE} names it (if on purpose, remove {MARKER_FILE})")
        if (size := file.stat().st_size) != expected:
            what = "is truncated" if size < expected else "has more in it than was written"
            raise Unusable(f"{name} {what}: {size} bytes, the marker {MARKER_FILE} says {expected}")


def _check_marker(checkpoint: Path, marker: Mapping[str, Any]) -> None:
    _check_sizes(checkpoint, marker)
    _check_checksums(checkpoint, marker)


def _check_checksums(checkpoint: Path, marker: Mapping[str, Any]) -> None:
    for name, expected in marker.get(CHECKSUMS, {}).items():
        check_checksum(checkpoint / name, expected)


# ---- the files that a resume reads ----


def _check_directory(checkpoint: Path) -> None:
    if not checkpoint.exists():
        raise Unusable("does not exist")
    if not checkpoint.is_dir():
        raise Unusable("is not a directory")
    if not any(checkpoint.iterdir()):
        raise Unusable("is empty")
    if (checkpoint / _SENTINEL).exists():
        raise Unusable(f"{_SENTINEL} is there: the process was killed while it wrote this checkpoint")


def _finished_steps(checkpoint: Path) -> int:
    """Reads how many optimizer steps were finished, and checks the state of the Trainer that says so."""
    file = checkpoint / STATE_FILE
    if not file.is_file():
        raise Unusable(f"{STATE_FILE} is missing: it is written last, so the others may not be whole")
    with reading(file):
        step: int = TrainerState.load_from_json(str(file)).global_step
    number = number_of(checkpoint)
    if number is not None and number != step:
        raise Unusable(f"{STATE_FILE} is of step {step}, not of {number}")
    return step


def _check_configs(checkpoint: Path) -> None:
    for file in (checkpoint / "config.json", *sorted(checkpoint.glob("**/adapter_config.json"))):
        if file.is_file():
            with reading(file):
                json_object_in(file)
                if file.name == "config.json":
                    PreTrainedConfig.from_json_file(file)


def _weight_files(checkpoint: Path) -> list[Path]:
    """Lists the files with weights that a resume reads."""
    files = [file for name in _WHOLE if (file := checkpoint / name).is_file()]
    # A resume reads these where there are shards besides.
    whole = bool(files)
    # PEFT keeps every adapter but the default one in a folder of its own.
    files += [file for name in _ADAPTERS for file in sorted((*checkpoint.glob(name), *checkpoint.glob(f"*/{name}")))]
    for index in (checkpoint / name for name in _INDEXES):
        if index.is_file() and not whole:
            files += _shards_of(index)
    files += sorted(checkpoint.glob("pytorch_model_fsdp*.bin"))
    if not _has_shards(checkpoint, "pytorch_model_fsdp_*") and not files and not is_of_deepspeed(checkpoint):
        raise Unusable("no weights: there is no model.safetensors, adapter_model.safetensors or other file with them")
    return files


def _shards_of(index: Path) -> list[Path]:
    with reading(index):
        shards = [index.parent / name for name in sorted(set(json_object_in(index)["weight_map"].values()))]
    for shard in shards:
        if not shard.is_file():
            raise Unusable(f"{shard.name} is missing ({index.name} names it)")
    return shards


def _has_shards(checkpoint: Path, pattern: str) -> bool:
    """Whether there is a directory that all ranks have written into together; refuses one that they have not."""
    folders = [folder for folder in checkpoint.glob(pattern) if folder.is_dir() and any(folder.iterdir())]
    for folder in folders:
        if not (folder / _METADATA).is_file():
            raise Unusable(
                f"{folder.name}/{_METADATA} is missing: it is written when all ranks have written their parts"
            )
    return bool(folders)


def _optimizer_files(checkpoint: Path) -> list[Path]:
    """Lists the files with optimizer state, and refuses a checkpoint without any, or without a schedule."""
    deepspeed = is_of_deepspeed(checkpoint)
    files = [file for pattern in _OPTIMIZERS for file in sorted(checkpoint.glob(pattern)) if file.is_file()]
    if not _has_shards(checkpoint, "optimizer_*") and not files and not deepspeed:
        raise Unusable("optimizer.pt is missing: no optimizer state, a resume would silently start with fresh moments")
    if not (checkpoint / "scheduler.pt").is_file() and not deepspeed:
        raise Unusable("scheduler.pt is missing: a resume would silently start the learning rate's schedule anew")
    return files


def _check_random_states(checkpoint: Path, findings: Findings, ranks: int) -> None:
    """Names the random states that are missing, or torn, which a resume gets over."""
    there = [file for file in sorted(checkpoint.glob("rng_state*.pth")) if _is_whole(file, findings)]
    if not there:
        findings.doubts.append("no rng_state.pth, so a resume draws other random numbers")
    numbers = {int(match[1]) for file in there if (match := _OF_RANK.fullmatch(file.name)) is not None}
    # One process alone writes rng_state.pth.
    wanted = range(max(max(numbers) + 1, ranks, 2)) if numbers else ()
    findings.missing += [f"rng_state_{number}.pth" for number in wanted if number not in numbers]


def _is_whole(random_state: Path, findings: Findings) -> bool:
    try:
        with reading(random_state), zipfile.ZipFile(random_state) as archive:
            if archive.testzip() is not None:
                raise ValueError("a checksum in it differs")
    except Unusable as reason:
        findings.doubts.append(f"{reason}, and is taken for missing: the resume is not bitwise")
        return False
    return True
