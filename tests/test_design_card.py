"""Code written against the interface that this library grew from: what a user typed there runs here."""

import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import OutputFault, sft_trainer
from transformers import TrainerCallback, TrainingArguments
from typer.testing import CliRunner

from self_healing import (
    FAILURE_RECIPES,
    Action,
    ConfigurationError,
    FailureType,
    HealingActions,
    HealingConfig,
    NaNDetector,
    SelfHealingCallback,
    SelfHealingTrainer,
    UnrecoverableTrainingError,
    ZClip,
    judge_log,
)
from self_healing.healers.numerics.learning_rate import LearningRateControl
from self_healing.tools.cli import app


CURVES = Path(__file__).parent / "data" / "curves"


def arguments(directory: Path, **given: Any) -> TrainingArguments:
    settings = {"per_device_train_batch_size": 8, "learning_rate": 1e-4, "max_grad_norm": 0.0, **given}
    return TrainingArguments(str(directory), use_cpu=True, report_to=[], **settings)


# ---- HealingActions ----


def test_actions_change_the_arguments_of_a_run_that_is_to_begin(tmp_path: Path) -> None:
    config = HealingConfig(api_retry_base_delay=0.0)
    engine, args = HealingActions(config, SelfHealingCallback(config)), arguments(tmp_path)
    asked = ["halve_learning_rate", "halve_batch_size", "enable_gradient_checkpointing", "enable_grad_clip"]
    returned = engine.apply([*asked, "clear_cache", "exponential_backoff"], {"loss": math.nan}, args)
    assert returned is args
    assert (args.learning_rate, args.per_device_train_batch_size, args.gradient_accumulation_steps) == (5e-5, 4, 2)
    assert (args.gradient_checkpointing, args.max_grad_norm) == (True, 1.0)
    assert engine.apply("increase_learning_rate", None, args).learning_rate == 1e-4
    assert all(line["happened"] for line in engine.results)
    assert engine.results[0]["learning_rate"] == [1e-4, 5e-5]


def test_what_needs_a_run_and_has_none_says_so_in_its_line(tmp_path: Path) -> None:
    engine, args = HealingActions(), arguments(tmp_path)
    for name in ("zclip_gradient", "save_emergency_checkpoint", "skip_batch", "log_bad_sample"):
        engine.apply(name, {}, args)
        assert "needs a run" in engine.results[-1]["why"]
    engine.apply(Action.ROLL_BACK, {}, args)
    assert str(tmp_path) in engine.results[-1]["why"]
    engine.apply("check_model_init", {}, args)
    assert "`model`" in engine.results[-1]["why"]
    assert not any(line["happened"] for line in engine.results)


def test_checks_look_at_the_model_and_the_dataset_of_the_context(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, math.nan)
    context = {"model": model, "train_dataset": [{"input_ids": []}, {"input_ids": [1]}]}
    engine = HealingActions()
    engine.apply(["check_model_init", "check_data_quality"], context, arguments(tmp_path))
    assert [line["clean"] for line in engine.results] == [False, False]


def test_limits_of_the_config_hold_for_actions_by_hand(tmp_path: Path) -> None:
    engine, args = (
        HealingActions(HealingConfig(max_lr_reductions=1)),
        arguments(tmp_path, per_device_train_batch_size=2),
    )
    engine.apply(["halve_learning_rate", "halve_learning_rate"], {}, args)
    engine.apply(["halve_batch_size", "halve_batch_size"], {}, args)
    assert (args.learning_rate, args.per_device_train_batch_size) == (5e-5, 1)
    assert "`max_lr_reductions` allows 1" in engine.results[1]["why"]
    assert "per_device_train_batch_size" in engine.results[3]["why"]


