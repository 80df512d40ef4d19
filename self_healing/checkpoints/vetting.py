"""Judges whether a directory can be resumed from, by what is in it and by nothing else."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, TrainerState

from ..checkpoint_files import MARKER_FILE, STATE_FILE, ModelNames, number_of
from .marker import CHECKSUMS, damage_of_marker, load_marker
from .stored_tensors import (
    Unusable,
    check_archive,
    check_checksum,
    check_safetensors,
    first_bad,
    in_short,
    load_archive,
    read_header,
    reading,
)


_SENTINEL = "checkpoint-is-incomplete.txt"
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# What `save_pretrained` calls weights, whole or in shards.
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
_WRITTEN_WITH_WEIGHTS = frozenset({"config.json", "generation_config.json", "README.md"})
# Characters of a name that may have changed while its file can still be read.
_CHANGED_CHARACTERS = 3


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
    """

    path: str
    step: int | None
    usable: bool
    reason: str
    standing: str
    doubts: tuple[str, ...] = ()


@dataclass(slots=True)
class _Findings:
    """Remarks in the reason of a usable checkpoint: what was not looked at, and what is odd."""

    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


def vet(checkpoint: Path, model: ModelNames | None = None) -> Verdict:
    """
    Looks at everything a resume would read: that it is there, whole, what was written, and finite.

    Args:
        checkpoint (`Path`):
            The directory; anything else gets its verdict as well.
        model ([`ModelNames`], *optional*):
            What the model that is to be trained calls its tensors.

    Returns:
        [`Verdict`]: Never an exception.
    """
    marker = load_marker(checkpoint)
    standing = "unmarked" if marker is None else str(marker.get("standing", "unverified"))
    step = number_of(checkpoint)
    findings = _Findings()
    try:
        _check_that_it_is_there(checkpoint)
        step = _finished_steps(checkpoint)
        _examine(checkpoint, marker, model, findings)
    except Unusable as refusal:
        return Verdict(str(checkpoint), step, False, str(refusal), standing)
    except Exception as error:
        # What the file system or a torn file makes a reader raise is a verdict as well.
        return Verdict(str(checkpoint), step, False, f"cannot be read ({in_short(error)})", standing)
    reason = "; ".join(["complete", *findings.notes, *findings.doubts])
    return Verdict(str(checkpoint), step, True, reason, standing, tuple(findings.doubts))


def vet_weights(checkpoint: Path) -> str | None:
    """
    Looks at the weights of a checkpoint alone, for a caller that loads nothing else.

    Returns:
        Why they cannot be loaded; `None` if they can.
    """
    findings = _Findings()
    checksums = (load_marker(checkpoint) or {}).get(CHECKSUMS, {})
    try:
        for file in _weight_files(checkpoint, findings):
            expected = checksums.get(str(file.relative_to(checkpoint)))
            if file.suffix != ".safetensors":
                check_archive(file, expected)
            _check_weights(file, expected, findings)
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
        kept = _check_marked_files(checkpoint, marker, _weight_files(checkpoint, _Findings()), _Findings())
        for name in kept & marker.get(CHECKSUMS, {}).keys():
            check_checksum(checkpoint / name, marker[CHECKSUMS][name])
    except Unusable as breach:
        return str(breach)
    except OSError as error:
        return f"cannot be read ({in_short(error)})"
    return None


def _examine(
    checkpoint: Path, marker: Mapping[str, Any] | None, model: ModelNames | None, findings: _Findings
) -> None:
    """Looks at everything in a checkpoint; what is cheap to see comes first."""
    weights = _weight_files(checkpoint, findings)
    for file in weights:
        if file.suffix == ".safetensors":
            read_header(file)
    _check_indexes(checkpoint, weights)
    optimizers, others = _check_that_the_rest_is_there(checkpoint, findings)
    checksums: dict[Path, int] = {}
    if marker is not None:
        checksums = _check_marker(checkpoint, marker, weights, findings)
    elif (damage := damage_of_marker(checkpoint)) is not None:
        findings.doubts.append(f"its marker {MARKER_FILE} cannot be believed ({damage}), so it is judged without it")
    _check_configs(checkpoint)
    if model is not None:
        _check_names(checkpoint, weights, model, not checksums, findings)
    for file in [*optimizers, *others, *(file for file in weights if file.suffix != ".safetensors")]:
        check_archive(file, checksums.pop(file, None))
    for file in weights:
        _check_weights(file, checksums.pop(file, None), findings)
    for file in optimizers:
        _check_optimizer(file, findings)
    for file in others:
        _check_that_it_loads(file)
    for file, checksum in checksums.items():
        check_checksum(file, checksum)


# ---- what has to be there ----


