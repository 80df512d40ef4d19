"""Checks what DeepSpeed has written into a checkpoint: the part of every rank, whole, finite and of one step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from .findings import Findings, Unusable, in_short, reading
from .foreign_objects import load_foreign
from .tensors import check_archive, first_bad
from .zero_padding import only_in_padding


# Its files that name the folder to load; written last, by the first rank.
LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
_FOLDERS = "global_step*"
_STEP = re.compile(r"global_step(\d+)")
# As `DeepSpeedEngine._get_ckpt_name` and `_get_rank_zero_ckpt_name` call them (0.19.8).
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt")
# In ZeRO-3, of the master weights and of what the optimizer keeps for them.
_PARTITION = re.compile(r"optimizer_state_dict\.(?:fp32_flat_groups\.(\d+)|optimizer_state_dict\.state\.(\d+)\.\w+)")
# Settings may well be infinite.
_NOT_SEARCHED = ("ds_config", "loss_scaler", "lr_scheduler", "random_ltd", "data_sampler")


def is_of_deepspeed(checkpoint: Path) -> bool:
    """Whether DeepSpeed has written into a checkpoint."""
    pointers = any((checkpoint / name).is_file() for name in (LATEST, LATEST_UNIVERSAL))
    return pointers or any(folder.is_dir() for folder in checkpoint.glob(_FOLDERS))


@dataclass
class DeepSpeedFolder:
    """
    What one of DeepSpeed's folders holds.

    Args:
        path (`Path`):
            The folder.
        models (`dict[tuple[int | None, int], Path]`):
            Files with weights, by the rank and the part of the model; the rank is `None` where one writes for all.
        optimizers (`dict[tuple[int, int], Path]`):
            Files with optimizer state.
    """

    path: Path
    models: dict[tuple[int | None, int], Path] = field(default_factory=dict)
    optimizers: dict[tuple[int, int], Path] = field(default_factory=dict)

    @classmethod
    def named_by(cls, pointer: Path) -> DeepSpeedFolder:
        """Lists the folder that one of the files names which DeepSpeed looks into."""
        with reading(pointer):
            tag = pointer.read_text(encoding="utf-8").strip()
        if not tag:
            raise Unusable(f"{pointer.name} is empty: DeepSpeed finds by it what to load")
        folder = cls(pointer.parent / tag)
        if not folder.path.is_dir():
            raise Unusable(f"{tag} is missing: {pointer.name} names it as what to load")
        for file in sorted(folder.path.iterdir()):
            if (match := _MODEL.fullmatch(file.name)) is not None:
                folder.models[None if match["rank"] is None else int(match["rank"]), int(match["part"])] = file
            elif (match := _OPTIMIZER.fullmatch(file.name)) is not None:
                folder.optimizers[int(match["rank"]), int(match["part"])] = file
        return folder

    @cached_property
    def said(self) -> list[Mapping[str, Any]]:
        """What the files with weights say of the job that wrote them."""
        contents = (_contents(file, []) for file in self.models.values())
        return [content for content in contents if isinstance(content, Mapping)]

    @property
    def spreads_weights(self) -> bool:
        """Whether each rank has a part of the weights."""
        return any(rank is not None for rank, _ in self.models)

    @property
    def processes(self) -> int:
        """How many ranks have written into it, or should have."""
        said = [size for each in self.said if isinstance(size := each.get("dp_world_size"), int)]
        return max([*said, *(rank + 1 for rank, _ in self.optimizers)], default=1)

    @property
    def stage(self) -> int:
        """The stage of ZeRO; 0 if the optimizer state lies with the weights."""
        if self.spreads_weights:
            return 3
        if not self.optimizers and any(each.get("optimizer") is not None for each in self.said):
            return 0
        configured = {_stage_in(each.get("ds_config")) for each in self.said}
        # Both write the same files.
        return 1 if configured == {1} else 2

    @property
    def bf16(self) -> bool:
        """Whether it was written in bf16, which is in the names of the files."""
        return any(file.name.startswith("bf16_") for file in self.optimizers.values())

    @property
    def lacks_schedule(self) -> bool:
        """Whether the schedule of the learning rate is not DeepSpeed's, and not in its files."""
        return bool(self.said) and all(each.get("lr_scheduler") is None for each in self.said)

    def missing(self) -> list[tuple[int, str]]:
        """Lists the files that are not there, each with the rank whose part it is."""
        parts = sorted({part for _, part in [*self.models, *self.optimizers]})
        wanted = [(rank, part) for rank in range(self.processes) for part in parts]
        prefix = "bf16_zero" if self.bf16 else "zero"
        gone = []
        for rank, part in wanted:
            if self.stage == 3 and (rank, part) not in self.models:
                gone.append((rank, f"zero_pp_rank_{rank}_mp_rank_{part:02d}_model_states.pt"))
            if self.stage and (rank, part) not in self.optimizers:
                gone.append((rank, f"{prefix}_pp_rank_{rank}_mp_rank_{part:02d}_optim_states.pt"))
        return gone