def test_an_unknown_action_does_nothing_and_names_those_there_are(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    with pytest.raises(ValueError, match=r"'halve_everything' is no action; the actions are: .*roll_back"):
        HealingActions().apply(["halve_learning_rate", "halve_everything"], {}, args)
    assert args.learning_rate == 1e-4


def test_rolling_back_without_a_run_resumes_the_next_one_from_the_newest_checkpoint(
    tmp_path: Path, tokenizer: Any
) -> None:
    sft_trainer(tmp_path, tokenizer, max_steps=2, save_steps=2, save_strategy="steps").train()
    args = HealingActions().apply("rollback_checkpoint", {}, arguments(tmp_path))
    assert args.resume_from_checkpoint == str(tmp_path / "checkpoint-2")


class AtStep(TrainerCallback):
    """Asks for actions once, as a user's own callback would."""

    def __init__(self, step: int, healing: SelfHealingCallback, *actions: str) -> None:
        self.step, self.healing, self.actions = step, healing, actions
        self.in_force: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and self.in_force is None:
            context = {"symptom": "reward collapsed", "reward": math.nan}
            self.in_force = self.healing.actions.apply(self.actions, context, args) is args


def test_actions_during_a_run_are_those_of_the_engine_that_heals(tmp_path: Path, tokenizer: Any) -> None:
    healing = SelfHealingCallback({"snapshot_interval": 2, "snapshot_verify_steps": 1})
    asked = "rollback_checkpoint", "halve_learning_rate", "enable_grad_clip", "check_model_init", "halve_batch_size"
    ask = AtStep(6, healing, *asked)
    more = {"lr_scheduler_type": "constant", "learning_rate": 1e-3, "max_grad_norm": 0.0}
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=10, callbacks=[healing, ask], **more)
    trainer.train()
    happened = {line["action"]: line["happened"] for line in healing.actions.results}
    assert happened.pop("reduce_batch_size") is False, "a loader that runs keeps its batch"
    assert all(happened.values())
    assert (ask.in_force, trainer.args.max_grad_norm) == (True, 1.0)
    assert 5e-4 in [entry.get("learning_rate") for entry in trainer.state.log_history]
    [incident] = healing.get_report().incidents
    assert (incident["symptom"], incident["outcome"]) == ("reward collapsed", "resolved")
    assert incident["actions"] == ["roll_back", "reduce_learning_rate", "enable_grad_clip", "check_model_init"]


@pytest.mark.parametrize("event", ["on_pre_optimizer_step", "on_optimizer_step", "on_step_end"])
def test_wherever_a_rollback_is_asked_for_all_steps_are_counted_that_it_takes_from_the_weights(
    tmp_path: Path, tokenizer: Any, event: str
) -> None:
    healing = SelfHealingCallback({"snapshot_interval": 2, "snapshot_verify_steps": 1})
    ask = AtStep(6, healing, "rollback_checkpoint")
    vars(ask).update({"on_step_end": lambda *_, **__: None, event: ask.on_step_end})
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=10, gradient_accumulation_steps=1, callbacks=[healing, ask])
    trainer.train()
    [updates] = {int(state["step"]) for state in trainer.optimizer.state.values()}
    assert healing.get_report().steps_lost == 10 - updates


def test_what_is_asked_for_before_healing_has_begun_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    healing = SelfHealingCallback()

    class AtTheStart(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            healing.actions.apply(["halve_batch_size", "halve_learning_rate"], {}, args)

    trainer = sft_trainer(tmp_path, tokenizer, max_steps=2, callbacks=[AtTheStart(), healing])
    trainer.train()
    assert ["begins later" in line["why"] for line in healing.actions.results] == [True, True]
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (4, 2)


def test_the_engine_of_a_wrapper_halves_the_batch_of_its_trainer(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=2)
    engine = SelfHealingTrainer(trainer).actions_engine
    assert engine is not None
    engine.apply("halve_batch_size", None, trainer.args)
    rows = list[int]()
    trainer.model.register_forward_pre_hook(
        lambda _, __, given: rows.append(len(given["input_ids"])), with_kwargs=True
    )
    trainer.train()
    assert rows == [2, 2, 2, 2] * 2


class RatesOfUpdates(TrainerCallback):
    def __init__(self) -> None:
        self.taken = list[float]()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.taken += {group["lr"] for group in optimizer.param_groups}


@pytest.mark.parametrize("whose", ["given", "given with its schedule", "left by a run before"])
def test_the_engine_of_a_wrapper_halves_the_rate_of_an_optimizer_that_exists(
    tmp_path: Path, tokenizer: Any, whose: str
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=2, learning_rate=1e-3, lr_scheduler_type="constant")
    if whose == "left by a run before":
        trainer.train()
    else:
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), 1e-3)
    if whose == "given with its schedule":
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 1.0)
    wrapper = SelfHealingTrainer(trainer)
    assert wrapper.actions_engine is not None
    wrapper.actions_engine.apply("halve_learning_rate", None, trainer.args)
    trainer.add_callback(rates := RatesOfUpdates())
    wrapper.train()
    assert rates.taken == [5e-4, 5e-4]


