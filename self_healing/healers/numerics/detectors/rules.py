"""The rules at work: each log is judged, and a flag that stays up is reported once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any

from ....detectors.rules.conditions import Series, bound_of, finite_number, holds
from ....detectors.rules.rule import TRENDS, MetricRule
from ....failures.recipes import Symptom


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
