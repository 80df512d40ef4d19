"""How far two computations of a step lie apart, and what that allows."""

from __future__ import annotations

import pytest
import torch

from self_healing.system.random_state import Repeatability, StepPrint, tolerance


def gradients(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(64, 100).to(dtype), torch.randn(5000).to(dtype), torch.randn(()).to(dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_same_bits_are_bitwise(dtype: torch.dtype) -> None:
    apart = StepPrint.of(2.0, gradients(dtype)).apart_from(StepPrint.of(2.0, gradients(dtype)), dtype)
    assert apart == Repeatability(0.0, 0.0, tolerance(dtype))
    assert str(apart) == "bitwise"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_flipped_bit_anywhere_is_seen(dtype: torch.dtype) -> None:
    changed = gradients(dtype)
    bits = changed[1].view(torch.int32 if dtype is torch.float32 else torch.int16)
    bits[4321] ^= 1
    apart = StepPrint.of(2.0, gradients(dtype)).apart_from(StepPrint.of(2.0, changed), dtype)
    assert apart is not None
    assert str(apart) == "within noise"


@pytest.mark.parametrize("eps", [1e-5, 1e-3, 1e-2])
def test_noise_is_measured_as_it_is(eps: float) -> None:
    noisy = [each * (1 + eps * torch.randn_like(each)) for each in gradients()]
    apart = StepPrint.of(2.0, gradients()).apart_from(StepPrint.of(2.0 * (1 + eps), noisy), torch.float32)
    assert apart is not None
    assert apart.loss == pytest.approx(eps, rel=0.1)
    assert apart.gradient == pytest.approx(eps, rel=0.1)


@pytest.mark.parametrize(("dtype", "within", "beyond"), [(torch.float32, 1e-4, 1e-2), (torch.bfloat16, 2e-2, 0.2)])
def test_more_than_kernels_do_is_beyond_noise(dtype: torch.dtype, within: float, beyond: float) -> None:
    for eps, said in ((within, "within noise"), (beyond, "beyond noise")):
        other = [each * (1 + eps * torch.randn_like(each)) for each in gradients()]
        assert str(StepPrint.of(2.0, gradients()).apart_from(StepPrint.of(2.0, other), dtype)) == said


def test_what_cannot_be_compared_gives_nothing() -> None:
    of_all = StepPrint.of(2.0, gradients())
    assert of_all.apart_from(StepPrint.of(2.0, gradients()[:2]), torch.float32) is None
    assert of_all.apart_from(StepPrint.of(float("nan"), gradients()), torch.float32) is None
    assert of_all.apart_from(StepPrint.of(2.0, [each * float("nan") for each in gradients()]), torch.float32) is None
    nothing = StepPrint.of(2.0, []).apart_from(StepPrint.of(2.0, []), torch.float32)
    assert nothing == Repeatability(0.0, 0.0, tolerance(torch.float32))


def test_tolerance_knows_the_precision() -> None:
    assert tolerance(torch.float32) == 1e-3
    assert tolerance(torch.float16) == 8 * 2**-10
    assert tolerance(torch.bfloat16) == 8 * 2**-7
