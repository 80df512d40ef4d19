"""Whether a directory can be resumed from, judged by what is in it and by nothing else."""

from __future__ import annotations

import json
import math
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


MARKER_FILE = "healing.json"
MARKER_SCHEMA = 1
STATE_FILE = "trainer_state.json"

_SENTINEL = "checkpoint-is-incomplete.txt"
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_NUMBERED = re.compile(r"checkpoint-(\d+)")
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    What is to be thought of a checkpoint.

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
    """

    path: str
    step: int | None
    usable: bool
    reason: str
    standing: str


class _Unusable(Exception):
    """Carries the reason."""


def vet(checkpoint: Path) -> Verdict:
    """
    Looks at everything a resume would read: that it is there, whole, and finite.

    Args:
        checkpoint (`Path`):
            The directory; anything else gets its verdict as well.

    Returns:
        [`Verdict`]: Never an exception.
    """
    marker = load_marker(checkpoint)
    standing = "unmarked" if marker is None else str(marker.get("standing", "unverified"))
    step = number_of(checkpoint)
    try:
        _check_that_it_is_there(checkpoint)
        step = _finished_steps(checkpoint)
        notes = _examine(checkpoint, marker)
    except _Unusable as refusal:
        return Verdict(str(checkpoint), step, False, str(refusal), standing)
    except Exception as error:
        # What the file system or a torn file makes a reader raise is a verdict as well.
        return Verdict(str(checkpoint), step, False, f"cannot be read ({_short(error)})", standing)
    return Verdict(str(checkpoint), step, True, "; ".join(["complete", *notes]), standing)


def vet_weights(checkpoint: Path) -> str | None:
    """
    Looks at the weights of a checkpoint alone, for those who load them and nothing else.

    Returns:
        Why they cannot be loaded; `None` if they can.
    """
    try:
        weights, notes = _weight_files(checkpoint)
        for file in weights:
            if file.suffix == ".safetensors":
                _check_header(file)
            else:
                _check_archive(file)
        for file in weights:
            _check_weights(file, notes)
    except _Unusable as refusal:
        return str(refusal)
    except Exception as error:
        return f"cannot be read ({_short(error)})"
    return None


def number_of(checkpoint: Path) -> int | None:
    """The step a directory is named after, `None` if its name is not that of a checkpoint."""
    match = _NUMBERED.fullmatch(checkpoint.name)
    return None if match is None else int(match[1])


def load_marker(checkpoint: Path) -> dict[str, Any] | None:
    """The marker as it was written, whether or not it holds for the files there; `None` if there is none to read."""
    try:
        content = json.loads((checkpoint / MARKER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("schema") != MARKER_SCHEMA:
        return None
    return content if isinstance(content.get("files"), dict) else None


def _examine(checkpoint: Path, marker: Mapping[str, Any] | None) -> list[str]:
    """What a usable checkpoint's reason has to mention. What is cheap to see comes first."""
    weights, notes = _weight_files(checkpoint)
    for file in weights:
        if file.suffix == ".safetensors":
            _check_header(file)
    optimizers, others = _check_that_the_rest_is_there(checkpoint, notes)
    if marker is not None:
        _check_marker(checkpoint, marker)
    for file in [*optimizers, *others, *(file for file in weights if file.suffix != ".safetensors")]:
        _check_archive(file)
    for file in weights:
        _check_weights(file, notes)
    for file in optimizers:
        _check_optimizer(file, notes)
    return notes


# ---- what has to be there ----


def _check_that_it_is_there(checkpoint: Path) -> None:
    if not checkpoint.exists():
        raise _Unusable("does not exist")
    if not checkpoint.is_dir():
        raise _Unusable("is not a directory")
    if not any(checkpoint.iterdir()):
        raise _Unusable("is empty")
    if (checkpoint / _SENTINEL).exists():
        raise _Unusable(f"{_SENTINEL} is there: the process was killed while it wrote this checkpoint")


