"""Rules on the metrics that a trainer logs."""

from __future__ import annotations

import difflib
import math
import operator
import os
import re
import reprlib
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from importlib import resources
from itertools import repeat
from numbers import Real
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from ....config.schema import read_toml, toml_value
from ....failures.recipes import Severity, Symptom
from ....hf.objective import BY_CLASS_NAME
from ....journal.incident import counted
from ....system.files import KeepsState


# ---- rule: one rule: which metric it watches, which conditions are a red flag, and what is to be done ----


Relation = Literal["below", "above", "at_least", "at_most", "near", "rising", "falling", "flat", "constant", "nan"]
RuleAction = Literal["alert", "rollback", "stop"]

# What a rule can be for: the objectives of TRL's trainers, EBFT, which is no objective of its own here, and the rest.
OBJECTIVES = (*(objective.name for objective in BY_CLASS_NAME.values()), "ebft", "generic")

TRENDS = ("rising", "falling", "flat")
# What is known once there are as many logs as a window has.
_OF_A_WINDOW = (*TRENDS, "constant")
# Observations of a metric whose median is the run's own early level.
EARLY = 10


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
        if self.of == "then":
            bound += " × what it was at the lowest"
        elif self.of in ("start", "lowest", "highest"):
            bound += f" × its {'early level' if self.of == 'start' else self.of}"
        elif self.of:
            bound += f" × {self.of.removeprefix('args.')}"
        words = {
            "flat": f"changing by less than {bound} over {self.window} logs",
            "constant": f"the same to {bound} over {self.window} logs",
            "nan": "NaN",
            "rising": f"rising by at least {bound} over {self.window} logs",
            "falling": f"falling by at least {bound} over {self.window} logs",
            "near": f"at {bound} ± {self.tolerance:g}" if self.tolerance else f"at {bound}",
        }.get(self.relation, f"{self.relation.replace('_', ' ')} {bound}")
        if self.share is not None:
            words += f" in at least {100 * self.share:g} % of the last {self.window} logs"
        return f"{self.metric} {words}".lstrip()


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
        trends = [part.window for part in self.red_flag if part.relation in _OF_A_WINDOW]
        early = [EARLY for part in self.red_flag if part.of == "start"]
        return max([1, *trends, *early]) + self.observations - 1

    def describe(self) -> str:
        """Puts the red flag into words."""
        return " and ".join(map(str, self.red_flag))

    def matches(self, metric: str) -> bool:
        if metric.startswith("eval_") and not self.metric.startswith("eval_"):
            return False
        return metric == self.metric or fnmatchcase(metric, self.metric)


def rules_for(rules: Iterable[MetricRule], objective: str) -> tuple[MetricRule, ...]:
    """Selects the rules in force for an objective."""
    known = objective if objective in OBJECTIVES else "generic"
    return tuple(rule for rule in rules if rule.enabled and known in rule.objectives)


# Rules that are named where some cannot fire.
_NAMED = 3
# Steps between two logs, as TRL has them: what is too seldom for a rule with these as well is the length of the run.
_USUAL = 10


def too_seldom_logged(rules: Iterable[MetricRule], objective: str, args: Any, steps: int, epochs: float) -> str | None:
    """
    Names the rules that cannot fire because a run with these arguments logs too seldom, not those that are only noted,
    and says what to set; `None` if there are none.
    """
    logs = int(epochs) if args.logging_strategy == "epoch" else 0
    if args.logging_strategy == "steps":
        # Below 1, a share of all steps.
        logs = steps // int(args.logging_steps if args.logging_steps >= 1 else math.ceil(steps * args.logging_steps))
    logs += args.logging_first_step
    # What a trainer of no known objective logs beside the Trainer's own metrics, it logs when it likes.
    known = objective not in ("generic", "unknown")
    silent = [
        f"{rule.name} needs {rule.logs_needed}"
        for rule in rules
        if rule.severity != "info" and logs < rule.logs_needed <= steps // _USUAL and rule.steps <= steps
        if {"loss", "grad_norm"}.issuperset(rule.metrics) or (known and "eval_" not in "".join(rule.metrics))
    ]
    if not silent:
        return None
    named = ", ".join([*silent[:_NAMED], *["..."][: len(silent) - _NAMED]])
    text = f"{counted(len(silent), 'metric rule')} cannot fire: this run logs {counted(logs, 'time')} in {steps} "
    return f'{text}steps ({named}). Set logging_strategy="steps", logging_steps={_USUAL}.'


