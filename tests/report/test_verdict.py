"""The verdict on the weights of a run: what it rests on, and that every form of the report shows the same one."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import OutputFault, sft_trainer
from rich.console import Console
from test_reading import MadeUpDirectory, row

from self_healing import HealingConfig, SelfHealingCallback
from self_healing.report.healing_report import HealingReport
from self_healing.report.output import briefing_of, show
from self_healing.report.page.rendering import page_of
from self_healing.report.reading import read_run
from self_healing.report.verdict import Verdict, movement_of
from self_healing.run.status import RunState


CURVES = Path(__file__).parent.parent / "data" / "curves"


@pytest.fixture
def ended(tmp_path: Path) -> MadeUpDirectory:
    made_up = MadeUpDirectory(tmp_path / "run")
    made_up.started()
    made_up.status(RunState.ENDED, 100)
    return made_up


def reported(made_up: MadeUpDirectory, failure: str, symptom: str = "rule:kl_high", **evidence: Any) -> None:
    made_up.event("detected", 40, incident="run-001", symptom=symptom, evidence=evidence)
    made_up.event(
        "diagnosed", 40, incident="run-001", failure=failure, cause=symptom.removeprefix("rule:").replace("_", " ")
    )
    made_up.event("outcome", 40, incident="run-001", outcome="reported", steps_lost=0, seconds_lost=0.0)


def verdict_of(made_up: MadeUpDirectory) -> Verdict:
    verdict = read_run(made_up.path).verdict
    assert verdict is not None
    return verdict


def in_text(made_up: MadeUpDirectory) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(read_run(made_up.path), HealingReport.from_run_dir(made_up.path), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def forms_of(made_up: MadeUpDirectory) -> dict[str, str]:
    report = read_run(made_up.path)
    return {"terminal": in_text(made_up), "agent.md": briefing_of(report), "page": page_of(report)}


def history(values: list[float], metric: str = "loss") -> list[dict[str, float]]:
    return [{"loss": 0.0, metric: value, "step": step} for step, value in enumerate(values)]


def noise(size: float, number: int) -> list[float]:
    chance = random.Random(0)
    return [chance.gauss(0.0, size) for _ in range(number)]


# ---- what it rests on ----


def test_a_run_in_which_nothing_was_found_is_good_and_says_what_it_has_learned(ended: MadeUpDirectory) -> None:
    ended.event("run_ended", 100, learned={"metric": "loss", "logs": 5, "first": 4.99, "last": 1.8234})
    verdict = "Good: no fault was found. Loss 4.99 to 1.823: evaluate the weights before you use them."
    assert str(verdict_of(ended)) == verdict


def test_what_was_healed_leaves_a_run_good(ended: MadeUpDirectory) -> None:
    ended.incident(1, 9, ["use_reexecuted_step"], "resolved")
    assert (verdict_of(ended).name, verdict_of(ended).why) == ("good", ["what was found was healed"])


@pytest.mark.parametrize("outcome", ["unresolved", "fatal"])
def test_what_was_not_healed_is_to_be_looked_at_first(ended: MadeUpDirectory, outcome: str) -> None:
    ended.incident(1, 9, [], outcome)
    assert verdict_of(ended).name == "look first"


@pytest.mark.parametrize("failure", ["red_flag", "vanishing_gradient", "corrupted_state", "gradient_spike"])
def test_a_red_flag_that_was_only_reported_is_to_be_looked_at_first(ended: MadeUpDirectory, failure: str) -> None:
    reported(ended, failure)
    assert str(verdict_of(ended)).startswith("Look first: kl high was only reported (step 40).")


@pytest.mark.parametrize("failure", ["reporting", "harder_data"])
def test_what_says_nothing_of_the_weights_is_no_reason_to_look(ended: MadeUpDirectory, failure: str) -> None:
    reported(ended, failure, "ConnectionError")
    assert verdict_of(ended).name == "good"


def test_steps_that_are_not_in_the_weights_are_to_be_looked_at_first(ended: MadeUpDirectory) -> None:
    ended.incident(1, 9, ["skip_step"], "resolved")
    assert verdict_of(ended).why == ["1 of 100 steps is not in the weights"]


def test_weights_with_none_of_the_steps_are_not_for_use(ended: MadeUpDirectory) -> None:
    ended.status(RunState.ENDED, 2)
    ended.steps(row(0, skipped=1), row(1, skipped=1))
    assert str(verdict_of(ended)) == "Do not use: none of its 2 steps is in them."


def test_a_run_that_took_no_step_has_no_weights_to_use(ended: MadeUpDirectory) -> None:
    ended.status(RunState.ENDED, 0)
    assert str(verdict_of(ended)) == "Do not use: none of its 0 steps is in them."


def test_weights_that_are_not_finite_at_the_end_are_not_for_use(ended: MadeUpDirectory) -> None:
    ended.event("run_ended", 100, nonfinite=["lm_head.weight"])
    assert str(verdict_of(ended)) == "Do not use: they hold NaN or Inf (lm_head.weight)."


def test_a_run_that_only_warns_of_nan_ends_with_weights_that_are_not_for_use(tmp_path: Path, tokenizer: Any) -> None:
    config = HealingConfig(on_nonfinite="watch")
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(config)])
    OutputFault(trainer.model, strike=lambda forward: forward == 5)
    trainer.train()
    verdict = read_run(tmp_path).verdict
    assert verdict is not None
    assert verdict.name == "do not use"


def test_steps_of_which_nobody_knows_whether_they_are_lost_are_named_with_the_reason(ended: MadeUpDirectory) -> None:
    ended.event("detected", 7, incident="run-001", symptom="ConnectionError", evidence={})
    ended.event("diagnosed", 7, incident="run-001", failure="network", cause="network", evidence=UNKNOWN)
    ended.event("outcome", 7, incident="run-001", outcome="resolved", steps_lost=0, seconds_lost=0.1)
    assert verdict_of(ended).why == ["how many steps are lost is not known (step 7: the stream was read on)"]
    for text in forms_of(ended).values():
        assert "steps lost not known" in " ".join(text.split()).lower()


UNKNOWN = {"steps_lost_unknown": "the stream was read on"}


def failed_save(made_up: MadeUpDirectory, step: int) -> None:
    made_up.event("detected", step, incident="run-001", symptom="OSError", evidence={})
    made_up.event("diagnosed", step, incident="run-001", failure="disk", cause="disk")
    made_up.event("outcome", step, incident="run-001", outcome="resolved", steps_lost=0, seconds_lost=0.1)


def test_steps_that_no_checkpoint_holds_after_a_failed_save_are_named(ended: MadeUpDirectory) -> None:
    failed_save(ended, 60)
    ended.checkpoint(30)
    assert verdict_of(ended).why == ["steps 31 to 100 are on no disk"]
    ended.checkpoint(100)
    assert verdict_of(ended).name == "good"


def test_a_run_that_wrote_no_checkpoint_and_failed_at_none_is_good(ended: MadeUpDirectory) -> None:
    assert verdict_of(ended).name == "good"


@pytest.mark.parametrize(("state", "step"), [(RunState.STOPPED, 40), (RunState.LEFT, 40)])
def test_a_run_that_is_not_finished_is_to_be_looked_at_first(
    ended: MadeUpDirectory, state: RunState, step: int
) -> None:
    ended.status(state, step)
    assert verdict_of(ended).why == ["the run is not finished, it came to step 40 of 100"]


# ---- what it has learned ----


@pytest.mark.parametrize(
    "values",
    [[0.0] * 30, [2.0 + each for each in noise(0.1, 60)], [2.0 + step / 100 for step in range(60)]],
    ids=["constant", "noise", "rising"],
)
def test_a_loss_that_does_not_fall_is_to_be_looked_at_first(ended: MadeUpDirectory, values: list[float]) -> None:
    ended.event("run_ended", 100, learned=movement_of(history(values)))
    assert verdict_of(ended).name == "look first"
    assert re.match(r"over \d+ logs the loss (did not move|moved by \S+ to the )", verdict_of(ended).why[0])


@pytest.mark.parametrize(
    "values",
    [
        [3.0 - step / 50 + each for step, each in enumerate(noise(0.1, 60))],
        [2.0 + 3 * math.exp(-step / 3) + each for step, each in enumerate(noise(0.1, 60))],
    ],
    ids=["steadily", "at the beginning"],
)
def test_a_loss_that_falls_is_good(ended: MadeUpDirectory, values: list[float]) -> None:
    ended.event("run_ended", 100, learned=movement_of(history(values)))
    assert verdict_of(ended).name == "good"


def test_a_reward_counts_before_the_loss_and_has_to_rise(ended: MadeUpDirectory) -> None:
    rising = movement_of(history([step / 30 for step in range(30)], "reward"))
    falling = movement_of(history([-step / 30 for step in range(30)], "reward"))
    assert rising["metric"] == falling["metric"] == "reward"
    ended.event("run_ended", 100, learned=falling)
    assert verdict_of(ended).name == "look first"
    ended.event("run_ended", 100, learned=rising)
    assert verdict_of(ended).name == "good"


def test_a_reward_that_fell_back_to_where_it_began_is_to_be_looked_at_first(ended: MadeUpDirectory) -> None:
    values = [min(step / 60, 1.0) if step < 90 else 0.0 for step in range(115)]
    ended.event("run_ended", 100, learned=movement_of(history(values, "reward")))
    assert verdict_of(ended).name == "look first"


def test_a_loss_that_has_gone_off_shows_in_few_logs_as_well(ended: MadeUpDirectory) -> None:
    ended.event("run_ended", 100, learned=movement_of(history([5.8, 7.0, 161.5])))
    assert verdict_of(ended).why == ["the loss is no better at the end than at the beginning"]


def test_too_few_logs_to_say_are_no_reason_to_look(ended: MadeUpDirectory) -> None:
    ended.event("run_ended", 100, learned=movement_of(history([2.0] * 19)))
    assert verdict_of(ended).name == "good"


def test_what_is_not_finite_and_what_is_no_training_log_says_nothing() -> None:
    logs = [
        {"loss": math.nan},
        {"loss": 1e308},
        {"loss": 2.0},
        {"eval_loss": 9.0},
        {"loss": "?"},
        {"loss": 1.0},
        {"train_loss": 5.0},
    ]
    assert movement_of(logs) == {"metric": "loss", "logs": 2, "first": 2.0, "last": 1.0}


def test_public_runs_that_learned_have_moved_and_a_dead_one_has_not(ended: MadeUpDirectory) -> None:
    moved = {}
    for path in CURVES.glob("*.csv"):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        if "loss" in rows[0]:
            learned = movement_of({"loss": float(each["loss"])} for each in rows if each["loss"])
            moved[path.stem] = learned["moved"] > 2 * learned["spread"]
    learned_well = ("healthy_sft_qlora", "healthy_sft_tech", "healthy_sft_tinyllama")
    assert {name: told for name, told in moved.items() if name.startswith(learned_well)}
    assert all(told for name, told in moved.items() if name.startswith(learned_well))
    assert not any(told for name, told in moved.items() if name.startswith("broken"))


# ---- the same in every form ----


def test_every_form_of_the_report_shows_the_same_verdict(ended: MadeUpDirectory) -> None:
    ended.incident(1, 9, ["skip_step"], "resolved")
    verdict = str(verdict_of(ended))
    for name, text in forms_of(ended).items():
        assert f"Verdict: {verdict}" in text, name
    assert json.loads(json.dumps(read_run(ended.path).to_dict()))["verdict"]["name"] == "look first"


def test_a_reported_incident_shows_diagnosis_and_advice_in_every_form(ended: MadeUpDirectory) -> None:
    long = "It is a long story, and all of it is told. " * 6
    reported(ended, "red_flag", diagnosis=f"{long}What it means.", remedy=f"{long}What helps.")
    for name, text in forms_of(ended).items():
        assert "What it means." in text, name
        assert "What helps." in text, name


def test_no_form_says_to_use_the_weights(ended: MadeUpDirectory) -> None:
    for text in forms_of(ended).values():
        assert "se the weights." not in text
