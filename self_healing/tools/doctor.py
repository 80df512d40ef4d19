"""Judges a machine before a run: what is healed on it, as tests have shown, what will not work, and what to do."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..failures.recipes import FAILURE_RECIPES, FailureType
from ..system.processes import Launch, launch_of
from .doctor_machine import Disk, Job, Machine, look_at_disk, look_at_machine


DISTRIBUTION = "self-healing-trl"
# Of a data loader worker that hands over batches of images; the default of Docker is 64 MiB.
_ENOUGH_SHARED_MEMORY = 256 << 20
# Less than a small model with its optimizer state takes.
_LITTLE_DISK = 1 << 30
_STYLES = {"healed": "green", "in part": "yellow", "not shown": "red", "not run": "dim", "no launcher": "red"}


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that will not work here, or should be changed, and what to do about it."""

    severity: Literal["problem", "warning"]
    what: str
    to_do: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a run would be started here, as far as the environment tells."""

    launch: Launch
    ranks: int = 1
    # One that runs the backward pass itself: DeepSpeed, Megatron-LM, XLA.
    engine: str | None = None
    sharded: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Setting:
        """Reads it from environment variables of torchrun, SLURM and accelerate."""

        def on(name: str) -> bool:
            return environment.get(name, "").lower() in ("1", "true", "yes", "on")

        engines = {"DeepSpeed": on("ACCELERATE_USE_DEEPSPEED"), "Megatron-LM": on("ACCELERATE_USE_MEGATRON_LM")}
        engines["XLA"] = "PJRT_DEVICE" in environment
        ranks = environment.get("WORLD_SIZE") or environment.get("SLURM_NTASKS") or "1"
        engine = next((engine for engine, used in engines.items() if used), None)
        count = int(ranks) if ranks.isdigit() else 1
        return cls(launch_of(environment), count, engine, sharded=on("ACCELERATE_USE_FSDP"))

    @property
    def started_again(self) -> bool:
        """Whether somebody starts the job again, as far as is known: SLURM and Kubernetes do not tell."""
        left = self.launch.restarts_left
        return bool(left) if left is not None else self.launch.launcher != "none" or self.launch.in_a_pod


@dataclass(frozen=True, slots=True)
class Checkup:
    """What was found on a machine before a run; problems come worst first."""

    machine: Machine
    disk: Disk
    setting: Setting
    coverage: list[dict[str, Any]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    job: Job | None = None

    @property
    def works(self) -> bool:
        """Whether nothing was found that will not work."""
        return all(problem.severity != "problem" for problem in self.problems)


def check_up(directory: str | Path = ".", job: Job | None = None) -> Checkup:
    """Looks at this machine and the directory of a run, and judges them with what was found of all ranks."""
    return judge(look_at_machine(), look_at_disk(Path(directory)), Setting.of(os.environ), job)


def judge(machine: Machine, disk: Disk, setting: Setting, job: Job | None = None) -> Checkup:
    """Judges what was found."""
    found = [*_of_versions(machine), *_of_machine(machine), *_of_disk(disk), *_of_launch(setting)]
    found += [] if job is None else _of_job(job)
    # Several extras ask for the same library.
    found = sorted(dict.fromkeys(found), key=lambda problem: problem.severity != "problem")
    return Checkup(machine, disk, setting, coverage_of(setting, machine.device), found, job)


# ---- what is healed here ----


def _matrix() -> Any:
    return json.loads(Path(__file__).with_name("matrix.json").read_text(encoding="utf-8"))


def coverage_of(setting: Setting, device: str = "cpu") -> list[dict[str, Any]]:
    """Lists each fault with what tests have shown (`tests/matrix.py`), in the README's columns for such a run."""
    matrix = _matrix()
    columns = ["callback", "wrapper", *(["gpu"] if device == "cuda" else [])]
    if setting.engine is not None:
        columns = ["deepspeed" if setting.engine == "DeepSpeed" else setting.engine]
    elif setting.sharded or setting.ranks > 1:
        columns = ["fsdp2" if setting.sharded else "ddp"]

    def shown(row: Any, column: str) -> dict[str, str]:
        # Of an engine that no test runs there is nothing to show.
        told: dict[str, str] = row["shown"].get(column, {"state": "not shown"})
        needs = row["needs_launcher"] and told["state"] == "healed" and not setting.started_again
        return {"state": "no launcher"} if needs else told

    name = matrix["columns"].get
    return [
        {"fault": fault, "what": row["what"], "shown": {name(each, each): shown(row, each) for each in columns}}
        for fault, row in matrix["faults"].items()
    ]


