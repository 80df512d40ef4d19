"""Checks what DeepSpeed has written into a checkpoint, and whether the job that is to go on from it can load it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .tensors import Findings, Unusable, first_bad, load_archive, reading


# Its files that name the folder to load; written last, by the first rank.
_LATEST = "latest"
_LATEST_UNIVERSAL = "latest_universal"
_FOLDERS = "global_step*"
_STEP = re.compile(r"global_step(\d+)")
# As `DeepSpeedEngine._get_ckpt_name` and `_get_rank_zero_ckpt_name` call them (0.19.8), for a model in one part.
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_00_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_00_optim_states\.pt")

_WITHOUT = (
    "it was written without DeepSpeed, which finds nothing in it. What to do: go on without DeepSpeed, or load its "
    "weights as the model of a new run"
)
_NOT_UNIVERSAL = (
    "it is no universal checkpoint, as none is that a job has written itself. What to do: remove "
    '"load_universal": true from the DeepSpeed configuration'
)
_CONVERT = (
    "convert it (python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder "
    '{path}/{tag} --output_folder {path}/{tag}_universal) and set "checkpoint": {{"load_universal": true}} in the '
    "DeepSpeed configuration"
)


def is_of_deepspeed(checkpoint: Path) -> bool:
    """Whether DeepSpeed has written into a checkpoint."""
    pointers = any((checkpoint / name).is_file() for name in (_LATEST, _LATEST_UNIVERSAL))
    return pointers or any(folder.is_dir() for folder in checkpoint.glob(_FOLDERS))


@dataclass
class _Folder:
    """One of DeepSpeed's folders: its files by rank, which is `None` where one is of all."""

    path: Path
    models: dict[int | None, Path] = field(default_factory=dict)
    optimizers: dict[int, Path] = field(default_factory=dict)

    @classmethod
    def named_by(cls, pointer: Path) -> _Folder:
        with reading(pointer):
            tag = pointer.read_text(encoding="utf-8").strip()
        if not tag:
            raise Unusable(f"{pointer.name} is empty: DeepSpeed finds by it what to load")
        folder = cls(pointer.parent / tag)
        if not folder.path.is_dir():
            raise Unusable(f"{tag} is missing: {pointer.name} names it as what to load")
        for file in sorted(folder.path.iterdir()):
            if (match := _MODEL.fullmatch(file.name)) is not None:
                folder.models[None if match["rank"] is None else int(match["rank"])] = file
            elif (match := _OPTIMIZER.fullmatch(file.name)) is not None:
                folder.optimizers[int(match["rank"])] = file
        return folder

    @cached_property
    def said(self) -> list[Mapping[str, Any]]:
        """What the files with weights say of the job that wrote them."""
        contents = (load_archive(file) for file in self.models.values())
        return [content for content in contents if isinstance(content, Mapping)]

    @property
    def processes(self) -> int:
        """How many ranks have written into it, or should have."""
        said = [size for each in self.said if isinstance(size := each.get("dp_world_size"), int)]
        return max([*said, *(rank + 1 for rank in self.optimizers)], default=1)

    @property
    def stage(self) -> int:
        """The stage of ZeRO; 0 if the optimizer state lies with the weights."""
        if any(rank is not None for rank in self.models):
            return 3
        if not self.optimizers and any(each.get("optimizer") is not None for each in self.said):
            return 0
        # Both write the same files.
        return 1 if any(_stage_in(each.get("ds_config")) == 1 for each in self.said) else 2

    @property
    def bf16(self) -> bool:
        """Whether it was written in bf16, which is in the names of the files."""
        return any(file.name.startswith("bf16_") for file in self.optimizers.values())

    def missing(self) -> list[tuple[int, str]]:
        """Lists the files that are not there, each with the rank whose part it is."""
        prefix = "bf16_zero" if self.bf16 else "zero"
        gone = []
        for rank in range(self.processes):
            if self.stage == 3 and rank not in self.models:
                gone.append((rank, f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"))
            if self.stage and rank not in self.optimizers:
                gone.append((rank, f"{prefix}_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
        return gone


def _stage_in(config: Any) -> int | None:
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return zero.get("stage") if isinstance(zero, Mapping) else None


# ---- that all is there, whole, and of one step ----


def check_deepspeed(checkpoint: Path, step: int | None, findings: Findings) -> None:
    """
    Refuses a checkpoint if what DeepSpeed would load lacks the part of a rank, is torn or of another step, or holds
    weights that are not finite.
    """
    pointers = [file for name in (_LATEST, _LATEST_UNIVERSAL) if (file := checkpoint / name).is_file()]
    if not pointers:
        raise Unusable(f"{_LATEST} is missing: DeepSpeed writes it when all is written, and finds by it what to load")
    folders = {pointer.name: _Folder.named_by(pointer) for pointer in pointers}
    regular = folders.get(_LATEST)
    if regular is not None:
        _check_parts(regular)
        _check_step(regular, step, findings)
        no_schedule = bool(regular.said) and all(each.get("lr_scheduler") is None for each in regular.said)
        if step is not None and no_schedule and not (checkpoint / "scheduler.pt").is_file():
            raise Unusable("scheduler.pt is missing: the learning rate's schedule is in no other file")
    for folder in folders.values():
        _check_files(folder)
    if regular is not None:
        how = f"ZeRO-{regular.stage}" if regular.stage else "DeepSpeed without ZeRO"
        processes = "1 process" if regular.processes == 1 else f"{regular.processes} processes"
        findings.notes.append(f"written by {processes} under {how}; its optimizer state was not searched for NaN")


def _check_parts(folder: _Folder) -> None:
    tag = folder.path.name
    if not folder.models:
        raise Unusable(f"{tag} has no *_model_states.pt: no process had written its part")
    if gone := folder.missing():
        rank, name = gone[0]
        more = f", and {len(gone) - 1} more" if len(gone) > 1 else ""
        raise Unusable(f"{tag}/{name} is missing: the part of rank {rank} of {folder.processes}{more}")


def _check_step(folder: _Folder, step: int | None, findings: Findings) -> None:
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
        raise Unusable(f"{_LATEST} names {tag}, the state of step {counts[0]}; the Trainer's is of step {step}")
    # A training step of the user's own may have DeepSpeed step several times.
    findings.doubts.append(f"DeepSpeed has counted {counts[0]} steps, and the Trainer {step}")


def _check_files(folder: _Folder) -> None:
    for file in sorted(folder.path.rglob("*.pt")):
        content = load_archive(file)
        if file in folder.optimizers.values():
            # It holds objects of DeepSpeed's classes, and in ZeRO-3 padding of any value.
            continue
        if file in folder.models.values():
            content = {"module": content["module"]} if isinstance(content, Mapping) and "module" in content else None
        if (bad := first_bad(content, "", masks=True)) is not None:
            raise Unusable(f"{bad} in {folder.path.name}/{file.name} holds NaN or Inf")


# ---- another job ----


@dataclass(frozen=True, slots=True)
class ZeroJob:
    """How a job uses DeepSpeed, as far as its checkpoints depend on it."""

    processes: int | None
    stage: int
    bf16: bool
    universal: bool


def why_of_another_job(checkpoint: Path, job: ZeroJob | None) -> str | None:
    """
    Says why a good checkpoint cannot be loaded by the job that is to go on from it, and what to do: DeepSpeed loads
    only what a job of its kind wrote. `job` is `None` for one without DeepSpeed.
    """
    if not is_of_deepspeed(checkpoint):
        return None if job is None else _WITHOUT
    if job is None:
        return (
            "its optimizer state is DeepSpeed's, and this job runs without DeepSpeed. What to do: start it with the "
            "DeepSpeed configuration it had; or put its weights together with zero_to_fp32.py, which lies in it, and "
            "load them as the model of a new run"
        )
    universal, pointer = checkpoint / _LATEST_UNIVERSAL, checkpoint / _LATEST
    if job.universal:
        return None if universal.is_file() else _NOT_UNIVERSAL
    if not pointer.is_file():
        return (
            'it has become a universal checkpoint. What to do: set "checkpoint": {"load_universal": true} in the '
            "DeepSpeed configuration"
        )
    was = _Folder.named_by(pointer)
    convert = _CONVERT.format(path=checkpoint, tag=was.path.name)
    if job.processes is not None and was.processes != job.processes:
        return (
            f"it was written by {was.processes} processes, and this job has {job.processes}; DeepSpeed gives each "
            f"process what the same one has written. What to do: start {was.processes} processes, or {convert}"
        )
    # ZeRO-1 and 2 load each other's.
    if (was.stage == 3, was.stage == 0) != (job.stage == 3, job.stage == 0):
        return (
            f"it was written under ZeRO-{was.stage}, and this job runs ZeRO-{job.stage}, which reads other files. "
            f"What to do: set the stage to {was.stage}, or {convert}"
        )
    if was.stage and was.bf16 != job.bf16:
        told = ("not in bf16", "in bf16") if job.bf16 else ("in bf16", "in another precision")
        return (
            f"it was written {told[0]}, and this job trains {told[1]}; DeepSpeed looks for files of other names. What "
            f"to do: set bf16={was.bf16}"
        )
    return None
