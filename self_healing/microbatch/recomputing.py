"""A chunk of which only the outputs are kept: it is computed again in the backward pass."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..instrument.random_state import RandomState
from .outputs import filled, flattened


# By how much the sums of what is computed again may differ: kernels that are not deterministic, in bf16.
_SAME = 1e-3


class ComputedOtherwise(RuntimeError):
    """
    A batch that was split gives something else than it should.

    Args:
        how (`str`):
            How it was computed.
    """

    def __init__(self, how: str) -> None:
        super().__init__(f"out of memory, and computed {how} gives something else")


def recomputed(
    run: Callable[[], Any],
    device: torch.device,
    parameters: Sequence[torch.Tensor],
    otherwise: Callable[[], None],
) -> Any:
    """
    What `run` gives, kept without its activations: in the backward pass it is run again.

    Args:
        run (`Callable[[], Any]`):
            A forward pass.
        device (`torch.device`):
            Where it draws random numbers, besides the CPU.
        parameters (`Sequence[torch.Tensor]`):
            What gets gradients in it.
        otherwise (`Callable[[], None]`):
            Told if something else comes out when it is run again, twice; [`ComputedOtherwise`] is raised then.
    """
    structure: list[Any] = []
    with warnings.catch_warnings():
        # Of checkpointing that re-enters: without gradients, as here, it has nothing to do.
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        tensors = _Recomputed.apply(run, structure, device, otherwise, *parameters)  # type: ignore[no-untyped-call]
    return filled(structure[0], tensors)


def recomputed_at_once(run: Callable[[], Any], device: torch.device) -> Any:
    """
    The same, but gradients of all chunks arrive together, at the end of the backward pass: whoever takes them sees
    them once, and they need memory for a second set.
    """
    drawn: list[RandomState] = []

    def same_draws() -> Any:
        # Not left to `checkpoint`, which looks for devices among arguments, and there are none.
        if not drawn:
            drawn.append(RandomState.capture(device))
            return run()
        with random_states_kept(device):
            drawn[0].restore()
            return run()

    return checkpoint(same_draws, use_reentrant=False, preserve_rng_state=False)


class _Recomputed(torch.autograd.Function):
    """
    Keeps what came out, computes it again in the backward pass, and adds the gradients to those there are.

    Not `torch.utils.checkpoint`: without re-entering, gradients of all parameters would be held a second time until
    all chunks are through; with it, outputs that nobody has used would be gone through with gradients of zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[], Any],
        held: list[Any],
        device: torch.device,
        otherwise: Callable[[], None],
        *parameters: torch.Tensor,
    ) -> Any:
        ctx.run, ctx.rng, ctx.device, ctx.otherwise = run, RandomState.capture(device), device, otherwise
        ctx.autocast = _autocast_now(device)
        ctx.set_materialize_grads(False)
        output = run()
        # What was cast without gradients must not be used by what needs them.
        torch.clear_autocast_cache()
        tensors: list[torch.Tensor] = []
        held.append(flattened(output, tensors))
        # Detached: what is given through as it came must not become an output of this.
        tensors = [tensor.detach() for tensor in tensors]
        ctx.sums = fingerprint(tensors)
        ctx.mark_non_differentiable(*(tensor for tensor in tensors if not tensor.is_floating_point()))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            # Would be added to `.grad`, where nobody looks for them.
            raise RuntimeError(
                "A model call was split because it did not fit in memory; gradients of it can be computed by "
                "`backward()`, but not by `torch.autograd.grad` or for some inputs only."
            )
        tensors = _run_again(ctx)
        if not agree(ctx.sums, fingerprint(tensors), _SAME):
            # A single observation may be a fault of the device; its activations go before the next.
            tensors.clear()
            tensors = _run_again(ctx)
            if not agree(ctx.sums, fingerprint(tensors), _SAME):
                ctx.otherwise()
                raise ComputedOtherwise("again in the backward pass a part of the batch")
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(tensors, gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        # Theirs have been added.
        return (None,) * len(ctx.needs_input_grad)


def _run_again(ctx: Any) -> list[torch.Tensor]:
    """What comes out with the random states and the precision of the first time, this time with activations."""
    tensors: list[torch.Tensor] = []
    with random_states_kept(ctx.device), contextlib.ExitStack() as stack:
        ctx.rng.restore()
        for context in ctx.autocast:
            stack.enter_context(torch.autocast(**context))
        with torch.enable_grad():
            flattened(ctx.run(), tensors)
    return tensors


def fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Two numbers of each tensor of floats that tell it from another one; the second is a sum of absolute values."""
    floats = [tensor.detach().float() for tensor in tensors if tensor.is_floating_point()]
    if not floats:
        return torch.zeros(0)
    return torch.stack([number for each in floats for number in (each.sum(), each.abs().sum())])


def agree(before: torch.Tensor, again: torch.Tensor, same: float, least: float = 1e-6) -> bool:
    """
    Whether fingerprints are those of the same tensors.

    Args:
        before (`torch.Tensor`), again (`torch.Tensor`):
            The fingerprints.
        same (`float`), least (`float`, *optional*, defaults to 1e-6):
            By how much they may differ: relative to the numbers in the tensors, and in any case.
    """
    if before.shape != again.shape:
        return False
    # Sums are as exact as what they are large against.
    scale = before[1::2].abs().repeat_interleave(2)
    near = (before - again).abs() <= same * scale + least
    # A number that is not finite says nothing about splitting; the step is judged by it soon enough.
    return bool((near | ~torch.isfinite(before) | ~torch.isfinite(again)).all())


def _autocast_now(device: torch.device) -> list[dict[str, Any]]:
    return [
        {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for kind in {"cpu", device.type}
    ]


@contextlib.contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    rng = RandomState.capture(device)
    try:
        yield
    finally:
        rng.restore()
