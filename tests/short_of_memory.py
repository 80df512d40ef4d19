"""Run by test_short_of_memory.py under torchrun: memory runs out on one of two ranks, at one place after the other."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from collectives import collectives_in
from conftest import TEXTS, build_tokenizer, dpo_trainer, grpo_trainer, journal, leave_together, losses, sft_trainer
from constants import settings_among
from datasets import Dataset
from torch.profiler import ProfilerActivity, profile
from transformers import set_seed

from self_healing import SelfHealingTrainer


# Rows that fit on the rank that is short of memory, and the step from which it is.
FIT, SINCE = 2, 1


class Short:
    """
    Too little memory on this rank for more than some rows.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer.
        where (`str`):
            Where it runs out: at the beginning of a forward, in the loss that is computed from it, or in backward.
        fit (`int`):
            Rows that fit.
        times (`int`, *optional*):
            How often it happens. Defaults to always.
    """

    def __init__(self, trainer: Any, where: str, fit: int = FIT, times: int | None = None) -> None:
        self.trainer, self.where, self.fit, self.times = trainer, where, fit, times
        self.fired = 0
        trainer.model.register_forward_pre_hook(self._before, with_kwargs=True)
        if where.startswith("backward"):
            trainer.model.register_forward_hook(self._after, with_kwargs=True)

    def _strikes(self, rows: int) -> bool:
        over = self.times is not None and self.fired >= self.times
        return rows > self.fit and self.trainer.state.global_step >= SINCE and not over

    def _raise(self, rows: int) -> None:
        self.fired += 1
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB. ({rows} rows)")

    def _before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows = kwargs["input_ids"].shape[0]
        training = module.training
        if self.where == "evaluation" and not training and self._strikes(rows):
            self._raise(rows)
        if self.where == "forward" and training and torch.is_grad_enabled() and self._strikes(rows):
            self._raise(rows)

    def _after(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        rows = kwargs["input_ids"].shape[0]
        tensors = [each for each in output.values() if isinstance(each, torch.Tensor) and each.requires_grad]
        if not module.training or not tensors or not self._strikes(rows):
            return

        def strike(gradient: Any) -> None:
            if self._strikes(rows):
                self._raise(rows)

        if self.where == "backward":
            # Nothing has got a gradient yet.
            tensors[0].register_hook(strike)
        else:
            # The head and the last layer have theirs.
            module.model.layers[0].mlp.down_proj.weight.register_post_accumulate_grad_hook(strike)


def count_forwards(model: Any) -> None:
    """A buffer that each forward changes, and that DDP sends from the first rank to the others."""
    model.register_buffer("forwards", torch.zeros(1))

    def count(module: Any, args: Any) -> None:
        if module.training:
            module.forwards += 1

    model.register_forward_pre_hook(count)


def draw_before_each_batch(trainer: Any) -> None:
    """Code of the user that prepares batches, and draws random numbers for it."""
    prepare = trainer._prepare_inputs

    def drawing(inputs: Any) -> Any:
        torch.rand(1)
        return prepare(inputs)

    trainer._prepare_inputs = drawing


def main(directory: Path, *wanted: str) -> None:
    rank = int(os.environ["RANK"])
    tokenizer = build_tokenizer()
    results: dict[str, Any] = {}

    def run(
        name: str,
        where: str | None,
        make: Callable[..., Any] = sft_trainer,
        *,
        healed: bool = True,
        fit: int = FIT,
        times: int | None = None,
        record: bool = False,
        **arguments: Any,
    ) -> None:
        if wanted and name not in wanted:
            return
        set_seed(1234)
        arguments = {"ddp_backend": "gloo", "max_steps": 6, "dropout": 0.0} | arguments
        counted, drawn = arguments.pop("counted", False), arguments.pop("drawn", False)
        if arguments.pop("eval", False):
            rows = Dataset.from_dict({"text": TEXTS[:16]})
            arguments["trainer_kwargs"] = {"eval_dataset": rows}
        trainer = make(directory / name, tokenizer, **arguments)
        if counted:
            count_forwards(trainer.model)
        if drawn:
            draw_before_each_batch(trainer)
        short = Short(trainer, where, fit, times) if where is not None and rank == 1 else None
        trained: Any = SelfHealingTrainer(trainer, settings_among({"PROBE_STEPS": 2})) if healed else trainer
        with profile(activities=[ProfilerActivity.CPU]) if record else torch.enable_grad() as profiled:
            trained.train()
        events = journal(directory / name, rank=rank)
        weights = trainer.model.state_dict().values()
        results[name] = {
            "fired": 0 if short is None else short.fired,
            "sum": sum(float(value.double().abs().sum()) for value in weights),
            "forwards": float(getattr(trainer.model, "forwards", 0.0)),
            "losses": losses(trainer),
            "evaluated": [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each],
            "incidents": [[each["failure"], each["outcome"]] for each in events if each["kind"] == "outcome"],
            "actions": [each["action"] for each in events if each["kind"] == "action"],
        }
        if record:
            results[name]["collectives"] = collectives_in(profiled)

    run("plain", None, healed=False)
    run("untroubled", None, record=True)
    run("forward", "forward", record=True)
    run("once", "forward", times=1)
    run("counted_plain", None, healed=False, counted=True)
    run("counted", "forward", times=1, counted=True)
    run("drawn_plain", None, healed=False, drawn=True, dropout=0.1)
    run("drawn", "forward", times=1, drawn=True, dropout=0.1)
    run("backward", "backward")
    run("evaluation", "evaluation", eval_strategy="steps", eval_steps=2, eval=True)
    run("dpo_plain", None, dpo_trainer, healed=False)
    run("dpo", "forward", dpo_trainer, fit=4)
    run("grpo_plain", None, grpo_trainer, healed=False)
    run("grpo", "forward", grpo_trainer)
    (directory / f"results.{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    leave_together()
