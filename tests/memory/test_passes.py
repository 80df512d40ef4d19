"""A training step computed in passes gives the gradients of the whole batch, each row once, or is thrown away."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import tiny_model
from noise import KernelNoise
from test_splitting import batch_of, distance, flattened_batch, gradients, only
from transformers import set_seed

from self_healing.memory.splitting import ComputedOtherwise, Passes, SplitCalls


Loss = Callable[[Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]


class Layers(torch.nn.Module):
    """Treats rows one by one, and counts them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        set_seed(seed)
        self.first, self.second = torch.nn.Linear(8, 16).double(), torch.nn.Linear(16, 8).double()
        self.rows: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.rows.append(len(inputs))
        output: torch.Tensor = self.second(torch.tanh(self.first(inputs)))
        return output


class Step:
    """One training step of a made-up trainer: the calls of its model are split, and its passes run."""

    def __init__(self, loss: Loss, rows: int, paired: bool = False) -> None:
        self.model, self.passes, self.losses = Layers(), Passes(paired), list[float]()
        self._loss, self._anew = loss, 0
        self._calls = SplitCalls(self.model, only(rows), passes=self.passes)
        original = self.model._call_impl
        self.model._call_impl = lambda *args: self._calls.call(original, *args)  # type: ignore[method-assign]

    @property
    def begun_anew(self) -> bool:
        return self._anew > 0

    def run(self, inputs: torch.Tensor) -> float:
        def compute() -> float:
            loss = self._loss(self.model, inputs)
            self.passes.look_at(loss)
            loss.backward()
            return float(loss)

        def anew() -> float:
            self._anew += 1
            return compute()

        self.model.rows.clear()
        return self.passes.run(compute, compute, anew)


