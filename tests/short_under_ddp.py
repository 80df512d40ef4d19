"""
Run by test_ddp_settings.py under torchrun: memory runs out on ranks of DDP, under each of its settings and wherever it
can be healed in place.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DDPCommunicationHookType
from conftest import build_tokenizer, journal, leave_together, losses, sft_trainer, tiny_model
from constants import settings_among
from short_of_memory import Short
from transformers import set_seed
from trl import SFTTrainer

from self_healing import SelfHealingTrainer


Setting = Callable[[Any], None]


def nothing(trainer: Any) -> None: ...


def hooked(kind: DDPCommunicationHookType, **options: Any) -> Setting:
    def setting(trainer: Any) -> None:
        handler = trainer.accelerator.ddp_handler
        handler.comm_hook, handler.comm_state_option = kind, options

    return setting


def as_views(trainer: Any) -> None:
    trainer.accelerator.ddp_handler.gradient_as_bucket_view = True


def averaged(trainer: Any) -> None:
    """What the model gives depends on the inputs of all ranks, as with batch normalisation over all of them."""

    def average(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        mean = output.detach().mean()
        torch.distributed.all_reduce(mean)
        return output + 1e-3 * mean

    trainer.model.model.layers[0].register_forward_hook(average)


# What is set, and arguments of the trainer.
SETTINGS: dict[str, tuple[Setting, dict[str, Any]]] = {
    # Which looks for unused parameters.
    "default": (nothing, {}),
    "all_used": (nothing, {"ddp_find_unused_parameters": False}),
    "unused_parameters": (nothing, {"ddp_find_unused_parameters": True}),
    "static_graph": (nothing, {"ddp_static_graph": True, "gradient_accumulation_steps": 1}),
    "views": (as_views, {"ddp_find_unused_parameters": False}),
    "hook": (hooked(DDPCommunicationHookType.FP16), {}),
    "power_sgd": (
        hooked(DDPCommunicationHookType.POWER_SGD, start_powerSGD_iter=2),
        {"ddp_find_unused_parameters": False},
    ),
}


class OfAllRanks(SFTTrainer):
    """Its loss asks for a number of all ranks, and changes the answer in place."""

    strike: Callable[[], None] = staticmethod(lambda: None)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = self.accelerator.gather(inputs["attention_mask"].sum().float().reshape(1))
        tokens /= 100.0
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.strike()
        loss, *others = loss if isinstance(loss, tuple) else (loss,)
        loss = loss * (1 + tokens[self.args.process_index])
        return (loss, *others) if others else loss


class SecondMicroBatch(Short):
    """It runs out once gradients have been added up."""

    def _strikes(self, rows: int) -> bool:
        added = next(self.trainer.model.parameters()).grad is not None
        return added and super()._strikes(rows)


def main(directory: Path, *wanted: str) -> None:
    rank = int(os.environ["RANK"])
    tokenizer = build_tokenizer()
    results: dict[str, Any] = {}

    def run(
        name: str,
        strike: Callable[[Any], Any] = lambda trainer: None,
        setting: Setting = nothing,
        healed: bool = True,
        trainer_class: type[SFTTrainer] = SFTTrainer,
        **arguments: Any,
    ) -> None:
        if wanted and name not in wanted:
            return
        set_seed(1234)
        model = tiny_model(tokenizer, dropout=0.0)
        if arguments.get("ddp_find_unused_parameters"):
            model.unused = torch.nn.Linear(3, 3)
        arguments = {"ddp_backend": "gloo", "max_steps": 4, "ddp_timeout": 60} | arguments
        trainer = sft_trainer(
            directory / name, tokenizer, model=model, dropout=0.0, trainer_class=trainer_class, **arguments
        )
        setting(trainer)
        seen: list[list[int]] = []
        model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append([trainer.state.global_step, kwargs["input_ids"].shape[0]]),
            with_kwargs=True,
        )
        struck = strike(trainer)
        trained: Any = SelfHealingTrainer(trainer, settings_among({"PROBE_STEPS": 2})) if healed else trainer
        trained.train()
        events = journal(directory / name, rank=rank)
        results[name] = {
            "fired": getattr(struck, "fired", 0),
            "sum": sum(float(each.double().abs().sum()) for each in trainer.model.state_dict().values()),
            "losses": losses(trainer),
            "seen": seen,
            "incidents": [[each["failure"], each["outcome"]] for each in events if each["kind"] == "outcome"],
        }
        (directory / f"results.{rank}.json").write_text(json.dumps(results))

    def on_the_second(where: str, **options: Any) -> Callable[[Any], Any]:
        return lambda trainer: Short(trainer, where, **options) if rank == 1 else None

    for name, (setting, arguments) in SETTINGS.items():
        run(f"{name}_plain", setting=setting, healed=False, **arguments)
        run(name, on_the_second("forward"), setting, **arguments)
        # Where outputs go through DDP, each of them gets a gradient.
        where = "backward" if name in ("default", "unused_parameters", "hook") else "forward"
        run(f"{name}_once", on_the_second(where, times=1), setting, **arguments)

    run("averaged_plain", setting=averaged, healed=False)
    run("averaged", on_the_second("forward", times=1), averaged)

    # Each rank has room for another number of rows, and runs out in another micro-batch of the same step.
    run(
        "unlike",
        lambda trainer: Short(trainer, "forward", fit=1) if rank == 1 else SecondMicroBatch(trainer, "forward", fit=2),
    )

    def in_the_loss(trainer: Any) -> Any:
        class Once:
            fired = 0

        def strike() -> None:
            if rank == 1 and trainer.state.global_step == 1 and not Once.fired:
                Once.fired += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        trainer.strike = strike
        return Once

    run("own_gather_plain", healed=False, trainer_class=OfAllRanks)
    run("own_gather", in_the_loss, trainer_class=OfAllRanks)

    def in_the_first_update(trainer: Any) -> Any:
        class Once:
            fired = 0

        def strike(optimizer: Any, *_: Any) -> None:
            if rank == 1 and not Once.fired:
                Once.fired += 1
                # The state of the first parameter was made, that of the next one did not fit.
                first = optimizer.param_groups[0]["params"][0]
                optimizer.state[first]["step"] = torch.tensor(0.0)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        trainer.create_optimizer()
        trainer.optimizer.register_step_pre_hook(strike)
        return Once

    run("update", in_the_first_update)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    leave_together()