def test_increases_undo_reductions_and_are_limited() -> None:
    control = LearningRateControl(HealingConfig(max_lr_reductions=2))
    for _ in range(2):
        control.reduce(5)
    assert control.scale(6) < 0.5
    for _ in range(2):
        assert control.increase(7)
    assert (control.scale(8), control.reductions) == (1.0, 0)
    assert [control.increase(9) for _ in range(3)] == [True, True, False]
    assert control.scale(9) == 4.0


# ---- settings, kinds of failure, recipes ----


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("loss_spike_window", "loss_spike_factor"),
        ("grad_vanishing_threshold", "fixed bound"),
        ("zclip_enabled", "zclip_mode"),
        ("batch_reduce_factor", "oom_reduce_batch"),
        ("max_batch_reductions", "oom_reduce_batch"),
        ("api_retry_backoff_factor", "api_retry_max_delay"),
        ("emergency_checkpoint_dir", "output_dir"),
        ("save_on_spike", "on_spike"),
        ("save_on_nan", "on_nonfinite"),
        ("postmortem_path", "healing_dir"),
        ("dry_run_steps", "dry_run"),
    ],
)
def test_a_former_setting_is_refused_with_what_takes_its_place(name: str, hint: str) -> None:
    for make in (lambda: HealingConfig(**{name: 1}), lambda: HealingConfig.from_dict({name: 1})):
        with pytest.raises(ConfigurationError, match=f"`{name}` is not a setting any more.*{hint}"):
            make()


def test_settings_of_the_card_are_those_of_today() -> None:
    config = HealingConfig.aggressive(
        nan_patience=5,
        loss_spike_factor=3.0,
        divergence_patience=20,
        grad_explosion_threshold=100.0,
        zclip_z_threshold=2.5,
        zclip_ema_decay=0.97,
        lr_reduce_factor=0.5,
        max_recovery_attempts=5,
        max_lr_reductions=3,
        api_retry_base_delay=1.0,
        api_retry_max_delay=60.0,
    )
    assert HealingConfig.from_dict(config.to_dict()) == config
    assert HealingConfig.conservative().nan_patience < config.nan_patience


def test_recipes_are_found_by_the_broad_kinds_of_failure() -> None:
    kinds = ("NAN_LOSS", "LOSS_SPIKE", "DIVERGENCE", "OOM", "SLOW_CONVERGENCE", "GRADIENT_EXPLOSION")
    for name in (*kinds, "GRADIENT_VANISHING", "DATA_ERROR", "API_ERROR", "UNKNOWN"):
        recipe = FAILURE_RECIPES[FailureType[name]]
        assert recipe is FAILURE_RECIPES[FailureType(name.lower())]
        assert recipe["severity"] == recipe.severity
        assert recipe["diagnosis"]
        assert all(isinstance(action, Action) for action in recipe["actions"])
    assert all(reference.startswith("https://") for each in FAILURE_RECIPES.values() for reference in each.references)
    assert all(each["references"] for each in FAILURE_RECIPES.values())
    with pytest.raises(KeyError, match="a recipe has: diagnosis"):
        FAILURE_RECIPES[FailureType.OOM]["remedies"]


# ---- ZClip, callback, wrapper ----


