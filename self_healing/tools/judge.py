"""`self-healing judge`: detectors and rules over the log of a run that has been, without training."""

from __future__ import annotations

import csv
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.healing_config import HealingConfig, as_config
from ..config.schema import ConfigurationError
from ..failures.recipes import Symptom, text_of
from ..healers.numerics.detectors.panel import DetectorPanel
from ..healers.numerics.detectors.rules import OBJECTIVES, MetricRules, finite_number, load_rules, rules_for
from ..healers.numerics.detectors.spikes import NonFiniteDetector
from ..hf.objective import BY_CLASS_NAME, UNKNOWN, StepSignals


# What a symptom would have led to, where it is more than a report.
_WOULD_HAVE = {
    "nonfinite_loss": "computed again, and bisected; left out if nothing explains it",
    "nonfinite_gradient": "computed again, and bisected; left out if nothing explains it",
    "gradient_spike": "computed again; clipped, or left out, if it stays",
    "gradient_explosion": "computed again; clipped, or left out, if it stays",
    "co_spike": "computed again; left out if it stays",
    "loss_spike": "checkpoints held until the loss is back",
    "divergence": "checkpoints held; back to a trusted state if older weights do better",
    "dead_loss": "stopped",
}
_OF_A_RULE = {"stop": "stopped", "rollback": "back to a trusted state"}
REPORTED = "reported"


@dataclass(frozen=True, slots=True)
class Judgement:
    """
    What would have been reported or done at a step of a run that has been.

    Args:
        step (`int`):
            As it was logged.
        symptom (`str`):
            Name of the detector, or `rule:` and the name of a rule.
        severity (`str`):
            `"info"`, `"warning"` or `"error"`.
        done (`str`):
            What would have been done; `"reported"` where that is all.
        evidence (`dict`):
            The numbers it was judged by.
    """

    step: int
    symptom: str
    severity: str
    done: str
    evidence: dict[str, Any]

    @property
    def acts(self) -> bool:
        """Whether more would have been done than to report it."""
        return self.done != REPORTED


def judge_log(
    path: str | Path,
    objective: str | None = None,
    config: HealingConfig | Mapping[str, Any] | None = None,
    vocabulary: int | None = None,
) -> list[Judgement]:
    """
    Shows detectors and rules the log of a run, one entry after the other, and tells what they would have found.

    What was logged is judged as if each entry were a step: of a run that logged every tenth, means of ten. After the
    first thing that would have been healed the real run went on without it, so later findings are of that run.

    Args:
        path (`str` or `Path`):
            `trainer_state.json`, a directory with one, or a CSV file with columns `step`, `loss` and what else was
            logged, such as `grad_norm`; also compressed (`.gz`).
        objective (`str`, *optional*):
            What was trained, such as `"sft"` or `"grpo"`. Left out, it is told by the columns.
        config ([`HealingConfig`] or `dict`, *optional*):
            Thresholds, and the file of rules. Defaults to `HealingConfig()`.
        vocabulary (`int`, *optional*):
            Tokens the model knows: a loss above chance is told by it.

    Returns:
        `list[Judgement]`: in the order of the log.

    Raises:
        ValueError: If the file holds no log, or the objective is not known.
        OSError: If it cannot be read.
    """
    config = as_config(config)
    entries = _entries_of(Path(path))
    trained = objective or _objective_of(entries)
    if trained not in OBJECTIVES:
        raise ConfigurationError(f"The objective is {trained!r}, but must be one of {', '.join(OBJECTIVES)}.")
    known = next((each for each in BY_CLASS_NAME.values() if each.name == trained), UNKNOWN)
    panel = DetectorPanel(config, known.detectors, vocabulary)
    nonfinite, rules = NonFiniteDetector(), MetricRules(rules_for(load_rules(config.rules_file), trained))
    found: list[Judgement] = []
    for step, metrics in entries:
        symptoms = _of_step(step, metrics, panel, nonfinite) + rules.observe(step, metrics)
        found += [_judged(symptom) for symptom in symptoms if symptom.severity != "info"]
    return found


def _of_step(
    step: int, metrics: Mapping[str, Any], panel: DetectorPanel, nonfinite: NonFiniteDetector
) -> list[Symptom]:
    loss, norm = metrics.get("loss"), metrics.get("grad_norm")
    if not isinstance(loss, int | float):
        return []
    signals = StepSignals(step, float(loss), float(norm) if isinstance(norm, int | float) else None)
    broken = nonfinite.observe(signals)
    if broken is not None:
        return [broken]
    alarm = panel.alarming(signals)
    panel.remember_spike(signals)
    # One that is left out, or clipped, is not taken in.
    return panel.observe(signals) if alarm is None else [alarm]


def _judged(symptom: Symptom) -> Judgement:
    done = _WOULD_HAVE.get(symptom.name) or _OF_A_RULE.get(str(symptom.evidence.get("action")), REPORTED)
    return Judgement(symptom.step, symptom.name, symptom.severity, done, dict(symptom.evidence))


# ---- the log ----


def _entries_of(path: Path) -> Sequence[tuple[int, Mapping[str, Any]]]:
    path = _log_in(path) if path.is_dir() else path
    try:
        entries = list(_read(path))
    except (ValueError, EOFError, RecursionError, csv.Error, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} cannot be read as a log: {text_of(error)}. Please name another file.") from error
    if not any(isinstance(metrics.get("loss"), int | float) for _, metrics in entries):
        raise ValueError(
            f"{path} holds no logged loss. Please name a trainer_state.json, a directory with one, or a CSV file with "
            "the columns step and loss."
        )
    return entries


def _log_in(directory: Path) -> Path:
    """The newest trainer_state.json: that of the run, or that of its newest checkpoint."""
    whole = directory / "trainer_state.json"
    of_checkpoints = directory.glob("checkpoint-*/trainer_state.json")
    return whole if whole.is_file() else max(of_checkpoints, default=whole, key=os.path.getmtime)


def _read(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = content.decode("utf-8-sig")
    if text.lstrip().startswith(("{", "[")):
        lines = [line for line in text.splitlines() if line.strip()]
        each_a_line = len(lines) > 1 and lines[0].startswith("{") and lines[0].rstrip().endswith("}")
        read = [*map(json.loads, lines)] if each_a_line else json.loads(text)
        rows = (read.get("log_history") or []) if isinstance(read, dict) else read
    else:
        rows = [
            {name: _number(value) for name, value in row.items() if value} for row in csv.DictReader(text.splitlines())
        ]
    for number, row in enumerate(row for row in (rows if isinstance(rows, list) else ()) if isinstance(row, dict)):
        step = row.get("step")
        known = {name: value for name, value in row.items() if name != "step"}
        yield int(step) if isinstance(step, int | float) else number, known


def _number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _objective_of(entries: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    names = {name for _, metrics in entries for name in metrics}
    if "rewards/chosen" in names:
        return "dpo"
    if "reward" in names or "completions/mean_length" in names:
        return "grpo"
    losses = [finite_number(metrics.get("loss")) for _, metrics in entries]
    return "unknown" if any(loss is not None and loss < 0 for loss in losses) else "sft"
