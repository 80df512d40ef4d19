"""One rule: which metric it watches, which conditions are a red flag, and what is to be done."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from ...objectives import BY_CLASS_NAME
from ..symptom import Severity


Relation = Literal["below", "above", "at_least", "at_most", "near", "rising", "falling", "flat"]
RuleAction = Literal["alert", "rollback", "stop"]

# What a rule can be for: the objectives of TRL's trainers, EBFT, which is no objective of its own here, and the rest.
OBJECTIVES = (*(objective.name for objective in BY_CLASS_NAME.values()), "ebft", "generic")

TRENDS = ("rising", "falling", "flat")
# Observations of a metric whose median is the run's own early level.
EARLY = 10
# Before `rewards/NAME/mean` and `rewards/NAME/std` there was the mean alone, under the name of the reward function.
_REWARD_IN_OLDER_TRL = re.compile(r"rewards/[^/]+")


@dataclass(frozen=True, slots=True)
class Condition:
    """
    One part of a red flag. In TOML it is an inline table, with `relation` written `is`.

    Args:
        relation (`str`):
            `"below"`, `"above"`, `"at_least"`, `"at_most"`, `"near"` compare the logged value with `value`;
            `"rising"`, `"falling"` and `"flat"` compare how far it moved over `window` observations with `value`.
            The movement is the difference between the medians of the last and the first third of the window; it
            counts as one only if the middle third lies between them and the noise within the thirds cannot explain it.
        value (`float`, *optional*, defaults to `0.0`):
            The bound, in units of the metric, or as a multiple of what `of` names.
        metric (`str`, *optional*):
            Exact name of the metric that is looked at. If left out, the one the rule was matched with.
        tolerance (`float`, *optional*, defaults to `0.0`):
            For `"near"`: largest distance from the bound that still holds.
        of (`str`, *optional*):
            What `value` is a multiple of: `"start"` (median of the metric's first 10 observations), `"lowest"` or
            `"highest"` (of the metric so far), or `"args.<name>"` (an argument of the trainer). A trend takes its
            absolute value. As long as it is not known the condition does not hold.
        share (`float`, *optional*):
            Hold if at least this share of the last `window` observations do, not if the newest one does. Not for
            trends.
        window (`int`, *optional*, defaults to 30):
            Observations that a trend or a share looks at. A trend waits until there are as many, a share does not.
    """

    relation: Relation
    value: float = 0.0
    metric: str = ""
    tolerance: float = 0.0
    of: str = ""
    share: float | None = None
    window: int = 30

    def __str__(self) -> str:
        bound = f"{self.value:g}"
        if self.of:
            reference = {"start": "its early level", "lowest": "its lowest", "highest": "its highest"}.get(self.of)
            bound = f"{bound} × {reference or self.of.removeprefix('args.')}"
        if self.relation == "flat":
            words = f"changing by less than {bound} over {self.window} logs"
        elif self.relation in TRENDS:
            words = f"{self.relation} by at least {bound} over {self.window} logs"
        elif self.relation == "near":
            words = f"at {bound}" + (f" ± {self.tolerance:g}" if self.tolerance else "")
        else:
            words = f"{self.relation.replace('_', ' ')} {bound}"
        if self.share is not None:
            words += f" in at least {100 * self.share:g} % of the last {self.window} logs"
        return f"{self.metric} {words}" if self.metric else words


@dataclass(frozen=True, slots=True)
class MetricRule:
    """
    One row of the table.

    Args:
        name (`str`):
            What it is called; in TOML, the name of its section.
        metric (`str`):
            The metric it watches, or a pattern such as `"rewards/*/mean"`, of which each match is watched on its own.
            A pattern matches metrics of the evaluation only if it begins with `eval_` itself. `rewards/NAME/mean` is
            also what older TRL logs as `rewards/NAME`.
        red_flag (`tuple[Condition, ...]`):
            What must hold at once.
        objectives (`tuple[str, ...]`, *optional*, defaults to all):
            What kinds of training it is for.
        healthy (`str`, *optional*):
            The healthy range, in words.
        steps (`int`, *optional*, defaults to 20):
            Optimizer steps for which the red flag must hold without a break.
        observations (`int`, *optional*, defaults to 3):
            Logs it must hold in, at least: with a large `logging_steps`, one value is not a trend.
        severity (`str`, *optional*, defaults to `"warning"`):
            `"info"`, `"warning"` or `"error"`, as in [`Symptom`].
        action (`str`, *optional*, defaults to `"alert"`):
            What is to be done: `"alert"`, `"rollback"` (to a good state, with a lower learning rate) or `"stop"`.
        diagnosis (`str`, *optional*):
            What it means.
        remedy (`str`, *optional*):
            What helps.
        about (`str`, *optional*):
            What it is about, in a word or two: of alerts about the same in one log, the most severe speaks for all.
        source (`str`, *optional*):
            Where the rule comes from.
        enabled (`bool`, *optional*, defaults to `True`):
            Whether it is in force.
    """

    name: str
    metric: str
    red_flag: tuple[Condition, ...]
    objectives: tuple[str, ...] = OBJECTIVES
    healthy: str = ""
    steps: int = 20
    observations: int = 3
    severity: Severity = "warning"
    action: RuleAction = "alert"
    diagnosis: str = ""
    remedy: str = ""
    about: str = ""
    source: str = ""
    enabled: bool = True

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics it reads: the one it watches first."""
        return tuple(dict.fromkeys([self.metric, *(part.metric for part in self.red_flag if part.metric)]))

    @property
    def logs_needed(self) -> int:
        """Logs until it can report: a trend and an early level are not known before."""
        trends = [part.window for part in self.red_flag if part.relation in TRENDS]
        early = [EARLY for part in self.red_flag if part.of == "start"]
        return max([1, *trends, *early]) + self.observations - 1

    def describe(self) -> str:
        """Puts the red flag into words."""
        return " and ".join(map(str, self.red_flag))

    def matches(self, metric: str) -> bool:
        """Whether it watches this metric."""
        if metric.startswith("eval_") and not self.metric.startswith("eval_"):
            return False
        if metric == self.metric or fnmatchcase(metric, self.metric):
            return True
        older = _REWARD_IN_OLDER_TRL.fullmatch(metric) is not None
        return older and self.metric.endswith("/mean") and fnmatchcase(f"{metric}/mean", self.metric)


def rules_for(rules: Iterable[MetricRule], objective: str) -> tuple[MetricRule, ...]:
    """
    Selects the rules in force for an objective.

    Args:
        rules (`Iterable[MetricRule]`):
            The table.
        objective (`str`):
            One of `OBJECTIVES`; any other name counts as `"generic"`.
    """
    known = objective if objective in OBJECTIVES else "generic"
    return tuple(rule for rule in rules if rule.enabled and known in rule.objectives)
