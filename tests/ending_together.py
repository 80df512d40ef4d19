"""Run by test_ending_together.py, once for each rank: one of them fails, the others wait for it in a collective."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from conftest import build_tokenizer, leave_together, sft_trainer
from constants import settings_among
from transformers import TrainerCallback, set_seed

from self_healing import HealingConfig, SelfHealingTrainer


FOREVER = 1000.0


def hold_connections() -> None:
    """As with NCCL, nobody is told when this process is gone: its connections stay open in another one."""
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)


def strike_rank(fault: str, note: Path) -> None:
    """Has something happen to this process, and notes when; what is not known here is nothing."""
    note.write_text(json.dumps({"time": time.time(), "pid": os.getpid()}))
    if fault == "exception":
        raise ValueError("only here")
    if fault == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if fault == "exit":
        sys.exit(3)
    if fault == "kill":
        hold_connections()
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "hang":
        hold_connections()
        time.sleep(FOREVER)


# Ways in which the gradients of a step do not reach the other ranks.
APART = ("leaves out a layer", "returns early")


def take_another_way(trainer: Any, way: str, now: Callable[[], bool]) -> None:
    """Has a trainer compute some of its steps otherwise."""
    compute_loss, training_step = trainer.compute_loss, trainer.training_step
    layers = trainer.model.model.layers

    def without_a_layer(*args: Any, **kwargs: Any) -> Any:
        if now():
            trainer.model.model.layers = layers[:1]
        try:
            return compute_loss(*args, **kwargs)
        finally:
            trainer.model.model.layers = layers

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return torch.zeros(()) if now() else training_step(*args, **kwargs)

    if way == "returns early":
        trainer.training_step = nothing
    else:
        trainer.compute_loss = without_a_layer


def main(directory: Path, options: dict[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    fault, at, on = options.get("fault"), options.get("step", 3), options.get("rank", 1)
    set_seed(1234)
    trainer = sft_trainer(
        directory,
        build_tokenizer(),
        ddp_backend="gloo",
        ddp_timeout=1800,
        ddp_find_unused_parameters=fault not in APART,
        max_steps=options.get("steps", 6),
        gradient_accumulation_steps=1,
        save_strategy="steps",
        save_steps=2,
    )

    class StopsAlone(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if rank == on and state.global_step == at:
                strike_rank(fault, directory / "struck")
                control.should_training_stop = True

    if fault == "stops_alone":
        trainer.add_callback(StopsAlone())

    def strike(module: Any, args: Any, kwargs: Any) -> None:
        if (
            rank == on
            and fault not in (None, "stops_alone", *APART)
            and module.training
            and trainer.state.global_step == at
        ):
            strike_rank(fault, directory / "struck")

    class Busy(Exception):
        """A service says when to ask again."""

        response = SimpleNamespace(status_code=503, headers={"Retry-After": str(options.get("busy_seconds"))})

    collate = trainer.data_collator

    def collate_later(rows: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == on and fault == "busy" and calls == at:
            raise Busy
        return collate(rows)

    calls = 0
    trainer.data_collator = collate_later
    if fault in APART:
        take_another_way(trainer, fault, lambda: trainer.state.global_step == at and (rank == on or on is None))
    trainer.model.register_forward_pre_hook(strike, with_kwargs=True)
    config = HealingConfig(**settings_among(options.get("config", {})))
    result: dict[str, Any] = {}
    try:
        SelfHealingTrainer(trainer, config).train()
        result["steps"] = trainer.state.global_step
    except BaseException as error:
        result["error"] = f"{type(error).__name__}: {error}"
        if options.get("stays"):
            # The processes that are left see nothing of it.
            time.sleep(FOREVER)
        raise
    finally:
        (directory / f"results.{rank}.json").write_text(json.dumps(result))
    if rank == on and "after" in options:
        # What the script does then needs none of the others for a while.
        time.sleep(options["after"])
    leave_together()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
