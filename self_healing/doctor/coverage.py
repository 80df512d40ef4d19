"""What is healed where a run is started like this, and by what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """

    launch: Launch
    ranks: int = 1
    engine: str | None = None
    sharded: bool = False
    by_accelerate: bool = False

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
        return cls(launch, max(ranks, 1), engine, on("ACCELERATE_USE_FSDP"), by_accelerate)

    @property
    def started_again(self) -> bool:
        """Whether somebody starts the job again, as far as is known: SLURM and Kubernetes do not tell."""
        left = self.launch.restarts_left
        return bool(left) if left is not None else self.launch.launcher != "none" or self.launch.in_a_pod


@dataclass(frozen=True, slots=True)
class Coverage:
    """
    What is done about one kind of fault here.

    Args:
        fault (`str`):
            In plain words.
        callback (`str`), wrapper (`str`), launcher (`str`):
            What the callback alone does, what `SelfHealingTrainer` does, and what is done where a launcher starts the
            job again. `"healed"`, `"watched"`, `"no"`, or what is done of it.
    """

    fault: str
    callback: str
    wrapper: str
    launcher: str


def coverage_of(setting: Setting) -> list[Coverage]:
    """
    Lists what is healed.

    Args:
        setting ([`Setting`]):
            How the run is started.
    """
    one = setting.ranks == 1
    watched = setting.engine is not None
    step = "watched" if watched else "healed"
    memory = "watched" if watched else "healed" if one and not setting.sharded else "no"

    def everywhere(fault: str, what: str) -> Coverage:
        return Coverage(fault, what, what, what)

    leaves = "leaves a checkpoint"
    return [
        everywhere("NaN, Inf or spike in a step", step),
        everywhere("NaN in weights, divergence", "watched" if watched else "rolled back"),
        Coverage("out of memory", memory, memory, memory if memory != "no" else "split at next start"),
        everywhere("sample that cannot be loaded", "replaced"),
        everywhere("reward or stream that fails", "called again"),
        Coverage("network error out of train()", "no", "goes on" if one else "postmortem", "goes on"),
        Coverage("other exception", "no", "checkpoint, postmortem" if one else "postmortem", "started again"),
        everywhere("checkpoint that is not written", "goes on" if one else "no"),
        Coverage("damaged checkpoint at resume", "refused", "passed over", "passed over"),
        Coverage("hang", "noticed", "goes on" if one else "noticed", "goes on"),
        Coverage("killed process, lost device", "no", "no", "started again"),
        Coverage("SIGTERM, SIGUSR1", leaves, leaves, "goes on"),
    ]
