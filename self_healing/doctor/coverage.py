"""What is healed where a run is started like this, as tests have shown it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..launcher import Launch


# What accelerate and its launcher call engines that run the backward pass themselves.
_ENGINES = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA", "TPU": "XLA"}


@dataclass(frozen=True, slots=True)
class Setting:
    """
    How a run would be started here, as far as the environment tells.

    Args:
        launch ([`Launch`]):
            Who has started this process.
        ranks (`int`):
            Processes of the job.
        engine (`str`, *optional*):
            `"DeepSpeed"`, `"Megatron-LM"` or `"XLA"`, where one of them runs the backward pass; else `None`.
        sharded (`bool`):
            Whether FSDP shards the model.
        by_accelerate (`bool`):
            Whether `accelerate launch` has started it: one process alone as a plain `python`, not started again.
        keeps_store (`bool`):
            Whether processes that are started again find what the first ones have left in the store of torchrun.
    """

    launch: Launch
    ranks: int = 1
    engine: str | None = None
    sharded: bool = False
    by_accelerate: bool = False
    keeps_store: bool = False

    @classmethod
    def of(cls, launch: Launch, environment: Mapping[str, str]) -> Setting:
        """
        Reads it from environment variables of torchrun, SLURM and accelerate.

        Args:
            launch ([`Launch`]), environment (`Mapping[str, str]`):
                Who has started this process, and with which variables.
        """

        def on(name: str) -> bool:
            return environment.get(name, "").lower() in ("1", "true", "yes", "on")

        engine = "DeepSpeed" if on("ACCELERATE_USE_DEEPSPEED") else None
        engine = engine or ("Megatron-LM" if on("ACCELERATE_USE_MEGATRON_LM") else None)
        engine = engine or ("XLA" if "PJRT_DEVICE" in environment or "XRT_TPU_CONFIG" in environment else None)
        engine = engine or _ENGINES.get(environment.get("ACCELERATE_DISTRIBUTED_TYPE", "").upper())
        try:
            ranks = int(environment.get("WORLD_SIZE") or environment.get("SLURM_NTASKS") or 1)
        except ValueError:
            ranks = 1
        by_accelerate = any(name.startswith("ACCELERATE_") for name in environment)
        # torch 2.13, `DynamicRendezvousHandler.next_rendezvous`: its store is made once, and not for each start.
        keeps_store = on("TORCHELASTIC_USE_AGENT_STORE")
        return cls(launch, max(ranks, 1), engine, on("ACCELERATE_USE_FSDP"), by_accelerate, keeps_store)

    @property
    def started_again(self) -> bool:
        """Whether somebody starts the job again, as far as is known: SLURM and Kubernetes do not tell."""
        left = self.launch.restarts_left
        return bool(left) if left is not None else self.launch.launcher != "none" or self.launch.in_a_pod


@dataclass(frozen=True, slots=True)
class Shown:
    """
    What tests show of a fault somewhere.

    Args:
        state (`"healed"`, `"in part"`, `"not shown"`, `"not run"` or `"no launcher"`):
            Whether tests that inject it have passed there; `"not run"` if none was run on such a device yet,
            `"no launcher"` if that heals it which starts the job again, and nothing here does.
        what (`str`, *optional*):
            What is done of it, if that is a part.
    """

    state: str
    what: str | None = None


@dataclass(frozen=True, slots=True)
class Coverage:
    """
    What is healed of one kind of fault here.

    Args:
        fault (`str`), what (`str`):
            Its key, and what it is in plain words.
        shown (`dict[str, Shown]`):
            By the columns that a run belongs to that is started like this: as the table in the README has them.
    """

    fault: str
    what: str
    shown: dict[str, Shown]


def recorded() -> str:
    """When the tests were last run, and where."""
    days = _matrix()["recorded"]
    return ", ".join(f"{day} on {'a GPU' if device == 'cuda' else 'the CPU'}" for device, day in days.items())


def coverage_of(setting: Setting, device: str = "cpu") -> list[Coverage]:
    """
    Lists what is healed, as tests have shown it (`tests/matrix.py`).

    Args:
        setting ([`Setting`]):
            How the run is started.
        device (`str`, *optional*, defaults to `"cpu"`):
            Kind of the device it trains on.
    """
    matrix = _matrix()
    columns = _columns(setting, device)

    def shown(found: Mapping[str, Any], column: str) -> Shown:
        # Of an engine that no test runs there is nothing to show.
        told = Shown(**found["shown"].get(column, {"state": "not shown"}))
        missing = found["needs_launcher"] and told.state == "healed" and not setting.started_again
        return Shown("no launcher") if missing else told

    return [
        Coverage(
            fault, found["what"], {matrix["columns"].get(column, column): shown(found, column) for column in columns}
        )
        for fault, found in matrix["faults"].items()
    ]


def _columns(setting: Setting, device: str) -> list[str]:
    if setting.engine is not None:
        return ["deepspeed" if setting.engine == "DeepSpeed" else setting.engine]
    if setting.sharded:
        return ["fsdp2"]
    if setting.ranks > 1:
        return ["ddp"]
    return ["callback", "wrapper", *(["gpu"] if device == "cuda" else [])]


@cache
def _matrix() -> Any:
    return json.loads(Path(__file__).with_name("matrix.json").read_text(encoding="utf-8"))
