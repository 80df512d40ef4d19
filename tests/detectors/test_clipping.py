"""ZClip does what its paper's equations say, and nothing to a gradient that it does not clip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from self_healing.config.schema import ConfigurationError
from self_healing.healers.numerics.clipping import ZClip
from self_healing.hf.state import scale_gradients, total_gradient_norm


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
    statistic = ZClip()
    limits = [math.nan if (d := statistic.decide(norm)).limit is None else d.limit for norm in norms]
    expected = zclip_by_the_equations(norms)
    np.testing.assert_allclose(limits, expected, rtol=1e-9, atol=0)
    clips = np.isfinite(expected)
    assert clips.any() == (name in ("lognormal with spikes", "another", "constant, then a spike", "shift"))
    assert (np.asarray(limits)[clips] < np.asarray(norms)[clips]).all()


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
