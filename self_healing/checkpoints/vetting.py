"""Judges whether a directory can be resumed from, by what is in it and by nothing else."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import consensus
from ..checkpoint_files import MARKER_FILE, STATE_FILE, ModelNames, number_of
from .deepspeed import check_deepspeed, is_of_deepspeed
from .expected_files import (
    check_directory,
    check_indexes,
    other_archives,
    sharded_optimizers,
    sharded_weights,
    weight_files,
)
from .findings import Findings, Unusable, few, in_short
from .marker import CHECKSUMS, damage_of_marker, load_marker
from .shards import check_shards
from .tensor_names import check_names
from .tensors import check_archive, check_checksum, check_safetensors, first_bad, load_archive, read_header
from .trainer_files import check_configs, check_mapping, finished_steps


# What `save_pretrained` calls weights, whole or in shards.
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
_WRITTEN_WITH_WEIGHTS = frozenset({"config.json", "generation_config.json", "README.md"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    The judgement of a checkpoint.

    Args:
        path (`str`):
            The directory.
        step (`int`, *optional*):
            Optimizer steps finished, as far as it can be known.
        usable (`bool`):
            Whether it can be resumed from.
        reason (`str`):
            Why not; or what was found and what could not be looked at.
        standing (`str`):
            `"verified"` (healthy steps came after it), `"unverified"`, `"suspect"`, or `"unmarked"` (written without
            this library).
        doubts (`tuple[str, ...]`):
            Warnings for the user who resumes from it.
        whole (`bool`):
            Whether every rank had written its part; one that is not is resumed from if there is no other.
    """

    path: str
    step: int | None
    usable: bool
    reason: str
    standing: str
    doubts: tuple[str, ...] = ()
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Readers:
    """
    What is known of the ranks that are to resume from a checkpoint, where machines have disks of their own.

    Args:
        here (`Collection[int]`, *optional*):
            Those whose parts are on the disk of the first one; `None` if all are.
        refused (`Mapping[str, str]`):
            Which of them cannot read a checkpoint, and why, by its path.
    """

    here: Collection[int] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)


ON_ONE_DISK = Readers()


def vet(checkpoint: Path, model: ModelNames | None = None, readers: Readers = ON_ONE_DISK) -> Verdict:
    """
    Looks at everything a resume would read: that it is there, whole, what was written, and finite.

    Args:
        checkpoint (`Path`):
            The directory; anything else gets its verdict as well.
        model ([`ModelNames`], *optional*):
            What the model that is to be trained calls its tensors.
        readers ([`Readers`], *optional*):
            The ranks that are to resume from it.

    Returns:
        [`Verdict`]: Never an exception.
    """
    marker = load_marker(checkpoint)
    standing = "unmarked" if marker is None else str(marker.get("standing", "unverified"))
    step = number_of(checkpoint)
    findings = Findings()
    try:
        if str(checkpoint) in readers.refused:
            raise Unusable(readers.refused[str(checkpoint)])
        check_directory(checkpoint)
        step = finished_steps(checkpoint)
        _examine(checkpoint, step, marker, model, readers, findings)
    except Unusable as refusal:
        return Verdict(str(checkpoint), step, False, str(refusal), standing)
    except Exception as error:
        # What the file system or a torn file makes a reader raise is a verdict as well.
        return Verdict(str(checkpoint), step, False, f"cannot be read ({in_short(error)})", standing)
    if findings.missing:
        what = "is missing" if len(findings.missing) == 1 else "are missing"
        findings.doubts.insert(
            0,
            f"{few(findings.missing)} {what}: not every process had written its part, and draws other random numbers",
        )
    whole = not findings.missing
    reason = "; ".join(["complete"] * whole + [*findings.notes, *findings.doubts])
    return Verdict(str(checkpoint), step, True, reason, standing, tuple(findings.doubts), whole)


def why_not_here(checkpoint: Path) -> str | None:
    """
    Looks only whether the files that a resume reads are there: for ranks that do not vet it, and may have another disk
    than the one that does.

    Returns:
        Why it cannot be read; `None` if it can.
    """
    findings = Findings()
    try:
        check_directory(checkpoint)
        if not (checkpoint / STATE_FILE).is_file():
            raise Unusable(f"{STATE_FILE} is missing")
        weight_files(checkpoint, findings)
        other_archives(checkpoint, findings)
    except Unusable as refusal:
        return str(refusal)
    except Exception as error:
        return in_short(error)
    return None


def vet_weights(checkpoint: Path) -> str | None:
    """
    Looks at the weights of a checkpoint alone, for a caller that loads nothing else.

    Returns:
        Why they cannot be loaded; `None` if they can.
    """
    findings = Findings()
    checksums = (load_marker(checkpoint) or {}).get(CHECKSUMS, {})
    try:
        for file in weight_files(checkpoint, findings):
            expected = checksums.get(str(file.relative_to(checkpoint)))
            if file.suffix != ".safetensors":
                check_archive(file, expected)
            _check_weights(file, expected, findings)
        for folder in sharded_weights(checkpoint):
            check_shards(folder, findings, masks=True)
        if is_of_deepspeed(checkpoint):
            # Which loads the best model by the same files.
            check_deepspeed(checkpoint, None, {checkpoint / name: each for name, each in checksums.items()}, findings)
    except Unusable as refusal:
        return str(refusal)
    except Exception as error:
        return f"cannot be read ({in_short(error)})"
    return None


def may_be_loaded(checkpoint: Path) -> bool:
    """Whether it is a whole checkpoint of ours, not suspect, with weights that are finite."""
    marker = load_marker(checkpoint)
    return marker is not None and marker.get("standing") != "suspect" and vet_weights(checkpoint) is None


