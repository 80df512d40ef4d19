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


# ---- rule: one rule: which metric it watches, which conditions are a red flag, and what is to be done ----


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


# ---- checks: checks a user's table of rules: its keys, their values, and conditions that do not fit together ----


def _is_number(value: Any) -> bool:
    return finite_number(value) is not None


def _is_count(value: Any, least: int, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


# From a key to whether a value is allowed, and what is. A window is bounded because it is gone through at every log.
_Check = tuple[Callable[[Any], bool], str]


def _choice(choices: tuple[str, ...]) -> _Check:
    return (lambda value: isinstance(value, str) and value in choices), "one of " + ", ".join(map(repr, choices))


_TEXT: _Check = (lambda value: isinstance(value, str)), "text"
_COUNT: _Check = (lambda value: _is_count(value, 1)), "an integer, at least 1"
RULE_KEYS: dict[str, _Check] = {
    "metric": (_is_name, 'the name of a metric, or a pattern such as "rewards/*/mean"'),
    "objectives": (
        lambda value: isinstance(value, list) and bool(value) and all(name in OBJECTIVES for name in value),
        "a list of one or more of " + ", ".join(map(repr, OBJECTIVES)),
    ),
    "healthy": _TEXT,
    "red_flag": (
        lambda value: isinstance(value, list) and bool(value) and all(isinstance(part, dict) for part in value),
        'a list of one or more conditions such as { is = "below", value = 0.01 }',
    ),
    "steps": _COUNT,
    "observations": _COUNT,
    "severity": _choice(get_args(Severity)),
    "action": _choice(get_args(RuleAction)),
    "diagnosis": _TEXT,
    "remedy": _TEXT,
    "about": _TEXT,
    "source": _TEXT,
    "enabled": ((lambda value: isinstance(value, bool)), "true or false"),
}
CONDITION_KEYS: dict[str, _Check] = {
    "metric": (
        lambda value: _is_name(value) and not set(value) & set("*?["),
        "the exact name of a metric (only the rule's own `metric` may be a pattern)",
    ),
    "is": _choice(get_args(Relation)),
    "value": (_is_number, "a finite number"),
    "of": (
        lambda value: isinstance(value, str) and re.fullmatch(r"start|lowest|highest|args\.\w+", value) is not None,
        "'start', 'lowest', 'highest' or an argument of the trainer such as 'args.max_completion_length'",
    ),
    "tolerance": ((lambda value: _is_number(value) and value >= 0), "a finite number, at least 0"),
    "share": ((lambda value: _is_number(value) and 0 < value <= 1), "a number above 0 and at most 1"),
    "window": ((lambda value: _is_count(value, 1, 1000)), "an integer from 1 to 1000"),
}
CONDITION_DEFAULTS = {field.name: field.default for field in fields(Condition)}
# With fewer, a third has too few values for a median that noise does not move.
_SHORTEST_TREND = 15


def problems_of(own: Mapping[str, Any], table: Mapping[str, Any]) -> list[str]:
    """Lists what is wrong with a user's table."""
    problems: list[str] = []
    for name, keys in own.items():
        if not isinstance(keys, dict):
            problems.append(
                f"`{name}` is at the top level, set to {reprlib.repr(keys)}. Please put it below the rule it is for, "
                f"such as [{next(iter(table))}]."
            )
            continue
        missing = [key for key in ("metric", "red_flag") if key not in keys]
        if name not in table and missing:
            close = difflib.get_close_matches(name, table, n=1)
            advice = f"Did you mean [{close[0]}]?" if close else f"The rules there are: {', '.join(table)}."
            problems.append(f"[{name}] is a new rule and needs {_listed(missing)}. {advice}")
        problems += _unfit(keys, RULE_KEYS, f"[{name}]")
        if "red_flag" in keys and RULE_KEYS["red_flag"][0](keys["red_flag"]):
            for number, part in enumerate(keys["red_flag"], start=1):
                where = f"condition {number} of `red_flag` in [{name}]"
                found = _unfit(part, CONDITION_KEYS, where)
                problems += found or _inconsistent(part, where)
    return problems


def _unfit(keys: Mapping[str, Any], known: Mapping[str, _Check], where: str) -> list[str]:
    problems = []
    for key, value in keys.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            advice = f"Did you mean `{close[0]}`?" if close else f"There are: {', '.join(known)}."
            problems.append(f"`{key}` in {where} is not a key. {advice}")
            continue
        fits, allowed = known[key]
        if not fits(value):
            problems.append(
                f"`{key}` in {where} is {reprlib.repr(value)} ({type(value).__name__}), but must be {allowed}."
            )
    return problems


def _inconsistent(part: Mapping[str, Any], where: str) -> list[str]:
    if "is" not in part:
        return [f"{where} does not say what is compared. Please set `is` to {CONDITION_KEYS['is'][1]}."]
    relation, problems = part["is"], []
    if "value" not in part:
        problems.append(f"{where} has no `value`. Please say what the metric is compared with.")
    if "tolerance" in part and relation != "near":
        problems.append(f'{where} has a `tolerance`, which only `is = "near"` reads. Please take it out.')
    if relation in TRENDS:
        if part.get("value", 1) <= 0:
            problems.append(f"{where} is a trend of size {part['value']}, but must be above 0: it is an amount.")
        if part.get("window", _SHORTEST_TREND) < _SHORTEST_TREND:
            problems.append(
                f"{where} is a trend over {part['window']} observations, but must be at least {_SHORTEST_TREND}."
            )
        if "share" in part:
            problems.append(f"{where} is a trend and cannot have a `share`. Please take it out.")
    elif "window" in part and "share" not in part:
        problems.append(f"{where} has a `window`, which only trends and a `share` read. Please set `share`, too.")
    return problems


def _listed(keys: Sequence[str]) -> str:
    return " and ".join(f"`{key}`" for key in keys)


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


class Series:
    """Remembers one metric: its newest value, the last ones, its early level and its range."""

    __slots__ = ("early", "highest", "log", "lowest", "recent", "start", "value")

    def __init__(self, window: int) -> None:
        self.recent: deque[float] = deque(maxlen=window)
        self.early: list[float] = []
        self.start: float | None = None
        self.lowest = math.inf
        self.highest = -math.inf
        self.value = math.nan
        self.log = 0

    def add(self, value: float, log: int) -> None:
        self.value, self.log = value, log
        self.recent.append(value)
        if value < self.lowest:
            self.lowest = value
        if value > self.highest:
            self.highest = value
        if self.start is None:
            self.early.append(value)
            if len(self.early) == EARLY:
                self.start = median(self.early)

    def state_dict(self) -> dict[str, Any]:
        # A series that exists but was never observed (its value was NaN) has no finite bounds to save.
        return {
            "recent": list(self.recent),
            "early": list(self.early),
            "range": [self.lowest, self.highest, self.value] if self.log else None,
            "log": self.log,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.recent.extend(state["recent"])
        self.early = list(state["early"])
        self.start = median(self.early) if len(self.early) == EARLY else None
        if state["range"] is not None:
            self.lowest, self.highest, self.value = state["range"]
        self.log = state["log"]


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


def bound_of(part: Condition, series: Series, limits: Mapping[str, float]) -> float | None:
    if not part.of:
        return part.value
    if part.of == "start":
        reference = series.start
    elif part.of == "lowest":
        reference = series.lowest
    elif part.of == "highest":
        reference = series.highest
    else:
        reference = limits.get(part.of.removeprefix("args."))
    if reference is None:
        return None
    return part.value * (abs(reference) if part.relation in TRENDS else reference)


def holds(part: Condition, series: Series, limits: Mapping[str, float]) -> bool:
    bound = bound_of(part, series, limits) if part.of else part.value
    if bound is None:
        return False
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


# Names in the plan that match nothing: a loop that logs ever new names must not fill the memory with them.
_UNREAD_NAMES = 4096


class MetricRules:
    """Judges what a trainer logs by a table of rules."""

    def __init__(self, rules: Iterable[MetricRule], limits: Mapping[str, float] | None = None) -> None:
        self.rules = tuple(rule for rule in rules if rule.enabled)
        given = {} if limits is None else limits
        self.limits = {name: number for name, value in given.items() if (number := finite_number(value)) is not None}
        self._series: dict[str, Series] = {}
        self._tracks: dict[str, dict[str, _Track]] = {rule.name: {} for rule in self.rules}
        # From a metric's name to what is done with it, so that patterns are matched once per name and not per log.
        self._plan: dict[str, tuple[Series, tuple[_Track, ...]] | None] = {}
        self._step = 0
        self._logs = 0

    def observe(self, step: int, metrics: Mapping[str, Any]) -> list[Symptom]:
        """Takes in one log and returns what is newly wrong."""
        if step < self._step:
            for track in self._all_tracks():
                track.step = None
        self._step = step
        self._logs += 1
        due: list[tuple[str, _Track]] = []
        for name, value in metrics.items():
            plan = self._plan[name] if name in self._plan else self._planned(name)
            if plan is None:
                continue
            number = finite_number(value)
            if number is None:
                continue
            plan[0].add(number, self._logs)
            due.extend((name, track) for track in plan[1])
        # Only now, so that the order of the metrics in the log does not matter.
        return [symptom for name, track in due if (symptom := self._judge(step, name, track)) is not None]

    def _planned(self, name: str) -> tuple[Series, tuple[_Track, ...]] | None:
        """Finds the rules that read a metric not seen before."""
        watching = [rule for rule in self.rules if isinstance(name, str) and rule.matches(name)]
        windows = [
            part.window if part.share is not None or part.relation in TRENDS else 0
            for rule in self.rules
            for part in rule.red_flag
            if part.metric == name or (not part.metric and rule in watching)
        ]
        plan: tuple[Series, tuple[_Track, ...]] | None = None
        if watching or windows:
            series = self._series.setdefault(name, Series(max(windows, default=0)))
            plan = series, tuple(self._tracks[rule.name].setdefault(name, _Track(rule)) for rule in watching)
        elif len(self._plan) >= _UNREAD_NAMES:
            self._plan = {known: kept for known, kept in self._plan.items() if kept is not None}
        self._plan[name] = plan
        return plan

    def _judge(self, step: int, name: str, track: _Track) -> Symptom | None:
        rule = track.rule
        read: list[Series] = []
        for part in rule.red_flag:
            series = self._series.get(part.metric or name)
            # An old value says nothing about this log.
            if series is None or series.log <= track.log:
                return None
            read.append(series)
        red = all(map(holds, rule.red_flag, read, repeat(self.limits)))
        if not track.extend(step, red, self._logs):
            return None
        evidence: dict[str, Any] = {
            "metric": name,
            "value": self._series[name].value,
            "bound": bound_of(rule.red_flag[0], read[0], self.limits),
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

    def _all_tracks(self) -> Iterable[_Track]:
        return (track for by_metric in self._tracks.values() for track in by_metric.values())

    def state_dict(self) -> dict[str, Any]:
        """Returns everything needed to go on, ready for JSON."""
        return {
            "step": self._step,
            "logs": self._logs,
            "series": {name: series.state_dict() for name, series in self._series.items()},
            "tracks": {
                rule: {metric: track.state_dict() for metric, track in by_metric.items()}
                for rule, by_metric in self._tracks.items()
                if by_metric
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where [`MetricRules.state_dict`] was called; rules that are no longer in the table are left out."""
        self._step, self._logs = state["step"], state["logs"]
        self._plan, self._series = {}, {}
        self._tracks = {rule.name: {} for rule in self.rules}
        for name, saved in state["series"].items():
            plan = self._planned(name)
            if plan is not None:
                plan[0].load_state_dict(saved)
                for track in plan[1]:
                    by_metric = state["tracks"].get(track.rule.name, {})
                    if name in by_metric:
                        track.load_state_dict(by_metric[name])


class _Track:
    """Counts for how long a rule's flag has been up, or down, for one metric."""

    __slots__ = ("count", "fired", "log", "red", "rule", "since", "step")

    def __init__(self, rule: MetricRule) -> None:
        self.rule = rule
        self.red = False
        self.since = 0  # the stretch began after this step
        self.count = 0
        self.step: int | None = None
        self.log = 0
        self.fired = False

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

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "rule"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


# ---- table: the table of rules: read from TOML with a user's own merged over it, and written as TOML ----


class RuleError(ValueError):
    """A table of rules cannot be used; the message names file, rule, key, value and what is allowed."""


def load_rules(path: str | os.PathLike[str] | None = None) -> tuple[MetricRule, ...]:
    """Reads the table of the package, with a user's table merged over it."""
    table = _default_table()
    if path is not None:
        own = read_toml(Path(path), RuleError)
        problems = problems_of(own, table)
        if problems:
            several = [f"{path}: {len(problems)} things in the table of rules cannot be used:", *problems]
            raise RuleError("\n- ".join(several) if len(problems) > 1 else f"{path}: {problems[0]}")
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
    shown = {name: value for name, value in keys.items() if name == "value" or value != CONDITION_DEFAULTS.get(name)}
    return "{ " + ", ".join(f"{name} = {toml_value(value)}" for name, value in shown.items()) + " }"


def _default_table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files(__package__).joinpath("metric_rules.toml").read_text(encoding="utf-8"))


def _rule(name: str, keys: Mapping[str, Any]) -> MetricRule:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}
    values["red_flag"] = tuple(_condition(part) for part in keys["red_flag"])
    return MetricRule(name=name, **values)


def _condition(keys: Mapping[str, Any]) -> Condition:
    values: dict[str, Any] = {("relation" if key == "is" else key): value for key, value in keys.items()}
    for key in ("value", "tolerance", "share"):
        if key in values:
            values[key] = float(values[key])
    return Condition(**values)