# ---- what will not work ----


def _of_versions(machine: Machine) -> Iterator[Problem]:
    requirements: list[str] = []
    # A clone that is not installed has none.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    for requirement in map(Requirement, requirements):
        optional = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        installed = machine.libraries.get(requirement.name, "")
        to_do = f"pip install '{requirement.name}{requirement.specifier}'"
        if installed is None and not optional:
            yield Problem("problem", f"{requirement.name} is not installed.", to_do)
        elif installed and not requirement.specifier.contains(installed, prereleases=True):
            what = f"{requirement.name} {installed} is installed, but this library supports {requirement.specifier}."
            yield Problem("problem", what, to_do)


def _of_machine(machine: Machine) -> Iterator[Problem]:
    if machine.device == "cpu" and machine.driver is not None:
        built = "without CUDA" if machine.cuda is None else f"for CUDA {machine.cuda}"
        what = f"There is an NVIDIA driver ({machine.driver}), but torch ({built}) sees no device."
        to_do = "Install a torch for it (https://pytorch.org/get-started/locally), and look at CUDA_VISIBLE_DEVICES."
        yield Problem("problem", what, to_do)
    if machine.shared_memory is not None and machine.shared_memory < _ENOUGH_SHARED_MEMORY:
        size = _gib(machine.shared_memory)
        what = f"/dev/shm has {size}: data loader workers that hand over larger batches are killed by a bus error."
        yield Problem("warning", what, "docker run --ipc=host or --shm-size=8g; or dataloader_num_workers=0.")
    if machine.error is not None:
        yield Problem("problem", f"The device could not be looked at ({machine.error}).", "Does nvidia-smi work?")


def _of_disk(disk: Disk) -> Iterator[Problem]:
    if disk.why_not_writable is not None:
        what = f"{disk.path} cannot be written ({disk.why_not_writable}): no checkpoint or journal could be saved."
        yield Problem("problem", what, "Name another output_dir, or make this one writable.")
        return
    if disk.free is not None and disk.free < max(2 * disk.checkpoint_bytes, _LITTLE_DISK):
        of = f", and one checkpoint takes {_gib(disk.checkpoint_bytes)}" if disk.checkpoint_bytes else ""
        what = f"{_gib(disk.free)} are free in {disk.path}{of}."
        severity: Literal["problem", "warning"] = "problem" if disk.free < disk.checkpoint_bytes else "warning"
        yield Problem(severity, what, "Make room, or set save_total_limit.")


def _of_launch(setting: Setting) -> Iterator[Problem]:
    if not setting.started_again:
        left = (
            "torchrun will not start this job again"
            if setting.launch.launcher == "torchrun"
            else "No launcher was found"
        )
        what = f"{left}: a process that is killed, or hangs in native code, ends it."
        yield Problem("warning", what, "torchrun --standalone --nproc-per-node 1 --max-restarts 3 train.py")