# ---- checks: the keys of a user's table of rules, and their values ----


class RuleError(ValueError):
    """A table of rules cannot be used; the message names file, rule, key, value and what is allowed."""


# From a key to whether a value is allowed, and what is.
_Check = tuple[Callable[[Any], bool], str]


def _number(allowed: str, fits: Callable[[float], bool] = lambda value: True) -> _Check:
    return (lambda value: finite_number(value) is not None and fits(value)), f"a finite number{allowed}"


def _integer(allowed: str, least: int, most: float = math.inf) -> _Check:
    return (lambda value: type(value) is int and least <= value <= most), f"an integer{allowed}"


def _choice(choices: tuple[str, ...]) -> _Check:
    return (lambda value: isinstance(value, str) and value in choices), "one of " + ", ".join(map(repr, choices))


def _text(allowed: str, pattern: str) -> _Check:
    return (lambda value: isinstance(value, str) and re.fullmatch(pattern, value, re.DOTALL) is not None), allowed


_ANY_TEXT = _text("text", ".*")
RULE_KEYS: dict[str, _Check] = {
    "metric": _text('the name of a metric, or a pattern such as "rewards/*/mean"', r".*\S.*"),
    "objectives": (
        lambda value: isinstance(value, list) and bool(value) and all(name in OBJECTIVES for name in value),
        "a list of one or more of " + ", ".join(map(repr, OBJECTIVES)),
    ),
    "healthy": _ANY_TEXT,
    "red_flag": (
        lambda value: isinstance(value, list) and bool(value) and all(isinstance(part, dict) for part in value),
        'a list of one or more conditions such as { is = "below", value = 0.01 }',
    ),
    "steps": _integer(", at least 1", 1),
    "observations": _integer(", at least 1", 1),
    "severity": _choice(get_args(Severity)),
    "action": _choice(get_args(RuleAction)),
    "diagnosis": _ANY_TEXT,
    "remedy": _ANY_TEXT,
    "about": _ANY_TEXT,
    "source": _ANY_TEXT,
    "enabled": ((lambda value: isinstance(value, bool)), "true or false"),
}
# A window is gone through at every log.
CONDITION_KEYS: dict[str, _Check] = {
    "metric": (
        lambda value: isinstance(value, str) and bool(value.strip()) and not set(value) & set("*?["),
        "the exact name of a metric (only the rule's own `metric` may be a pattern)",
    ),
    "is": _choice(get_args(Relation)),
    "value": _number(""),
    "of": _text(
        "'start', 'lowest', 'highest', 'then' (as it was when the rule's own metric was lowest) or an argument of the "
        "trainer such as 'args.max_completion_length'",
        r"start|lowest|highest|then|args\.\w+",
    ),
    "tolerance": _number(", at least 0", lambda value: value >= 0),
    "share": _number(" above 0 and at most 1", lambda value: 0 < value <= 1),
    "window": _integer(" from 3 to 1000", 3, 1000),
}


def _check_table(own: Mapping[str, Any], table: Mapping[str, Any]) -> None:
    """Raises for the first thing in a user's table that cannot be used."""
    for name, keys in own.items():
        if not isinstance(keys, dict):
            raise RuleError(
                f"`{name}` is at the top level, set to {reprlib.repr(keys)}. Please put it below the rule it is for, "
                f"such as [{next(iter(table))}]."
            )
        if name not in table and not {"metric", "red_flag"} <= keys.keys():
            advice = _advice(name, table, "[{}]")
            raise RuleError(f"[{name}] is a new rule and needs `metric` and `red_flag`. {advice}")
        _check_keys(keys, RULE_KEYS, f"[{name}]")
        for number, part in enumerate(keys.get("red_flag", ()), start=1):
            where = f"condition {number} of `red_flag` in [{name}]"
            _check_keys(part, CONDITION_KEYS, where)
            missing = next((key for key in ("is", "value") if key not in part), None)
            if missing is not None:
                raise RuleError(f"{where} has no `{missing}`. Please set `{missing}` to {CONDITION_KEYS[missing][1]}.")