def _check_that_it_is_there(checkpoint: Path) -> None:
    if not checkpoint.exists():
        raise Unusable("does not exist")
    if not checkpoint.is_dir():
        raise Unusable("is not a directory")
    if not any(checkpoint.iterdir()):
        raise Unusable("is empty")
    if (checkpoint / _SENTINEL).exists():
        raise Unusable(f"{_SENTINEL} is there: the process was killed while it wrote this checkpoint")


def _finished_steps(checkpoint: Path) -> int:
    file = checkpoint / STATE_FILE
    if not file.is_file():
        raise Unusable(f"{STATE_FILE} is missing: it is written last, so the others may not be whole")
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise Unusable(f"{STATE_FILE} is not JSON: it was written in part only, or damaged") from None
    step = state.get("global_step") if isinstance(state, dict) else None
    if not isinstance(step, int) or isinstance(step, bool):
        raise Unusable(f"{STATE_FILE} has no global_step")
    number = number_of(checkpoint)
    if number is not None and number != step:
        raise Unusable(f"{STATE_FILE} is of step {step}, not of {number}")
    _check_state(file)
    return step


def _weight_files(checkpoint: Path, findings: _Findings) -> list[Path]:
    """The files with weights that a resume reads."""
    files = [file for name in _SINGLE if (file := checkpoint / name).is_file()]
    whole = next(iter(files), None)
    files += [file for name in _ADAPTERS if (file := checkpoint / name).is_file()]
    # PEFT keeps every adapter but the default one in a folder of its own.
    files += [file for name in _ADAPTERS for file in sorted(checkpoint.glob(f"*/{name}"))]
    for index in _indexes(checkpoint):
        if whole is None:
            files += _shards(index)
        else:
            findings.notes.append(f"{index.name} was not looked at, because a resume reads {whole.name}")
    files += sorted(checkpoint.glob("pytorch_model_fsdp*.bin"))
    unscanned = [
        folder for pattern in ("pytorch_model_fsdp_*", "global_step*") for folder in _folders(checkpoint, pattern)
    ]
    if not files and not unscanned:
        raise Unusable("no weights: there is no model.safetensors, adapter_model.safetensors or other file with them")
    findings.notes += [f"{folder.name} was not scanned" for folder in unscanned]
    return files


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
        return {str(name): str(file) for name, file in _json_object(index)["weight_map"].items()}


def _check_indexes(checkpoint: Path, weights: list[Path]) -> None:
    """Every tensor that an index names is in its shards: those of another set of weights may lie among them."""
    for index in _indexes(checkpoint):
        named = _weight_map(index)
        shards = [checkpoint / file for file in set(named.values())]
        if not all(shard in weights and shard.suffix == ".safetensors" for shard in shards):
            continue
        held = {tensor.name for shard in shards for tensor in read_header(shard)}
        if gone := sorted(named.keys() - held):
            raise Unusable(f"{_few(gone)} of {index.name} is in none of its shards")


def _folders(checkpoint: Path, pattern: str) -> list[Path]:
    return sorted(folder for folder in checkpoint.glob(pattern) if folder.is_dir() and any(folder.iterdir()))


def _check_that_the_rest_is_there(checkpoint: Path, findings: _Findings) -> tuple[list[Path], list[Path]]:
    """The torch archives beside the weights: those of the optimizer, and the others."""
    deepspeed = bool(_folders(checkpoint, "global_step*"))
    patterns = ("optimizer.pt", "optimizer.bin", "optimizer.pt_*", "rank*-of-*-optimizer.pt")
    optimizers = [file for pattern in patterns for file in sorted(checkpoint.glob(pattern)) if file.is_file()]
    sharded = _folders(checkpoint, "optimizer_*")
    if not optimizers and not sharded and not deepspeed:
        raise Unusable("optimizer.pt is missing: no optimizer state, a resume would silently start with fresh moments")
    findings.notes.extend(f"{folder.name} was not scanned" for folder in sharded)
    scheduler = checkpoint / "scheduler.pt"
    if not scheduler.is_file() and not deepspeed:
        raise Unusable("scheduler.pt is missing: a resume would silently start the learning rate's schedule anew")
    random_states = sorted(checkpoint.glob("rng_state*.pth"))
    if not random_states:
        findings.doubts.append("no rng_state.pth, so a resume draws other random numbers")
    others = [scheduler, checkpoint / "scaler.pt", checkpoint / "training_args.bin"]
    return optimizers, [*(file for file in others if file.is_file()), *random_states]


# ---- what the marker says ----


def _check_marker(
    checkpoint: Path, marker: Mapping[str, Any], weights: list[Path], findings: _Findings
) -> dict[Path, int]:
    """The checksums that the files are to be compared with."""
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
    checkpoint: Path, marker: Mapping[str, Any], weights: list[Path], findings: _Findings
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


