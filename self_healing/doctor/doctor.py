"""Judges a machine and a directory: what will not work, what had better be otherwise, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from ..failures import FAILURE_RECIPES, FailureType
from ..launcher import Launch, launch_of
from .coverage import Coverage, Setting, coverage_of
from .job import Job
from .machine import Machine, Place, look_at_machine, look_at_place


DISTRIBUTION = "self-healing-trl"
# Of a data loader worker that hands over batches of images; the default of Docker is 64 MiB.
_ENOUGH_SHARED_MEMORY = 256 << 20
# What is measured of each rank.
_MEASURED = {
    "teraflops": "in a product of matrices",
    "memory": "in its own memory",
    "from_host": "from the host",
    "neighbours": "with the ranks next to it",
}
# Less than a small model with its optimizer state takes.
_LITTLE_DISK = 1 << 30


@dataclass(frozen=True, slots=True)
class Problem:
    """
    Something that will not work here, or had better be otherwise.

    Args:
        severity (`"problem"` or `"warning"`):
            Whether it will not work, or may not.
        what (`str`), to_do (`str`):
            What it is, with the values found, and what to do about it.
    """

    severity: Literal["problem", "warning"]
    what: str
    to_do: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.what} {self.to_do}"


@dataclass(frozen=True, slots=True)
class Checkup:
    """
    What was found on a machine before a run.

    Args:
        machine ([`Machine`]), place ([`Place`]), setting ([`Setting`]):
            What there is, where the run would write to, and how it would be started.
        coverage (`list[Coverage]`):
            What is healed here, as tests have shown it.
        problems (`list[Problem]`):
            Worst first.
        job ([`Job`], *optional*):
            All ranks, if this process was started as one of several.
    """

    machine: Machine
    place: Place
    setting: Setting
    coverage: list[Coverage] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    job: Job | None = None

    @property
    def works(self) -> bool:
        """Whether nothing was found that will not work."""
        return all(problem.severity != "problem" for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Converts it to types that JSON has."""
        return {"works": self.works, **asdict(self)}


def check_up(
    directory: str | Path = ".", environment: Mapping[str, str] | None = None, job: Job | None = None
) -> Checkup:
    """
    Looks at this machine and a directory. Never raises.

    Args:
        directory (`str` or `Path`, *optional*, defaults to the working directory):
            The `output_dir` of a run, or where its script lies.
        environment (`Mapping[str, str]`, *optional*):
            Environment variables. Defaults to `os.environ`.
        job ([`Job`], *optional*):
            What was found of the ranks of this job.
    """
    environment = os.environ if environment is None else environment
    machine, place = look_at_machine(), look_at_place(Path(directory))
    try:
        launch = launch_of(environment)
    except Exception as error:
        launch = Launch("none", 0, None)
        machine.unknown["launcher"] = f"{type(error).__name__}: {error}"
    return judge(machine, place, Setting.of(launch, environment), job=job)


def judge(
    machine: Machine,
    place: Place,
    setting: Setting,
    requirements: Iterable[str] | None = None,
    job: Job | None = None,
) -> Checkup:
    """
    Judges what was found.

    Args:
        machine ([`Machine`]), place ([`Place`]), setting ([`Setting`]):
            What there is.
        requirements (`Iterable[str]`, *optional*):
            What this library asks for, as in its metadata. Defaults to those of the installed distribution.
        job ([`Job`], *optional*):
            What was found of the ranks of this job.
    """
    found = [
        *(() if job is None else _of_job(job)),
        *_of_versions(machine, _requirements() if requirements is None else requirements),
        *_of_device(machine, setting),
        *_of_place(place),
        *_of_memory(machine, place),
        *_of_launch(machine, setting),
        *(
            Problem("warning", f"The {what} could not be determined ({why}).", "")
            for what, why in machine.unknown.items()
        ),
    ]
    found.sort(key=lambda problem: problem.severity != "problem")
    return Checkup(machine, place, setting, coverage_of(setting, machine.device.kind), found, job)


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        # Run from a clone that is not installed.
        return []


