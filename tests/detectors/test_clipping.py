"""ZClip does what its paper's equations say, and nothing to a gradient that it does not clip."""

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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from self_healing.config.schema import ConfigurationError
from self_healing.healers.numerics.clipping import ClipDecision, ZClip, ZClipStatistic
from self_healing.hf.state import scale_gradients, total_gradient_norm


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
    norms: Sequence[float], threshold: float = 2.5, alpha: float = 0.97, floor: float = 0.01
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
            clipped = limit = mu + threshold**2 / z * sigma
        limits.append(limit)
        mu = alpha * mu + (1 - alpha) * clipped
        variance = alpha * variance + (1 - alpha) * (clipped - mu) ** 2
    return limits


@pytest.mark.parametrize("name", SEQUENCES)
def test_the_limits_are_those_of_the_equations(name: str) -> None:
    norms = SEQUENCES[name]
    statistic = ZClipStatistic()
    limits = [math.nan if (d := statistic.observe(norm)).limit is None else d.limit for norm in norms]
    expected = zclip_by_the_equations(norms)
    np.testing.assert_allclose(limits, expected, rtol=1e-9, atol=0)
    clips = np.isfinite(expected)
    assert clips.any() == (name in ("lognormal with spikes", "another", "constant, then a spike", "shift"))
    assert (np.asarray(limits)[clips] < np.asarray(norms)[clips]).all()


def test_other_settings_enter_the_equations() -> None:
    norms = SEQUENCES["lognormal with spikes"]
    statistic = ZClipStatistic(z_threshold=1.7, ema_decay=0.9, std_floor=0.4)
    limits = [math.nan if (d := statistic.observe(norm)).limit is None else d.limit for norm in norms]
    expected = zclip_by_the_equations(norms, threshold=1.7, alpha=0.9, floor=0.4)
    np.testing.assert_allclose(limits, expected, rtol=1e-9, atol=0)


def test_garbage_in_between_changes_no_limit() -> None:
    norms = SEQUENCES["lognormal with spikes"]
    statistic = ZClipStatistic()
    limits = []
    for step, norm in enumerate(norms):
        assert statistic.observe(GARBAGE[step % len(GARBAGE)]).limit is None
        limit = statistic.observe(norm).limit
        limits.append(math.nan if limit is None else limit)
    np.testing.assert_allclose(limits, zclip_by_the_equations(norms), rtol=1e-9, atol=0)


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
@given(norms=st.lists(st.floats(0, 1e30), min_size=26, max_size=80))
def test_a_limit_is_below_the_norm_and_not_below_the_mean(norms: list[float]) -> None:
    statistic = ZClipStatistic()
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
        ({"max_grad_norm": math.nan}, "`max_grad_norm` is nan, but must be a finite number above 0"),
    ],
)
def test_settings_of_zclip_that_cannot_be_used(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ZClip(**settings)


# ---- ZClip on gradients ----


@pytest.mark.parametrize("known", [False, True], ids=["norm computed", "norm given"])
def test_a_clipped_gradient_has_the_norm_of_the_limit(known: bool) -> None:
    zclip = warmed_up()
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
