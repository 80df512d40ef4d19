"""What differs between SFT, DPO, GRPO and the rest, and the signals of one step as plain floats."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Objective:
    """The arithmetic of one trainer family."""

    name: str
    paired: bool = False
    online: bool = False
    counts_own_tokens: bool = False
    detectors: frozenset[str] = frozenset()


# What may be judged whatever a loss means: gradients by the run's own, and one that is positive by its own course.
_ANY_LOSS = frozenset({"loss_spike", "divergence", "gradient_spike", "gradient_explosion", "vanishing_gradient"})
_OFFLINE = _ANY_LOSS | {"co_spike", "slow_rise"}
# ln(vocabulary) bounds a mean cross-entropy per token, and nothing else; exactly 0 is wrong for it, and only for it.
_CROSS_ENTROPY = _OFFLINE | {"above_chance", "never_learned", "dead_loss"}
# Policy gradients: the loss is near 0 and has a sign, and a batch in which all rewards are equal has no gradient.
_POLICY_GRADIENT = frozenset({"gradient_explosion"})


# By class name over the MRO, so that a subclass of a TRL trainer is known and TRL itself need not be installed.
BY_CLASS_NAME = {
    "SFTTrainer": Objective("sft", detectors=_CROSS_ENTROPY),
    "DPOTrainer": Objective("dpo", paired=True, detectors=_OFFLINE),
    "KTOTrainer": Objective("kto", detectors=_OFFLINE),
    "RewardTrainer": Objective("reward", paired=True, detectors=_OFFLINE),
    "GRPOTrainer": Objective("grpo", online=True, detectors=_POLICY_GRADIENT),
    "RLOOTrainer": Objective("rloo", online=True, detectors=_POLICY_GRADIENT),
    "DistillationTrainer": Objective(
        "distillation", online=True, detectors=frozenset({"loss_spike", "divergence", "gradient_explosion"})
    ),
}
# The Trainer's own loss is most often a cross-entropy, but need not be: exactly 0 may be right for it.
GENERIC = Objective("generic", detectors=_OFFLINE | {"above_chance", "never_learned"})
UNKNOWN = Objective("unknown", detectors=_ANY_LOSS)


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
            objective = replace(objective, detectors=objective.detectors & _ANY_LOSS)
        return objective
    return UNKNOWN if own_loss else GENERIC


def what_is_trained(trainer: Any, error: BaseException | None) -> str:
    """Says it for the table of known errors, with the columns that the Trainer takes away if an error misses one."""
    # Commands that read the rules, which name objectives, do not wait for torch.
    from ..failures.classify import describe_exception

    taken = set[str]()
    with suppress(Exception):
        if error is not None and trainer.args.remove_unused_columns and "KeyError" in describe_exception(error):
            columns = getattr(trainer.train_dataset, "column_names", None) or dict(trainer.train_dataset[0])
            taken = {*columns} - {*trainer._signature_columns}
    return f"[objective {objective_of(trainer).name}][taken away: {sorted(taken)}]"


def has_own_loss(trainer: Any) -> bool:
    """Whether the loss is the user's: a function given to the trainer, or a subclass that computes it itself."""
    # TRL has a text there, where an older transformers would divide the loss once more.
    if callable(getattr(trainer, "compute_loss_func", None)):
        return True
    for method in ("compute_loss", "_compute_loss", "training_step"):
        owner = next((cls for cls in type(trainer).__mro__ if method in vars(cls)), None)
        if owner is not None and owner.__module__.partition(".")[0] not in ("transformers", "trl"):
            return True
    return False


@dataclass(frozen=True, slots=True)
class StepSignals:
    """
    One optimizer step, read between the backward of its last micro-batch and `optimizer.step()`.

    Args:
        step (`int`):
            Number of optimizer steps finished before this one (the Trainer's `global_step`).
        loss (`float`):
            Sum of the micro-batch losses as the Trainer adds them up, in nats for language models.
        grad_norm (`float`, *optional*):
            Total gradient norm before clipping. `None` where the trainer computes none.
        seconds (`float`, *optional*, defaults to 0.0):
            Time from the first forward of the step to now.
    """

    step: int
    loss: float
    grad_norm: float | None = None
    seconds: float = 0.0

    @property
    def finite(self) -> bool:
        """Whether loss and gradient norm are."""
        return math.isfinite(self.loss) and (self.grad_norm is None or math.isfinite(self.grad_norm))
