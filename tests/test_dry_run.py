"""A dry run leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    TEXTS,
    TRAINERS,
    RaisingForward,
    adapter_trainer,
    assert_same_weights,
    dpo_trainer,
    grpo_trainer,
    logged,
    plain_trainer,
    rloo_trainer,
    scaled_half_precision_trainer,
    sft_trainer,
    slowly,
    text_rows,
    tiny_model,
    weights,
)
from datasets import Dataset
from transformers import TrainerCallback

from self_healing import SelfHealingTrainer
from self_healing.healers import dry_run


@pytest.mark.parametrize("name", ["SFTTrainer", "GRPOTrainer", *slowly("Trainer", "DPOTrainer")])
def test_training_after_a_dry_run_is_training_without_one(tmp_path: Path, tokenizer: Any, name: str) -> None:
    plain = TRAINERS[name](tmp_path / "plain", tokenizer, max_steps=4)
    plain.train()
    trainer = TRAINERS[name](tmp_path / "healed", tokenizer, max_steps=4)
    wrapper = SelfHealingTrainer(trainer)
    report = wrapper.dry_run(2)
    wrapper.train()
    assert report.steps == 2
    assert len(report.losses) == 2
    assert report.finite
    assert report.seconds_per_step > 0
    assert report.data is not None
    assert {finding.kind for finding in report.data.findings} <= {"duplicates"}
    assert report.model is not None
    assert report.model.clean
    assert_same_weights(weights(trainer), weights(plain))
    assert logged(trainer) == logged(plain)


def test_it_writes_no_file_and_tells_no_callback(tmp_path: Path, tokenizer: Any) -> None:
    told: list[str] = []

    class Listener(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            told.append("step")

    trainer = sft_trainer(tmp_path / "run", tokenizer, callbacks=[Listener()], save_strategy="steps", save_steps=1)
    SelfHealingTrainer(trainer).dry_run()
    assert not told
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_an_exception_in_it_leaves_no_trace_either(tmp_path: Path, tokenizer: Any) -> None:
    plain = sft_trainer(tmp_path / "plain", tokenizer)
    plain.train()
    trainer = sft_trainer(tmp_path / "healed", tokenizer)
    fault = RaisingForward(trainer.model, lambda forward: forward == 4, lambda: ValueError("bug"))
    with pytest.raises(ValueError, match="bug"):
        SelfHealingTrainer(trainer).dry_run(3)
    fault.handle.remove()
    SelfHealingTrainer(trainer).train()
    assert_same_weights(weights(trainer), weights(plain))


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        pytest.param(
            sft_trainer, {"bf16": True, "neftune_noise_alpha": 5.0}, id="bf16 and NEFTune", marks=pytest.mark.slow
        ),
        pytest.param(scaled_half_precision_trainer, {}, id="fp16 with a scaler"),
        pytest.param(
            adapter_trainer, {"bf16": True, "gradient_checkpointing": True}, id="LoRA", marks=pytest.mark.slow
        ),
        pytest.param(sft_trainer, {"torch_compile": True}, id="torch.compile", marks=pytest.mark.slow),
    ],
)
def test_training_after_a_dry_run_is_prepared_as_without_one(
    tmp_path: Path, tokenizer: Any, build: Any, arguments: dict[str, Any]
) -> None:
    plain = build(tmp_path / "plain", tokenizer, max_steps=4, **arguments)
    plain.train()
    # Shapes that were compiled for one trainer would decide what is compiled for the next.
    torch._dynamo.reset()
    trainer = build(tmp_path / "healed", tokenizer, max_steps=4, **arguments)
    wrapper = SelfHealingTrainer(trainer)
    wrapper.dry_run(2)
    wrapper.train()
    assert_same_weights(weights(trainer), weights(plain))
    assert type(trainer.model_wrapped) is type(plain.model_wrapped)
    scaler = trainer.accelerator.scaler
    assert scaler is None or scaler.state_dict() == plain.accelerator.scaler.state_dict()


def test_a_model_that_cannot_be_put_back_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="sharded"):
        SelfHealingTrainer(trainer).dry_run(1)


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer)
    trainer.args.optim = "galore_adamw_layerwise"
    with pytest.raises(ValueError, match="cannot undo what galore_adamw_layerwise updates in the backward pass"):
        SelfHealingTrainer(trainer).dry_run(1)


def test_it_says_what_is_wrong_with_the_training_rows_and_the_weights(tmp_path: Path, tokenizer: Any) -> None:
    model = tiny_model(tokenizer)
    torch.nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
    trainer = sft_trainer(tmp_path, tokenizer, texts=[*TEXTS[:3], "", *TEXTS[3:8]], model=model)
    report = SelfHealingTrainer(trainer).dry_run(1)
    assert report.data is not None
    assert report.model is not None
    assert [(finding.kind, finding.examples) for finding in report.data.findings] == [("empty_rows", [3])]
    assert [finding.kind for finding in report.model.findings] == ["all_zero_tensors"]
    assert report.finite


def test_a_stream_is_looked_at_and_then_trained_on_from_its_beginning(tmp_path: Path, tokenizer: Any) -> None:
    def streaming_trainer(directory: str) -> Any:
        trainer = plain_trainer(tmp_path / directory, tokenizer)
        trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
        return trainer

    plain = streaming_trainer("plain")
    plain.train()
    healed = streaming_trainer("healed")
    report = SelfHealingTrainer(healed).dry_run(2)
    assert report.data is not None
    assert report.data.looked_at == len(TEXTS)
    healed.train()
    assert_same_weights(weights(healed), weights(plain))


# ---- what a person would look at before a long run ----


def advice_of(trainer: Any, steps: int = 1) -> str:
    return "\n".join(SelfHealingTrainer(trainer).dry_run(steps).advice)


# As many do it: nothing to be said about it.
USUAL = {"learning_rate": 2e-5, "warmup_steps": 0.05, "weight_decay": 0.01, "max_steps": 100, "eval_strategy": "steps"}
HELD_OUT = {"trainer_kwargs": {"eval_dataset": text_rows(*TEXTS[:4])}}


def test_there_is_no_advice_where_all_is_usual(tmp_path: Path, tokenizer: Any) -> None:
    assert advice_of(sft_trainer(tmp_path, tokenizer, **USUAL, **HELD_OUT)) == ""


@pytest.mark.parametrize(
    ("unusual", "advice"),
    [
        ({"learning_rate": 1e-3}, "learning_rate=0.001: usual for sft with full training is 1e-5 to 5e-5."),
        ({"warmup_steps": 40}, "The warm-up is 40 % of 100 steps: usual is 5 to 10 % (warmup_steps=0.05)."),
        ({"weight_decay": 0.5}, "weight_decay=0.5: usual is 0 to 0.01"),
        ({"eval_strategy": "no"}, "Nothing is evaluated, so overfitting will not show."),
        ({"logging_steps": 500}, "1 metric rule cannot fire: this run logs 0 times in 100 steps"),
        # Its own length is known from the part of an epoch that the steps were: 8 of them to each of 5 epochs.
        ({"max_steps": -1, "num_train_epochs": 5, "warmup_steps": 20}, "The warm-up is 50 % of 40 steps"),
    ],
    ids=str,
)
def test_a_setting_out_of_the_usual_range_is_named_with_the_range(
    unusual: dict[str, Any], advice: str, tmp_path: Path, tokenizer: Any
) -> None:
    said = advice_of(sft_trainer(tmp_path, tokenizer, **{**USUAL, **unusual}, **HELD_OUT))
    assert said.startswith(advice)
    assert "\n" not in said


def test_the_rate_of_full_training_is_too_low_for_lora(tmp_path: Path, tokenizer: Any) -> None:
    said = advice_of(adapter_trainer(tmp_path, tokenizer, **{**USUAL, "eval_strategy": "no"}))
    assert said.startswith("learning_rate=2e-05: usual for sft with LoRA is 1e-4 to 5e-4.")


def test_two_rows_are_shown_with_the_trained_tokens_marked(tmp_path: Path, tokenizer: Any) -> None:
    rows = {"prompt": ["the row"] * 8, "completion": [" reads it"] * 8}
    report = SelfHealingTrainer(sft_trainer(tmp_path, tokenizer, dataset=Dataset.from_dict(rows))).dry_run(1)
    assert report.rows == ["the row[[ reads it<eos>]]"] * 2
    assert report.trained_share == pytest.approx(3 / 5)
    assert "60 % of the tokens are trained, those in [[ ]]:\n" + "\n".join(report.rows) in str(report)


def test_of_preferences_a_pair_is_shown(tmp_path: Path, tokenizer: Any) -> None:
    chosen, rejected = SelfHealingTrainer(dpo_trainer(tmp_path, tokenizer)).dry_run(1).rows
    assert chosen.partition("[[")[0] == rejected.partition("[[")[0]
    assert chosen != rejected


def test_the_effective_batch_is_one_line(tmp_path: Path, tokenizer: Any) -> None:
    report = SelfHealingTrainer(grpo_trainer(tmp_path, tokenizer)).dry_run(1)
    line = "8 rows in an optimizer step: 4 per device x 2 accumulated x 1 rank, 2 prompts x 4 completions"
    assert report.batch == line
    assert line in str(report).splitlines()


def half_of_them(completions: list[str], **_: Any) -> list[float | None]:
    return [None if at % 2 else float(at % 4) for at, _ in enumerate(completions)]


def always_one(completions: list[str], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


def no_number(completions: list[str], **_: Any) -> list[float | None]:
    return [None for _ in completions]


def test_what_each_reward_function_gave_is_told(tmp_path: Path, tokenizer: Any) -> None:
    functions = [half_of_them, always_one, no_number]
    report = SelfHealingTrainer(grpo_trainer(tmp_path, tokenizer, reward_funcs=functions)).dry_run(1)
    half, one, none = report.rewards
    assert (half.mean, half.std, half.missing, half.equal_groups, half.reward) == (1.0, 1.0, 0.5, 0.0, 2.0)
    assert half.completion
    assert (one.mean, one.std, one.missing, one.equal_groups) == (1.0, 0.0, 0.0, 1.0)
    assert (none.missing, none.equal_groups) == (1.0, 1.0)
    assert str(half) in str(report)
    constant, missing = (line for line in report.advice if line.startswith("Reward"))
    assert constant.startswith("Reward always_one is 1 for every completion.")
    assert missing.startswith("Reward no_number is None or NaN for every completion.")


def test_rewards_that_tell_no_completion_from_another_teach_nothing(tmp_path: Path, tokenizer: Any) -> None:
    said = advice_of(grpo_trainer(tmp_path, tokenizer, reward_funcs=always_one))
    assert "All completions of a prompt get one reward: nothing is learned." in said


def test_the_rewards_of_rloo_are_told_as_well(tmp_path: Path, tokenizer: Any) -> None:
    (given,) = SelfHealingTrainer(rloo_trainer(tmp_path / "run", tokenizer)).dry_run(1).rewards
    assert (given.name, given.missing) == ("count_of_the", 0.0)
    assert given.reward > given.mean


def reward_of_some(completions: list[str], answer: list[str] | None = None, **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def reward_of_answers(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_a_column_that_a_reward_function_does_not_get_is_named(tmp_path: Path, tokenizer: Any) -> None:
    said = advice_of(grpo_trainer(tmp_path, tokenizer, reward_funcs=reward_of_some))
    assert said.startswith(
        "Reward reward_of_some asks for 'answer' and gets None: the columns of the data are prompt."
    )


def test_and_before_it_raises_for_want_of_it(tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer = grpo_trainer(tmp_path, tokenizer, reward_funcs=reward_of_answers)
    with pytest.raises(TypeError, match="answer") as caught:
        SelfHealingTrainer(trainer).dry_run(1)
    assert "Reward reward_of_answers asks for 'answer' and raises" in caplog.text
    (note,) = caught.value.__notes__
    assert note.startswith("self_healing: raised in step 1 of 1 of a dry run; the trainer is as it was before it.")
    assert "Known error reward_arguments:" in note
    assert note.endswith("the columns of the data are prompt.")


def test_logits_that_do_not_fit_are_reckoned(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    report = SelfHealingTrainer(plain_trainer(tmp_path, tokenizer)).dry_run(1)
    assert report.logits_bytes == 4 * 24 * len(tokenizer) * 4
    assert "logits" not in "".join(report.advice)
    # A device that is nearly full.
    full = {"host_available": 1 << 40, "free": 10_000, "reserved": 30_000, "allocated": 20_000}
    monkeypatch.setattr(dry_run, "memory_figures", lambda device: full)
    said = advice_of(plain_trainer(tmp_path, tokenizer))
    assert f"(4 rows x 24 tokens x {len(tokenizer)} words x 4 bytes)" in said


def test_a_look_that_fails_is_no_matter_of_the_run(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer)
    tokenizer_of_another_kind = object()
    trainer.processing_class = tokenizer_of_another_kind
    trainer.args.logging_steps = "often"
    report = SelfHealingTrainer(trainer).dry_run(1)
    assert (report.steps, report.rows) == (1, [])
    assert report.batch


class Queue(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Rows that are gone once they are read."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        while self.rows:
            yield self.rows.pop(0)


def queue_trainer(output_dir: Path, tokenizer: Any, rows: int) -> Any:
    trainer = plain_trainer(output_dir, tokenizer, accelerator_config={"dispatch_batches": False})
    trainer.train_dataset = Queue([trainer.train_dataset[number % 8] for number in range(rows)])
    return trainer


def test_of_a_stream_that_is_read_once_no_more_is_read_than_is_trained_on(tmp_path: Path, tokenizer: Any) -> None:
    trainer = queue_trainer(tmp_path, tokenizer, 200)
    report = SelfHealingTrainer(trainer).dry_run(2)
    assert report.steps == 2
    assert len(trainer.train_dataset.rows) > 150
    assert "the rows that these steps read are gone" in "".join(report.advice)


def test_a_run_of_no_step_is_not_finite(tmp_path: Path, tokenizer: Any) -> None:
    report = SelfHealingTrainer(queue_trainer(tmp_path, tokenizer, 0)).dry_run(2)
    assert (report.steps, report.finite) == (0, False)
    assert "No step was run: the training data gave no batch." in report.advice


def sometimes_infinite(completions: list[str], **_: Any) -> list[float]:
    return [float("inf") if number % 2 else 1.0 for number in range(len(completions))]


def test_an_infinite_reward_is_named(tmp_path: Path, tokenizer: Any) -> None:
    said = advice_of(grpo_trainer(tmp_path, tokenizer, reward_funcs=sometimes_infinite))
    assert "Reward sometimes_infinite is infinite for some completions" in said


def test_without_a_tokenizer_no_rows_are_shown(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = plain_trainer(tmp_path, tokenizer)
    trainer.processing_class = None
    report = SelfHealingTrainer(trainer).dry_run(1)
    assert (report.rows, report.trained_share) == ([], None)
    assert "could not be looked at" not in caplog.text