def _replaced(checkpoint: Path, files: Collection[str], weights: list[Path], findings: _Findings) -> set[str]:
    """Names of files that `save_pretrained` has replaced or made needless, if a resume reads other weights."""
    marked = {name for name in files if _WEIGHTS.fullmatch(name)}
    read = {str(file.relative_to(checkpoint)) for file in weights}
    if not marked or not read or read & marked or not all(_WEIGHTS.fullmatch(name) for name in read):
        return set()
    findings.doubts.append(
        f"its weights are not those it was written with: {_few(read)} in place of {_few(marked)}, which the marker "
        f"{MARKER_FILE} names"
    )
    return marked | (_WRITTEN_WITH_WEIGHTS & set(files))


def _few(names: Collection[str]) -> str:
    first, *rest = sorted(names)
    return f"{first} and {len(rest)} more" if rest else first


# ---- what the model says ----


def _check_names(
    checkpoint: Path, weights: list[Path], model: ModelNames, may_be_damaged: bool, findings: _Findings
) -> None:
    """
    A tensor that the model does not know by its name is not loaded, and the Trainer goes on with what the model has.

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
            and (file.name in _ADAPTERS) == adapter
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
                f"the model has tensors that are not in it and keep the values they have: {_few(missing)}"
            )


def _differences(
    found: Mapping[str, tuple[int, ...]], way: Mapping[str, tuple[int, ...]], tied: Mapping[str, frozenset[str]]
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """The tensors of the model that are not there, and those there that the model does not know."""
    missing = {
        name: shape
        for name, shape in way.items()
        if name not in found and not any(other in found for other in tied.get(name, ()))
    }
    return missing, [name for name in found if name not in way]


def _nearly_equal(name: str, other: str) -> bool:
    changed = sum(one != another for one, another in zip(name, other, strict=False))
    return len(name) == len(other) and changed <= _CHANGED_CHARACTERS


# ---- what has to be readable ----


def _json_object(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def _check_configs(checkpoint: Path) -> None:
    """Reads the configurations as the Trainer does when it resumes."""
    for file in (checkpoint / "config.json", *sorted(checkpoint.glob("**/adapter_config.json"))):
        if file.is_file():
            with reading(file):
                _json_object(file)
                if file.name == "config.json":
                    PreTrainedConfig.from_json_file(file)


def _check_state(file: Path) -> None:
    """Reads the state as the Trainer does, and checks that each value is of the kind it will be taken for."""
    with reading(file):
        state = TrainerState.load_from_json(str(file))
    hints = typing.get_type_hints(TrainerState)
    for each in dataclasses.fields(TrainerState):
        value = getattr(state, each.name)
        # Given as a list to a new state, and kept as a mapping.
        kind = dict if each.name == "stateful_callbacks" else hints[each.name]
        if value != each.default and not _is_of(value, kind):
            raise Unusable(f"{file.name} says {each.name}={str(value)[:50]!r}, which cannot be")
    if not all(isinstance(entry, dict) for entry in state.log_history):
        raise Unusable(f"{file.name} has entries in log_history that are none")


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is of an annotated type; whole numbers and others stand for each other."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_is_of(value, each) for each in typing.get_args(kind))
    wanted = typing.get_origin(kind) or kind
    if wanted in (int, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return not isinstance(wanted, type) or isinstance(value, wanted)


def _check_that_it_loads(file: Path) -> None:
    """Schedule, scaler and random states are mappings; what they were made of besides torch's is not looked at."""
    if file.suffix in (".pt", ".pth"):
        content = load_archive(file)
        if content is not None and not isinstance(content, Mapping):
            raise Unusable(f"{file.name} holds a {type(content).__name__} and no state")


# ---- what has to be finite ----


def _check_weights(file: Path, checksum: int | None, findings: _Findings) -> None:
    if file.suffix == ".safetensors":
        check_safetensors(file, checksum)
        return
    loaded = load_archive(file, findings.notes)
    bad = None if loaded is None else first_bad(loaded, "", masks=True)
    if bad is not None:
        raise Unusable(f"{bad} in {file.name} holds NaN or Inf")


def _check_optimizer(file: Path, findings: _Findings) -> None:
    loaded = load_archive(file, findings.notes)
    if isinstance(loaded, Mapping) and "state" in loaded:
        # Among the settings Inf may be meant: Prodigy's growth_rate is.
        bad = first_bad(loaded["state"], "state") or first_bad(loaded.get("param_groups"), "param_groups", inf=True)
    else:
        bad = first_bad(loaded, "state")
    if bad is not None:
        raise Unusable(f"{bad} in {file.name} holds NaN or Inf")
