"""Checks what DeepSpeed has written into a checkpoint, and whether the job that is to go on from it can load it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .tensors import Findings, Unusable, first_bad, load_archive, reading


# Its file that names the folder to load; written last, by the first rank.
_LATEST = "latest"
_FOLDERS = "global_step*"
_STEP = re.compile(r"global_step(\d+)")
# As `DeepSpeedEngine._get_ckpt_name` and `_get_rank_zero_ckpt_name` call them (0.19.8), for a model in one part.
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_00_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_00_optim_states\.pt")

_CONVERT = (
    "convert it (python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder "
    "{path}/{tag} --output_folder {path}/{tag}_universal) and set {setting}"
)
_UNIVERSAL = '"checkpoint": {"load_universal": true} in the DeepSpeed configuration'
# DeepSpeed puts it beside parts that no other library reads; under ZeRO-3 there is no other file with weights.
_SCRIPT = "zero_to_fp32.py"


def is_of_deepspeed(checkpoint: Path) -> bool:
    """Whether DeepSpeed has written into a checkpoint."""
    return (checkpoint / _LATEST).is_file() or any(folder.is_dir() for folder in checkpoint.glob(_FOLDERS))


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
    def job(self) -> ZeroJob:
        """The job that wrote it; its precision is in the names of the files."""
        bf16 = any(file.name.startswith("bf16_") for file in self.optimizers.values())
        return ZeroJob(self.processes, self.stage, bf16)

    def missing(self) -> list[tuple[int, str]]:
        """Lists the files that are not there, each with the rank whose part it is."""
        prefix = "bf16_zero" if self.job.bf16 else "zero"
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
    if not (checkpoint / _LATEST).is_file():
        raise Unusable(f"{_LATEST} is missing: DeepSpeed writes it when all is written, and finds by it what to load")
    folder = _Folder.named_by(checkpoint / _LATEST)
    _check_parts(folder)
    _check_step(folder, step, findings)
    no_schedule = bool(folder.said) and all(each.get("lr_scheduler") is None for each in folder.said)
    if step is not None and no_schedule and not (checkpoint / "scheduler.pt").is_file():
        raise Unusable("scheduler.pt is missing: the learning rate's schedule is in no other file")
    _check_files(folder)
    findings.notes.append(f"written by {folder.job}; its optimizer state was not searched for NaN")


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

    processes: int
    stage: int
    bf16: bool
    universal: bool = False

    def loads(self, other: ZeroJob) -> bool:
        """Whether it finds all that the other one has written: ZeRO-1 and 2 have the same files."""
        same_files = (self.stage == 3, self.stage == 0) == (other.stage == 3, other.stage == 0)
        return same_files and self.processes == other.processes and (self.bf16 == other.bf16 or not other.stage)

    def __str__(self) -> str:
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        how = f"ZeRO-{self.stage}" if self.stage else "DeepSpeed without ZeRO"
        return f"{processes} under {how}{' in bf16' if self.bf16 else ''}"


def why_of_another_job(checkpoint: Path, job: ZeroJob | None) -> str | None:
    """
    Says why a good checkpoint cannot be loaded by the job that is to go on from it, and what to do: DeepSpeed loads
    only what a job of its kind wrote. `job` is `None` for one without DeepSpeed.
    """
    of_deepspeed = is_of_deepspeed(checkpoint)
    if job is None and not of_deepspeed:
        return None
    if job is None or not of_deepspeed:
        whose = "it was written by DeepSpeed, and this job runs without" if of_deepspeed else "it is not DeepSpeed's"
        weights, script = "load its weights", checkpoint / _SCRIPT
        if script.is_file():
            weights = f"put its weights together (python {script} {checkpoint} NEW_DIRECTORY) and load them"
        return f"{whose}. What to do: start the job as before, or {weights} as the model of a new run"
    if job.universal:
        # What was converted is for a job of any kind.
        return None
    folder = _Folder.named_by(checkpoint / _LATEST)
    was = folder.job
    if job.loads(was):
        return None
    convert = _CONVERT.format(path=checkpoint, tag=folder.path.name, setting=_UNIVERSAL)
    return (
        f"it was written by {was}, and this job has {job}; DeepSpeed loads only what such a job has written. What to "
        f"do: start it as before, or {convert}"
    )
