"""A chunk of which only the outputs are kept: it is computed again in the backward pass."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ...random_state import RandomState
from .outputs import filled, flattened
from .repeating import FEW, MANY, Repeats, Trace, Verdict


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
    repeats: Repeats | None = None,
    unclear: Callable[[], None] = lambda: None,
) -> Any:
    """
    Gives the output of `run` without keeping its activations: in the backward pass it is run again.

    Args:
        run (`Callable[[], Any]`):
            A forward pass.
        device (`torch.device`):
            Where it draws random numbers, besides the CPU.
        parameters (`Sequence[torch.Tensor]`):
            What gets gradients in it.
        otherwise (`Callable[[], None]`):
            Told if something else comes out when it is run again; [`ComputedOtherwise`] is raised then.
        repeats ([`Repeats`], *optional*):
            How closely what is run repeats itself.
        unclear (`Callable[[], None]`, *optional*):
            Told if what comes out may be something else, and is used.
    """
    structure: list[Any] = []
    with warnings.catch_warnings():
        # Of checkpointing that re-enters: without gradients, as here, it has nothing to do.
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        tensors = _Recomputed.apply(  # type: ignore[no-untyped-call]
            run, structure, device, otherwise, unclear, repeats or Repeats(device=device), *parameters
        )
    return filled(structure[0], tensors)


def recomputed_at_once(run: Callable[[], Any], device: torch.device) -> Any:
    """
    The same, but gradients of all chunks arrive together, at the end of the backward pass: a hook sees
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
    all chunks are through; with it, outputs that were not used would be gone through with gradients of zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[], Any],
        held: list[Any],
        device: torch.device,
        otherwise: Callable[[], None],
        unclear: Callable[[], None],
        repeats: Repeats,
        *parameters: torch.Tensor,
    ) -> Any:
        ctx.run, ctx.rng, ctx.device = run, RandomState.capture(device), device
        ctx.otherwise, ctx.unclear, ctx.repeats = otherwise, unclear, repeats
        ctx.autocast = _autocast_now(device)
        ctx.set_materialize_grads(False)
        output = run()
        # What was cast without gradients must not be used by what needs them.
        torch.clear_autocast_cache()
        tensors: list[torch.Tensor] = []
        held.append(flattened(output, tensors))
        # Detached: what is given through as it came must not become an output of this.
        tensors = [tensor.detach() for tensor in tensors]
        ctx.first = repeats.first_trace(tensors)
        ctx.mark_non_differentiable(*(tensor for tensor in tensors if not tensor.is_floating_point()))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            # Would be added to `.grad`, where no optimizer looks for them.
            raise RuntimeError(
                "A model call was split because it did not fit in memory; gradients of it can be computed by "
                "`backward()`, but not by `torch.autograd.grad` or for some inputs only."
            )
        tensors, trace = _run_again(ctx, with_gradients=True)
        if not ctx.repeats.near(ctx.first, trace):
            # Its activations go before the next.
            tensors.clear()
            tensors = _looked_into(ctx)
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(tensors, gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        # Theirs have been added.
        return (None,) * len(ctx.needs_input_grad)


def _run_again(ctx: Any, with_gradients: bool) -> tuple[list[torch.Tensor], Trace]:
    """Runs once more with the random states and the precision of the first time; with activations, or as then."""
    tensors: list[torch.Tensor] = []
    with random_states_kept(ctx.device), contextlib.ExitStack() as stack:
        ctx.rng.restore()
        for context in ctx.autocast:
            stack.enter_context(torch.autocast(**context))
        with torch.set_grad_enabled(with_gradients):
            flattened(ctx.run(), tensors)
        trace = ctx.repeats.trace(tensors)
    if not with_gradients:
        torch.clear_autocast_cache()
    return tensors, trace


def _looked_into(ctx: Any) -> list[torch.Tensor]:
    """
    Runs once more and gives the output, if it is that of the first time but for the noise of the kernels.

    Raises:
        ComputedOtherwise: If it is not. A single observation may be a fault of the device: it is not believed.
    """
    repeated: list[Trace] = []
    for times in (FEW, MANY):
        repeated += [_run_again(ctx, with_gradients=False)[1] for _ in range(len(repeated), times)]
        verdict = ctx.repeats.judge(ctx.first, repeated)
        if verdict is Verdict.SAME:
            break
    if verdict is not Verdict.OTHER:
        tensors, trace = _run_again(ctx, with_gradients=True)
        if ctx.repeats.accept(ctx.first, trace):
            if verdict is Verdict.UNCLEAR:
                ctx.unclear()
            return tensors
    ctx.otherwise()
    raise ComputedOtherwise("again in the backward pass a part of the batch")


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