def _of_job(job: Job) -> Iterable[Problem]:
    if job.missing:
        yield Problem(
            "problem",
            f"Rank {', '.join(map(str, job.missing))} of {job.ranks} did not come to the store of the job.",
            "Look at the output of those processes, and whether their machines reach MASTER_ADDR at MASTER_PORT.",
        )
    if job.error is not None:
        yield Problem(
            "problem",
            f"The ranks of this job could not be looked at together: {job.error}.",
            "A rank that has failed, or a network on which they do not meet: NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME and "
            "GLOO_SOCKET_IFNAME.",
        )
    for rank, what in sorted(job.wrong.items()):
        host = next((f" on {row.host} ({row.device})" for row in job.rows if row.rank == rank), "")
        yield Problem("problem", f"Rank {rank}{host}: {what}.", FAILURE_RECIPES[FailureType.WRONG_RESULTS].advice)
    for row in job.rows:
        if row.error is not None:
            yield Problem("warning", f"The device of rank {row.rank} could not be checked ({row.error}).", "")
    for rank, what, reached, others in job.slow():
        unit = "TFLOP/s" if what == "teraflops" else "GB/s"
        yield Problem(
            "warning",
            f"Rank {rank} reaches {reached:.3g} {unit} {_MEASURED[what]}, the others {others:.3g}.",
            "Look at the clocks and links of its device (nvidia-smi -q -d PERFORMANCE,CLOCK; nvidia-smi topo -m), and "
            "at what else runs on its machine.",
        )


def _of_versions(machine: Machine, requirements: Iterable[str]) -> Iterable[Problem]:
    for requirement in map(Requirement, requirements):
        optional = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        if requirement.name not in machine.libraries:
            continue
        installed = machine.libraries[requirement.name]
        if installed is None and not optional:
            yield Problem(
                "problem",
                f"{requirement.name} is not installed.",
                f"pip install '{requirement.name}{requirement.specifier}'",
            )
        elif installed is not None and not requirement.specifier.contains(installed, prereleases=True):
            yield Problem(
                "problem",
                f"{requirement.name} {installed} is installed, and this library knows {requirement.specifier}.",
                f"pip install '{requirement.name}{requirement.specifier}'",
            )
    if machine.libraries.get("trl", "") is None:
        yield Problem(
            "warning",
            "TRL is not installed: the plain Trainer is healed, and `self-healing demo` does not run.",
            f"pip install '{DISTRIBUTION}[trl]'",
        )


def _of_device(machine: Machine, setting: Setting) -> Iterable[Problem]:
    device = machine.device
    if device.kind == "cpu" and device.driver is not None:
        built = "without CUDA" if device.cuda is None else f"for CUDA {device.cuda}"
        yield Problem(
            "problem",
            f"There is an NVIDIA driver ({device.driver}), and torch ({built}) sees no device: a run would be on "
            "the CPU.",
            "Install a torch for the CUDA of this driver (https://pytorch.org/get-started/locally), and look at "
            "CUDA_VISIBLE_DEVICES.",
        )
    if len(device.names) > 1 and setting.ranks == 1:
        yield Problem(
            "warning",
            f"{len(device.names)} devices are visible to one process: the Trainer would put replicas of the model on "
            "them (nn.DataParallel), which TRL refuses, and calls that run out of memory are not split there.",
            "Start it with torchrun --nproc-per-node, or show it one device: CUDA_VISIBLE_DEVICES=0.",
        )
    if device.kind != "cpu" and device.bf16 is False:
        yield Problem(
            "warning",
            f"{device.names[0] if device.names else device.kind} does not compute in bfloat16.",
            "Train with fp16=True, whose overflows are left to the GradScaler, or in float32.",
        )
    if device.free is not None and device.total and device.free < 0.5 * device.total:
        yield Problem(
            "warning",
            f"{size_in_words(device.free)} of {size_in_words(device.total)} of device memory are free: something else "
            "uses it.",
            "nvidia-smi shows what; a killed run may have left a process behind.",
        )


