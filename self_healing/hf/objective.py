"""Objectives: what differs between SFT, DPO, GRPO and the rest in the rows of a batch and the detectors that apply."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Objective:
    """The arithmetic of one trainer family."""

    name: str
    paired: bool = False
    online: bool = False
    counts_own_tokens: bool = False
    detectors: frozenset[str] = frozenset()


# Every other detector judges a logarithm or a ratio, and these need a loss that is positive.
ANY_POSITIVE_LOSS = frozenset({"loss_spike", "divergence"})
_OFFLINE = ANY_POSITIVE_LOSS | {
    "co_spike",
    "gradient_spike",
    "gradient_explosion",
    "vanishing_gradient",
    "plateau",
    "slow_rise",
}
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
        "distillation", online=True, detectors=ANY_POSITIVE_LOSS | {"gradient_explosion"}
    ),
}
# The Trainer's own loss is most often a cross-entropy, but need not be: exactly 0 may be right for it.
# Overfitting is a metric rule for the objectives of TRL, with a remedy; here there is none.
GENERIC = Objective("generic", detectors=_OFFLINE | {"above_chance", "never_learned", "overfitting"})
UNKNOWN = Objective("unknown", detectors=ANY_POSITIVE_LOSS)


def objective_named(name: str) -> Objective:
    """Returns the objective with a name."""
    known = {objective.name: objective for objective in (*BY_CLASS_NAME.values(), GENERIC, UNKNOWN)}
    if name not in known:
        raise ValueError(f"There is no objective {name!r}. There are: {', '.join(sorted(known))}.")
    return known[name]