def _check_keys(keys: Mapping[str, Any], known: Mapping[str, _Check], where: str) -> None:
    for key, value in keys.items():
        if key not in known:
            raise RuleError(f"`{key}` in {where} is not a key. {_advice(key, known, '`{}`')}")
        fits, allowed = known[key]
        if not fits(value):
            what = f"{reprlib.repr(value)} ({type(value).__name__})"
            raise RuleError(f"`{key}` in {where} is {what}, but must be {allowed}.")


def _advice(name: str, known: Mapping[str, Any], form: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {form.format(close[0])}?" if close else f"There are: {', '.join(known)}."


# ---- conditions: conditions, held against what was logged of a metric ----


# How the other relations compare a value with its bound; "near" compares the distance between them with its tolerance.
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "below": operator.lt,
    "above": operator.gt,
    "at_least": operator.ge,
    "at_most": operator.le,
    "near": operator.le,
}
# A trend must exceed the standard error of the difference of two medians by this factor. Windows overlap from one
# observation to the next and metrics are not independent: two or three would cry wolf in a long run.
_STANDARD_ERRORS = 4.0


class Series(KeepsState):
    """Remembers one metric: its newest value, the last ones, its early level and its range."""

    _state = ("recent", "early", "lowest", "highest", "value", "nan", "log")

    def __init__(self, window: int) -> None:
        self.recent: deque[float] = deque(maxlen=window)
        self.early: list[float] = []
        self.value: float | None = None
        self.lowest: float | None = None
        self.highest: float | None = None
        # Whether the newest was NaN, which is no value to any other condition.
        self.nan = False
        self.log = 0
        self._start: float | None = None

    def add(self, value: float, log: int) -> None:
        self.value, self.nan, self.log = value, False, log
        self.recent.append(value)
        if self.lowest is None or value < self.lowest:
            self.lowest = value
        if self.highest is None or value > self.highest:
            self.highest = value
        if len(self.early) < EARLY:
            self.early.append(value)

    def level(self, of: str) -> float | None:
        """What a bound is a multiple of; `None` while it is not known."""
        if of == "start":
            if self._start is None and len(self.early) == EARLY:
                self._start = median(self.early)
            return self._start
        return self.lowest if of == "lowest" else self.highest


def finite_number(value: Any) -> float | None:
    """Converts a value to a finite float; `None` where it is none, as trainers log strings and `None` as well."""
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, Real):
            return None
        try:
            value = float(value)
        except OverflowError:
            return None
    return value if math.isfinite(value) else None


def bound_of(part: Condition, series: Series, limits: Mapping[str, float], then: float | None) -> float | None:
    if not part.of:
        return part.value
    argument = part.of.removeprefix("args.")
    if part.of == "then":
        reference = then
    else:
        reference = series.level(part.of) if argument == part.of else limits.get(argument)
    if reference is None:
        return None
    return part.value * (abs(reference) if part.relation in TRENDS else reference)


def holds(part: Condition, series: Series, limits: Mapping[str, float], then: float | None) -> bool:
    if part.relation == "nan":
        return series.nan
    bound = bound_of(part, series, limits, then)
    if bound is None or series.value is None:
        return False
    if part.relation == "constant":
        window = list(series.recent)[-part.window :]
        return len(window) == part.window and max(window) - min(window) <= bound
    if part.relation in TRENDS:
        return _moves(part, series.recent, bound)
    values = [series.value] if part.share is None else list(series.recent)[-part.window :]
    if part.relation == "near":
        values, bound = [abs(value - bound) for value in values], part.tolerance
    holding = sum(map(_COMPARISONS[part.relation], values, repeat(bound)))
    return holding >= (1 if part.share is None else part.share * len(values))