def _of_place(place: Place) -> Iterable[Problem]:
    if place.why_not_writable is not None:
        yield Problem(
            "problem",
            f"{place.path} cannot be written ({place.why_not_writable}): no checkpoint or journal could be saved.",
            "Name another output_dir, or make this one writable.",
        )
        return
    if place.free is not None:
        needed = max(2 * place.checkpoint_bytes, _LITTLE_DISK)
        if place.free < needed:
            of = (
                f", and one checkpoint takes {size_in_words(place.checkpoint_bytes)}" if place.checkpoint_bytes else ""
            )
            yield Problem(
                "problem" if place.free < place.checkpoint_bytes else "warning",
                f"{size_in_words(place.free)} are free in {place.path}{of}.",
                "Make room, or set save_total_limit; a checkpoint that does not fit is removed and tried again later.",
            )
    if not place.hard_links:
        yield Problem(
            "warning",
            f"{place.path} has no hard links: the last good checkpoints are copied, which takes time and disk space.",
            "An output_dir on a local disk has them; keep_verified_checkpoints=0 does without.",
        )


def _of_memory(machine: Machine, place: Place) -> Iterable[Problem]:
    snapshots = 2 * place.checkpoint_bytes
    if snapshots and machine.memory_free is not None and machine.memory_free < snapshots:
        yield Problem(
            "warning",
            f"{size_in_words(machine.memory_free)} of host memory are free, and two snapshots of a run with "
            f"checkpoints of {size_in_words(place.checkpoint_bytes)} may not fit: it would go back to checkpoints on "
            "disk instead.",
            "Give the job more host memory, or save more often.",
        )
    if machine.shared_memory is not None and machine.shared_memory < _ENOUGH_SHARED_MEMORY:
        yield Problem(
            "warning",
            f"/dev/shm has {size_in_words(machine.shared_memory)}: data loader workers that hand over larger batches "
            "are killed by a bus error.",
            "docker run --ipc=host or --shm-size=8g; or dataloader_num_workers=0.",
        )


def _of_launch(machine: Machine, setting: Setting) -> Iterable[Problem]:
    launch = setting.launch
    if setting.engine == "DeepSpeed":
        yield Problem(
            "warning",
            "Under DeepSpeed steps are healed with ZeRO-1, 2 and 3, and only watched with NVMe offload and stage 0.",
            "With FSDP2 (cpu_offload as well) or DDP they are healed.",
        )
    elif setting.engine is not None:
        yield Problem(
            "warning",
            f"{setting.engine} runs the backward pass itself: steps are watched and reported, and not healed.",
            "With FSDP2 or DDP they are healed.",
        )
    if launch.restarts_left == 0 and launch.launcher == "torchrun":
        yield Problem(
            "warning",
            "torchrun will not start this job again: a hang that cannot be interrupted, or a lost device, ends it.",
            "Start it with --max-restarts 3.",
        )
    elif not setting.started_again:
        yield Problem(
            "warning",
            "No launcher was found: a process that is killed, or hangs in native code, is not started again.",
            "torchrun --standalone --nproc-per-node 1 --max-restarts 3 train.py",
        )
    if setting.keeps_store and setting.ranks > 1 and launch.restarts_left:
        yield Problem(
            "warning",
            "torchrun starts several processes again with the store of the first ones (torch 2.13): they find old "
            "addresses there, and often not each other (Connection refused).",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, with --rdzv-backend c10d or --standalone.",
        )
    for name in machine.ignored_signals:
        yield Problem(
            "warning",
            f"{name} is ignored in this shell, and in what it starts: a preemption is not noticed before the kill.",
            f"Start the run from a shell that has no trap '' {name.removeprefix('SIG')}.",
        )


def size_in_words(count: int | None) -> str:
    """Puts a number of bytes into words, for a person."""
    if count is None:
        return "not known"
    if count <= 0:
        return "0 bytes"
    power = min(int(math.log(count, 1024)), 4)
    return f"{count / 1024**power:.{0 if power < 2 else 1}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
