"""Runs whose kernels do not repeat bitwise, simulated: what is healed by computing again is healed there, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    POISON_WORD,
    TEXTS,
    TRAINERS,
    GradientFault,
    OutputFault,
    PoisonToken,
    RaisingForward,
    assert_same_weights,
    journal,
    logged,
    lost_connection,
    quarantined,
    scaled_half_precision_trainer,
    sft_trainer,
    tiny_model,
    weights,
)
from noise import kernel_noise
from transformers import TrainerCallback

from self_healing import SelfHealingCallback, SelfHealingTrainer


# Of one element: what atomic sums in single precision do, and what one step of the last place of a bfloat16 does.
LEVELS = [
    pytest.param(False, 1e-6, id="fp32-1e-6"),
    pytest.param(False, 1e-4, id="fp32-1e-4"),
    pytest.param(True, 1e-3, id="bf16-1e-3"),
    pytest.param(True, 4e-3, id="bf16-4e-3"),
]


# ---- the simulation ----


def loss_and_gradient(model: Any, bf16: bool = False) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of the same batch with the same random state, each time."""
    torch.manual_seed(0)
    model.zero_grad()
    rows = torch.arange(24).reshape(2, 12)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    return loss.detach(), [each.grad.clone() for each in model.parameters() if each.grad is not None]


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The norm of the difference, relative to the norm."""
    apart = torch.stack([(x - y).norm() for x, y in zip(a, b, strict=True)]).norm()
    return float(apart / torch.stack([x.norm() for x in a]).norm())


@pytest.mark.parametrize(("bf16", "eps"), LEVELS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
def test_noise_keeps_a_pass_from_repeating(tokenizer: Any, bf16: bool, eps: float, checkpointing: bool) -> None:
    model = tiny_model(tokenizer).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with kernel_noise(model, eps) as noise:
        (loss, gradient), (again, gradient_again) = (loss_and_gradient(model, bf16) for _ in range(2))
    assert 0 < distance(gradient, gradient_again) < 10 * eps
    # A mean over many elements may round to the same.
    assert abs(loss - again) < 10 * eps
    # Two layers, twice; none of them is wanted again to recompute what the backward of the others needs.
    assert (noise.forwards, noise.backwards) == (4, 4)


def test_noise_ends_with_its_block(tokenizer: Any) -> None:
    model = tiny_model(tokenizer).train()
    expected, gradient = loss_and_gradient(model)
    with kernel_noise(model, 1e-2):
        loss_and_gradient(model)
    loss, again = loss_and_gradient(model)
    assert loss == expected
    assert distance(gradient, again) == 0


def test_noise_leaves_the_random_state_alone(tokenizer: Any) -> None:
    model = tiny_model(tokenizer).train()
    loss_and_gradient(model)
    expected = torch.get_rng_state()
    with kernel_noise(model, 1e-2):
        loss_and_gradient(model)
    assert torch.equal(torch.get_rng_state(), expected)


# ---- healthy runs ----


@pytest.mark.parametrize(("bf16", "eps"), LEVELS)
def test_a_healthy_noisy_run_is_left_alone(tmp_path: Path, tokenizer: Any, bf16: bool, eps: float) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, bf16=bf16, max_steps=20, callbacks=[SelfHealingCallback()])
    with kernel_noise(trainer.model, eps) as noise:
        trainer.train()
    assert noise.backwards > 0
    assert not journal(tmp_path, "detected")
    assert not journal(tmp_path, "action")


@pytest.mark.slow
@pytest.mark.parametrize(("bf16", "eps"), LEVELS)
@pytest.mark.parametrize("name", [name for name in TRAINERS if name != "SFTTrainer"])
def test_a_healthy_noisy_run_of_any_trainer_is_left_alone(
    tmp_path: Path, tokenizer: Any, name: str, bf16: bool, eps: float
) -> None:
    callback = SelfHealingCallback()
    trainer = TRAINERS[name](tmp_path / "run", tokenizer, bf16=bf16, max_steps=12, callbacks=[callback])
    with kernel_noise(trainer.model, eps):
        trainer.train()
    assert not journal(tmp_path / "run", "detected")
    assert not journal(tmp_path / "run", "action")


# ---- whether a step repeats ----


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def repeats(output_dir: Path) -> list[str]:
    return [event["repeats"] for event in journal(output_dir, "repeats")]


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("SFTTrainer", "GRPOTrainer") else pytest.param(name, marks=pytest.mark.slow)
        for name in TRAINERS
    ],
)
def test_a_step_computed_again_is_told_to_be_bitwise(tmp_path: Path, tokenizer: Any, name: str) -> None:
    plain = TRAINERS[name](tmp_path / "plain", tokenizer, max_steps=4)
    plain.train()
    healed = TRAINERS[name](tmp_path / "healed", tokenizer, max_steps=4, callbacks=[SelfHealingCallback()])
    OutputFault(healed.model, strike=lambda forward: forward == 4)
    healed.train()
    assert repeats(tmp_path / "healed") == ["bitwise"]
    assert_same_weights(weights(healed), weights(plain))
    assert logged(healed) == logged(plain)


def test_a_scaled_step_is_told_to_be_bitwise(tmp_path: Path, tokenizer: Any) -> None:
    plain = scaled_half_precision_trainer(tmp_path / "plain", tokenizer)
    plain.train()
    healed = scaled_half_precision_trainer(tmp_path / "healed", tokenizer, callbacks=[SelfHealingCallback()])
    OutputFault(healed.model, strike=lambda forward: forward == 8)
    healed.train()
    assert repeats(tmp_path / "healed") == ["bitwise"]
    assert_same_weights(weights(healed), weights(plain))


@pytest.mark.parametrize(("bf16", "eps"), LEVELS)
def test_a_noisy_step_is_told_to_be_within_noise(tmp_path: Path, tokenizer: Any, bf16: bool, eps: float) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, bf16=bf16, callbacks=[SelfHealingCallback()])
    OutputFault(trainer.model, strike=lambda forward: forward == 4)
    with kernel_noise(trainer.model, eps):
        trainer.train()
    [told] = journal(tmp_path, "repeats")
    [outcome] = journal(tmp_path, "outcome")
    assert told["repeats"] == "within noise"
    assert 0.01 * eps < told["gradient"] < 10 * eps
    assert outcome["failure"] == "nonfinite_transient"
    assert outcome["outcome"] == "resolved"
    assert outcome["steps_lost"] == 0


def test_a_fault_that_strikes_the_comparison_is_not_trained_on(tmp_path: Path, tokenizer: Any) -> None:
    plain = sft_trainer(tmp_path / "plain", tokenizer, gradient_accumulation_steps=1)
    plain.train()
    callbacks = [SelfHealingCallback()]
    trainer = sft_trainer(tmp_path / "healed", tokenizer, callbacks=callbacks, gradient_accumulation_steps=1)
    OutputFault(trainer.model, strike=lambda forward: forward == 3)
    # The third step is computed again, then comes the fourth, and that once more to compare.
    compared = OutputFault(trainer.model, lambda forward: forward == 6, lambda hidden: 1.5 * hidden)
    trainer.train()
    assert compared.fired == 1
    assert repeats(tmp_path / "healed") == ["bitwise"]
    assert_same_weights(weights(trainer), weights(plain))


def with_a_counter(trainer: Any) -> None:
    """A loss that is weighted by how often it was computed, which nobody can put back."""
    loss, calls = trainer.compute_loss, 0

    def weighted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return loss(*arguments, **named) * (1 + 0.05 * (0.618034 * calls % 1))

    trainer.compute_loss = weighted


def test_a_state_that_nobody_can_put_back_is_no_noise(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, bf16=False, callbacks=[SelfHealingCallback()])
    with_a_counter(trainer)
    OutputFault(trainer.model, strike=lambda forward: forward == 3)
    trainer.train()
    assert repeats(tmp_path) == ["beyond noise"]
    assert "something keeps a state of its own that is not put back" in caplog.text


def test_nor_are_steps_that_it_makes_differ_when_they_are_applied_again(tmp_path: Path, tokenizer: Any) -> None:
    callbacks = [SelfHealingCallback(GOES_BACK), AtStep(FAULT, nan_weights)]
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=callbacks, **{**LONG, "bf16": False})
    with_a_counter(trainer)
    trainer.train()
    [replay] = replays(tmp_path)
    assert not replay["happened"]
    assert "keeps a state of its own" in replay["why"]


def test_an_out_of_memory_retry_tells_whether_it_repeats(tmp_path: Path, tokenizer: Any) -> None:
    plain = sft_trainer(tmp_path / "plain", tokenizer)
    plain.train()
    healed = sft_trainer(tmp_path / "healed", tokenizer, callbacks=[SelfHealingCallback()])
    RaisingForward(healed.model, lambda forward: forward == 4, out_of_memory)
    healed.train()
    assert repeats(tmp_path / "healed") == ["bitwise"]
    assert_same_weights(weights(healed), weights(plain))


def test_it_is_measured_once_and_told_each_time(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()])
    # Each takes two forwards to compute step 1 again, and the first another two to measure step 2.
    fault = OutputFault(trainer.model, strike=lambda forward: forward in (4, 11))
    trainer.train()
    assert [event["step"] for event in journal(tmp_path, "detected")] == [1, 3]
    assert repeats(tmp_path) == ["bitwise", "bitwise"]
    assert fault.forwards == 6 * 2 + 3 * 2


def test_after_the_last_step_nothing_is_left_to_measure_with(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()])
    OutputFault(trainer.model, strike=lambda forward: forward == 12)
    trainer.train()
    assert repeats(tmp_path) == ["not measured"]


def test_nothing_is_computed_twice_in_a_healthy_run(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()])
    never = OutputFault(trainer.model, strike=lambda forward: False)
    trainer.train()
    assert never.forwards == 6 * 2
    assert not repeats(tmp_path)


@pytest.mark.parametrize("error", [out_of_memory, RuntimeError], ids=["out of memory", "any"])
def test_a_measurement_that_fails_costs_nothing(tmp_path: Path, tokenizer: Any, error: Any) -> None:
    plain = sft_trainer(tmp_path / "plain", tokenizer)
    plain.train()
    healed = sft_trainer(tmp_path / "healed", tokenizer, callbacks=[SelfHealingCallback()])
    # Step 1 is forwards 3 and 4, and again 5 and 6; step 2 is 7 and 8, and to measure 9 and 10.
    OutputFault(healed.model, strike=lambda forward: forward == 4)
    fault = RaisingForward(healed.model, lambda forward: forward == 10, error)
    healed.train()
    assert fault.fired == 1
    assert repeats(tmp_path / "healed") == ["not measured"]
    assert len(journal(tmp_path / "healed", "detected")) == 1
    assert_same_weights(weights(healed), weights(plain))
    assert logged(healed) == logged(plain)


def test_a_fault_that_strikes_while_it_is_measured_is_healed(tmp_path: Path, tokenizer: Any) -> None:
    plain = sft_trainer(tmp_path / "plain", tokenizer)
    plain.train()
    healed = sft_trainer(tmp_path / "healed", tokenizer, callbacks=[SelfHealingCallback()])
    OutputFault(healed.model, strike=lambda forward: forward in (4, 10))
    healed.train()
    assert [event["failure"] for event in journal(tmp_path / "healed", "outcome")] == ["nonfinite_transient"] * 2
    assert repeats(tmp_path / "healed") == ["not measured", "not measured"]
    assert_same_weights(weights(healed), weights(plain))


# ---- going back, and applying the steps since then again ----


class AtStep(TrainerCallback):
    """Does something once, at the end of a step."""

    def __init__(self, step: int, do: Callable[[Any], None]) -> None:
        self._step, self._do = step, do

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self._step:
            with torch.no_grad():
                self._do(model)


def nan_weights(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight.view(-1)[:3] = float("nan")


# The snapshot of step 20 is trusted by then, and that of step 40 not yet.
GOES_BACK = {"snapshot_interval": 20}
FAULT, TRUSTED = 43, 20
ANOTHER_STEP = "as if more than weights, optimizer and data made it up"
LOOKS_BAD = "does not look as it should"
LONG = {"max_steps": 56, "lr_scheduler_type": "constant", "bf16": True, "gradient_accumulation_steps": 1}


def replays(output_dir: Path) -> list[dict[str, Any]]:
    return [event for event in journal(output_dir, "action") if event["action"] == "replay_steps"]


def steps_lost(output_dir: Path) -> list[int]:
    return [event["steps_lost"] for event in journal(output_dir, "outcome")]


@pytest.mark.parametrize("eps", [1e-3, pytest.param(3e-3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rate", [pytest.param(1e-3, marks=pytest.mark.slow), 1e-2])
def test_noisy_steps_are_applied_again(tmp_path: Path, tokenizer: Any, eps: float, rate: float) -> None:
    callbacks = [SelfHealingCallback(GOES_BACK), AtStep(FAULT, nan_weights)]
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=callbacks, learning_rate=rate, **LONG)
    with kernel_noise(trainer.model, eps):
        trainer.train()
    [replay] = replays(tmp_path)
    assert replay["happened"]
    assert replay["replayed"] == FAULT - TRUSTED
    assert replay["repeats"] == "within noise"
    assert steps_lost(tmp_path) == [0]


def test_steps_that_repeat_are_told_to_be_bitwise(tmp_path: Path, tokenizer: Any) -> None:
    callbacks = [SelfHealingCallback(GOES_BACK), AtStep(FAULT, nan_weights)]
    sft_trainer(tmp_path, tokenizer, callbacks=callbacks, **LONG).train()
    [replay] = replays(tmp_path)
    assert (replay["repeats"], replay["apart"]) == ("bitwise", 0.0)


def test_a_spike_the_run_had_got_over_is_no_reason_to_lose_steps(tmp_path: Path, tokenizer: Any) -> None:
    callbacks = [SelfHealingCallback(GOES_BACK), AtStep(FAULT, nan_weights)]
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=callbacks, **LONG)
    loss = trainer.compute_loss

    def spiking(*arguments: Any, **named: Any) -> Any:
        return loss(*arguments, **named) + (20.0 if trainer.state.global_step == 33 else 0.0)

    trainer.compute_loss = spiking
    trainer.train()
    assert [replay["repeats"] for replay in replays(tmp_path)] == ["bitwise"]
    assert ("loss_spike", "self_recovered", 0) in outcomes(tmp_path)
    assert ("corrupted_state", "resolved", 0) in outcomes(tmp_path)


def another_batch(healing: SelfHealingCallback) -> Callable[[Any], None]:
    """The first of the steps that are kept gets other rows."""

    def swap(model: Any) -> None:
        [first] = [each for each in healing.run.rollback.batches.tape if each.step == TRUSTED]
        for _, inputs, *_ in first.control.calls:
            rows = torch.randint(3, len(model.lm_head.weight), inputs["input_ids"].shape)
            inputs.update(input_ids=rows, labels=rows.where(inputs["labels"] >= 0, inputs["labels"]))

    return swap


def a_scaled_snapshot(healing: SelfHealingCallback) -> Callable[[Any], None]:
    """The trusted state is no longer what it was."""

    def scale(model: Any) -> None:
        healing.run.rollback.ring.trusted[-1].parameters["lm_head.weight"].host.mul_(1.5)

    return scale


def a_callback_that_writes_weights(healing: SelfHealingCallback) -> Callable[[Any], None]:
    return lambda model: model.lm_head.weight.mul_(1.3)


@pytest.mark.parametrize(
    ("wrong", "at", "rate"),
    [
        (a_callback_that_writes_weights, 30, 1e-3),
        *(
            pytest.param(wrong, at, rate, marks=pytest.mark.slow)
            for wrong, at in [(another_batch, 42), (a_scaled_snapshot, 42), (a_callback_that_writes_weights, 30)]
            for rate in (1e-3, 1e-2)
            if (wrong, rate) != (a_callback_that_writes_weights, 1e-3)
        ),
    ],
)
def test_steps_that_come_out_otherwise_are_refused_in_noise(
    tmp_path: Path, tokenizer: Any, wrong: Callable[..., Any], at: int, rate: float
) -> None:
    healing = SelfHealingCallback(GOES_BACK)
    callbacks = [healing, AtStep(at, wrong(healing)), AtStep(FAULT, nan_weights)]
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=callbacks, learning_rate=rate, **LONG)
    with kernel_noise(trainer.model, 1e-3):
        trainer.train()
    [replay] = replays(tmp_path)
    assert not replay["happened"]
    reasons = (ANOTHER_STEP,) if wrong is a_callback_that_writes_weights else (ANOTHER_STEP, LOOKS_BAD)
    assert any(reason in replay["why"] for reason in reasons)
    assert steps_lost(tmp_path) == [FAULT + 1 - TRUSTED]


def test_a_replay_that_is_not_finite_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    callbacks = [SelfHealingCallback(GOES_BACK), AtStep(FAULT, nan_weights)]
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=callbacks, **LONG)
    # The step after the fault, and that computed once more; then, each time, the first step that is applied again.
    begins = FAULT + 3
    OutputFault(trainer.model, strike=lambda forward: forward in (begins, begins + 1))
    with kernel_noise(trainer.model, 1e-3):
        trainer.train()
    refused = replays(tmp_path)[0]
    assert not refused["happened"]
    assert "is not finite" in refused["why"]


# ---- every fault, under every trainer and at every level of noise ----

QUICK = ("SFTTrainer", "bf16-4e-3")
EVERYWHERE = [
    pytest.param(
        name,
        *level.values,
        id=f"{name}-{level.id}",
        marks=() if (name, level.id) == QUICK else pytest.mark.slow,
    )
    for name in ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer")
    for level in LEVELS
]
# A policy gradient has spikes, and rows that are generated do not come again.
OFFLINE = [each for each in EVERYWHERE if each.values[0] != "GRPOTrainer"]
# Long enough for the detectors to know what is usual.
LONG_RUN = {"max_steps": 80, "lr_scheduler_type": "constant", "learning_rate": 1e-3}
STEADY = {"max_steps": 46, "lr_scheduler_type": "constant", "gradient_accumulation_steps": 1, "learning_rate": 1e-3}


def healed(
    output_dir: Path,
    tokenizer: Any,
    name: str,
    bf16: bool,
    eps: float,
    arm: Callable[[Any], Any],
    callbacks: Sequence[TrainerCallback] = (),
    config: Mapping[str, Any] = GOES_BACK,
    wrapped: bool = False,
    **arguments: Any,
) -> tuple[Any, Any]:
    """A noisy run with a fault; the trainer and the fault."""
    watching = [] if wrapped else [SelfHealingCallback(config)]
    trainer = TRAINERS[name](output_dir, tokenizer, bf16=bf16, callbacks=[*watching, *callbacks], **arguments)
    fault = arm(trainer)
    with kernel_noise(trainer.model, eps):
        (SelfHealingTrainer(trainer, config) if wrapped else trainer).train()
    return trainer, fault


def outcomes(output_dir: Path) -> list[tuple[str, str, int]]:
    return [(each["failure"], each["outcome"], each["steps_lost"]) for each in journal(output_dir, "outcome")]


@pytest.mark.parametrize(("name", "bf16", "eps"), EVERYWHERE)
def test_a_passing_nan_costs_no_step(tmp_path: Path, tokenizer: Any, name: str, bf16: bool, eps: float) -> None:
    def arm(trainer: Any) -> OutputFault:
        return OutputFault(trainer.model, strike=lambda forward: forward == 4)

    healed(tmp_path, tokenizer, name, bf16, eps, arm, max_steps=6)
    assert outcomes(tmp_path) == [("nonfinite_transient", "resolved", 0)]
    assert repeats(tmp_path) == ["within noise"]


@pytest.mark.parametrize(("name", "bf16", "eps"), OFFLINE)
def test_a_passing_gradient_spike_costs_no_step(
    tmp_path: Path, tokenizer: Any, name: str, bf16: bool, eps: float
) -> None:
    def arm(trainer: Any) -> GradientFault:
        return GradientFault(trainer.model, lambda backward: backward == 41, value=1e4)

    # At a higher rate the gradients of a reward model are so uneven that none stands out.
    _, fault = healed(tmp_path, tokenizer, name, bf16, eps, arm, **STEADY | {"learning_rate": 1e-4})
    assert fault.fired == 1
    assert ("spike_transient", "resolved", 0) in outcomes(tmp_path)
    assert all(lost == 0 for *_, lost in outcomes(tmp_path))


@pytest.mark.parametrize(("name", "bf16", "eps"), OFFLINE)
def test_poison_rows_are_named(tmp_path: Path, tokenizer: Any, name: str, bf16: bool, eps: float) -> None:
    token = tokenizer.convert_tokens_to_ids(POISON_WORD)
    texts = [f"{text} {POISON_WORD}" if index in (5, 17) else text for index, text in enumerate(TEXTS)]
    rows: dict[str, Any] = {"texts": texts} if name == "SFTTrainer" else {"poisoned": (5, 17)}
    trainer, _ = healed(
        tmp_path, tokenizer, name, bf16, eps, lambda trainer: PoisonToken(trainer.model, token), max_steps=8, **rows
    )
    poisoned = {
        index
        for index, row in enumerate(trainer.train_dataset)
        if any(token in ids for key, ids in row.items() if key.endswith("_ids") and not key.startswith("KL"))
    }
    assert poisoned
    assert {row["dataset_index"] for row in quarantined(tmp_path)} == poisoned
    assert {(failure, lost) for failure, _, lost in outcomes(tmp_path)} == {("nonfinite_poison_rows", 0)}


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-3, 1e-2])
@pytest.mark.parametrize(("name", "bf16", "eps"), EVERYWHERE)
def test_nan_weights_are_undone(
    tmp_path: Path, tokenizer: Any, name: str, bf16: bool, eps: float, rate: float
) -> None:
    fault = AtStep(FAULT, nan_weights)
    steady = STEADY | {"learning_rate": rate, "max_steps": 60}
    healed(tmp_path, tokenizer, name, bf16, eps, lambda _: None, [fault], **steady)
    [lost] = [lost for failure, _, lost in outcomes(tmp_path) if failure == "corrupted_state"]
    [replay] = replays(tmp_path)
    if replay["happened"]:
        assert lost == 0
        return
    # Steps with generated rows are not kept; at such a rate noise decides which way some of the losses jump.
    assert name == "GRPOTrainer" or (rate == 1e-2 and name in ("KTOTrainer", "RewardTrainer"))
    assert lost <= FAULT + 1 - TRUSTED
    assert any(reason in replay["why"] for reason in (ANOTHER_STEP, LOOKS_BAD, "their rows were generated"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bf16", "eps"), OFFLINE)
def test_scaled_weights_are_undone(tmp_path: Path, tokenizer: Any, name: str, bf16: bool, eps: float) -> None:
    def scale(model: Any) -> None:
        (model.score if name == "RewardTrainer" else model.lm_head).weight.mul_(-10)

    fault, often = AtStep(60, scale), {"snapshot_interval": 10}
    healed(tmp_path, tokenizer, name, bf16, eps, lambda _: None, [fault], often, **LONG_RUN)
    assert ("divergence", "weights") in [(each["failure"], each["cause"]) for each in journal(tmp_path, "diagnosed")]
    [replay] = replays(tmp_path)
    assert (replay["happened"], replay["repeats"]) == (True, "within noise")
    assert all(lost == 0 for *_, lost in outcomes(tmp_path))


@pytest.mark.parametrize(("name", "bf16", "eps"), EVERYWHERE)
def test_an_exception_costs_no_step(tmp_path: Path, tokenizer: Any, name: str, bf16: bool, eps: float) -> None:
    def arm(trainer: Any) -> RaisingForward:
        return RaisingForward(trainer.model, lambda forward: forward == 6, lost_connection)

    trainer, fault = healed(tmp_path, tokenizer, name, bf16, eps, arm, wrapped=True, max_steps=8)
    assert fault.fired == 1
    assert trainer.state.global_step == 8
    assert outcomes(tmp_path) == [("network", "resolved", 0)]
