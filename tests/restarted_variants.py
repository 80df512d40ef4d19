"""
Run by test_memory_start.py, once for each rank and start: one way to shard after the other. The first time all ranks
fail after a step of each.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from conftest import leave_together, losses
from restarted_ranks import digest
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, set_seed
from two_sharded_processes import _VARIANTS, Runs, sharded_on_the_cpu

from self_healing import HealingConfig, SelfHealingTrainer


# Started again with a model that the state does not fit.
CHANGED = "changed"


class Failing(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            raise ValueError("after the step")


class Restarted(Runs):
    """Trains each variant until it fails, or, started again, to its end and then once more without a break."""

    def see(self, name: str, first: bool) -> None:
        variant = "kept" if name == CHANGED else name
        variables, arguments = _VARIANTS[variant]
        os.environ.update(variables)
        arguments = {"max_steps": 7, "save_strategy": "steps", "save_steps": 3, "ddp_backend": "gloo", **arguments}

        def make(directory: str) -> Any:
            set_seed(1234)
            return self.maker_of(variant)(self._directory / directory, self.tokenizer, **arguments)

        trainer = make(name)
        if name == CHANGED and not first:
            # In no checkpoint, and nothing that a resume would miss.
            trainer.model.register_buffer("added", torch.zeros(1), persistent=False)
        if first:
            trainer.add_callback(Failing())
        config = HealingConfig(snapshot_interval=3, snapshot_verify_steps=1, launcher_restarts="yes", on_hang="notify")
        with contextlib.suppress(ValueError) if first else contextlib.nullcontext():
            SelfHealingTrainer(trainer, config).train()
        if not first:
            parameters = [each for each in trainer.model.parameters() if each.requires_grad]
            self.results[name] = {
                "steps": trainer.state.global_step,
                "sharded": all(isinstance(each, DTensor) for each in parameters),
                "placements": str(getattr(parameters[0], "placements", "")),
                "weights": digest(trainer.model),
                "losses": losses(trainer),
            }
            plain = make(f"{name}_plain")
            plain.train()
            self.results[name] |= {"plain_weights": digest(plain.model), "plain_losses": losses(plain)}
        for variable in variables:
            del os.environ[variable]


def main(directory: Path, options: dict[str, Any]) -> None:
    sharded_on_the_cpu(options["strategy"])
    os.environ["FSDP_STATE_DICT_TYPE"] = "SHARDED_STATE_DICT"
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
    runs = Restarted(directory)
    for name in options["variants"]:
        runs.see(name, first=os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
        (directory / f"results.{runs.rank}.json").write_text(json.dumps(runs.results))
        torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    leave_together()
