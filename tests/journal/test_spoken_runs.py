"""What real runs say in the terminal, from their first line to their last, past the Trainer's own progress bar."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    OutputFault,
    RaisingAt,
    RaisingForward,
    dpo_trainer,
    grpo_trainer,
    journal,
    lost_connection,
    plain_trainer,
    reward_trainer,
    sft_trainer,
    tiny_model,
)
from replayed_terminal import terminal_of
from transformers import ProgressCallback, Trainer, TrainerCallback

from self_healing import (
    HealingConfig,
    SelfHealingCallback,
    SelfHealingTrainer,
    UnrecoverableTrainingError,
)
from self_healing.journal.terminal import Terminal
from self_healing.tools.anywhere.entering import environment, way_in
from self_healing.tools.anywhere.hook import VARIABLE


def speakers() -> list[logging.Handler]:
    return [each for each in logging.getLogger("self_healing").handlers if isinstance(each, Terminal)]


@pytest.fixture(autouse=True)
def _nobody_speaks_after_a_run() -> Any:
    yield
    assert speakers() == []


def own_lines(shown: list[str]) -> list[str]:
    return [line for line in shown if line.startswith("[self_healing")]


def said(train: Callable[[], Any]) -> list[str]:
    """What training says to a pipe."""
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        train()
    return own_lines(re.split("[\r\n]", stream.getvalue()))


def without_losses(lines: list[str]) -> list[str]:
    return [re.sub(r"Loss \S+ to \S+:", "Loss L to L:", line) for line in lines]


def ended_well(step: int) -> str:
    return (
        f"[self_healing] ended at step {step} of {step}: 0 incidents. Good: no fault was found. Loss L to L: evaluate "
        "the weights before you use them"
    )


def healer_of(trainer: Any, **settings: Any) -> SelfHealingTrainer:
    return SelfHealingTrainer(trainer, HealingConfig(api_retry_base_delay=0.01, **settings))


INSIDE = "NaN/Inf, spikes, divergence, out of memory, bad samples, failed saves"
ON = f"[self_healing] on: heals {INSIDE}, hangs, exceptions."


def test_no_bar_is_torn_where_a_step_is_healed_and_train_entered_again(tmp_path: Path, tokenizer: Any) -> None:
    with terminal_of(400) as shown:
        trainer = plain_trainer(tmp_path / "run", tokenizer, disable_tqdm=False, max_steps=8)
        OutputFault(trainer.model, lambda forward: forward == 5)
        RaisingForward(trainer.model, lambda forward: forward == 15, lost_connection)
        healer_of(trainer).train()
    lines = [line for line in shown.lines if line]
    begin, healed, entered_again, end = own_lines(lines)
    assert begin == f"{ON} Journal: {tmp_path}/run/healing_events.jsonl"
    assert healed.startswith("[self_healing] step 2: NaN/Inf in loss, transient -> computed again; 0 steps lost")
    assert entered_again.startswith("[self_healing] step 5: ConnectionError, network -> saved, waits, then resumes;")
    assert end.startswith("[self_healing] ended at step 8 of 8: 2 incidents (1 NaN/Inf transient, 1 network), 2 hea")
    assert re.search(r" s\. Good: what was found was healed\. Loss \S+ to \S+: evaluate the weights before", end)
    assert end.endswith(f" use them. More: self-healing report {tmp_path}/run")
    # What is left are the logs, each in a line of its own, and the one bar, at its end.
    others = lines[lines.index(begin) :]
    others = [line for line in others if line not in (begin, healed, entered_again, end)]
    assert [line for line in others if not line.startswith("{'") and "%|" not in line] == []
    (bar,) = [line for line in others if re.match(r" *\d+%\|", line)]
    assert bar.startswith("100%|")
    assert "8/8" in bar


def test_a_healthy_run_says_what_it_heals_and_that_nothing_happened(tmp_path: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(tmp_path, tokenizer, max_steps=2)
    assert without_losses(said(healer_of(trainer).train)) == [
        f"{ON} Journal: {tmp_path}/healing_events.jsonl",
        ended_well(2),
    ]


class StopsAtOnce(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


def said_of_rules(build: Callable[..., Trainer], directory: Path, tokenizer: Any, **arguments: Any) -> list[str]:
    settings = HealingConfig(rules_file=arguments.pop("rules_file", None))
    trainer = build(directory, tokenizer, callbacks=[SelfHealingCallback(settings), StopsAtOnce()], **arguments)
    begin, *between, end = said(trainer.train)
    assert "] on: heals" in begin
    assert "] ended at step 1 of" in end
    return between


ONE_EPOCH = {
    "max_steps": -1,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
}
TOO_SELDOM: list[tuple[Callable[..., Trainer], dict[str, Any], str]] = [
    (
        sft_trainer,
        {"max_steps": 100, "logging_steps": 500},
        "1 metric rule cannot fire: this run logs 0 times in 100 steps (sft_grad_norm_high needs 3)",
    ),
    (
        grpo_trainer,
        {"max_steps": 600, "logging_steps": 20},
        "3 metric rules cannot fire: this run logs 30 times in 600 steps (reward_std_mostly_zero needs 40, "
        "most_steps_without_signal needs 40, reward_constant needs 50)",
    ),
    (
        grpo_trainer,
        {"max_steps": 100, "logging_steps": 500, "logging_first_step": True},
        "16 metric rules cannot fire: this run logs 1 time in 100 steps (reward_stuck_at_zero needs 3, "
        "reward_std_zero needs 3, no_group_has_signal needs 3, ...)",
    ),
    *(
        (
            dpo_trainer,
            {**ONE_EPOCH, **arguments},
            f"2 metric rules cannot fire: this run logs {times} in 64 steps (dpo_not_training needs 3, dpo_saturated "
            "needs 3)",
        )
        for times, arguments in (
            ("0 times", {"logging_strategy": "no"}),
            ("1 time", {"logging_strategy": "epoch"}),
            ("2 times", {"logging_steps": 0.5}),
        )
    ),
]


@pytest.mark.parametrize(("build", "arguments", "line"), TOO_SELDOM)
def test_rules_that_cannot_fire_because_the_run_logs_too_seldom_are_named(
    build: Callable[..., Trainer], arguments: dict[str, Any], line: str, tmp_path: Path, tokenizer: Any
) -> None:
    assert said_of_rules(build, tmp_path, tokenizer, **arguments) == [
        f'[self_healing] {line}. Set logging_strategy="steps", logging_steps=10.'
    ]


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        # As often as TRL logs: the loss plateau of SFT has to wait for 102 logs all the same.
        (sft_trainer, {"max_steps": 300, "logging_steps": 10}),
        # A short run: with more logs it would have no rule that can fire, either.
        (grpo_trainer, {"max_steps": 20, "logging_steps": 500}),
        # Enough for all but the rule that is only noted.
        (sft_trainer, {"max_steps": 2000, "logging_steps": 50}),
        # It logs nothing that a rule reads.
        (plain_trainer, {"max_steps": 100, "logging_steps": 500}),
        # Its one rule reads evaluations.
        (reward_trainer, {"max_steps": 100, "logging_steps": 500}),
    ],
)
def test_no_rule_is_spoken_of_in_an_ordinary_run(
    build: Callable[..., Trainer], arguments: dict[str, Any], tmp_path: Path, tokenizer: Any
) -> None:
    assert said_of_rules(build, tmp_path, tokenizer, **arguments) == []


def test_a_rule_of_the_users_own_is_named_where_it_reads_what_the_trainer_logs(tmp_path: Path, tokenizer: Any) -> None:
    rule = '[{}]\nmetric = "{}"\nred_flag = [{{ is = "above", value = 9.0 }}]\n'
    own = tmp_path / "rules.toml"
    own.write_text(rule.format("high_loss", "loss") + rule.format("high_score", "my_score"))
    (line,) = said_of_rules(
        plain_trainer, tmp_path / "run", tokenizer, max_steps=100, logging_steps=500, rules_file=str(own)
    )
    assert "] 1 metric rule cannot fire: this run logs 0 times in 100 steps (high_loss needs 3)." in line


class AsJson(logging.Formatter):
    """As Ray's: what is not of every record is dumped as it is."""

    def format(self, record: logging.LogRecord) -> str:
        usual = vars(logging.makeLogRecord({}))
        added = {name: value for name, value in vars(record).items() if name not in usual}
        return json.dumps({"message": record.getMessage(), **added})