def whole(loss: Loss, inputs: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    model = Layers()
    value = loss(model, inputs)
    value.backward()
    return float(value), gradients(model)


def mean_over_rows(model: Callable[..., torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).pow(2).sum(1).mean()


def margin_of_pairs(model: Callable[..., torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    chosen, rejected = model(inputs).sum(1).chunk(2)
    return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


def of_two_calls(model: Callable[..., torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    return (model(inputs) * model(inputs.flip(1))).sum(1).exp().mean()


def beside_a_reference(model: Callable[..., torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        reference = model(inputs)
    return (model(inputs) - 0.5 * reference).pow(2).sum(1).mean()


def penalty_on_weights(model: Layers, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).pow(2).mean() + sum(each.pow(2).sum() for each in model.parameters())


def second_head(model: Layers, inputs: torch.Tensor) -> torch.Tensor:
    """Uses a weight of the model beside its call, on what came out of it."""
    return (model(inputs) @ model.second.weight).pow(2).mean()


def contrasting(model: Callable[..., torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """Every row is compared with all others."""
    output = model(inputs)
    return torch.nn.functional.cross_entropy(output @ output.T, torch.arange(len(inputs)))


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
@pytest.mark.parametrize("loss", [mean_over_rows, of_two_calls, beside_a_reference])
def test_gradients_and_loss_are_those_of_the_whole(loss: Loss, rows: int) -> None:
    inputs = torch.randn(7, 8, dtype=torch.float64)
    expected, of_all = whole(loss, inputs)
    step = Step(loss, rows)
    assert step.run(inputs) == pytest.approx(expected, rel=1e-12)
    assert distance(gradients(step.model), of_all) < 1e-12
    calls = 2 if loss is of_two_calls else 1
    # Each row once, and no more of them at a time than fit.
    assert sum(step.model.rows) == 7 * calls
    assert max(step.model.rows) <= rows


def test_a_row_that_is_not_finite_says_nothing_about_the_others() -> None:
    inputs = torch.randn(7, 8, dtype=torch.float64)
    inputs[0] = torch.nan
    step = Step(mean_over_rows, 2)
    assert math.isnan(step.run(inputs))
    assert sum(step.model.rows) == 7
    assert not step.begun_anew


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_pairs_stay_together(rows: int) -> None:
    inputs = torch.randn(10, 8, dtype=torch.float64)
    expected, of_all = whole(margin_of_pairs, inputs)
    step = Step(margin_of_pairs, rows, paired=True)
    assert step.run(inputs) == pytest.approx(expected, rel=1e-12)
    assert distance(gradients(step.model), of_all) < 1e-12
    assert sum(step.model.rows) == 10
    assert max(step.model.rows) <= rows


def test_a_pair_that_does_not_fit_is_not_torn_apart() -> None:
    inputs = torch.randn(6, 8, dtype=torch.float64)
    _, of_all = whole(margin_of_pairs, inputs)
    step = Step(margin_of_pairs, 1, paired=True)
    step.run(inputs)
    assert step.begun_anew
    assert distance(gradients(step.model), of_all) < 1e-12


def test_a_loss_that_compares_rows_is_noticed_and_not_tried_a_third_time() -> None:
    inputs = torch.randn(6, 8, dtype=torch.float64)
    step = Step(contrasting, 2)
    for _ in range(2):
        assert step.passes.wanted
        with pytest.raises(ComputedOtherwise):
            step.run(inputs)
        step.model.zero_grad()
    assert not step.passes.wanted


@pytest.mark.parametrize("loss", [contrasting, mean_over_rows])
def test_in_few_bits_rounding_is_told_from_a_loss_that_compares_rows(loss: Loss) -> None:
    noise, inputs = KernelNoise(4e-3), torch.randn(6, 8)

    def rounded_anew(model: Callable[..., torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        # A loss whose own kernels do not repeat: the gradients of the outputs are rounded at other places each time.
        return loss(lambda given: noise.hook(torch.nn.Identity(), given, model(given)), inputs)

    step = Step(rounded_anew, 2)
    step.model.to(torch.bfloat16)
    with pytest.raises(ComputedOtherwise) if loss is contrasting else contextlib.nullcontext():
        step.run(inputs.to(torch.bfloat16))


def test_one_step_that_was_otherwise_is_forgotten_after_one_that_was_not() -> None:
    inputs, step = torch.randn(6, 8, dtype=torch.float64), Step(contrasting, 2)
    for _ in range(3):
        step._loss = contrasting
        with pytest.raises(ComputedOtherwise):
            step.run(inputs)
        step._loss = mean_over_rows
        step.run(inputs)
    assert step.passes.wanted


def test_a_nan_says_nothing_about_the_loss() -> None:
    inputs = torch.randn(6, 8, dtype=torch.float64)
    inputs[1] = float("nan")
    step = Step(mean_over_rows, 2)
    step.run(inputs)
    assert step.passes.wanted


def test_calls_of_which_some_are_not_split_begin_the_step_anew() -> None:
    def loss(model: Callable[..., torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs).sum() * model(inputs[:2]).sum()

    inputs = torch.randn(6, 8, dtype=torch.float64)
    _, of_all = whole(loss, inputs)
    step = Step(loss, 2)
    step.run(inputs)
    assert step.begun_anew
    assert distance(gradients(step.model), of_all) < 1e-12


@pytest.mark.parametrize("loss", [penalty_on_weights, second_head])
def test_a_loss_that_reaches_weights_past_the_calls_begins_anew(loss: Any) -> None:
    inputs = torch.randn(6, 8, dtype=torch.float64)
    _, of_all = whole(loss, inputs)
    step = Step(loss, 2)
    step.run(inputs)
    assert step.begun_anew
    assert distance(gradients(step.model), of_all) < 1e-12


def test_what_the_loss_writes_into_a_kept_result_is_noticed() -> None:
    def loss(model: Callable[..., torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            reference = model(inputs[:2])
        reference.add_(1)
        return (model(inputs) - reference.sum()).pow(2).mean()

    step = Step(loss, 2)
    with pytest.raises(ComputedOtherwise):
        step.run(torch.randn(6, 8, dtype=torch.float64))


def test_a_step_that_fits_is_one_pass() -> None:
    inputs = torch.randn(6, 8, dtype=torch.float64)
    expected, _ = whole(mean_over_rows, inputs)
    step = Step(mean_over_rows, 6)
    assert step.run(inputs) == expected
    assert step.model.rows == [6]


@pytest.mark.parametrize("flat", [False, True], ids=["padded rows", "sequences one after the other"])
def test_language_models_with_their_own_loss(tokenizer: Any, flat: bool) -> None:
    batch = {**flattened_batch(tokenizer, boundaries=False), "use_cache": False} if flat else batch_of(tokenizer)

    def computed(rows: int) -> tuple[float, dict[str, torch.Tensor], SplitCalls]:
        model, passes = tiny_model(tokenizer, dropout=0.0).double(), Passes(paired=False)
        calls, original = SplitCalls(model, only(rows), loss_only=True, passes=passes), model._call_impl
        model._call_impl = lambda *args, **kwargs: calls.call(original, *args, **kwargs)

        def compute() -> float:
            loss = model(**batch, num_items_in_batch=torch.tensor(50))["loss"]
            loss.backward()
            return float(loss)

        return passes.run(compute, compute, compute), gradients(model), calls

    expected, of_all, _ = computed(10**6)
    loss, found, calls = computed(batch["input_ids"].numel() // 3 + 2 if flat else 2)
    assert calls.refused == ""
    assert calls.pieces > 1
    assert loss == pytest.approx(expected, rel=1e-6)
    assert distance(found, of_all) < 1e-6
