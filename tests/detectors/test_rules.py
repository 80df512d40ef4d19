"""Rules on logged metrics: the engine, the table that comes with the package, the command line, and real TRL runs."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from conftest import best_model_trainer, grpo_trainer, journal
from typer.testing import CliRunner, Result

from self_healing import SelfHealingCallback
from self_healing.failures.recipes import Severity, Symptom
from self_healing.healers.numerics.detectors.rules import (
    OBJECTIVES,
    Condition,
    MetricRule,
    MetricRules,
    RuleAction,
    RuleError,
    load_rules,
    rules_for,
)
from self_healing.tools.cli import app


CURVES = Path(__file__).parents[1] / "data" / "curves"
TABLE = {rule.name: rule for rule in load_rules()}
LN2 = math.log(2)

LOW = MetricRule("low", "entropy", (Condition("below", 0.01),), steps=20)

Log = Mapping[str, Any]


def feed(watch: MetricRules, logs: Mapping[int, Log]) -> list[tuple[int, str]]:
    """What is reported for logs given by step."""
    return [(step, symptom.name) for step, log in logs.items() for symptom in watch.observe(step, log)]


def constant(log: Log, steps: range) -> dict[int, Log]:
    return dict.fromkeys(steps, log)


def steps_reported(rule: MetricRule, values: Mapping[int, Any]) -> list[int]:
    logs = {step: {rule.metric: value} for step, value in values.items()}
    return [step for step, _ in feed(MetricRules([rule]), logs)]


# ---- how long a red flag must be up ----


def test_it_is_reported_once_after_its_steps() -> None:
    assert steps_reported(LOW, dict.fromkeys(range(1, 200), 0.001)) == [20]


def test_the_report_says_what_was_seen_and_what_helps() -> None:
    rule = replace(LOW, severity="error", action="stop", healthy="0.05 to 0.5", diagnosis="d", remedy="r", source="s")
    watch = MetricRules([rule])
    assert not feed(watch, {1: {"entropy": 0.4}} | constant({"entropy": 0.001}, range(2, 21)))
    assert watch.observe(21, {"entropy": 0.002}) == [
        Symptom(
            name="rule:low",
            step=21,
            severity="error",
            evidence={
                "metric": "entropy",
                "value": 0.002,
                "bound": 0.01,
                "red_flag": "below 0.01",
                "healthy": "0.05 to 0.5",
                "since_step": 2,
                "observations": 20,
                "action": "stop",
                "diagnosis": "d",
                "remedy": "r",
                "source": "s",
            },
        )
    ]


def test_steps_are_optimizer_steps_also_when_every_tenth_is_logged() -> None:
    # The log of step 10 is the average of steps 1 to 10; how far back the very first one reaches is not assumed.
    values = {step: 0.5 if step == 10 else 0.001 for step in range(10, 200, 10)}
    assert steps_reported(replace(LOW, steps=30), values) == [40]
    assert steps_reported(replace(LOW, steps=50), dict.fromkeys(range(10, 200, 10), 0.001)) == [60]


def test_one_healthy_value_starts_the_count_again() -> None:
    values = dict.fromkeys(range(1, 100), 0.001) | {19: 0.5, 38: 0.5}
    assert steps_reported(LOW, values) == [58]


def test_it_is_armed_again_when_the_flag_was_down_as_long_as_it_must_be_up() -> None:
    def run(down: int) -> list[int]:
        return steps_reported(LOW, {step: 0.5 if 20 < step <= 20 + down else 0.001 for step in range(1, 100)})

    assert run(down=19) == [20]
    assert run(down=20) == [20, 60]


# ---- what was not observed ----


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, False, None, "0.001", [0.001], 10**400])
def test_what_is_no_finite_number_was_not_observed(value: Any) -> None:
    assert (
        steps_reported(replace(LOW, red_flag=(Condition("at_most", 1.0),)), dict.fromkeys(range(1, 60), value)) == []
    )
    assert steps_reported(LOW, {step: value if step % 2 else 0.001 for step in range(1, 60)}) == [22]


# ---- what a red flag can say ----


@pytest.mark.parametrize(
    ("condition", "holds", "fails"),
    [
        (Condition("below", 2.0), 1.9, 2.0),
        (Condition("above", 2.0), 2.1, 2.0),
        (Condition("at_least", 2.0), 2.0, 1.9),
        (Condition("at_most", 2.0), 2.0, 2.1),
        (Condition("near", 2.0, tolerance=0.25), 2.25, 2.26),
        (Condition("near", 2.0), 2.0, math.nextafter(2.0, 3.0)),
        (Condition("above", 0.5, of="args.limit"), 50.1, 50.0),
    ],
    ids=str,
)
def test_comparisons(condition: Condition, holds: float, fails: float) -> None:
    rule = MetricRule("rule", "metric", (condition,), steps=1, observations=1)
    assert MetricRules([rule], {"limit": 100}).observe(1, {"metric": holds})
    assert not MetricRules([rule], {"limit": 100}).observe(1, {"metric": fails})


def series(value: Callable[[int], float]) -> list[float]:
    return [value(step) for step in range(1, 60)]


@pytest.mark.parametrize(
    ("condition", "values", "reported"),
    [
        # The median of the first ten is 2.5.
        (Condition("above", 1.5, of="start"), [9, 9, 9, 1, 1, 2, 2, 2, 3, 3, 3.7, 3.7, 3.8], [13]),
        (Condition("above", 1.5, of="lowest"), [3.0, 2.0, 2.9, 3.1, 2.0], [4]),
        # Medians of thirds of 30 points on a line are 20 steps apart.
        (Condition("rising", 1.0, window=30), series(lambda step: 0.051 * step), [30]),
        (Condition("rising", 1.0, window=30), series(lambda step: 0.049 * step), []),
        (Condition("rising", 1.0, window=30), series(lambda step: -0.051 * step), []),
        (Condition("rising", 1.0, window=30), series(lambda step: 1e6 * (step % 9 == 0)), []),
        (Condition("falling", 1.0, window=30), series(lambda step: -0.051 * step), [30]),
        (Condition("falling", 0.1, of="start", window=30), series(lambda step: -50.0 - 0.3 * step), [30]),
        (Condition("falling", 0.1, of="start", window=30), series(lambda step: -50.0 - 0.2 * step), []),
        (Condition("flat", 0.1, of="start", window=30), series(lambda step: 5.0 + 0.1 * (step % 2)), [30]),
        (Condition("flat", 0.1, of="start", window=30), series(lambda step: 5.0 - 0.1 * step), []),
    ],
)
def test_levels_and_trends(condition: Condition, values: list[float], reported: list[int]) -> None:
    rule = MetricRule("rule", "metric", (condition,), steps=1, observations=1)
    assert steps_reported(rule, dict(enumerate(values, start=1))) == reported


def test_all_conditions_must_hold_in_one_log() -> None:
    rule = MetricRule("rule", "a", (Condition("above", 1.0), Condition("below", 0.0, metric="b")), steps=5)
    assert not feed(MetricRules([rule]), {step: {"a": 2.0, "b": 1.0} for step in range(1, 30)})
    assert not feed(MetricRules([rule]), {step: {"a": 2.0} for step in range(1, 30)})
    # A value of `b` from an earlier log says nothing about this one.
    assert not feed(MetricRules([rule]), {1: {"a": 0.0, "b": -1.0}} | constant({"a": 2.0}, range(2, 30)))
    for log in ({"a": 2.0, "b": -1.0}, {"b": -1.0, "a": 2.0}):
        watch = MetricRules([rule])
        assert not feed(watch, constant(log, range(1, 5)))
        (symptom,) = watch.observe(5, log)
        assert symptom.evidence["other_values"] == {"b": -1.0}


# ---- patterns ----


def test_each_metric_that_matches_a_pattern_is_watched_on_its_own() -> None:
    rule = MetricRule("rule", "rewards/*/mean", (Condition("near", 0.0),))
    watch = MetricRules([rule])
    symptoms = [
        symptom
        for step in range(1, 40)
        for symptom in watch.observe(
            step,
            {
                "rewards/format/mean": 0.0,
                "rewards/length/mean": float(step < 10),
                "rewards/format/std": 0.0,
                "mean": 0.0,
            },
        )
    ]
    assert [(symptom.step, symptom.evidence["metric"]) for symptom in symptoms] == [
        (20, "rewards/format/mean"),
        (29, "rewards/length/mean"),
    ]


@pytest.mark.parametrize("metric", ["reward_std", "*", "*reward_std", "reward*"])
def test_metrics_of_the_evaluation_are_other_metrics(metric: str) -> None:
    rule = MetricRule("rule", metric, (Condition("near", 0.0),))
    assert not feed(MetricRules([rule]), constant({"eval_reward_std": 0.0}, range(1, 50)))
    evaluation = replace(rule, metric="eval_reward_std")
    assert feed(MetricRules([evaluation]), constant({"eval_reward_std": 0.0}, range(1, 50)))


# ---- state ----


@pytest.mark.parametrize("cut", [1, 7, 19, 20, 25, 60, 110])
def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened(cut: int) -> None:
    generator = random.Random(3)
    logs = {
        step: {
            "entropy": 0.001 if step < 45 or step > 80 else 0.5,
            "grad_norm": generator.choice([1.0, 11.0, 20.0]),
            "rewards/a/mean": 0.0 if step > 15 else 1.0,
            "completions/mean_length": min(100.0, 20.0 + 2 * step),
            "kl": math.nan if step % 3 else 3.0,
        }
        for step in range(1, 140)
    }
    limits = {"max_completion_length": 100}
    whole = MetricRules(rules_for(TABLE.values(), "grpo"), limits)
    expected = [symptom for step, log in logs.items() for symptom in whole.observe(step, log)]
    assert len({symptom.name for symptom in expected}) >= 4

    first = MetricRules(rules_for(TABLE.values(), "grpo"), limits)
    seen = [symptom for step, log in logs.items() if step <= cut for symptom in first.observe(step, log)]
    second = MetricRules(rules_for(TABLE.values(), "grpo"), limits)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert second.state_dict() == first.state_dict()
    seen += [symptom for step, log in logs.items() if step > cut for symptom in second.observe(step, log)]
    assert seen == expected
    assert second.state_dict() == whole.state_dict()


# ---- a table of one's own ----


def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "my_rules.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_one_number_of_one_rule_can_be_changed(tmp_path: Path) -> None:
    table = {rule.name: rule for rule in load_rules(own(tmp_path, "[entropy_collapse]\nsteps = 50\n"))}
    assert table.pop("entropy_collapse") == replace(TABLE["entropy_collapse"], steps=50)
    assert table == {name: rule for name, rule in TABLE.items() if name != "entropy_collapse"}


def test_a_rule_can_be_switched_off(tmp_path: Path) -> None:
    table = load_rules(own(tmp_path, "[entropy_collapse]\nenabled = false\n"))
    assert "entropy_collapse" not in {rule.name for rule in rules_for(table, "grpo")}


def test_a_rule_can_be_added(tmp_path: Path) -> None:
    path = own(
        tmp_path,
        """
        [my_score]
        metric = "score/*"
        objectives = ["generic"]
        red_flag = [{ is = "below", value = 0.5, of = "start" }, { metric = "loss", is = "at_most", value = 0 }]
        steps = 5
        action = "stop"
        """,
    )
    rule = load_rules(path)[-1]
    assert rule == MetricRule(
        "my_score",
        "score/*",
        (Condition("below", 0.5, of="start"), Condition("at_most", 0.0, metric="loss")),
        objectives=("generic",),
        steps=5,
        action="stop",
    )
    logs = {step: {"score/a": 10.0 if step <= 10 else 4.0, "loss": 0.0} for step in range(1, 30)}
    assert feed(MetricRules(rules_for([rule], "MyTrainer")), logs) == [(15, "rule:my_score")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps = 5", ["`steps` is at the top level", "below the rule"]),
        (
            "[entropy_colapse]\nsteps = 5",
            ["[entropy_colapse] is a new rule", "`metric`", "Did you mean [entropy_collapse]?"],
        ),
        ("[entropy_collapse]\nstep = 5", ["`step` in [entropy_collapse]", "Did you mean `steps`?"]),
        ("[entropy_collapse]\nqwertz = 5", ["`qwertz` in [entropy_collapse]", "There are: metric, objectives"]),
        ("[entropy_collapse]\nsteps = 0", ["`steps` in [entropy_collapse] is 0 (int)", "an integer, at least 1"]),
        ('[entropy_collapse]\nseverity = "bad"', ["'bad' (str)", "'info', 'warning', 'error'"]),
        ('[entropy_collapse]\naction = "pray"', ["'alert', 'rollback', 'stop'"]),
        ('[entropy_collapse]\nobjectives = ["grop"]', ["['grop'] (list)", "'grpo'"]),
        ("[entropy_collapse]\nred_flag = { is = 'below', value = 1 }", ["a list of one or more conditions"]),
        (
            "[entropy_collapse]\nred_flag = [{ value = 1 }]",
            ["condition 1 of `red_flag` in [entropy_collapse]", "set `is`"],
        ),
        ("[entropy_collapse]\nred_flag = [{ is = 'below' }]", ["has no `value`"]),
        ("[entropy_collapse]\nred_flag = [{ is = 'less', value = 1 }]", ["'less' (str)", "'below', 'above'"]),
        ("[entropy_collapse]\nred_flag = [{ is = 'below', valeu = 1 }]", ["Did you mean `value`?"]),
        ("[entropy_collapse]\nred_flag = [{ is = 'below', value = nan }]", ["a finite number"]),
        ("[entropy_collapse]\nred_flag = [{ is = 'below', value = 1, metric = 'a*' }]", ["exact name"]),
        ("[entropy_collapse]\nred_flag = [{ is = 'below', value = 1, of = 'args' }]", ["args.max_completion_length"]),
        ("[entropy_collapse]\nred_flag = [{ is = 'below', value = 1, share = 0 }]", ["above 0 and at most 1"]),
        ("[entropy_collapse\n", ["is not valid TOML", "line 1"]),
    ],
    ids=lambda value: value.replace("\n", " ") if isinstance(value, str) else "",
)
def test_an_error_says_where_what_and_what_is_allowed(tmp_path: Path, text: str, words: list[str]) -> None:
    path = own(tmp_path, text)
    with pytest.raises(RuleError) as raised:
        load_rules(path)
    message = str(raised.value)
    assert message.startswith(str(path))
    assert [word for word in words if word not in message] == []


# ---- the table of the package ----


def test_the_table_is_whole() -> None:
    for rule in TABLE.values():
        assert all([rule.objectives, rule.healthy, rule.diagnosis, rule.remedy, rule.source]), rule.name
        assert set(rule.objectives) <= set(OBJECTIVES), rule.name
        assert rule.severity in get_args(Severity), rule.name
        assert rule.action in get_args(RuleAction), rule.name
    assert all(rules_for(TABLE.values(), objective) for objective in OBJECTIVES)


def test_an_unknown_objective_gets_the_generic_rules() -> None:
    generic = rules_for(TABLE.values(), "generic")
    assert rules_for(TABLE.values(), "MyTrainer") == generic
    # What these rules read means the same whoever logs it; a loss, a gradient norm or an entropy does not.
    assert not {"loss", "grad_norm", "entropy", "kl"} & {metric for rule in generic for metric in rule.metrics}


@dataclass(frozen=True)
class Example:
    """What the metrics of a rule are, at each log, when all is well and when the flag is up; it is up from `after`."""

    healthy: Callable[[int], Log]
    red: Callable[[int], Log]
    after: int = 0


def levels(healthy: Log, red: Log, start: Log | None = None) -> Example:
    """Constant values; with `start`, ten logs of these first."""
    if start is None:
        return Example(lambda _: healthy, lambda _: red)
    return Example(lambda _: healthy, lambda log: start if log <= 10 else red, after=10)


def of_one(metric: str, healthy: float, red: float, start: float | None = None) -> Example:
    return levels({metric: healthy}, {metric: red}, None if start is None else {metric: start})


EXAMPLES: dict[str, Example] = {
    "reward_stuck_at_zero": of_one("rewards/format_reward/mean", 0.2, 0.0),
    "rewards_missing": of_one("rewards/sandbox/mean", 0.2, math.nan),
    "reward_constant": Example(lambda log: {"reward": 0.3 + 0.1 * (log % 3)}, lambda log: {"reward": 0.25}, after=49),
    "no_gradient": Example(lambda log: {"grad_norm": 0.4 * (log % 10 == 0)}, lambda log: {"grad_norm": 0.0}),
    "reward_std_zero": of_one("reward_std", 0.3, 0.0),
    "reward_std_mostly_zero": Example(
        lambda log: {"reward_std": 0.3 * (log % 2)}, lambda log: {"reward_std": 0.0 if log % 10 else 0.3}, after=9
    ),
    "most_steps_without_signal": Example(
        lambda log: {"frac_reward_zero_std": 0.5, "reward_std": 0.3},
        lambda log: {"frac_reward_zero_std": 1.0 if log % 10 else 0.5, "reward_std": 0.3},
        after=9,
    ),
    "no_group_has_signal": of_one("frac_reward_zero_std", 0.5, 1.0),
    "few_groups_have_signal": of_one("frac_reward_zero_std", 0.5, 0.9),
    "entropy_collapse": of_one("entropy", 0.3, 0.005),
    "entropy_high": of_one("entropy", 0.4, 1.6, start=0.4),
    "kl_high": of_one("kl", 0.3, 2.5),
    "kl_burst": levels({"kl": 0.05, "grad_norm": 0.1}, {"kl": 4.4, "grad_norm": 63.0}, {"kl": 0.05, "grad_norm": 0.1}),
    "clip_ratio_high": of_one("clip_ratio/region_mean", 0.05, 0.4),
    "grad_norm_high": Example(lambda _: {"grad_norm": 0.5}, lambda log: {"grad_norm": 0.5 if (log - 1) % 3 else 15.0}),
    "sampling_logp_difference": of_one("sampling/sampling_logp_difference/mean", 0.05, 1.5),
    "importance_ratio_near_zero": levels(
        # One masked sequence puts the minimum at 0: TRL's default mode does that in healthy runs.
        {"sampling/importance_sampling_ratio/min": 0.0, "sampling/importance_sampling_ratio/mean": 0.97},
        {"sampling/importance_sampling_ratio/min": 0.0, "sampling/importance_sampling_ratio/mean": 0.3},
    ),
    "completions_grow_to_limit": of_one("completions/mean_length", 120.0, 250.0, start=120.0),
    "completions_clipped": of_one("completions/clipped_ratio", 0.2, 0.95),
    "ebft_alignment_low": of_one("ebft/alignment", 0.5, 0.25),
    "ebft_diversity_collapse": of_one("ebft/diversity", 0.05, 1.2),
    "ebft_cfm_loss_high": of_one("ebft/cfm_loss", 5.0, 15.0),
    "dpo_not_training": levels(
        {"loss": 0.6925, "rewards/margins": 0.001}, {"loss": round(LN2, 4), "rewards/margins": 0.0}
    ),
    "dpo_at_chance": Example(
        lambda log: {"loss": 0.69 - 0.002 * log, "rewards/margins": log / 250, "rewards/accuracies": 0.5 + log / 500},
        lambda log: {"loss": 0.6925, "rewards/margins": 0.002, "rewards/accuracies": 0.25 + 0.25 * (log % 3)},
    ),
    "likelihood_displacement": Example(
        lambda log: {"logps/chosen": -50.0 + 0.1 * log, "rewards/margins": 0.01 * log, "rewards/chosen": 0.001 * log},
        lambda log: {"logps/chosen": -50.0 - 0.3 * log, "rewards/margins": 0.01 * log, "rewards/chosen": -0.03 * log},
        after=49,
    ),
    "dpo_saturated": levels({"loss": 0.4, "rewards/accuracies": 1.0}, {"loss": 0.004, "rewards/accuracies": 1.0}),
    "sft_grad_norm_high": of_one("grad_norm", 2.0, 150.0),
    "sft_loss_plateau": Example(
        lambda log: {"loss": 1.0 + 1.5 * math.exp(-log / 100)}, lambda log: {"loss": 2.5}, after=99
    ),
    "overfitting": Example(
        lambda log: {"loss": 2.0 - 0.01 * log, "eval_loss": 2.1 - 0.008 * log},
        lambda log: {"loss": 2.0 - 0.01 * log, "eval_loss": 1.5 + abs(log - 50) / 200},
        after=65,
    ),
    "eval_gap": of_one("healing/eval_gap", 0.4, 2.1),
}
LIMITS = {"max_completion_length": 256}


def test_every_rule_has_an_example() -> None:
    assert EXAMPLES.keys() == TABLE.keys(), "please give the new rule an example of a healthy and of a bad run"


@pytest.mark.parametrize("name", TABLE)
def test_a_rule_reports_its_red_flag_once_and_not_too_early(name: str) -> None:
    rule, example = TABLE[name], EXAMPLES[name]
    seen = feed(MetricRules([rule], LIMITS), {log: example.red(log) for log in range(1, 150)})
    assert seen == [(example.after + max(rule.steps, rule.observations), f"rule:{name}")]


@pytest.mark.parametrize("name", TABLE)
def test_a_rule_is_silent_while_its_metric_is_healthy(name: str) -> None:
    """With some noise, and alone or among the other rules."""
    generator = random.Random(1)
    logs = {}
    for log in range(1, 180):
        exact = EXAMPLES[name].healthy(log)
        logs[log] = {metric: value * (1 + generator.gauss(0, 0.02)) for metric, value in exact.items()}
    for objective in TABLE[name].objectives:
        assert feed(MetricRules(rules_for(TABLE.values(), objective), LIMITS), logs) == []


@pytest.mark.parametrize("path", sorted(CURVES.glob("healthy_*.csv")), ids=lambda path: path.stem)
def test_the_curves_of_healthy_runs_raise_nothing(path: Path) -> None:
    objective = "grpo" if "grpo" in path.name else "sft"
    watch = MetricRules(rules_for(TABLE.values(), objective), {"max_completion_length": 200})
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 100
    for row in rows:
        log = {name: float(value) for name, value in row.items() if value}
        if "completion_length" in log:  # as this metric was called then
            log["completions/mean_length"] = log["completion_length"]
        assert watch.observe(int(row["step"]), log) == []


# ---- the command line ----


def run(*arguments: str, columns: int = 120) -> Result:
    return CliRunner().invoke(app, ["rules", *arguments], env={"COLUMNS": str(columns)})


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_in_force_is_printed(columns: int) -> None:
    result = run("--objective", "dpo", columns=columns)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= columns
    for rule in TABLE.values():
        assert (rule.name in result.stdout) == ("dpo" in rule.objectives)
    assert "0.693147" in result.stdout
    assert "stop" in result.stdout
    assert "requires_grad" in result.stdout


def test_the_toml_it_prints_is_read_back(tmp_path: Path) -> None:
    path = own(tmp_path, "[kl_high]\nenabled = false\n[entropy_high]\nsteps = 77\nseverity = 'info'\n")
    printed = run("--rules", str(path), "--toml")
    assert printed.exit_code == 0
    expected = load_rules(path)
    assert load_rules(own(tmp_path, printed.stdout)) == expected

    of_grpo = run("--rules", str(path), "--objective", "grpo", "--toml")
    assert rules_for(load_rules(own(tmp_path, of_grpo.stdout)), "grpo") == rules_for(expected, "grpo")


def test_an_unknown_objective_is_an_error() -> None:
    result = run("--objective", "gpro")
    assert result.exit_code == 2
    assert "'gpro'" in result.stderr
    assert "grpo" in result.stderr


def test_a_table_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    result = run("--rules", str(own(tmp_path, "[kl_high]\nstep = 3")))
    assert result.exit_code == 2
    assert "Did you mean `steps`?" in result.stderr
    result = run("--rules", str(tmp_path / "nowhere.toml"))
    assert result.exit_code == 2
    assert "nowhere.toml cannot be read" in result.stderr


# ---- in a run ----


def test_a_reward_function_that_gives_none_for_every_completion_is_reported(tmp_path: Path, tokenizer: Any) -> None:
    trainer = grpo_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()], max_steps=6)
    trainer.reward_funcs = [lambda completions, **_: [None] * len(completions)]
    trainer.train()

    found = journal(tmp_path, "detected")
    assert [(event["symptom"], event["step"]) for event in found] == [("rule:rewards_missing", 5)]
    assert "gives None or NaN for every completion" in found[0]["evidence"]["diagnosis"]


def test_an_evaluation_logs_how_far_its_loss_is_from_that_of_training(tmp_path: Path, tokenizer: Any) -> None:
    trainer = best_model_trainer(tmp_path, tokenizer, SelfHealingCallback(), max_steps=2)
    trainer.train()

    training, evaluation = trainer.state.log_history[1:3]
    assert evaluation["healing/eval_gap"] == evaluation["eval_loss"] - training["loss"]