def _finished_steps(checkpoint: Path) -> int:
    file = checkpoint / STATE_FILE
    if not file.is_file():
        raise _Unusable(f"{STATE_FILE} is missing: it is written last, so the others may not be whole")
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise _Unusable(f"{STATE_FILE} is not JSON: it was written in part only, or damaged") from None
    step = state.get("global_step") if isinstance(state, dict) else None
    if not isinstance(step, int) or isinstance(step, bool):
        raise _Unusable(f"{STATE_FILE} has no global_step")
    number = number_of(checkpoint)
    if number is not None and number != step:
        raise _Unusable(f"{STATE_FILE} is of step {step}, not of {number}")
    return step


def _weight_files(checkpoint: Path) -> tuple[list[Path], list[str]]:
    """The files with weights, and notes on those that are taken as they are."""
    candidates = [checkpoint / name for name in (*_SINGLE, *_ADAPTERS)]
    # PEFT keeps every adapter but the default one in a folder of its own.
    candidates += [file for name in _ADAPTERS for file in sorted(checkpoint.glob(f"*/{name}"))]
    files = [file for file in candidates if file.is_file()]
    for name in _INDEXES:
        if (checkpoint / name).is_file():
            files += _shards(checkpoint / name)
    files += sorted(checkpoint.glob("pytorch_model_fsdp*.bin"))
    unscanned = [
        folder for pattern in ("pytorch_model_fsdp_*", "global_step*") for folder in _folders(checkpoint, pattern)
    ]
    if not files and not unscanned:
        raise _Unusable("no weights: there is no model.safetensors, adapter_model.safetensors or other file with them")
    return files, [f"{folder.name} was not scanned" for folder in unscanned]


def _shards(index: Path) -> list[Path]:
    with _reading(index):
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for name in names:
        if not (index.parent / name).is_file():
            raise _Unusable(f"{name} is missing ({index.name} names it)")
    return [index.parent / name for name in names]


def _folders(checkpoint: Path, pattern: str) -> list[Path]:
    return sorted(folder for folder in checkpoint.glob(pattern) if folder.is_dir() and any(folder.iterdir()))


def _check_that_the_rest_is_there(checkpoint: Path, notes: list[str]) -> tuple[list[Path], list[Path]]:
    """The torch archives beside the weights: those of the optimizer, and the others."""
    deepspeed = bool(_folders(checkpoint, "global_step*"))
    patterns = ("optimizer.pt", "optimizer.bin", "optimizer.pt_*", "rank*-of-*-optimizer.pt")
    optimizers = [file for pattern in patterns for file in sorted(checkpoint.glob(pattern)) if file.is_file()]
    sharded = _folders(checkpoint, "optimizer_*")
    if not optimizers and not sharded and not deepspeed:
        raise _Unusable(
            "optimizer.pt is missing: no optimizer state, a resume would silently start with fresh moments"
        )
    notes.extend(f"{folder.name} was not scanned" for folder in sharded)
    scheduler = checkpoint / "scheduler.pt"
    if not scheduler.is_file() and not deepspeed:
        raise _Unusable("scheduler.pt is missing: a resume would silently start the learning rate's schedule anew")
    random_states = sorted(checkpoint.glob("rng_state*.pth"))
    if not random_states:
        notes.append("no rng_state.pth, so a resume draws other random numbers")
    others = [scheduler, checkpoint / "scaler.pt", checkpoint / "training_args.bin"]
    return optimizers, [*(file for file in others if file.is_file()), *random_states]


def _check_marker(checkpoint: Path, marker: Mapping[str, Any]) -> None:
    if marker.get("standing") == "suspect":
        incident = f" (incident {marker['incident']})" if marker.get("incident") else ""
        raise _Unusable(f"written in a stretch that was rolled back or went bad{incident}")
    for name, expected in marker["files"].items():
        file = checkpoint / name
        if not file.is_file():
            raise _Unusable(f"{name} is gone; the marker {MARKER_FILE} names it")
        if file.stat().st_size != expected:
            raise _Unusable(f"{name} has {file.stat().st_size} bytes, the marker {MARKER_FILE} says {expected}")


