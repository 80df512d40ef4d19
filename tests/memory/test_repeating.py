"""What is computed again is known by its outputs: through noise, another mode or not, without large copies."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from noise import KernelNoise
from peft import LoraConfig, get_peft_model
from test_splitting import batch_of, only, split
from torch.profiler import ProfilerActivity, profile

from self_healing.memory.splitting import ComputedOtherwise
from self_healing.memory.splitting.outputs import alike, furthest
from self_healing.memory.splitting.passes import fingerprint
from self_healing.memory.splitting.recomputing import recomputed
from self_healing.memory.splitting.repeating import FEW, MANY, Repeats, Trace, Verdict, sampled


LOGITS = (2, 64, 25_000)
SCORE = (1, 1)


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


class Computing:
    """Computes the same again and again, on kernels that do not repeat."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, eps: float) -> None:
        self.repeats, self._noise, self._exact = (
            Repeats(torch.nn.Linear(1, 1).to(dtype)),
            KernelNoise(eps),
            values(shape),
        )
        self._dtype = dtype

    def trace(self, changed: float = 1.0) -> Trace:
        return self.repeats.first_trace([(self._noise.disturb(self._exact) * changed).to(self._dtype)])

    def verdict(self, changed: float = 1.0, times: int = MANY) -> Verdict:
        return self.repeats.judge(self.trace(changed), [self.trace() for _ in range(times)])


KERNELS = [(torch.float32, 1e-6), (torch.float32, 1e-4), (torch.bfloat16, 1e-3), (torch.bfloat16, 4e-3)]


# ---- noise ----


@pytest.mark.parametrize("shape", [SCORE, (2, 12), (4, 500)])
@pytest.mark.parametrize(("dtype", "eps"), KERNELS)
def test_noise_is_not_taken_for_another_computation(dtype: torch.dtype, eps: float, shape: tuple[int, ...]) -> None:
    computing = Computing(shape, dtype, eps)
    assert Verdict.OTHER not in {computing.verdict() for _ in range(20)}


@pytest.mark.parametrize(("dtype", "eps"), KERNELS)
def test_noise_that_is_known_costs_no_second_look(dtype: torch.dtype, eps: float) -> None:
    computing = Computing((2, 12), dtype, eps)
    computing.verdict(times=FEW)
    assert all(computing.repeats.near(computing.trace(), computing.trace()) for _ in range(20))


@pytest.mark.parametrize("shape", [SCORE, (2, 12), (4, 500)])
@pytest.mark.parametrize(("dtype", "eps"), KERNELS)
def test_another_computation_is_not_taken_for_noise(dtype: torch.dtype, eps: float, shape: tuple[int, ...]) -> None:
    assert Computing(shape, dtype, eps).verdict(changed=1.5) is Verdict.OTHER


def test_what_other_kernels_may_explain_is_unclear() -> None:
    assert Computing((2, 12), torch.float32, 1e-6).verdict(changed=1.0003) is Verdict.UNCLEAR
    assert Computing((2, 12), torch.bfloat16, 1e-3).verdict(changed=1.05) is Verdict.UNCLEAR


@pytest.mark.parametrize(("dtype", "changed"), [(torch.float32, 1.0003), (torch.bfloat16, 1.03)])
def test_nothing_is_unclear_where_dropout_was_switched(dtype: torch.dtype, changed: float) -> None:
    computing = Computing((4, 500), dtype, 1e-6)
    first, _ = computing.trace(changed), torch.rand(1)
    assert computing.repeats.judge(first, [computing.trace() for _ in range(FEW)]) is Verdict.OTHER


def test_a_number_that_happens_to_be_near_zero_is_as_noisy_as_others() -> None:
    repeats, noise = Repeats(torch.nn.Linear(1, 1).bfloat16()), KernelNoise(4e-3)

    def score(of: float) -> Trace:
        # A sum that nearly cancels: of terms of about 1, with their noise.
        terms = torch.cat([torch.ones(50), -torch.ones(49), torch.tensor([of - 1.0])])
        return repeats.first_trace([noise.disturb(terms).sum(0, keepdim=True)])

    others = [score(of) for of in (0.5, -0.8, 0.3)]
    assert others
    for _ in range(20):
        assert repeats.judge(score(1e-3), [score(1e-3) for _ in range(MANY)]) is not Verdict.OTHER