def breach_of_marker(checkpoint: Path) -> str | None:
    """
    Finds what is no longer as the marker of a checkpoint says: files that are gone, of another length, or changed.

    Returns:
        The first such thing; `None` if all is as it was, or if there is no marker to compare with.
    """
    marker = load_marker(checkpoint)
    if marker is None:
        return None
    try:
        kept = _check_marked_files(checkpoint, marker, weight_files(checkpoint, Findings()), Findings())
        for name in kept & marker.get(CHECKSUMS, {}).keys():
            check_checksum(checkpoint / name, marker[CHECKSUMS][name])
    except Unusable as breach:
        return str(breach)
    except OSError as error:
        return f"cannot be read ({in_short(error)})"
    return None


def _examine(
    checkpoint: Path,
    step: int,
    marker: Mapping[str, Any] | None,
    model: ModelNames | None,
    readers: Readers,
    findings: Findings,
) -> None:
    """Looks at everything in a checkpoint; what is cheap to see comes first."""
    weights = weight_files(checkpoint, findings)
    for file in weights:
        if file.suffix == ".safetensors":
            read_header(file)
    check_indexes(checkpoint, weights)
    ranks = consensus.world_size() if marker is None else 1
    optimizers, others = other_archives(checkpoint, findings, ranks, readers.here)
    checksums: dict[Path, int] = {}
    if marker is not None:
        checksums = _check_marker(checkpoint, marker, weights, findings)
    elif (damage := damage_of_marker(checkpoint)) is not None:
        findings.doubts.append(f"its marker {MARKER_FILE} cannot be believed ({damage}), so it is judged without it")
    check_configs(checkpoint)
    if model is not None:
        check_names(checkpoint, weights, model, not checksums, findings)
    for file in [*optimizers, *others, *(file for file in weights if file.suffix != ".safetensors")]:
        check_archive(file, checksums.pop(file, None))
    for file in weights:
        _check_weights(file, checksums.pop(file, None), findings)
    for file in optimizers:
        _check_optimizer(file, findings)
    for folder in sharded_weights(checkpoint):
        check_shards(folder, findings, masks=True)
    for folder in sharded_optimizers(checkpoint):
        check_shards(folder, findings)
    if is_of_deepspeed(checkpoint):
        check_deepspeed(checkpoint, step, checksums, findings)
    for file in others:
        check_mapping(file)
    for file, checksum in checksums.items():
        check_checksum(file, checksum)


# ---- what the marker says ----


def _check_marker(
    checkpoint: Path, marker: Mapping[str, Any], weights: list[Path], findings: Findings
) -> dict[Path, int]:
    """Refuses a suspect checkpoint; returns the checksums that its files are to be compared with."""
    if marker.get("standing") == "suspect":
        incident = f" (incident {marker['incident']})" if marker.get("incident") else ""
        raise Unusable(f"written in a stretch that was rolled back or went bad{incident}")
    kept = _check_marked_files(checkpoint, marker, weights, findings)
    checksums = marker.get(CHECKSUMS)
    if checksums is None:
        findings.notes.append(f"its bytes were not compared, because {MARKER_FILE} has no checksums")
        return {}
    return {checkpoint / name: checksum for name, checksum in checksums.items() if name in kept}


def _check_marked_files(
    checkpoint: Path, marker: Mapping[str, Any], weights: list[Path], findings: Findings
) -> set[str]:
    """
    Checks that the files the marker names are there and as long as they were.

    Returns:
        Their names; without those that another set of weights has taken the place of.
    """
    files: dict[str, int] = marker["files"]
    replaced = _replaced(checkpoint, files, weights, findings)
    for name, expected in files.items():
        if name in replaced:
            continue
        file = checkpoint / name
        if not file.is_file():
            raise Unusable(f"{name} is gone; the marker {MARKER_FILE} names it")
        if file.stat().st_size != expected:
            raise Unusable(f"{name} has {file.stat().st_size} bytes, the marker {MARKER_FILE} says {expected}")
    return files.keys() - replaced


def _replaced(checkpoint: Path, files: Collection[str], weights: list[Path], findings: Findings) -> set[str]:
    """Names of files that `save_pretrained` has replaced or made needless, if a resume reads other weights."""
    marked = {name for name in files if _WEIGHTS.fullmatch(name)}
    read = {str(file.relative_to(checkpoint)) for file in weights}
    if not marked or not read or read & marked or not all(_WEIGHTS.fullmatch(name) for name in read):
        return set()
    findings.doubts.append(
        f"its weights are not those it was written with: {few(read)} in place of {few(marked)}, which the marker "
        f"{MARKER_FILE} names"
    )
    return marked | (_WRITTEN_WITH_WEIGHTS & set(files))


# ---- what has to be finite ----


def _check_weights(file: Path, checksum: int | None, findings: Findings) -> None:
    if file.suffix == ".safetensors":
        check_safetensors(file, checksum)
        return
    loaded = load_archive(file, findings.notes)
    bad = None if loaded is None else first_bad(loaded, "", masks=True)
    if bad is not None:
        raise Unusable(f"{bad} in {file.name} holds NaN or Inf")


def _check_optimizer(file: Path, findings: Findings) -> None:
    loaded = load_archive(file, findings.notes)
    if isinstance(loaded, Mapping) and "state" in loaded:
        # Among the settings Inf may be meant: Prodigy's growth_rate is.
        bad = first_bad(loaded["state"], "state") or first_bad(loaded.get("param_groups"), "param_groups", inf=True)
    else:
        bad = first_bad(loaded, "state")
    if bad is not None:
        raise Unusable(f"{bad} in {file.name} holds NaN or Inf")
