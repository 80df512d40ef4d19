"""One rule: which metric it watches, which conditions are a red flag, and what is to be done."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from ...failures.recipes import Severity
from ...hf.objective import BY_CLASS_NAME


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
    """One part of a red flag."""

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
    """One row of the table."""

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
    """Selects the rules in force for an objective."""
    known = objective if objective in OBJECTIVES else "generic"
    return tuple(rule for rule in rules if rule.enabled and known in rule.objectives)
