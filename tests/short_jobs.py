"""
Run by test_jobs_that_end.py: memory runs out on ranks of jobs, which are started again where it cannot be healed in
place.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from conftest import TEXTS, build_tokenizer, grpo_trainer, losses, sft_trainer, tiny_model
from constants import settings_among
from datasets import Dataset
from ending_together import hold_connections, strike_rank
from forked_pairs import run_pair
from short_of_memory import Short
from short_under_ddp import averaged
from strategies import STATE_DICTS
from transformers import set_seed
from trl import SFTTrainer
from two_processes import digest_of
from two_sharded_processes import sharded_on_the_cpu, whole

from self_healing import HealingConfig, SelfHealingTrainer
from self_healing.hf.memory import fingerprint_of


STEPS, SAVE_STEPS = 6, 2
SECONDS, APART = 600.0, 30.0

Make = Callable[..., Any]


class Late(Short):
    """In backward, with some gradients there already; each time is written down."""

    def __init__(self, trainer: Any, note: Path, where: str = "backward late", fit: int = 2) -> None:
        self._note = note
        super().__init__(trainer, where, fit)

    def _raise(self, rows: int) -> None:
        self.fired += 1
        with Path(f"{self._note}.steps").open("a") as file:
            file.write(f"{self.trainer.state.global_step}\n")
        hold_connections()
        strike_rank("oom", self._note)


class Summed(SFTTrainer):
    """Its loss is a meeting of ranks that this library knows nothing of, and memory runs out after it."""

    strike: Callable[[int], None] = staticmethod(lambda rows: None)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = inputs["attention_mask"].sum().float()
        torch.distributed.all_reduce(tokens)
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.strike(inputs["input_ids"].shape[0])
        return loss


def strike_once(note: Path, when: Callable[[], bool]) -> Callable[..., None]:
    def strike(*_: Any) -> None:
        if when() and not note.exists():
            hold_connections()
            strike_rank("oom", note)

    return strike


def in_loss(trainer: Any, rank: int, note: Path) -> None:
    trainer.strike = strike_once(note, lambda: rank == 1 and trainer.state.global_step == 3)


def in_generation(trainer: Any, rank: int, note: Path) -> None:
    """There is memory for so many prompts at a time."""
    generate = trainer.model.generate

    def short(*args: Any, **kwargs: Any) -> Any:
        prompts = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if rank == 1 and trainer.state.global_step >= 2 and prompts.shape[0] > 2:
            hold_connections()
            strike_rank("oom", note)
        return generate(*args, **kwargs)

    trainer.model.generate = short


def in_update(trainer: Any, rank: int, note: Path) -> None:
    """One weight was updated when it ran out."""
    strike = strike_once(note, lambda: rank == 1 and trainer.state.global_step == 3)

    def half(optimizer: Any, *_: Any) -> None:
        if rank == 1 and trainer.state.global_step == 3 and not note.exists():
            optimizer.param_groups[0]["params"][0].data.add_(1.0)
        strike()

    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(half)


def always(where: str = "backward late", on: int = 1, **options: int) -> Any:
    def strike(trainer: Any, rank: int, note: Path) -> Any:
        return Late(trainer, note, where, **options) if rank == on else None

    return strike


def on_both(first: Callable[..., Any], second: Callable[..., Any]) -> Any:
    return lambda trainer, rank, note: (first, second)[rank](trainer, rank, note)


def learned_before(trainer: Any, rank: int, note: Path) -> None:
    """Each rank has learned something else in an earlier start, of training and of evaluation."""
    run = Path(trainer.args.output_dir)
    run.mkdir(parents=True, exist_ok=True)
    fits, fails = ((3, 4), (2, 3))[rank]
    sizes = {kind: {"fits": [[fits, 64]], "fails": [[fails, 1]]} for kind in ("train", "forward")}
    content = {
        "version": 1,
        "for": fingerprint_of(trainer),
        "checkpointing_activations": False,
        "sizes": sizes,
    }
    name = "healing_sizes.json" if rank == 0 else f"healing_sizes.rank{rank}.json"
    (run / name).write_text(json.dumps(content))
    torch.distributed.barrier()
    always("forward", on=rank, fit=fits)(trainer, rank, note)


def whatever(trainer: Any, rank: int, note: Path) -> None:
    averaged(trainer)
    always("forward")(trainer, rank, note)


def from_the_first_step(trainer: Any, rank: int, note: Path) -> None:
    strike = strike_once(note, lambda: rank == 1)
    trainer.model.register_forward_pre_hook(strike)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of job: what strikes it, given trainer, rank and a file to note that in; how often it is started."""

    strike: Callable[[Any, int, Path], Any]
    make: Make = sft_trainer
    strategy: str = "ddp"
    arguments: dict[str, Any] = field(default_factory=dict)
    starts: int = 2


EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 4}
KINDS: dict[str, Kind] = {
    "plain": Kind(lambda *_: None),
    "plain_policy": Kind(lambda *_: None, grpo_trainer),
    "plain_sharded": Kind(lambda *_: None, strategy="fsdp2_sharded"),
    "backward": Kind(always()),
    "loss": Kind(in_loss, partial(sft_trainer, trainer_class=Summed)),
    "generation": Kind(in_generation, grpo_trainer),
    "evaluation": Kind(always("evaluation"), strategy="fsdp2_sharded", arguments=EVALUATED),
    "update": Kind(in_update),
    "static_graph": Kind(from_the_first_step, arguments={"ddp_static_graph": True, "gradient_accumulation_steps": 1}),
    "both": Kind(on_both(always(on=0), always(fit=1))),
    "both_sharded": Kind(on_both(always("forward", on=0), always("forward", fit=1)), strategy="fsdp2_sharded"),
    "averaged": Kind(whatever),
    "learned": Kind(learned_before, strategy="fsdp2_sharded", arguments=EVALUATED),
}


def job(directory: Path, rank: int, name: str) -> dict[str, Any]:
    kind = KINDS[name]
    if kind.strategy != "ddp":
        sharded_on_the_cpu("fsdp2")
        os.environ["FSDP_STATE_DICT_TYPE"] = STATE_DICTS[kind.strategy]
    tokenizer = build_tokenizer()
    set_seed(1234)
    arguments: dict[str, Any] = {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "ddp_backend": "gloo",
        "ddp_timeout": 1800,
        **kind.arguments,
    }
    if "eval_strategy" in arguments:
        arguments["trainer_kwargs"] = {"eval_dataset": Dataset.from_dict({"text": TEXTS[:16]})}
    model = tiny_model(tokenizer, dropout=0.0)
    trainer = kind.make(directory / "run", tokenizer, model=model, **arguments)
    note = directory / f"struck.{rank}"
    kind.strike(trainer, rank, note)
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    SelfHealingTrainer(trainer, HealingConfig(**settings_among({"PROBE_STEPS": 3}))).train()
    weights = {each: whole(value) for each, value in trainer.model.state_dict().items()}
    return {
        "weights": digest_of(weights),
        "sums": [float(value.double().sum()) for value in weights.values()],
        "losses": losses(trainer),
        "steps": trainer.state.global_step,
        "most_rows": max(seen),
        "calls": len(seen),
    }


def main(directory: Path, *names: str) -> None:
    results: dict[str, Any] = {}
    for name in names or KINDS:
        own = directory / name
        results[name] = []
        for start in range(KINDS[name].starts):
            launcher = {
                "TORCHELASTIC_RUN_ID": "job",
                "TORCHELASTIC_RESTART_COUNT": str(start),
                "TORCHELASTIC_MAX_RESTARTS": "8",
            }
            outcome = run_pair(own, partial(job, name=name), SECONDS, APART, launcher)
            notes = [json.loads(path.read_text())["time"] for path in own.glob("struck.[01]")]
            ended = [each for each in outcome["ended"] if each is not None]
            outcome["apart"] = max(ended, default=0.0) - max(notes, default=0.0)
            steps = [path.read_text().split() for path in own.glob("struck.*.steps")]
            outcome["struck_at"] = [int(step) for each in steps for step in each]
            told = [own / "run" / each for each in ("postmortem.json", "postmortem.rank1.json")]
            outcome["advice"] = [json.loads(path.read_text())["what_to_do"] for path in told if path.exists()]
            outcome["log"] = [(own / f"log.{rank}.txt").read_text() for rank in (0, 1)]
            results[name].append(outcome)
            (directory / "results.json").write_text(json.dumps(results))
            if outcome["codes"] == [0, 0]:
                break


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *sys.argv[2:])