# ---- what has to be whole ----


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except _Unusable:
        raise
    except Exception as error:
        raise _Unusable(f"{file.name} cannot be read ({_short(error)})") from None


def _short(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}"


def _check_header(file: Path) -> None:
    size = file.stat().st_size
    with _reading(file), file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or 8 + length > size:
            raise _Unusable(f"{file.name} is truncated: {size} bytes do not even hold its header")
        header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    whole = 8 + length + max(ends, default=0)
    if size != whole:
        what = "is truncated" if size < whole else "has more in it than it should"
        raise _Unusable(f"{file.name} {what}: {size} bytes, its header says {whole}")


def _check_archive(file: Path) -> None:
    """Every member of a torch archive against its checksum."""
    if file.stat().st_size == 0:
        raise _Unusable(f"{file.name} is empty")
    with _reading(file):
        with file.open("rb") as stream:
            if stream.read(4) != b"PK\x03\x04":
                # The format of torch before 1.6 has no checksums: that it loads is all there is to see.
                torch.load(file, map_location="cpu", weights_only=True)
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


# ---- what has to be finite ----


def _check_weights(file: Path, notes: list[str]) -> None:
    if file.suffix != ".safetensors":
        loaded = _load(file, notes)
        bad = None if loaded is None else _first_bad(loaded, "", masks=True)
    else:
        with _reading(file), safe_open(file, framework="pt", device="cpu") as tensors:
            names = tensors.keys()
            # Integers cannot be bad, and of what torch has no type for (F4, F6) there is no NaN.
            scanned = (name for name in names if _may_be_bad(tensors.get_slice(name).get_dtype()))
            bad = next((name for name in scanned if _is_bad(tensors.get_tensor(name), masks=True)), None)
    if bad is not None:
        raise _Unusable(f"{bad} in {file.name} holds NaN or Inf")


def _may_be_bad(dtype: str) -> bool:
    return dtype.startswith(("F8", "F16", "F32", "F64", "BF16", "C"))


def _check_optimizer(file: Path, notes: list[str]) -> None:
    loaded = _load(file, notes)
    if isinstance(loaded, Mapping) and "state" in loaded:
        # Among the settings Inf may be meant: Prodigy's growth_rate is.
        bad = _first_bad(loaded["state"], "state") or _first_bad(loaded.get("param_groups"), "param_groups", inf=True)
    else:
        bad = _first_bad(loaded, "state")
    if bad is not None:
        raise _Unusable(f"{bad} in {file.name} holds NaN or Inf")


def _load(file: Path, notes: list[str]) -> Any:
    """What is in a torch archive; `None` with a note if that cannot be known without running code from it."""
    with _reading(file):
        with file.open("rb") as stream:
            mapped = stream.read(4) == b"PK\x03\x04"
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError:
            notes.append(f"{file.name} could not be scanned, because it holds objects of other classes than torch's")
            return None


def _first_bad(value: Any, name: str, masks: bool = False, inf: bool = False) -> str | None:
    """The name of the first value within nested ones that is not finite."""
    if isinstance(value, torch.Tensor):
        return name if _is_bad(value, masks, inf) else None
    if isinstance(value, float):
        return name if math.isnan(value) or (math.isinf(value) and not inf) else None
    if isinstance(value, Mapping):
        inner: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list | tuple):
        inner = list(enumerate(value))
    else:
        return None
    found = (_first_bad(each, f"{name}.{key}" if name else str(key), masks, inf) for key, each in inner)
    return next((bad for bad in found if bad is not None), None)


def _is_bad(tensor: torch.Tensor, masks: bool = False, inf: bool = False) -> bool:
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
    flat = tensor.reshape(-1)
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