def _of_job(job: Job) -> Iterator[Problem]:
    if job.missing:
        what = f"Rank {', '.join(map(str, job.missing))} of {job.ranks} did not reach the store of the job."
        to_do = "Look at the output of those processes, and whether their machines reach MASTER_ADDR at MASTER_PORT."
        yield Problem("problem", what, to_do)
    if job.error is not None:
        to_do = "Look at the network between them: NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."
        yield Problem("problem", f"The ranks of this job could not be looked at together: {job.error}.", to_do)
    for rank, what in sorted(job.wrong.items()):
        row = job.rows[rank]
        advice = FAILURE_RECIPES[FailureType.WRONG_RESULTS].advice
        yield Problem("problem", f"Rank {rank} on {row['host']} ({row['device']}): {what}.", advice)
    for row in job.rows:
        if row["error"] is not None:
            yield Problem("warning", f"The device of rank {row['rank']} could not be checked ({row['error']}).")


# ---- for the terminal ----


def print_checkup(checkup: Checkup, console: Console) -> None:
    """Prints what there is, what is healed here, and what will not work."""
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for name, value in _facts(checkup):
        facts.add_row(name, Text(value))
    console.print(facts)
    console.print(Text(), *_healed(checkup), sep="\n")
    for problem in checkup.problems:
        style = "bold red" if problem.severity == "problem" else "yellow"
        console.print(Text.assemble((f"{problem.severity}: ", style), f"{problem.what} ", (problem.to_do, "italic")))
    if checkup.works:
        console.print("Nothing was found that will not work." if checkup.problems else "All is well.")


def _facts(checkup: Checkup) -> Iterator[tuple[str, str]]:
    machine, disk, setting = checkup.machine, checkup.disk, checkup.setting
    yield "python", f"{machine.python} on {machine.system}"
    libraries = [f"{name} {version or '(not installed)'}" for name, version in machine.libraries.items()]
    yield "libraries", ", ".join(libraries)
    yield "device", ", ".join(machine.devices) or f"{machine.device}, {machine.cores or '?'} cores"
    if machine.cuda or machine.driver:
        yield "CUDA", f"{machine.cuda or 'none'} in torch, driver {machine.driver or 'not known'}"
    yield "host memory", f"{_gib(machine.memory_free)} free of {_gib(machine.memory_total)}"
    notes = ("" if disk.exists else " (not made yet)", ", cannot be written" if disk.why_not_writable else "")
    yield "directory", f"{disk.path}{notes[0]}: {_gib(disk.free)} free{notes[1]}"
    launcher, left = setting.launch.launcher, setting.launch.restarts_left
    again = "restarts not known" if left is None else f"{left or 'no'} restarts left"
    yield "launcher", "none (plain python)" if launcher == "none" else f"{launcher}, {again}"
    engine = setting.engine or ("FSDP" if setting.sharded else "DDP" if setting.ranks > 1 else "")
    yield "processes", f"{setting.ranks} {engine}".strip()
    for row in checkup.job.rows if checkup.job else ():
        results = "WRONG results" if checkup.job and row["rank"] in checkup.job.wrong else "right results"
        yield f"rank {row['rank']}", f"{row['host']}, {row['device']}: {row['error'] or results}"


def _healed(checkup: Checkup) -> Iterator[RenderableType]:
    """What is healed here, and the notes below it."""
    table = Table(title="What is healed here", title_justify="left", header_style="bold")
    table.add_column("what goes wrong")
    for column in checkup.coverage[0]["shown"]:
        table.add_column(column, no_wrap=True)
    notes: dict[str, int] = {}
    for row in checkup.coverage:
        cells = []
        for shown in row["shown"].values():
            number = f" ({notes.setdefault(shown['what'], len(notes) + 1)})" if "what" in shown else ""
            cells.append(Text(shown["state"] + number, _STYLES.get(shown["state"], "")))
        table.add_row(row["what"], *cells)
    yield table
    yield from (Text(f"({number}) {what}", "dim") for what, number in notes.items())
    days = [f"{day} on {'a GPU' if where == 'cuda' else 'the CPU'}" for where, day in _matrix()["recorded"].items()]
    words = "healed: tests inject it into real runs, and passed; not shown: no test does"
    yield Text(f"{words} (last run: {', '.join(days)}).", "dim")


def _gib(count: int | None) -> str:
    return "not known" if count is None else f"{count / 2**30:.1f} GiB"
