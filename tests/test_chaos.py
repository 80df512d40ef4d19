"""The faults of chaos: when they strike, how often, what they leave behind, and what is survived."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    TEXTS,
    assert_same_weights,
    common_arguments,
    grpo_trainer,
    journal,
    logged,
    sft_trainer,
    weights,
)
from datasets import Dataset
from torch import nn
from transformers import Trainer, TrainingArguments
from typer.testing import CliRunner

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.failures.recipes import FailureType
from self_healing.journal.journal import Journal
from self_healing.tools.chaos.callback import Chaos
from self_healing.tools.chaos.faults import (
    KINDS,
    FaultError,
    Ledger,
    parse_faults,
    strike_ranks,
    strike_steps,
)
from self_healing.tools.chaos.rehearsal import Survival, survived
from self_healing.tools.cli import app


def chaos(directory: Path, faults: str, **kwargs: Any) -> Chaos:
    return Chaos(faults, ledger=directory / "chaos.jsonl", **kwargs)


def strikes(directory: Path) -> list[tuple[str, int]]:
    return [(strike.kind, strike.step) for strike in Ledger(directory / "chaos.jsonl").strikes()]


def rehearsed(
    directory: Path,
    tokenizer: Any,
    faults: str,
    maker: Callable[..., Trainer] = sft_trainer,
    config: HealingConfig | None = None,
    **kwargs: Any,
) -> tuple[Trainer, list[Survival]]:
    """A run under faults, with the wrapper, and what became of each."""
    callbacks = [SelfHealingCallback(config), chaos(directory, faults)]
    trainer = maker(directory / "run", tokenizer, callbacks=callbacks, **kwargs)
    SelfHealingTrainer(trainer, sleep=lambda _: None).train()
    return trainer, survived(directory / "chaos.jsonl", directory / "run")


def unprotected(directory: Path, tokenizer: Any, faults: str, maker: Any = sft_trainer, **kwargs: Any) -> Trainer:
    """A run under faults without anything that heals them."""
    trainer = maker(directory / "run", tokenizer, callbacks=[chaos(directory, faults)], **kwargs)
    trainer.train()
    return trainer


# ---- how faults are written down ----


def test_faults_are_read_as_they_are_written() -> None:
    texts = ["nan_loss*3@random", "oom*always@4", "hang@20:seconds=0.5:where=forward:wait=native", "oom@12:rank=3"]
    assert [str(each) for each in parse_faults(", ".join(texts))] == texts
    assert [fault.kind for fault in parse_faults("all")] == list(KINDS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nan_losss@2", "There is no fault 'nan_losss'. The faults are: nan_loss, "),
        ("oom@soon", "at='soon' must be a whole number from 0, or 'random'"),
        ("oom*none", "times='none' must be a whole number from 1, or 'always'"),
        ("nan_loss:seconds=3", "nan_loss has no parameter 'seconds'; it takes rank"),
        ("hang:where=moon", "where='moon' must be one of data, forward"),
        ("bad_sample:index=-3", "index=-3 must be a whole number from 0"),
        ("hang:5", "'5' is no parameter of hang, which takes: seconds, where, wait, rank"),
        ("", "There are no faults in ''"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_faults(text)
    assert said in str(caught.value)


# ---- when they strike ----


def test_between_random_steps_there_is_room_to_recover() -> None:
    seed = 0
    before = random.getstate()
    steps = strike_steps(parse_faults("all"), 400, seed)
    assert random.getstate() == before
    assert steps == strike_steps(parse_faults("all"), 400, seed)
    assert steps != strike_steps(parse_faults("all"), 400, seed + 1)
    steps = sorted(steps)
    assert steps[0] >= 12
    assert steps[-1] < 400
    assert min(later - earlier for earlier, later in pairwise(steps)) >= 11


def test_a_run_that_is_too_short_for_them_is_refused() -> None:
    with pytest.raises(FaultError, match="15 faults at random do not fit into 10 steps"):
        strike_steps(parse_faults("all"), 10, seed=0)
    with pytest.raises(FaultError, match="cannot strike rank 4: this job has 4"):
        strike_ranks(parse_faults("oom:rank=4"), 4, seed=0)


def test_what_has_struck_does_not_strike_again_in_a_restarted_process(tmp_path: Path, tokenizer: Any) -> None:
    faults = "nan_loss@1,nan_gradient*2@2"
    rehearsed(tmp_path, tokenizer, faults, max_steps=3)
    assert strikes(tmp_path) == [("nan_loss", 1), ("nan_gradient", 2)]
    again = sft_trainer(tmp_path / "run", tokenizer, callbacks=[SelfHealingCallback(), chaos(tmp_path, faults)])
    SelfHealingTrainer(again).train()
    # The second of two has not been yet: it comes in the first step after that of the first.
    assert strikes(tmp_path) == [("nan_loss", 1), ("nan_gradient", 2), ("nan_gradient", 3)]


def test_a_strike_is_on_record_before_it_kills(tmp_path: Path, tokenizer: Any) -> None:
    child = os.fork()
    if child == 0:
        try:
            unprotected(tmp_path, tokenizer, "sigkill@2")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (strike,) = Ledger(tmp_path / "chaos.jsonl").strikes()
    assert (strike.kind, strike.step, strike.effect, strike.pid) == ("sigkill", 2, True, child)


# ---- several ranks ----


# ---- what they leave behind ----


def test_afterwards_model_data_and_trainer_are_as_they_were(tmp_path: Path, tokenizer: Any) -> None:
    faults = "nan_loss@1,network_error@2:where=data,bad_sample@50,poison_samples@50,disk_full@50"
    reward = "network_error@60"
    trainer = grpo_trainer(
        tmp_path / "run", tokenizer, callbacks=[SelfHealingCallback(), chaos(tmp_path, f"{faults},{reward}")]
    )
    hooks = [
        (module._forward_hooks, module._forward_pre_hooks, module._forward_hooks_with_kwargs)
        for module in trainer.model.modules()
    ]
    attributes, callbacks = set(vars(trainer)), list(trainer.callback_handler.callbacks)
    rewards, kind = list(trainer.reward_funcs), type(trainer.train_dataset)
    SelfHealingTrainer(trainer, sleep=lambda _: None).train()

    assert strikes(tmp_path)[0] == ("nan_loss", 1)
    assert all(not each for entry in hooks for each in entry)
    assert all(not (parameter._backward_hooks or {}) for parameter in trainer.model.parameters())
    assert "save_model" not in vars(trainer)
    assert attributes <= set(vars(trainer))
    assert trainer.callback_handler.callbacks == callbacks
    assert trainer.reward_funcs == rewards
    assert type(trainer.train_dataset) is kind


def test_faults_that_never_strike_change_nothing(tmp_path: Path, tokenizer: Any) -> None:
    untouched = sft_trainer(tmp_path / "plain", tokenizer)
    untouched.train()
    everything = ",".join(f"{kind}@900" for kind in KINDS)
    trainer = unprotected(tmp_path, tokenizer, everything)
    assert strikes(tmp_path) == []
    assert_same_weights(weights(trainer), weights(untouched))
    assert logged(trainer) == logged(untouched)


# ---- what they do ----


def test_a_nan_reaches_the_loss_of_any_network(tmp_path: Path, tokenizer: Any) -> None:
    """No norm, no blocks, no `model.model`."""

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.second(torch.tanh(self.first(x)))
            return {"loss": (out.squeeze(-1) - labels).square().mean(), "logits": out}

    data = Dataset.from_list([{"x": [float(i), 1.0, -float(i)], "labels": i / 10} for i in range(64)])
    trainer = Trainer(
        Regression(),
        TrainingArguments(**common_arguments(tmp_path / "run")),
        train_dataset=data,
        callbacks=[SelfHealingCallback(), chaos(tmp_path, "nan_loss@1,poison_samples@3")],
    )
    trainer.train()
    assert all(row.effect and row.incident for row in survived(tmp_path / "chaos.jsonl", tmp_path / "run"))


def test_a_poison_sample_stays_one(tmp_path: Path, tokenizer: Any) -> None:
    # Skipped, not quarantined: it comes again.
    config = HealingConfig(on_nonfinite="skip", nan_patience=10, max_skipped_fraction=1.0)
    faults = "poison_samples@1:rows=2"
    trainer, rows = rehearsed(tmp_path, tokenizer, faults, config=config, texts=TEXTS[:16], max_steps=8)
    assert trainer.state.global_step == 8
    assert len(rows[0].detail["rows"]) == 2
    # Of 16 rows in steps of 8, they come in every epoch of two steps.
    assert {event["step"] // 2 for event in journal(tmp_path / "run", "detected")} == {0, 1, 2, 3}


# ---- what is survived ----


def test_faults_inside_of_a_step_are_survived(tmp_path: Path, tokenizer: Any) -> None:
    faults = "nan_loss@2,nan_gradient@4,inf_gradient@6,network_error@7,oom@8,poison_samples@9"
    config = HealingConfig(api_retry_base_delay=0.01)
    trainer, rows = rehearsed(tmp_path, tokenizer, faults, grpo_trainer, config=config, max_steps=10)
    assert trainer.state.global_step == 10
    assert len(rows) == 6
    assert all(row.effect and row.incident and row.survived for row in rows), rows
    assert len({row.incident for row in rows}) == 6


def events_of(directory: Path, failure: FailureType, outcome: str | None = "resolved", step: int = 4) -> None:
    record = Journal(directory, HealingConfig(), f"run-{failure}")
    incident = record.open(step, "seen", {})
    record.diagnosed(incident, failure, "found", {})
    if outcome is not None:
        record.closed(incident, outcome)


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        ("sigkill", FailureType.PROCESS_DIED),
        ("bad_sample", FailureType.BAD_DATA),
        ("disk_full", FailureType.DISK),
    ],
)
def test_each_fault_is_matched_with_its_incident(kind: str, failure: FailureType, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "chaos.jsonl")
    ledger.write("strike", fault=f"{kind}@4", kind=kind, step=4, count=1, detail={})
    (row,) = survived(ledger, tmp_path / "run")
    assert (row.incident, row.outcome, row.survived) == (None, "no incident", False)
    events_of(tmp_path / "run", FailureType.USER_CODE)
    events_of(tmp_path / "run", failure)
    (row,) = survived(ledger, tmp_path / "run")
    assert row.incident == f"run-{failure}-001"
    assert (row.outcome, row.survived) == ("resolved", True)


# ---- the command line ----


def test_a_script_that_is_not_there_and_faults_that_are_none_are_refused(tmp_path: Path) -> None:
    runner, script = CliRunner(), tmp_path / "train.py"
    script.touch()
    missing = runner.invoke(app, ["chaos", str(tmp_path / "nothing.py")])
    assert missing.exit_code == 2
    assert "There is no script" in missing.stderr
    wrong = runner.invoke(app, ["chaos", str(script), "--faults", "earthquake"])
    assert wrong.exit_code == 2
    assert "There is no fault 'earthquake'" in wrong.stderr
    (tmp_path / "old.jsonl").write_text("{}\n")
    old = runner.invoke(app, ["chaos", str(script), "--ledger", str(tmp_path / "old.jsonl")])
    assert old.exit_code == 2
    assert "holds an earlier rehearsal" in old.stderr


def test_the_table_of_faults_in_the_docs_is_up_to_date() -> None:
    page = (Path(__file__).parent.parent / "docs" / "chaos.md").read_text(encoding="utf-8")
    for name, kind in KINDS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert kind.what in row
        assert all(f"`{parameter}" in row for parameter in kind.parameters)
        assert row.endswith("| calls |" if kind.counts_calls else "| steps |")
