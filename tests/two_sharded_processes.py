"""Run by test_distributed.py under torchrun: the same struck runs under FSDP2 or DDP, on two processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from conftest import (
    POISON_WORD,
    TEXTS,
    OutputFault,
    PoisonToken,
    build_tokenizer,
    journal,
    leave_together,
    losses,
    sft_trainer,
)
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, set_seed

from self_healing import SelfHealingCallback
from self_healing.instrument.gradients import gradients_of
from self_healing.instrument.live_state import local


def shard_on_the_cpu() -> None:
    """Has accelerate take the CPU for a device that FSDP2 can shard over; otherwise it trains under DDP, silently."""
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", ACCELERATE_TORCH_DEVICE="cpu")
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


class PoisonGradient(PoisonToken):
    """The gradient is NaN for every row that holds a certain token, the loss is not."""

    def _spoil(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if self._bad is None or not bool(self._bad.any()) or not output.requires_grad:
            return None
        self.fired += 1
        bad = self._bad.any(dim=1)[:, None, None]
        output.register_hook(lambda gradient: gradient.masked_fill(bad, float("nan")))
        return None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(directory: Path, strategy: str, part: str) -> None:
    if strategy == "fsdp2":
        shard_on_the_cpu()
    torch.distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    tokenizer = build_tokenizer()
    poison = tokenizer.convert_tokens_to_ids(POISON_WORD)
    results: dict[str, Any] = {}

    class Corrupting(TrainerCallback):
        """Weights of the second rank turn NaN after the 20th step."""

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 20 and rank == 1:
                local(next(model.parameters()).data).view(-1)[0] = float("nan")

    def run(name: str, fault: Callable[[Any], Any], poisoned: tuple[int, ...] = (), **arguments: Any) -> None:
        set_seed(1234)
        trainer = sft_trainer(
            directory / name,
            tokenizer,
            texts=[f"{text} {POISON_WORD}" if index in poisoned else text for index, text in enumerate(TEXTS)],
            callbacks=None if name == "plain" else [SelfHealingCallback()],
            **{"ddp_backend": "gloo", "max_steps": 4, **arguments},
        )
        fault(trainer)
        trainer.train()
        results[name] = {
            "sharded": all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()),
            "sum": sum(float(whole(value.data).double().sum()) for value in trainer.model.parameters()),
            "losses": losses(trainer),
            "left_over": len(gradients_of(trainer.model)),
            "outcomes": [
                [event["failure"], event["steps_lost"]] for event in journal(directory / name, "outcome") if rank == 0
            ],
        }

    def within_a_step() -> None:
        run("plain", lambda trainer: None)
        run("transient", lambda trainer: OutputFault(trainer.model, lambda forward: forward == 4 and rank == 1))
        # Of the second and of the last step all rows are NaN: what is left of them reaches the third, or the end.
        struck = (1, 3)
        run(
            "skipped",
            lambda trainer: OutputFault(trainer.model, lambda _: trainer.state.global_step in struck),
            **same,
        )
        run("poison", lambda trainer: PoisonToken(trainer.model, poison), poisoned=(5, 17), **same)
        run("gradient", lambda trainer: PoisonGradient(trainer.model, poison), poisoned=(5, 17), **same)

    def going_back() -> None:
        longer = {"max_steps": 24, "gradient_accumulation_steps": 1}
        run("plain", lambda trainer: None, **longer)
        run("corrupted", lambda trainer: trainer.add_callback(Corrupting()), **longer)

    same: dict[str, Any] = {"dropout": 0.0}
    {"step": within_a_step, "rollback": going_back}[part]()
    (directory / f"results.{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    leave_together()
