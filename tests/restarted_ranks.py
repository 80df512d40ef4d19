"""Run by test_memory_start.py, once for each rank and start: the first time one of the ranks is struck."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from conftest import TEXTS, build_tokenizer, leave_together, losses, sft_trainer
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, set_seed
from two_sharded_processes import sharded_on_the_cpu, whole

from self_healing import HealingConfig, SelfHealingTrainer


class Struck(TrainerCallback):
    """The second rank fails after a step, when its callbacks are told of it."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at and torch.distributed.get_rank() == 1:
            raise ValueError("after the step")


class StruckBeforeUpdate(TrainerCallback):
    """Fails when a step was found fit; a rank that does not applies it."""

    def __init__(self, at: int, ranks: Sequence[int] = (1,)) -> None:
        self.at, self.ranks = at, ranks

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at - 1 and torch.distributed.get_rank() in self.ranks:
            raise ValueError("before the update")


def digest(model: Any) -> str:
    content = hashlib.sha256()
    for parameter in model.parameters():
        content.update(whole(parameter.data).contiguous().numpy().tobytes())
    return content.hexdigest()


def make(directory: Path, options: dict[str, Any]) -> Any:
    set_seed(1234)
    evaluates = {"eval_strategy": "steps", "eval_steps": 1} if options["evaluates"] else {}
    # Dropout is on, and each rank draws its own.
    trainer = sft_trainer(
        directory,
        build_tokenizer(),
        ddp_backend="gloo",
        max_steps=10,
        gradient_accumulation_steps=1,
        save_strategy="steps",
        save_steps=options["save_steps"],
        logging_steps=3,
        trainer_kwargs={"eval_dataset": Dataset.from_dict({"text": TEXTS[:4]})} if evaluates else {},
        **evaluates,
    )
    trainer.model.get_input_embeddings().requires_grad_(not options["frozen"])
    return trainer


def main(directory: Path, options: dict[str, Any]) -> None:
    strategy, rank, begun = options["strategy"], int(os.environ["RANK"]), time.monotonic()
    if strategy != "ddp":
        sharded_on_the_cpu(strategy)
        os.environ["FSDP_STATE_DICT_TYPE"] = options["states"]
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    trainer = make(directory / "run", options)
    if options["frozen"] == "drawn anew" and not first:
        trainer.model.get_input_embeddings().weight.data[0] += 1e-3
    fault, at = options["fault"], options["at"]

    def strike(module: Any, args: Any, kwargs: Any) -> None:
        if rank == 1 and first and trainer.state.global_step == at and module.training:
            if fault == "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("in the model")

    callbacks = {
        "callback": Struck(at),
        "before_update": StruckBeforeUpdate(at),
        "before_no_update": StruckBeforeUpdate(at + 1, ranks=(0, 1)),
    }
    if fault in callbacks:
        if first:
            trainer.add_callback(callbacks[fault])
    else:
        trainer.model.register_forward_pre_hook(strike, with_kwargs=True)
    config = HealingConfig(snapshot_interval=3, snapshot_verify_steps=1, launcher_restarts="yes")
    healer = SelfHealingTrainer(trainer, config)
    healer.train()
    result = {
        "steps": trainer.state.global_step,
        "weights": digest(trainer.model),
        "losses": losses(trainer),
        "sharded": all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()),
        "seconds": time.monotonic() - begun,
    }
    plain = make(directory / "plain", options)
    plain.train()
    result |= {"plain_weights": digest(plain.model), "plain_losses": losses(plain)}
    (directory / f"results.{rank}.json").write_text(json.dumps(result))
    leave_together()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
