"""
Rules on the metrics that a trainer logs: which value, held for how long, is a red flag, and what helps.

The table itself is data, in `metric_rules.toml` next to this file; a user's table is merged over it. No torch, no
transformers: the rules can be asked by hand in any training loop.
"""

from .metric_rules import MetricRules
from .rule import OBJECTIVES, Condition, MetricRule, RuleAction, rules_for
from .table import RuleError, load_rules, rules_to_toml


__all__ = [
    "OBJECTIVES",
    "Condition",
    "MetricRule",
    "MetricRules",
    "RuleAction",
    "RuleError",
    "load_rules",
    "rules_for",
    "rules_to_toml",
]