def _moves(part: Condition, recent: Sequence[float], size: float) -> bool:
    if len(recent) < part.window:
        return False
    window = list(recent)[-part.window :]
    third = part.window // 3
    first, last = median(window[:third]), median(window[-third:])
    if part.relation == "flat":
        return abs(last - first) < size
    change = last - first if part.relation == "rising" else first - last
    if change < size:
        return False
    thirds = window[:third], window[third:-third], window[-third:]
    middle = median(thirds[1])
    if not min(first, last) <= middle <= max(first, last):
        return False
    centred = zip(thirds, (first, middle, last), strict=True)
    deviations = [abs(value - centre) for values, centre in centred for value in values]
    # 1.4826 MAD is the scale, and 1.2533 that over the root of n the standard error of a median of n (normal noise).
    return change > _STANDARD_ERRORS * 1.2533 * math.sqrt(2 / third) * 1.4826 * median(deviations)


# ---- metric rules: the rules at work: each log is judged, and a flag that stays up is reported once ----


class MetricRules:
    """Judges what a trainer logs by a table of rules."""

    def __init__(self, rules: Iterable[MetricRule], limits: Mapping[str, float] | None = None) -> None:
        self.rules = tuple(rule for rule in rules if rule.enabled)
        given = {} if limits is None else limits
        self.limits = {name: number for name, value in given.items() if (number := finite_number(value)) is not None}
        # What is known of each metric, and the rules that watch it; `None` where no rule reads it.
        self._metrics: dict[str, tuple[Series, dict[str, _Track]] | None] = {}
        self._step = 0
        self._logs = 0

    def observe(self, step: int, metrics: Mapping[str, Any]) -> list[Symptom]:
        """Takes in one log and returns what is newly wrong."""
        if step < self._step:
            for _, tracks in filter(None, self._metrics.values()):
                for track in tracks.values():
                    track.step = None
        self._step = step
        self._logs += 1
        due: list[tuple[str, _Track]] = []
        for name, value in metrics.items():
            if name not in self._metrics:
                self._metrics[name] = self._watched(name)
            metric, number = self._metrics[name], finite_number(value)
            if metric is None:
                continue
            series, tracks = metric
            if number is not None:
                series.add(number, self._logs)
                due.extend((name, track) for track in tracks.values())
            elif value is None or (type(value) is float and math.isnan(value)):
                # As None is how TRL logs it.
                series.nan, series.log = True, self._logs
                due.extend((name, track) for track in tracks.values() if track.rule.red_flag[0].relation == "nan")
        # Only now, so that the order of the metrics in the log does not matter.
        return [symptom for name, track in due if (symptom := self._judge(step, name, track)) is not None]

    def _watched(self, name: str) -> tuple[Series, dict[str, _Track]] | None:
        """Finds the rules that read a metric not seen before."""
        watching = [rule for rule in self.rules if isinstance(name, str) and rule.matches(name)]
        windows = [
            part.window if part.share is not None or part.relation in _OF_A_WINDOW else 0
            for rule in self.rules
            for part in rule.red_flag
            if part.metric == name or (not part.metric and rule in watching)
        ]
        if not watching and not windows:
            return None
        return Series(max(windows, default=0)), {rule.name: _Track(rule) for rule in watching}

    def _judge(self, step: int, name: str, track: _Track) -> Symptom | None:
        rule = track.rule
        read: list[Series] = []
        for part in rule.red_flag:
            metric = self._metrics.get(part.metric or name)
            # An old value says nothing about this log.
            if metric is None or metric[0].log <= track.log:
                return None
            read.append(metric[0])
        watched = self._metrics[name]
        if watched is not None and watched[0].value == watched[0].lowest:
            track.then = {part.metric: series.value for part, series in zip(rule.red_flag, read, strict=True)}
        then = [track.then.get(part.metric) for part in rule.red_flag]
        red = all(map(holds, rule.red_flag, read, repeat(self.limits), then))
        if not track.extend(step, red, self._logs):
            return None
        evidence: dict[str, Any] = {
            "metric": name,
            "value": None if watched is None else watched[0].value,
            "bound": bound_of(rule.red_flag[0], read[0], self.limits, then[0]),
            "red_flag": rule.describe(),
            "healthy": rule.healthy,
            "since_step": track.since + 1,
            "observations": track.count,
            "action": rule.action,
            "diagnosis": rule.diagnosis,
            "remedy": rule.remedy,
            "source": rule.source,
        }
        if rule.about:
            evidence["about"] = rule.about
        others = {part.metric: series.value for part, series in zip(rule.red_flag, read, strict=True) if part.metric}
        if others:
            evidence["other_values"] = others
        return Symptom(name=f"rule:{rule.name}", step=step, evidence=evidence, severity=rule.severity)

    def state_dict(self) -> dict[str, Any]:
        """Returns everything needed to go on, ready for JSON."""
        metrics = {
            name: [metric[0].state_dict(), {rule: track.state_dict() for rule, track in metric[1].items()}]
            for name, metric in self._metrics.items()
            if metric is not None
        }
        return {"step": self._step, "logs": self._logs, "metrics": metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where [`MetricRules.state_dict`] was called; rules that are no longer in the table are left out."""
        self._step, self._logs, self._metrics = state["step"], state["logs"], {}
        for name, (series, tracks) in state["metrics"].items():
            metric = self._metrics[name] = self._watched(name)
            if metric is not None:
                metric[0].load_state_dict(series)
                for rule, track in metric[1].items():
                    if rule in tracks:
                        track.load_state_dict(tracks[rule])


class _Track(KeepsState):
    """Counts for how long a rule's flag has been up, or down, for one metric."""

    _state = ("red", "since", "count", "step", "log", "fired", "then")

    def __init__(self, rule: MetricRule) -> None:
        self.rule = rule
        self.red = False
        self.since = 0  # the stretch began after this step
        self.count = 0
        self.step: int | None = None
        self.log = 0
        self.fired = False
        # What the other metrics were when this one was lowest.
        self.then: dict[str, float | None] = {}

    def extend(self, step: int, red: bool, log: int) -> bool:
        """Takes in one judgement, and returns whether the rule reports now."""
        if self.step is None or red != self.red:
            # A log holds the average since the one before. How far back the very first one reaches is not known.
            self.since = step - 1 if self.step is None else self.step
            self.red, self.count = red, 0
        self.count += 1
        self.step, self.log = step, log
        if step - self.since < self.rule.steps or self.count < self.rule.observations:
            return False
        reports = red and not self.fired
        self.fired = red
        return reports


# ---- table: the table of rules: read from TOML with a user's own merged over it, and written as TOML ----


def load_rules(path: str | os.PathLike[str] | None = None) -> tuple[MetricRule, ...]:
    """Reads the table of the package, with a user's table merged over it."""
    default = resources.files(__package__).joinpath("metric_rules.toml").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = tomllib.loads(default)
    if path is not None:
        own = read_toml(Path(path), RuleError)
        try:
            _check_table(own, table)
        except RuleError as error:
            raise RuleError(f"{path}: {error}") from None
        for name, keys in own.items():
            table[name] = {**table.get(name, {}), **keys}
    return tuple(_rule(name, keys) for name, keys in table.items())


def rules_to_toml(rules: Iterable[MetricRule]) -> str:
    """Writes the rules as TOML that [`load_rules`] reads back to equal ones."""
    sections = []
    for rule in rules:
        lines = [f"[{rule.name if re.fullmatch(r'[A-Za-z0-9_-]+', rule.name) else toml_value(rule.name)}]"]
        for name in RULE_KEYS:
            value = getattr(rule, name)
            if name == "red_flag":
                parts = "".join(f"\n    {_condition_to_toml(part)}," for part in value)
                lines.append(f"red_flag = [{parts}\n]")
            else:
                # Also what is the default of the class: the package's table may say something else.
                lines.append(f"{name} = {toml_value(value)}")
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


def _condition_to_toml(part: Condition) -> str:
    keys = {name: getattr(part, "relation" if name == "is" else name) for name in CONDITION_KEYS}
    defaults = {field.name: field.default for field in fields(Condition)}
    shown = {name: value for name, value in keys.items() if name == "value" or value != defaults.get(name)}
    return "{ " + ", ".join(f"{name} = {toml_value(value)}" for name, value in shown.items()) + " }"


def _rule(name: str, keys: Mapping[str, Any]) -> MetricRule:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}
    conditions = []
    for part in keys["red_flag"]:
        numbers = {key: float(value) for key, value in part.items() if key in ("value", "tolerance", "share")}
        others = {key: value for key, value in part.items() if key != "is"}
        conditions.append(Condition(part["is"], **others | numbers))
    return MetricRule(name=name, **values | {"red_flag": tuple(conditions)})
