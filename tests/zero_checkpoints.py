"""Run by test_zero_checkpoints.py under torchrun: checkpoints that DeepSpeed writes, damaged, and gone on from."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import two_zero_processes as zero_processes
from conftest import leave_together
from transformers import TrainerCallback
from two_zero_processes import Runs, config_of, zero_on_the_cpu

from self_healing import CheckpointError


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}


class OwnError(Exception):
    """Of the user's own code."""


class Raises(TrainerCallback):
    """Raises in the fourth step."""

    def __init__(self, trainer: Any) -> None:
        trainer.add_callback(self)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise OwnError("a callback has failed")


class CheckpointRuns(Runs):
    """Trains, writes checkpoints, and goes on from what is left of them."""

    def torn(self, stage: int, bf16: bool) -> None:
        """A run of four steps, gone on from twice: with its newest checkpoint torn on one rank, and without it."""
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "resume": "auto", **SAVING}
        self.run("torn", max_steps=4, **same)
        if self.rank == 0:
            directory = self._directory / "torn"
            shutil.copytree(directory, self._directory / "undisturbed")
            (part,) = (directory / "checkpoint-4").rglob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")
            part.write_bytes(part.read_bytes()[:-500])
            for left in (self._directory / "undisturbed").rglob("checkpoint-4"):
                shutil.rmtree(left)
            shutil.rmtree(directory / "last-known-good", ignore_errors=True)
        torch.distributed.barrier()
        self.run("torn", max_steps=6, **same)
        self.run("undisturbed", max_steps=6, **same)

    def raised(self, stage: int, bf16: bool) -> None:
        """An exception of the user's own in the fourth step, and the run that goes on from what it left."""
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "resume": "auto", "max_steps": 6}
        with suppress(OwnError):
            self.run("raised", fault=Raises, **same)
        left = list(self._directory.joinpath("raised").rglob("checkpoint-*"))
        self.run("raised", **same)
        self.run("never_raised", **same)
        self.results["left"] = [str(each.relative_to(self._directory)) for each in left]

    def other_job(self, stage: int, bf16: bool) -> None:
        """Another job in the directory of a run: it is refused."""
        try:
            self.run("torn", stage, bf16=bf16, resume="auto", max_steps=8, **SAVING)
        except CheckpointError as error:
            self.results["other_job"] = str(error)

    def converted(self, stage: int, bf16: bool) -> None:
        """The same job after its checkpoint was converted."""
        zero_processes.config_of = lambda *args, **kwargs: {
            **config_of(*args, **kwargs),
            "checkpoint": {"load_universal": True},
        }
        self.run("torn", stage, bf16=bf16, resume="auto", max_steps=8, **SAVING)


def main(directory: Path, stage: str, precision: str, *parts: str) -> None:
    zero_on_the_cpu()
    # A deadlock is a failure after this time.
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
    runs = CheckpointRuns(directory)
    for part in parts:
        getattr(runs, part)(int(stage), precision == "bf16")
    (directory / f"results.{runs.rank}.json").write_text(json.dumps(runs.results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    leave_together()