def test_each_incident_reaches_a_log_in_json(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneThatRaises(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise ValueError("a broken row")
            return rows[index]

    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(AsJson())
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    trainer = plain_trainer(tmp_path / "run", tokenizer, max_steps=12)
    rows = trainer.train_dataset
    trainer.train_dataset = OneThatRaises()
    OutputFault(trainer.model, lambda forward: forward == 5)
    RaisingForward(trainer.model, lambda forward: forward == 15, lost_connection)
    healer_of(trainer).train()
    assert "Logging error" not in capsys.readouterr().err
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    told = [line["incident"] for line in lines if "incident" in line]
    assert {each["failure"] for each in told} == {"nonfinite_transient", "network", "bad_data"}
    assert {each["incident"] for each in told} == {each["incident"] for each in journal(tmp_path / "run", "detected")}


def test_a_storage_of_the_hub_that_does_not_answer_is_waited_for(tmp_path: Path, tokenizer: Any) -> None:
    text = "Data processing error: CAS service error : ReqwestMiddleware Error: Request failed after 5 retries"
    trainer = plain_trainer(tmp_path, tokenizer, max_steps=4)
    RaisingForward(trainer.model, lambda forward: forward == 5, lambda: RuntimeError(text))
    _, waited, end = said(healer_of(trainer).train)
    assert "step 2: RuntimeError, network -> saved, waits, then resumes; 0 steps lost" in waited
    assert "ended at step 4 of 4: 1 incident (1 network), 1 healed" in end


@pytest.mark.parametrize(("strategy", "told"), [("steps", True), ("no", False)])
def test_checkpoints_without_optimizer_state_are_spoken_of_at_the_start(
    tmp_path: Path, tokenizer: Any, strategy: str, told: bool
) -> None:
    trainer = plain_trainer(tmp_path, tokenizer, max_steps=1, save_only_model=True, save_strategy=strategy)
    begin = said(healer_of(trainer).train)[0]
    line = "killed, it cannot go on from its checkpoints (save_only_model=True; please set it to False). Journal: "
    assert (line in begin) is told


def test_a_preset_that_is_in_force_is_named(tmp_path: Path, tokenizer: Any) -> None:
    healer = SelfHealingTrainer(plain_trainer(tmp_path, tokenizer, max_steps=1), HealingConfig.aggressive())
    assert said(healer.train)[0].startswith("[self_healing] on (preset aggressive): heals NaN/Inf")


def test_trainable_weights_that_are_in_no_optimizer_are_named(tmp_path: Path, tokenizer: Any) -> None:
    model = tiny_model(tokenizer)
    some = [weight for name, weight in model.named_parameters() if "norm" not in name]
    optimizers = {"optimizers": (torch.optim.AdamW(some), None)}
    trainer = plain_trainer(
        tmp_path, tokenizer, model=model, max_steps=1, callbacks=[SelfHealingCallback()], trainer_kwargs=optimizers
    )
    assert said(trainer.train)[0] == (
        "[self_healing] 5 trainable tensors are in no optimizer, so nothing trains them: "
        "model.layers.0.input_layernorm.weight, model.layers.0.post_attention_layernorm.weight, "
        "model.layers.1.input_layernorm.weight, .... Was the model changed after the optimizer was made? Please let "
        "the Trainer make it, or give it all weights that are to be trained."
    )


def test_a_second_callback_is_spoken_of_by_name(tmp_path: Path, tokenizer: Any) -> None:
    twice = [SelfHealingCallback(), SelfHealingCallback()]
    trainer = plain_trainer(tmp_path, tokenizer, max_steps=1, callbacks=twice)
    assert [line for line in said(trainer.train) if "more than one SelfHealingCallback" in line] == [
        "[self_healing] The trainer has more than one SelfHealingCallback; only the first one heals. Please remove "
        "the rest."
    ]


def test_settings_that_give_way_are_spoken_of_by_name(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = plain_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()])
    (line,) = said(lambda: SelfHealingTrainer(trainer, HealingConfig(nan_patience=7)))
    assert line.startswith("[self_healing] The trainer's SelfHealingCallback had other settings than")
    monkeypatch.setenv("SELF_HEALING_VERBOSITY", "error")
    assert said(lambda: SelfHealingTrainer(trainer, HealingConfig(nan_patience=8))) == []


def test_settings_of_the_program_are_spoken_of_by_name(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, environment(HealingConfig.aggressive())[VARIABLE])
    trainer = plain_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()])
    assert said(lambda: way_in(trainer, Trainer.train, (), {})) == [
        "[self_healing] The program has its own SelfHealingCallback. Its settings are in force, and those of "
        "`self-healing run` are not."
    ]