def check_deepspeed(checkpoint: Path, step: int | None, checksums: dict[Path, int], findings: Findings) -> None:
    """
    Refuses a checkpoint if what DeepSpeed would load lacks the part of a rank, is torn, not finite or of another step.

    Args:
        checkpoint (`Path`):
            The checkpoint directory.
        step (`int`, *optional*):
            Optimizer steps finished, as the Trainer has counted them; `None` for a caller that loads weights alone.
        checksums (`dict[Path, int]`):
            Those in the marker; what is compared here is taken out.
        findings ([`Findings`]):
            Gets what could not be looked at, and by how many ranks it was written.
    """
    pointers = [file for name in (LATEST, LATEST_UNIVERSAL) if (file := checkpoint / name).is_file()]
    if not pointers:
        raise Unusable(f"{LATEST} is missing: DeepSpeed writes it when all is written, and finds by it what to load")
    folders = {pointer.name: DeepSpeedFolder.named_by(pointer) for pointer in pointers}
    read = [folder.path for folder in folders.values()]
    findings.notes += [
        f"{other.name} was not looked at, because {pointers[0].name} names {read[0].name}"
        for other in sorted(checkpoint.glob(_FOLDERS))
        if other.is_dir() and other not in read
    ]
    regular = folders.get(LATEST)
    if regular is not None:
        _check_parts(regular)
        _check_step(regular, step, findings)
        if step is not None and regular.lacks_schedule and not (checkpoint / "scheduler.pt").is_file():
            raise Unusable("scheduler.pt is missing: the learning rate's schedule is in no other file")
    for folder in folders.values():
        _check_files(folder, checksums, findings)
    if regular is not None:
        _check_optimizer_steps(regular)
        how = f"ZeRO-{regular.stage}" if regular.stage else "DeepSpeed without ZeRO"
        processes = "1 process" if regular.processes == 1 else f"{regular.processes} processes"
        findings.notes.append(f"written by {processes} under {how}")


# ---- that all is there, and of one step ----


def _check_parts(folder: DeepSpeedFolder) -> None:
    tag = folder.path.name
    if not folder.models:
        raise Unusable(f"{tag} has no *_model_states.pt: no process had written its part")
    if gone := folder.missing():
        rank, name = gone[0]
        more = f", and {len(gone) - 1} more" if len(gone) > 1 else ""
        raise Unusable(f"{tag}/{name} is missing: the part of rank {rank} of {folder.processes}{more}")


