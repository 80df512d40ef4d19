"""A smaller batch with more accumulation: the same rows in the same optimizer steps, in smaller portions."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Sizes before and after; their product stays."""

    rows: int
    accumulation: int
    rows_before: int
    accumulation_before: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class CannotReduce(Exception):
    """Raised where a smaller batch would change what is trained; the message says why."""


def rows_per_step(trainer: Any) -> int:
    """Counts the rows of one optimizer step, on all processes together."""
    args, layout = trainer.args, getattr(trainer.accelerator, "parallelism_config", None)
    # Those that share the rows of one, as under tensor parallelism.
    sharing = 1 if layout is None else int(layout.non_data_parallel_size)
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size // sharing)


def smaller_batch(trainer: Any, objective: str, refused: str = "") -> BatchPlan:
    """Finds the next smaller size, by the smallest factor that divides it."""
    args = trainer.args
    rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    factor = next((factor for factor in range(2, rows + 1) if rows % factor == 0), None)
    if factor is None:
        raise CannotReduce(f"per_device_train_batch_size is {rows} already")
    plan = BatchPlan(rows // factor, accumulation * factor, rows, accumulation)
    why = _why_not_the_same(trainer, objective, refused) or _why_not(trainer, plan)
    if why:
        raise CannotReduce(why)
    return plan


def _why_not_the_same(trainer: Any, objective: str, refused: str) -> str:
    """Says why the loss of smaller micro-batches is not that of the whole; empty where nothing speaks against it."""
    if objective == "kto":
        return "KTO subtracts a statistic of the micro-batch"
    kinds = getattr(trainer, "loss_types", None) or []
    if objective == "dpo" and any(str(kind).startswith("aot") for kind in kinds):
        return "the loss sorts the micro-batch"
    coupled = "batch normalisation" in refused or "depend on each other" in refused
    return refused if coupled else ""


def _why_not(trainer: Any, plan: BatchPlan) -> str:
    args = trainer.args
    if hasattr(args, "num_generations"):
        return "generations are made for batches of the size there is"
    if args.n_gpu > 1:
        return "several devices share the batch of this process"
    if getattr(args, "train_sampling_strategy", "") == "group_by_length" or getattr(args, "group_by_length", False):
        return "rows are grouped by length within batches, and would come in another order"
    loader = trainer.callback_handler.train_dataloader
    try:
        before = len(loader)
        total = len(trainer.train_dataset)
    except TypeError:
        return "the data are a stream: a resume could not tell where it stood"
    if getattr(getattr(loader, "batch_sampler", None), "batch_size", plan.rows_before) != plan.rows_before:
        return "the batches do not come in the size of per_device_train_batch_size"
    rounded = math.floor if args.dataloader_drop_last else math.ceil
    share = total / (trainer.accelerator.num_processes or 1)
    if before != rounded(share / plan.rows_before):
        return "it is not known how the data become batches"
    after = rounded(share / plan.rows)
    if math.ceil(before / plan.accumulation_before) != math.ceil(after / plan.accumulation):
        return "an epoch would have another number of optimizer steps"
    return ""


def change_batch(trainer: Any, plan: BatchPlan) -> None:
    """Sets the sizes, between two calls of `train()`: the arguments, and what the Trainer has taken from them."""
    trainer.args.per_device_train_batch_size = plan.rows
    trainer.args.gradient_accumulation_steps = plan.accumulation
    # Read from the arguments once, in the constructor.
    trainer._train_batch_size = plan.rows