def test_zclip_takes_a_norm_or_parameters() -> None:
    zclip, model = ZClip(warmup_steps=5), torch.nn.Linear(4, 1)
    usual = [zclip.update_and_clip(1.0 + 0.01 * (step % 2)) for step in range(20)]
    assert usual[:5] == [1.0, 1.01, 1.0, 1.01, 1.0]
    clipped = zclip.update_and_clip(50.0)
    assert 1.0 < clipped < 1.2
    assert zclip.clip_count == 1
    assert zclip.update_and_clip(torch.tensor(1.0)) == zclip.update_and_clip(np.float32(1.0)) == 1.0
    again = ZClip(warmup_steps=5)
    again.load_state_dict(zclip.state_dict())
    assert (again.mean, again.std, again.clip_count) == (zclip.mean, zclip.std, zclip.clip_count)
    (100 * model(torch.ones(1, 4))).sum().backward()
    zclip.update_and_clip(model.parameters())
    assert float(torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])) < 1.2


def test_a_run_is_read_from_callback_wrapper_and_report(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=6, logging_steps=1)
    wrapper = SelfHealingTrainer(trainer)
    assert (wrapper.attempt, wrapper.converged, wrapper.recovery_history) == (0, False, [])
    OutputFault(trainer.model, strike=lambda forward: forward == 5)
    wrapper.train()
    callback, report = wrapper.healing_callback, wrapper.get_report()
    assert callback is not None
    assert wrapper.actions_engine is callback.actions
    assert (wrapper.attempt, wrapper.converged) == (1, True)
    assert report["converged"] is report.converged is True
    assert (report["attempts"], report["total_recoveries"], report["nan_count"]) == (1, 1, 1)
    assert report["recovery_history"] == wrapper.recovery_history == report.incidents
    assert [each["action"] for each in report["callback_actions"]] == ["use_reexecuted_step"]
    assert callback.recovery_actions == report.callback_actions
    assert (report["lr_reductions"], report["batch_reductions"], report["zclip_total_clips"]) == (0, 0, 0)
    assert report["last_good_step"] == callback.last_good_step == 6
    assert report["postmortem_data"] is callback.postmortem_data is None
    assert str(report["status"]).startswith("The run ended at step 6 of 6")
    assert (callback.nan_count, callback.recovery_attempts, callback.lr_reductions, callback.batch_reductions) == (
        *(1, 0, 0, 0),
    )
    assert callback.loss_history == [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(callback.grad_norm_history) == 6
    assert callback.zclip is not None
    assert json.loads(json.dumps(callback.get_state())) == callback.get_state() != {}
    for copied in (copy.copy(callback), copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert copied.actions.callback is copied
    other = SelfHealingCallback()
    other.load_state(callback.get_state())
    assert other.get_state() == callback.get_state()
    with pytest.raises(KeyError):
        report["nothing_of_the_kind"]


def test_the_postmortem_of_a_run_that_was_stopped_is_read_from_the_report(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, max_steps=6)
    OutputFault(trainer.model, strike=lambda forward: forward >= 5)
    wrapper = SelfHealingTrainer(trainer, {"on_nonfinite": "raise"})
    with pytest.raises(UnrecoverableTrainingError):
        wrapper.train()
    assert wrapper.converged is False
    assert wrapper.get_report()["postmortem_data"]["step"] == 2


def test_a_dry_run_takes_its_steps_from_the_call(tmp_path: Path, tokenizer: Any) -> None:
    wrapper = SelfHealingTrainer(sft_trainer(tmp_path, tokenizer))
    assert len(wrapper.dry_run(num_steps=1).losses) == 1
    assert len(wrapper.dry_run().losses) == 2


# ---- a loop of one's own, and runs that have been ----


def test_a_nan_detector_leaves_out_steps_and_asks_for_a_rollback() -> None:
    detector = NaNDetector(action="skip", max_consecutive=2)
    assert detector.check_loss(torch.tensor(2.0), 0)
    assert not detector.check_loss(math.nan, 1)
    assert not detector.should_rollback
    assert not detector.check_loss(math.inf, 2)
    assert detector.should_rollback
    state = detector.state
    assert (state.consecutive, state.total, state.last_good_loss, state.last_good_step) == (2, 2, 2.0, 0)
    assert detector.check_loss(1.5, 3)
    assert (state.consecutive, state.last_good_step, len(state.history)) == (0, 3, 4)


def test_gradients_that_are_not_finite_count_as_one_step_each() -> None:
    detector, model = NaNDetector(max_consecutive=2), torch.nn.Linear(2, 1)
    (model(torch.ones(1, 2)) * math.inf).sum().backward()
    for step in range(2):
        # Of two micro-batches.
        assert detector.check_loss(1.0, step)
        assert detector.check_loss(1.0, step)
        assert not detector.check_gradients(model, step)
    assert (detector.should_rollback, detector.state.total, detector.state.last_good_step) == (True, 2, None)


def test_large_gradients_are_finite_and_steps_between_bad_ones_count() -> None:
    model, embedding = torch.nn.Linear(300, 300).half(), torch.nn.Embedding(4, 2, sparse=True)
    for each in model.parameters():
        each.grad = torch.full_like(each, 5e4)
    assert NaNDetector().check_gradients(model, 0)
    embedding(torch.tensor([1])).sum().backward()
    assert NaNDetector().check_gradients(embedding, 0)
    detector = NaNDetector("skip", max_consecutive=2)
    for step in range(6):
        model.weight.grad = torch.full_like(model.weight, math.nan if step % 2 else 1.0)
        assert detector.check_gradients(model, step) is (step % 2 == 0)
    assert (detector.should_rollback, detector.state.total) == (False, 3)


def test_a_nan_detector_warns_or_raises(caplog: Any) -> None:
    assert not NaNDetector("warn").check_loss(math.nan, 7)
    assert "Step 7: loss is nan" in caplog.text
    with pytest.raises(UnrecoverableTrainingError, match="Step 7"):
        NaNDetector("raise").check_loss(math.nan, 7)
    with pytest.raises(ConfigurationError, match="'ignore', but must be one of warn, skip, raise"):
        NaNDetector("ignore")  # type: ignore[arg-type]


def test_judge_tells_what_would_have_been_done_in_a_run_that_has_been() -> None:
    found = judge_log(CURVES / "broken_sft_all_zero_loss.csv")
    assert [(each.step, each.symptom, each.done) for each in found if each.acts] == [(200, "dead_loss", "stopped")]
    assert not any(each.acts for each in judge_log(CURVES / "healthy_sft_token_compressor_every10.csv"))


def test_judge_reads_what_the_trainer_wrote(tmp_path: Path) -> None:
    entries = [{"step": step, "loss": 2.0 + 0.1 * (step % 2), "grad_norm": 1.0} for step in range(1, 61)]
    entries[40]["loss"] = math.nan
    entries += [{"step": 60, "eval_loss": 2.0}, {"step": 60, "train_loss": 2.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
    result = CliRunner().invoke(app, ["judge", str(tmp_path), "--json"])
    assert result.exit_code == 1
    assert [(each["step"], each["symptom"]) for each in json.loads(result.output)] == [(41, "nonfinite_loss")]
    (tmp_path / "run" / "checkpoint-9").mkdir(parents=True)
    (tmp_path / "trainer_state.json").rename(tmp_path / "run" / "checkpoint-9" / "trainer_state.json")
    assert [each.step for each in judge_log(tmp_path / "run")] == [41]
    lines = tmp_path / "log.jsonl"
    lines.write_text("\n".join(json.dumps(entry) for entry in entries))
    assert [each.step for each in judge_log(lines)] == [41]
    for content in (b'{"log_history": null}', b'{"log_history": [1, {"loss": null}]}', b"\xff\xfe\x00", b"{", b""):
        lines.write_bytes(content)
        with pytest.raises(ValueError, match=str(lines)):
            judge_log(lines)
    empty = tmp_path / "notes.csv"
    empty.write_text("a,b\n1,2\n")
    result = CliRunner().invoke(app, ["judge", str(empty)])
    assert (result.exit_code, "holds no logged loss" in result.output) == (2, True)