def test_the_callback_says_what_needs_the_wrapper(tmp_path: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(tmp_path, tokenizer, max_steps=2, callbacks=[SelfHealingCallback()])
    assert without_losses(said(trainer.train)) == [
        "[self_healing] on: heals NaN/Inf, spikes, divergence, out of memory, bad samples, failed saves; with "
        f"SelfHealingTrainer also hangs, exceptions. Journal: {tmp_path}/healing_events.jsonl",
        ended_well(2),
    ]


class RaisingOn(TrainerCallback):
    """Raises in one event, once."""

    def __init__(self, event: str) -> None:
        self.times = 0
        setattr(self, event, self._raise_once)

    def _raise_once(self, *args: Any, **kwargs: Any) -> None:
        self.times += 1
        if self.times == 1:
            raise ValueError("no such project")


@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin"])
def test_a_run_that_another_callback_ends_before_its_first_step_is_not_spoken_for_any_longer(
    tmp_path: Path, tokenizer: Any, event: str
) -> None:
    trainer = plain_trainer(tmp_path, tokenizer, max_steps=2, callbacks=[SelfHealingCallback(), RaisingOn(event)])

    def fail() -> None:
        with pytest.raises(ValueError, match="no such project"):
            trainer.train()

    assert [line.partition(":")[0] for line in said(fail)] == ["[self_healing] on"]
    assert speakers() == []
    assert [line.partition(":")[0] for line in said(trainer.train)] == [
        "[self_healing] on",
        "[self_healing] ended at step 2 of 2",
    ]


def test_what_is_switched_off_is_named_with_its_setting(tmp_path: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(tmp_path, tokenizer, max_steps=1)
    begin, _ = said(healer_of(trainer, on_oom="raise", on_hang="off").train)
    assert "; not out of memory (on_oom='raise'), hangs (on_hang='off'). Journal" in begin


def test_both_ways_of_healing_at_once_speak_with_one_voice(tmp_path: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(tmp_path, tokenizer, max_steps=1, callbacks=[SelfHealingCallback()])
    assert len(said(SelfHealingTrainer(trainer).train)) == 2


def test_the_command_at_the_end_can_be_pasted_into_a_shell(tmp_path: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(tmp_path / "my run; 2", tokenizer, max_steps=2)
    OutputFault(trainer.model, lambda forward: forward == 2)
    end = said(healer_of(trainer).train)[-1]
    assert end.endswith(f". More: self-healing report '{tmp_path}/my run; 2'")


def test_a_program_may_make_it_quiet(tmp_path: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(tmp_path, tokenizer, max_steps=3)
    OutputFault(trainer.model, lambda forward: forward == 3)
    logger = logging.getLogger("self_healing")
    logger.setLevel(logging.ERROR)
    try:
        assert said(healer_of(trainer).train) == []
    finally:
        logger.setLevel(logging.NOTSET)
    assert len(journal(tmp_path, "detected")) == 1


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_log"])
def test_an_exception_that_only_the_epoch_sees_ends_with_a_line(event: str, tmp_path: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(tmp_path, tokenizer, max_steps=4, callbacks=[SelfHealingCallback(), RaisingAt(event, 2)])

    def train() -> None:
        with pytest.raises(ConnectionError):
            trainer.train()

    assert said(train)[1:] == ["[self_healing] stopped at step 2 of 4 by ConnectionError: 0 incidents"]


@pytest.mark.parametrize("wrapped", [False, True], ids=["callback", "wrapper"])
def test_a_run_that_cannot_be_healed_ends_with_a_line(wrapped: bool, tmp_path: Path, tokenizer: Any) -> None:
    model = tiny_model(tokenizer)
    OutputFault(model, lambda forward: True)
    callbacks = None if wrapped else [SelfHealingCallback()]
    trainer = plain_trainer(tmp_path, tokenizer, model=model, callbacks=callbacks)

    def train() -> None:
        with pytest.raises(UnrecoverableTrainingError):
            (healer_of(trainer) if wrapped else trainer).train()

    _, stopped, end = said(train)
    assert stopped.startswith("[self_healing] step 0: NaN/Inf in loss, ")
    assert " -> run stopped; " in stopped
    assert end.startswith("[self_healing] stopped at step 0 of 6 by UnrecoverableTrainingError: 1 incident (")
    assert ", 1 fatal, " in end


def test_ctrl_c_is_no_error(tmp_path: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(tmp_path, tokenizer)
    RaisingForward(trainer.model, lambda forward: forward == 3, KeyboardInterrupt)

    def train() -> None:
        with pytest.raises(KeyboardInterrupt):
            healer_of(trainer).train()

    assert said(train)[-1] == "[self_healing] left at step 1 of 6 (KeyboardInterrupt): 0 incidents"


def test_settings_that_do_not_go_with_a_model_leave_nobody_speaking(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "self_healing.callback.enter", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("a bug of ours"))
    )
    trainer = plain_trainer(tmp_path, tokenizer, max_steps=1, callbacks=[SelfHealingCallback()])
    lines = said(trainer.train)
    assert lines[0] == "[self_healing] self_healing could not attach; training goes on without it."
    assert int(trainer.state.global_step) == 1


def test_a_trainer_within_a_run_shares_its_terminal(tmp_path: Path, tokenizer: Any) -> None:
    class Within(ProgressCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                SelfHealingTrainer(plain_trainer(tmp_path / "inner", tokenizer, max_steps=1)).train()

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None: ...

        def on_train_end(self, *args: Any, **kwargs: Any) -> None: ...

    outer = plain_trainer(tmp_path / "outer", tokenizer, max_steps=2)
    outer.add_callback(Within())
    lines = said(SelfHealingTrainer(outer).train)
    assert len(lines) == 4
    assert lines[1].endswith("inner/healing_events.jsonl")
    assert without_losses(lines[2:]) == [ended_well(1).replace("Loss L to L: evaluate", "Evaluate"), ended_well(2)]


def test_a_terminal_that_cannot_be_written_to_ends_no_run(tmp_path: Path, tokenizer: Any) -> None:
    gone = io.StringIO()
    trainer = plain_trainer(tmp_path, tokenizer, max_steps=2)
    gone.close()
    with contextlib.redirect_stderr(gone):
        healer_of(trainer).train()
    assert int(trainer.state.global_step) == 2


class Pager(logging.Handler):
    """Sends messages to somebody's phone, when there is a network."""

    def emit(self, record: logging.LogRecord) -> None:
        raise ConnectionError("the pager is away")


@pytest.mark.parametrize("wrapped", [False, True], ids=["callback", "wrapper"])
def test_a_handler_of_the_program_that_raises_ends_no_run(tmp_path: Path, tokenizer: Any, wrapped: bool) -> None:
    healing = [] if wrapped else [SelfHealingCallback()]
    trainer = plain_trainer(tmp_path, tokenizer, max_steps=4, callbacks=healing)
    OutputFault(trainer.model, strike=lambda forward: forward == 2)
    pager = Pager()
    logging.getLogger("self_healing").addHandler(pager)
    try:
        (healer_of(trainer) if wrapped else trainer).train()
    finally:
        logging.getLogger("self_healing").removeHandler(pager)
    assert int(trainer.state.global_step) == 4
    assert [event["outcome"] for event in journal(tmp_path, "outcome")] == ["resolved"]


def test_the_panels_of_rich_are_left_before_train_is_entered_again(tmp_path: Path, tokenizer: Any) -> None:
    trl = pytest.importorskip("trl")
    with terminal_of(120) as shown:
        callback = trl.RichProgressCallback()
        trainer = plain_trainer(tmp_path, tokenizer, disable_tqdm=False, max_steps=4, callbacks=[callback])
        trainer.remove_callback(ProgressCallback)
        RaisingForward(trainer.model, lambda forward: forward == 5, lost_connection)
        lives: list[Any] = []
        begin = callback.on_train_begin

        def on_train_begin(*args: Any, **kwargs: Any) -> None:
            begin(*args, **kwargs)
            lives.append(callback.rich_group)

        callback.on_train_begin = on_train_begin
        healer_of(trainer).train()
    assert [live.is_started for live in lives] == [False, False]
    assert len([line for line in shown.lines if line.startswith("[self_healing] step 2: ConnectionError")]) == 1


def test_what_a_dry_run_finds_is_said_behind_the_name_as_well(tmp_path: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(tmp_path, tokenizer)
    trainer.train_dataset = trainer.train_dataset.map(lambda row: {"labels": [-100] * len(row["labels"])})
    lines = said(lambda: SelfHealingTrainer(trainer).dry_run(1))
    assert lines[0].startswith("[self_healing] Before the dry run, in the training data:")
