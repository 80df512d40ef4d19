"""The objective of a trainer, and whether its loss is the user's."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..failures.classify import describe_exception
from ..hf.objective import ANY_POSITIVE_LOSS, BY_CLASS_NAME, GENERIC, UNKNOWN, Objective


# TRL 1.16, GRPOTrainer._compute_loss: the loss types that divide by `num_items_in_batch` of the generation batch.
_TOKEN_NORMALISED_GRPO = frozenset({"dapo", "cispo", "vespo"})


def objective_of(trainer: Any) -> Objective:
    """Returns the objective of a trainer, by the names of its classes and by where its loss comes from."""
    own_loss = has_own_loss(trainer)
    for cls in type(trainer).__mro__:
        if cls.__name__ not in BY_CLASS_NAME:
            continue
        objective = BY_CLASS_NAME[cls.__name__]
        if objective.name == "grpo":
            token_normalised = getattr(trainer, "loss_type", None) in _TOKEN_NORMALISED_GRPO
            objective = replace(objective, counts_own_tokens=token_normalised)
        if own_loss:
            # What comes out may be anything; what stays true of it is what the safe subset judges.
            objective = replace(objective, detectors=objective.detectors & ANY_POSITIVE_LOSS)
        return objective
    return UNKNOWN if own_loss else GENERIC


def what_is_trained(trainer: Any, error: BaseException | None) -> str:
    """Says it for the table of known errors, with the columns that the Trainer takes away if an error misses one."""
    taken = set[str]()
    with suppress(Exception):
        if error is not None and trainer.args.remove_unused_columns and "KeyError" in describe_exception(error):
            columns = getattr(trainer.train_dataset, "column_names", None) or dict(trainer.train_dataset[0])
            taken = {*columns} - {*trainer._signature_columns}
    return f"[objective {objective_of(trainer).name}][taken away: {sorted(taken)}]"


def has_own_loss(trainer: Any) -> bool:
    """Whether the loss is the user's: a function given to the trainer, or a subclass that computes it itself."""
    if getattr(trainer, "compute_loss_func", None) is not None:
        return True
    for method in ("compute_loss", "_compute_loss", "training_step"):
        owner = next((cls for cls in type(trainer).__mro__ if method in vars(cls)), None)
        if owner is not None and owner.__module__.partition(".")[0] not in ("transformers", "trl"):
            return True
    return False