def _check_step(folder: DeepSpeedFolder, step: int | None, findings: Findings) -> None:
    tag = folder.path.name
    counts = sorted({each["global_steps"] for each in folder.said if isinstance(each.get("global_steps"), int)})
    if len(counts) > 1:
        raise Unusable(f"{tag} has parts of different steps ({', '.join(map(str, counts))})")
    named = _STEP.fullmatch(tag)
    if counts and named is not None and counts[0] != int(named[1]):
        raise Unusable(f"{tag} holds the state of step {counts[0]}")
    if not counts or not step or counts[0] == step:
        return
    if counts[0] % step:
        raise Unusable(f"{LATEST} names {tag}, the state of step {counts[0]}; the Trainer's is of step {step}")
    # A training step of the user's own may have DeepSpeed step several times.
    findings.doubts.append(f"DeepSpeed has counted {counts[0]} steps, and the Trainer {step}")


def _check_optimizer_steps(folder: DeepSpeedFolder) -> None:
    """Refuses optimizer state that one rank has written at another step than the others."""
    counted = {}
    for (rank, _), file in folder.optimizers.items():
        if steps := list(_steps_in(_contents(file, []))):
            counted[rank] = max(steps)
    if len(set(counted.values())) > 1:
        told = ", ".join(f"{step:g} of rank {rank}" for rank, step in sorted(counted.items()))
        raise Unusable(f"{folder.path.name} has optimizer state of different steps ({told})")


def _steps_in(value: Any) -> Iterator[float]:
    """Yields the steps that an optimizer has counted, wherever in its state."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key == "step" and (isinstance(each, int | float) or (torch.is_tensor(each) and each.numel() == 1)):
                yield float(each)
            elif key not in _NOT_SEARCHED:
                yield from _steps_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _steps_in(each)


# ---- that each file is whole and finite ----


def _check_files(folder: DeepSpeedFolder, checksums: dict[Path, int], findings: Findings) -> None:
    ranks = {file: rank for files in (folder.models, folder.optimizers) for (rank, _), file in files.items()}
    for file in sorted(folder.path.rglob("*.pt")):
        check_archive(file, checksums.pop(file, None))
        content = _contents(file, findings.notes)
        for name, value in _searched(content, ""):
            bad = first_bad(value, name, masks=file not in folder.optimizers.values(), inf="param_groups" in name)
            if bad is not None and not _in_padding(folder, ranks.get(file), content, value, name):
                raise Unusable(f"{bad} in {folder.path.name}/{file.name} holds NaN or Inf")


def _contents(file: Path, notes: list[str]) -> Any:
    """What is in one of its files; `None` if that cannot be known without running code from it."""
    try:
        return load_foreign(file)
    except Exception as error:
        notes.append(f"{file.name} could not be scanned ({in_short(error)})")
        return None


def _searched(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields each value that has to be finite, with its name."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key not in _NOT_SEARCHED:
                yield from _searched(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _searched(each, f"{name}.{index}")
    else:
        yield name, value


def _in_padding(folder: DeepSpeedFolder, rank: int | None, content: Any, value: Any, name: str) -> bool:
    """Whether all that is not finite in a partition of ZeRO-3 lies behind the end of its weights."""
    if folder.stage != 3 or rank is None or not isinstance(value, torch.Tensor):
        return False
    said = folder.said[0] if folder.said else {}
    groups = _flat_groups(content)
    if (match := _PARTITION.fullmatch(name)) is not None and int(match[1] or match[2]) < len(groups):
        group = int(match[1] or match[2])
        shapes = [shape for each in said.get("param_shapes") or () for shape in each.values()]
        begin = sum(groups[:group])
        return groups[group] == value.numel() and only_in_padding(value, shapes, begin, rank, folder.processes)
    frozen = (said.get("frozen_param_shapes") or {}).get(name.removeprefix("frozen_param_fragments."))
    return frozen is not None and only_in_padding(value, [frozen], 0, rank, folder.processes)


def _flat_groups(content: Mapping[str, Any]) -> list[int]:
    """Counts the numbers in each partition of the weights."""
    groups = (content.get("optimizer_state_dict") or {}).get("fp32_flat_groups") or ()
    return [each.numel() for each in groups if isinstance(each, torch.Tensor)]


def _stage_in(config: Any) -> int | None:
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return zero.get("stage") if isinstance(zero, Mapping) else None
