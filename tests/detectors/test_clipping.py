"""ZClip and AdaGC do what their papers' equations say, and nothing to a gradient that they do not clip."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

from self_healing.clipping import AdaGC, ZClip, scale_gradients, total_gradient_norm
from self_healing.config import ConfigurationError
from self_healing.detectors.norm_statistics import ClipDecision, ZClipStatistic


VARIANTS = ("reciprocal", "mean", "percentile")
GARBAGE = (math.nan, math.inf, -math.inf, -1.0, 1e200)
generator = np.random.default_rng(0)


def lognormal_with_spikes() -> list[float]:
    norms = np.exp(generator.normal(0, 0.3, 600))
    norms[generator.integers(30, 600, 20)] *= generator.uniform(3, 1000, 20)
    return [float(norm) for norm in norms]


SEQUENCES = {
    "lognormal with spikes": lognormal_with_spikes(),
    "another": [1e-6 * norm for norm in lognormal_with_spikes()],
    "constant": [0.7] * 100,
    "constant, then a spike": [0.7] * 60 + [7.0] + [0.7] * 60,
    "ramp up": [0.1 + 0.01 * step for step in range(300)],
    "ramp down": [5.0 / (1 + step) for step in range(300)],
    "shift": [1.0, 1.1, 0.9] * 20 + [10.0, 11.0, 9.0] * 60,
    "zeros in between": [0.0 if step % 3 else 1.0 + step / 100 for step in range(200)],
}


def parameters_with(gradients: Sequence[Sequence[float] | None]) -> list[nn.Parameter]:
    tensors = []
    for gradient in gradients:
        tensor = nn.Parameter(torch.zeros(1 if gradient is None else len(gradient)))
        if gradient is not None:
            tensor.grad = torch.tensor(gradient)
        tensors.append(tensor)
    return tensors


def random_parameters(seed: int = 0, sizes: Sequence[int] = (3, 50, 7), scale: float = 1.0) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(seed)
    return parameters_with([(scale * torch.randn(size, generator=draws)).tolist() for size in sizes])


def bits(parameters: Sequence[torch.Tensor]) -> list[bytes | None]:
    return [None if p.grad is None else p.grad.numpy().tobytes() for p in parameters]


def warmed_up(**settings: Any) -> ZClip:
    """After a warm-up with mean 1 and standard deviation 0.1."""
    zclip = ZClip(**settings)
    for step in range(25):
        zclip.decide(1.0 + 0.1 * math.sqrt(25 / 24) * (0 if step == 24 else 1 if step % 2 else -1))
    return zclip


# ---- the statistic of ZClip ----


def zclip_by_the_equations(
    norms: Sequence[float], variant: str, threshold: float = 2.5, alpha: float = 0.97, floor: float = 0.01
) -> list[float]:
    """The limits of arXiv:2504.02507 for norms that are all valid, NaN where nothing is clipped."""
    limits = [math.nan] * 25
    mu = np.mean(norms[:25])
    variance = np.mean((np.asarray(norms[:25]) - mu) ** 2)
    for norm in norms[25:]:
        sigma = max(np.sqrt(variance), floor * mu)
        z = (norm - mu) / sigma
        clipped, limit = norm, math.nan
        if z > threshold:
            z_star = {"reciprocal": threshold**2 / z, "mean": 0.0, "percentile": threshold}[variant]
            clipped = limit = mu + z_star * sigma
        limits.append(limit)
        mu = alpha * mu + (1 - alpha) * clipped
        variance = alpha * variance + (1 - alpha) * (clipped - mu) ** 2
    return limits


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SEQUENCES)
def test_the_limits_are_those_of_the_equations(name: str, variant: Any) -> None:
    norms = SEQUENCES[name]
    statistic = ZClipStatistic(variant=variant)
    limits = [math.nan if (d := statistic.observe(norm)).limit is None else d.limit for norm in norms]
    expected = zclip_by_the_equations(norms, variant)
    np.testing.assert_allclose(limits, expected, rtol=1e-9, atol=0)
    clips = np.isfinite(expected)
    assert clips.any() == (name in ("lognormal with spikes", "another", "constant, then a spike", "shift"))
    assert (np.asarray(limits)[clips] < np.asarray(norms)[clips]).all()


def test_other_settings_enter_the_equations() -> None:
    norms = SEQUENCES["lognormal with spikes"]
    statistic = ZClipStatistic(z_threshold=1.7, ema_decay=0.9, std_floor=0.4)
    limits = [math.nan if (d := statistic.observe(norm)).limit is None else d.limit for norm in norms]
    expected = zclip_by_the_equations(norms, "reciprocal", threshold=1.7, alpha=0.9, floor=0.4)
    np.testing.assert_allclose(limits, expected, rtol=1e-9, atol=0)


def test_garbage_in_between_changes_no_limit() -> None:
    norms = SEQUENCES["lognormal with spikes"]
    statistic = ZClipStatistic()
    limits = []
    for step, norm in enumerate(norms):
        assert statistic.observe(GARBAGE[step % len(GARBAGE)]).limit is None
        limit = statistic.observe(norm).limit
        limits.append(math.nan if limit is None else limit)
    np.testing.assert_allclose(limits, zclip_by_the_equations(norms, "reciprocal"), rtol=1e-9, atol=0)


def test_nothing_is_judged_during_the_warm_up() -> None:
    statistic = ZClipStatistic(warmup_steps=10)
    for norm in [1.0] * 9 + [1000.0]:
        assert statistic.observe(norm) == ClipDecision(limit=None, z=None, mean=None, std=None)
    assert statistic.observe(1.0).mean == pytest.approx(100.9)


def test_the_decision_carries_what_the_norm_was_judged_by() -> None:
    decision = warmed_up().statistic.observe(2.0)
    assert decision.mean == pytest.approx(1.0)
    assert decision.std == pytest.approx(0.1)
    assert decision.z == pytest.approx(10.0)
    assert decision.limit == pytest.approx(1.0 + 6.25 / 10 * 0.1)


def test_constant_norms_leave_room_for_small_changes() -> None:
    statistic = ZClipStatistic()
    for _ in range(2000):
        statistic.observe(3.0)
    assert statistic.observe(3.07).limit is None
    decision = statistic.observe(3.5)
    assert decision.limit is not None
    assert decision.std == pytest.approx(0.03, rel=0.05)


def test_a_warm_up_of_zeros_does_not_freeze_the_run() -> None:
    statistic = ZClipStatistic()
    for _ in range(25):
        statistic.observe(0.0)
    decisions = [statistic.observe(1.0) for _ in range(200)]
    assert decisions[0] == ClipDecision(limit=None, z=None, mean=0.0, std=0.0)
    assert all(decision.limit is None for decision in decisions[100:])
    assert statistic.mean == pytest.approx(1.0, rel=0.1)


valid_norms = st.lists(st.floats(0, 1e30), min_size=0, max_size=60)


@settings(deadline=None)  # the machine may be busy
@given(norms=valid_norms, garbage=st.sampled_from(GARBAGE) | st.floats(max_value=-1e-300))
def test_what_is_no_norm_never_enters(norms: list[float], garbage: float) -> None:
    statistic = ZClipStatistic()
    for norm in norms:
        statistic.observe(norm)
    before = statistic.state_dict()
    for _ in range(1000):
        decision = statistic.observe(garbage)
        assert decision.limit is None
        assert decision.z is None
    assert statistic.state_dict() == before


@pytest.mark.parametrize("seen", [10, 25, 200])
def test_a_resumed_statistic_decides_exactly_as_the_first(seen: int) -> None:
    norms = SEQUENCES["lognormal with spikes"]
    statistic, resumed = ZClipStatistic(), ZClipStatistic()
    for norm in norms[:seen]:
        statistic.observe(norm)
    resumed.load_state_dict(json.loads(json.dumps(statistic.state_dict(), allow_nan=False)))
    assert [resumed.observe(norm) for norm in norms[seen:]] == [statistic.observe(norm) for norm in norms[seen:]]


@settings(deadline=None)  # the machine may be busy
@given(norms=valid_norms, rest=st.lists(st.floats(0, 1e30), min_size=1, max_size=40))
def test_the_state_survives_json_exactly(norms: list[float], rest: list[float]) -> None:
    statistic, resumed = ZClipStatistic(), ZClipStatistic()
    for norm in norms:
        statistic.observe(norm)
    resumed.load_state_dict(json.loads(json.dumps(statistic.state_dict(), allow_nan=False)))
    assert [resumed.observe(norm) for norm in rest] == [statistic.observe(norm) for norm in rest]
    assert resumed.state_dict() == statistic.state_dict()


@settings(deadline=None)  # the machine may be busy
@given(norms=st.lists(st.floats(0, 1e30), min_size=26, max_size=80), variant=st.sampled_from(VARIANTS))
def test_a_limit_is_below_the_norm_and_not_below_the_mean(norms: list[float], variant: Any) -> None:
    statistic = ZClipStatistic(variant=variant)
    for norm in norms:
        decision = statistic.observe(norm)
        if decision.limit is not None:
            assert decision.mean is not None
            assert decision.mean <= decision.limit < norm


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"z_threshold": 0.0}, "`z_threshold` is 0.0, but must be a finite number above 0"),
        ({"ema_decay": 1.0}, "`ema_decay` is 1.0, but must be above 0 and below 1"),
        ({"warmup_steps": 1}, "`warmup_steps` is 1, but must be at least 2"),
        ({"variant": "median"}, "`variant` is 'median', but must be one of 'reciprocal', 'mean', 'percentile'"),
        ({"max_grad_norm": math.nan}, "`max_grad_norm` is nan, but must be a finite number above 0"),
    ],
)
def test_settings_of_zclip_that_cannot_be_used(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ZClip(**settings)


# ---- ZClip on gradients ----


@pytest.mark.parametrize("known", [False, True], ids=["norm computed", "norm given"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_clipped_gradient_has_the_norm_of_the_limit(variant: Any, known: bool) -> None:
    zclip = warmed_up(variant=variant)
    parameters = random_parameters(scale=3.0)
    before = [p.grad.clone() for p in parameters]
    norm = torch.cat(before).norm()
    result = zclip.update_and_clip(iter(parameters), norm if known else None)
    assert result.norm == float(norm)
    assert result.limit is not None
    after = torch.cat([p.grad for p in parameters])
    assert float(after.norm()) == pytest.approx(result.limit, rel=1e-6)
    torch.testing.assert_close(after, torch.cat(before) * result.factor)  # the direction is kept


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 100.0}], ids=["no ceiling", "high ceiling"])
def test_what_is_not_clipped_is_not_touched(settings: dict[str, Any]) -> None:
    zclip = warmed_up(**settings)
    parameters = random_parameters()
    scale_gradients(parameters, 1.05 / float(total_gradient_norm(parameters)))
    before, versions = bits(parameters), [p.grad._version for p in parameters]
    result = zclip.update_and_clip(parameters)
    assert (result.factor, result.limit) == (1.0, None)
    assert bits(parameters) == before
    assert [p.grad._version for p in parameters] == versions  # not even multiplied by 1


def test_the_ceiling_holds_during_the_warm_up_and_after_it() -> None:
    zclip = ZClip(max_grad_norm=0.5)
    parameters = random_parameters()
    norm = float(total_gradient_norm(parameters))
    result = zclip.update_and_clip(parameters)
    assert (result.limit, result.z) == (0.5, None)
    assert float(total_gradient_norm(parameters)) == pytest.approx(0.5, rel=1e-6)
    assert zclip.state_dict()["norms"] == [norm]  # the norm from before the ceiling

    for ceiling, norm, limit in ((0.9, 1.05, 0.9), (0.9, 2.0, 0.9), (1.5, 2.0, 1.0625), (1.5, 1.1, None)):
        result = warmed_up(max_grad_norm=ceiling).decide(norm)
        assert result.limit == (None if limit is None else pytest.approx(limit))
        assert result.factor == pytest.approx(1.0 if limit is None else limit / norm)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_changes_nothing(value: float) -> None:
    zclip = warmed_up(max_grad_norm=1.0)
    state = zclip.state_dict()
    parameters = random_parameters()
    parameters[1].grad[7] = value
    before = bits(parameters)
    result = zclip.update_and_clip(parameters)
    assert not math.isfinite(result.norm)
    assert (result.factor, result.limit) == (1.0, None)
    assert bits(parameters) == before
    assert zclip.state_dict() == state


def test_deciding_touches_no_gradient_and_scaling_does_the_rest() -> None:
    parameters, twins = random_parameters(scale=3.0), random_parameters(scale=3.0)
    result = warmed_up().decide(float(total_gradient_norm(parameters)))
    scale_gradients(parameters, result.factor)
    assert warmed_up().update_and_clip(twins) == result
    assert bits(parameters) == bits(twins)


def test_models_iterables_and_single_tensors_are_taken() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].bias.requires_grad = False
    model(torch.ones(5, 3)).sum().backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert float(total_gradient_norm(model)) == pytest.approx(float(norm))
    for parameters in (model, model.parameters(), iter(list(model.parameters()) * 2)):
        twin = copy.deepcopy([p.grad for p in model.parameters() if p.grad is not None])
        scale_gradients(parameters, 0.5)
        for p, before in zip((p for p in model.parameters() if p.grad is not None), twin, strict=True):
            torch.testing.assert_close(p.grad, before * 0.5)
    single = random_parameters()[1]
    before = single.grad.clone()
    scale_gradients(single, 0.25)
    assert torch.equal(single.grad, before * 0.25)
    assert float(total_gradient_norm([])) == 0.0
    assert ZClip().update_and_clip([]).norm == 0.0


@pytest.mark.parametrize("factor", [math.nan, math.inf, -0.5])
def test_factors_that_make_no_sense_are_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="cannot be scaled by"):
        scale_gradients(random_parameters(), factor)


def test_the_state_of_zclip_survives_json() -> None:
    zclip, resumed = warmed_up(), ZClip()
    resumed.load_state_dict(json.loads(json.dumps(zclip.state_dict(), allow_nan=False)))
    assert [resumed.decide(norm) for norm in (1.1, 5.0, 0.9)] == [zclip.decide(norm) for norm in (1.1, 5.0, 0.9)]


# ---- sharded gradients ----


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def shard(parameters: Sequence[nn.Parameter], mesh: Any, mixed: bool = False) -> list[nn.Parameter]:
    """Twins whose gradients are DTensors; if `mixed`, the last is left plain."""
    twins = []
    for position, parameter in enumerate(parameters):
        if mixed and position == len(parameters) - 1:
            twins.append(nn.Parameter(parameter.detach().clone()))
            twins[-1].grad = parameter.grad.clone()
            continue
        placement = [Replicate() if position == 0 else Shard(0)]
        twin = nn.Parameter(distribute_tensor(parameter.detach().clone(), mesh, placement))
        twin.grad = distribute_tensor(parameter.grad.clone(), mesh, placement)
        twins.append(twin)
    return twins


def full_gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in parameters]


@pytest.mark.parametrize("mixed", [False, True], ids=["sharded", "sharded and plain"])
def test_zclip_clips_sharded_gradients_like_plain_ones(mesh: Any, mixed: bool) -> None:
    plain = random_parameters(scale=3.0)
    sharded = shard(plain, mesh, mixed)
    expected = warmed_up().update_and_clip(plain)
    result = warmed_up().update_and_clip(sharded)
    assert result.norm == pytest.approx(expected.norm, rel=1e-6)
    assert result.limit == pytest.approx(expected.limit, rel=1e-6)
    torch.testing.assert_close(full_gradients(sharded), [p.grad for p in plain])


@pytest.mark.parametrize("mixed", [False, True], ids=["sharded", "sharded and plain"])
def test_adagc_clips_sharded_gradients_like_plain_ones(mesh: Any, mixed: bool) -> None:
    ones, others = AdaGC(warmup_steps=2), AdaGC(warmup_steps=2)
    for step in range(5):
        plain = random_parameters(seed=step, scale=1 + step)
        sharded = shard(plain, mesh, mixed)
        expected, result = ones.update_and_clip(plain), others.update_and_clip(sharded)
        torch.testing.assert_close(result.norms, expected.norms)
        torch.testing.assert_close(result.factors, expected.factors)
        torch.testing.assert_close(full_gradients(sharded), [p.grad for p in plain])


# ---- AdaGC ----


def adagc_by_the_equations(
    steps: Sequence[Sequence[np.ndarray]], warmup: int = 100, beta: float = 0.98, rel: float = 1.05
) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """The clipped gradients of arXiv:2502.11034, and γ after the last step."""
    gamma = np.full(len(steps[0]), np.inf)
    out = []
    for t, gradients in enumerate(steps):
        clipped = []
        for i, g in enumerate(gradients):
            if t < warmup:
                h = min(1.0, 1.0 / np.sqrt(sum((other**2).sum() for other in gradients)))
                gamma[i] = min(gamma[i], np.linalg.norm(h * g))
            else:
                h = min(1.0, rel * gamma[i] / np.linalg.norm(g))
                gamma[i] = beta * gamma[i] + (1 - beta) * np.linalg.norm(h * g)
            clipped.append(h * g)
        out.append(clipped)
    return out, gamma


def gradients_of_a_run(steps: int, sizes: Sequence[int] = (3, 50, 7)) -> list[list[np.ndarray]]:
    draws = np.random.default_rng(1)
    scales = np.array([0.02, 0.1, 0.5])
    run = [[scale * draws.normal(size=size) for scale, size in zip(scales, sizes, strict=True)] for _ in range(steps)]
    for step in draws.integers(0, steps, steps // 10):
        run[step][draws.integers(3)] *= 20
    return run


def in_float64(gradients: Sequence[np.ndarray | None]) -> list[nn.Parameter]:
    tensors = []
    for gradient in gradients:
        tensor = nn.Parameter(torch.zeros(5 if gradient is None else len(gradient), dtype=torch.float64))
        tensor.grad = None if gradient is None else torch.from_numpy(gradient.copy())
        tensors.append(tensor)
    return tensors


def test_adagc_is_that_of_the_equations() -> None:
    run = gradients_of_a_run(250)
    expected, gamma = adagc_by_the_equations(run)
    adagc = AdaGC()
    for gradients, wanted in zip(run, expected, strict=True):
        parameters = in_float64(gradients)
        adagc.update_and_clip(parameters)
        for parameter, clipped in zip(parameters, wanted, strict=True):
            np.testing.assert_allclose(parameter.grad.numpy(), clipped, rtol=1e-9, atol=0)
    np.testing.assert_allclose(list(adagc.state_dict()["gamma"].values()), gamma, rtol=1e-9)


def test_other_settings_enter_adagcs_equations() -> None:
    run = gradients_of_a_run(60)
    expected, gamma = adagc_by_the_equations(run, warmup=5, beta=0.9, rel=1.5)
    adagc = AdaGC(beta=0.9, relative_threshold=1.5, warmup_steps=5)
    for gradients in run:
        parameters = in_float64(gradients)
        adagc.update_and_clip(parameters)
    np.testing.assert_allclose([p.grad.norm() for p in parameters], [np.linalg.norm(g) for g in expected[-1]])
    np.testing.assert_allclose(list(adagc.state_dict()["gamma"].values()), gamma, rtol=1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("warmup", [3, 100], ids=["after the warm-up", "during it"])
def test_a_step_that_is_not_finite_changes_nothing_in_adagc(warmup: int, value: float) -> None:
    adagc, twin = AdaGC(warmup_steps=warmup), AdaGC(warmup_steps=warmup)
    run = gradients_of_a_run(20)
    for one in (adagc, twin):
        one.update_and_clip(in_float64(run[0]))
    for gradients in run[1:]:
        spoilt = in_float64(gradients)
        spoilt[1].grad[3] = value
        before, state = bits(spoilt), adagc.state_dict()
        result = adagc.update_and_clip(spoilt)
        assert result.factors.tolist() == [1.0, 1.0, 1.0]
        assert bits(spoilt) == before
        assert adagc.state_dict() == state
        for one in (adagc, twin):
            one.update_and_clip(in_float64(gradients))
    assert adagc.state_dict() == twin.state_dict()


def test_what_adagc_does_not_clip_keeps_its_bits() -> None:
    adagc = AdaGC(warmup_steps=1, absolute_threshold=1e6)
    adagc.update_and_clip(random_parameters())
    parameters = random_parameters(scale=0.5)
    before = bits(parameters)
    assert adagc.update_and_clip(parameters).factors.tolist() == [1.0, 1.0, 1.0]
    assert bits(parameters) == before


def test_a_parameter_without_a_gradient_keeps_its_gamma() -> None:
    adagc, twin = AdaGC(warmup_steps=3), AdaGC(warmup_steps=3)
    run = gradients_of_a_run(8)
    for gradients in run[:5]:
        adagc.update_and_clip(in_float64(gradients))
    before = adagc.state_dict()["gamma"]
    absent = in_float64([run[5][0], None, run[5][2]])
    result = adagc.update_and_clip(absent)
    after = adagc.state_dict()["gamma"]
    assert absent[1].grad is None
    assert (float(result.norms[1]), float(result.factors[1])) == (0.0, 1.0)
    assert after["1"] == before["1"]
    assert after["0"] != before["0"]
    # A tensor that never had one is no hindrance, and its state is JSON.
    result = twin.update_and_clip(in_float64([10 * run[0][0], None, 10 * run[0][2]]))
    assert result.factors[0] < 1
    assert result.factors[1] == 1
    assert json.loads(json.dumps(twin.state_dict(), allow_nan=False))["gamma"]["1"] is None


@pytest.mark.parametrize("zeros", [1, 3, 40])
def test_a_tensor_whose_gradients_were_zero_at_first_is_not_frozen(zeros: int) -> None:
    adagc = AdaGC(warmup_steps=5)
    norms = []
    for step in range(zeros + 60):
        parameters = parameters_with([[0.0, 0.0] if step < zeros else [0.3, 0.4], [0.1, 0.2]])
        adagc.update_and_clip(parameters)
        norms.append(float(parameters[0].grad.norm()))
    assert norms[:zeros] == [0.0] * zeros
    assert norms[zeros:] == pytest.approx([0.5] * 60)


def test_the_first_gradient_of_a_tensor_is_held_to_the_absolute_threshold() -> None:
    adagc = AdaGC(warmup_steps=2)
    for _ in range(4):
        adagc.update_and_clip(parameters_with([[0.0, 0.0], [0.1, 0.2]]))
    parameters = parameters_with([[300.0, 400.0], [0.1, 0.2]])
    adagc.update_and_clip(parameters)
    assert float(parameters[0].grad.norm()) == pytest.approx(1.0)
    assert adagc.state_dict()["gamma"]["0"] == pytest.approx(1.0)


def test_gamma_has_a_floor() -> None:
    adagc = AdaGC(warmup_steps=1, gamma_floor=0.01)
    adagc.update_and_clip(parameters_with([[1e-20], [0.5, 0.5, 0.5]]))
    gamma = adagc.state_dict()["gamma"]
    assert gamma["0"] == pytest.approx(0.01 * math.sqrt(1 / 4))
    assert gamma["1"] == pytest.approx(0.5 * math.sqrt(3))
    parameters = parameters_with([[0.4], [0.5, 0.5, 0.5]])
    adagc.update_and_clip(parameters)
    assert float(parameters[0].grad) == pytest.approx(1.05 * 0.005)


@pytest.mark.parametrize("steps", [0, 2, 30])
def test_the_state_of_adagc_survives_json_exactly(steps: int) -> None:
    run = gradients_of_a_run(60)
    model = nn.ParameterDict({"first": torch.zeros(3), "second": torch.zeros(50), "third": torch.zeros(7)})

    def step(adagc: AdaGC, gradients: Sequence[np.ndarray]) -> list[bytes | None]:
        for parameter, gradient in zip(model.values(), gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient).float()
        adagc.update_and_clip(model)
        return bits(list(model.values()))

    adagc, resumed = AdaGC(warmup_steps=10), AdaGC(warmup_steps=10)
    for gradients in run[:steps]:
        step(adagc, gradients)
    state = json.loads(json.dumps(adagc.state_dict(), allow_nan=False))
    assert list(state["gamma"]) == (["first", "second", "third"] if steps else [])
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state  # before the first step too
    for gradients in run[steps:]:
        assert step(resumed, gradients) == step(adagc, gradients)
    assert resumed.state_dict() == adagc.state_dict()


def test_a_tensor_that_is_unfrozen_joins_with_the_others_state_kept() -> None:
    model = nn.ParameterDict({"first": torch.zeros(2), "second": torch.zeros(2)})
    model["second"].requires_grad = False
    adagc = AdaGC(warmup_steps=1)
    model["first"].grad = torch.tensor([0.3, 0.4])
    adagc.update_and_clip(model)
    assert adagc.state_dict() == {"steps": 1, "gamma": {"first": 0.5}}
    model["second"].requires_grad = True
    model["second"].grad = torch.tensor([0.6, 0.8])
    adagc.update_and_clip(model)
    assert adagc.state_dict() == {"steps": 2, "gamma": {"first": 0.5, "second": pytest.approx(1.0)}}


def test_adagc_never_waits_for_the_device() -> None:
    # A tensor on the meta device has no values: whatever asked for one would raise.
    adagc = AdaGC(warmup_steps=1)
    parameters = [nn.Parameter(torch.zeros(4, device="meta")) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter.grad = torch.ones(4, device="meta")
    for _ in range(3):
        adagc.update_and_clip(parameters)


def lora_model() -> Any:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return get_peft_model(LlamaForCausalLM(config), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))


def test_adagc_refuses_lora_and_says_what_to_use() -> None:
    model = lora_model()
    inputs = torch.arange(8)[None]
    model(input_ids=inputs, labels=inputs).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    # The reason, on the real model: the gradients of A are exactly 0, those of B are not.
    assert all(not gradient.any() for name, gradient in gradients.items() if "lora_A" in name)
    assert any(gradient.any() for name, gradient in gradients.items() if "lora_B" in name)
    for refused in (AdaGC().update_and_clip, AdaGC.refuse_lora):
        with pytest.raises(ConfigurationError, match=r"trains `.*lora_A.*Please use ZClip"):
            refused(model)
    assert ZClip().update_and_clip(model).norm > 0
    for parameter in model.parameters():
        parameter.requires_grad = False  # adapters that are only used, not trained
    AdaGC.refuse_lora(model)


def test_settings_of_adagc_that_cannot_be_used() -> None:
    for setting, message in (
        ({"beta": 1.0}, "`beta` is 1.0, but must be at least 0 and below 1"),
        ({"relative_threshold": 0.9}, "`relative_threshold` is 0.9"),
        ({"absolute_threshold": 0.0}, "`absolute_threshold` is 0.0"),
        ({"warmup_steps": 0}, "`warmup_steps` is 0"),
        ({"gamma_floor": 0.0}, "`gamma_floor` is 0.0"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            AdaGC(**setting)  # type: ignore[arg-type]