def test_what_is_not_finite_says_nothing() -> None:
    repeats, one = Repeats(), values((2, 12))
    other = one.clone()
    other[0, 3], other[1, 2] = float("nan"), float("-inf")
    assert repeats.near(repeats.trace([one]), repeats.trace([other]))
    assert repeats.near(repeats.trace([other * float("nan")]), repeats.trace([one]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_mask_puts_in_does_not_hide_the_rest(dtype: torch.dtype) -> None:
    repeats, one = Repeats(), values((2, 12), dtype)
    one[0, 3] = torch.finfo(dtype).min
    assert not repeats.near(repeats.trace([one]), repeats.trace([torch.where(one < -100, one, one * 1.01)]))


def test_other_sizes_are_another_computation() -> None:
    repeats = Repeats()
    assert not repeats.near(repeats.trace([values((2, 12))]), repeats.trace([values((2, 11))]))


def test_what_is_cast_inside_of_the_model_is_as_coarse() -> None:
    """As accelerate does it, which cannot be seen from outside of the call."""
    one = values((2, 12)).bfloat16().float()
    other = one * torch.tensor([1.0, 1 + 2**-7]).repeat(12).reshape(2, 12)
    for autocast, accepted in ((None, False), (torch.bfloat16, True)):
        repeats = Repeats(autocast=autocast)
        assert repeats.near(repeats.trace([one]), repeats.trace([one]))
        assert repeats.accept(repeats.trace([one]), repeats.trace([other])) == accepted


# ---- what is switched between forward and backward ----


def refused(model: Any, switch: Callable[[], None], batch: dict[str, torch.Tensor]) -> bool:
    """Whether two attempts in a row rule out splitting, with something switched in each before the backward pass."""
    with split(model, only(2)) as calls:
        for _ in range(2):
            loss = model(**batch)["loss"]
            switch()
            with contextlib.suppress(ComputedOtherwise):
                loss.backward()
            switch()
    return bool(calls.given_up)


def test_another_adapter_is_refused_even_where_it_gives_the_same(tokenizer: Any) -> None:
    """As adapters do at the start of training: the gradients would be those of the other."""
    adapter = LoraConfig(target_modules=["q_proj"], r=2)
    model = get_peft_model(tiny_model(tokenizer, dropout=0.0), adapter, adapter_name="one")
    model.add_adapter("other", adapter)
    names = iter(["other", "one"] * 2)
    assert refused(model, lambda: model.set_adapter(next(names)), batch_of(tokenizer))


def test_a_mode_that_changes_nothing_is_not_refused(tokenizer: Any) -> None:
    model = tiny_model(tokenizer, dropout=0.0)
    assert not refused(model, lambda: model.train(not model.training), batch_of(tokenizer))


# ---- memory ----


def most_allocated(directory: Path, action: Callable[[], Any]) -> int:
    """Bytes that the CPU's allocator gave out at most for an action, temporaries of kernels included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = action()
    del kept
    profiler.export_chrome_trace(str(directory / "trace.json"))
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    now = most = 0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    "look",
    [
        lambda logits: sampled([logits]),
        lambda logits: fingerprint(logits),
        lambda logits: alike([logits], [logits], 0.03),
        lambda logits: furthest([logits], [logits]),
    ],
    ids=["computed again", "gradients in passes", "rows alike", "noise of rows"],
)
@pytest.mark.parametrize("whole", [True, False], ids=["contiguous", "a slice"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_looking_at_logits_takes_a_tenth_of_them_at_most(
    dtype: torch.dtype, whole: bool, look: Callable[[torch.Tensor], Any], tmp_path: Path
) -> None:
    logits = values(LOGITS, dtype)
    logits = logits if whole else logits[:, :-1]
    size = logits.numel() * logits.element_size()
    assert most_allocated(tmp_path, lambda: look(logits)) < size / 10


def test_keeping_a_piece_takes_a_tenth_more_than_its_outputs(tmp_path: Path) -> None:
    weight = torch.ones(LOGITS[-1], dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(*LOGITS[:-1], 1, dtype=torch.bfloat16)
    size = hidden.numel() * weight.numel() * weight.element_size()

    def forward() -> Any:
        return recomputed(lambda: hidden * weight, torch.device("cpu"), [weight], otherwise=pytest.fail)

    assert size <= most_allocated(tmp_path, forward) < 1.1 * size


@pytest.mark.parametrize(("verdict", "looks", "told"), [(Verdict.SAME, FEW, 0), (Verdict.UNCLEAR, MANY, 1)])
def test_one_look_is_enough_where_it_tells(verdict: Verdict, looks: int, told: int) -> None:
    runs, unclear = list[int](), list[int]()
    weight = torch.ones(3, requires_grad=True)
    repeats = Repeats(device=torch.device("cpu"))
    repeats.near = lambda first, again: False  # type: ignore[method-assign]
    repeats.judge = lambda first, repeated: verdict  # type: ignore[method-assign]
    repeats.accept = lambda first, again: True  # type: ignore[method-assign]

    def run() -> torch.Tensor:
        runs.append(1)
        return weight * 2

    recomputed(run, torch.device("cpu"), [weight], pytest.fail, repeats, lambda: unclear.append(1)).sum().backward()
    # Forward, once more for the backward pass, the looks, and once more with activations.
    assert len(runs) == 3 + looks
    assert len(unclear) == told
    assert torch.equal(weight.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


def test_what_was_cast_for_a_piece_is_not_used_by_the_next() -> None:
    linear, inputs = torch.nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        pieces = recomputed(lambda: linear(inputs), torch.device("cpu"), [linear.weight], otherwise=pytest.fail)
        (pieces + linear(inputs)).sum().backward()
    assert torch.equal(linear.weight.grad, torch.full((1, 2), 2.0))  # type: ignore[arg-type]


def test_a_fingerprint_leaves_the_gradient_as_it_was() -> None:
    gradient = values(LOGITS)
    before = gradient.clone()
    found = fingerprint(gradient)
    assert torch.equal(gradient, before)
    torch.testing.assert_close(found, torch.stack([gradient.sum(), gradient.abs().sum()]), rtol=1e-4, atol=1.0)


def test_a_sample_is_from_all_over_the_tensor() -> None:
    """Also where a table has as many columns as would be left out between two elements."""
    (sample,) = sampled([torch.arange(4096 * 300).reshape(4096, 300).float()])
    assert 2000 < len(sample) <= 4096
    assert len((sample % 300).unique()) == 300
    assert len((sample // 300).unique()) > 2000
