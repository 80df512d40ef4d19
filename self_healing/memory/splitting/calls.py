"""The calls of one module, run over as many rows at a time as fit."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ... import consensus
from ...call_shape import CallShape
from ...instrument import hooks_on_gradients, is_of_deepspeed
from ...random_state import RandomState
from .additivity import (
    Additivity,
    is_classifier,
    is_language_model,
    merge,
    put_back,
    rope_by_length,
    why_rows_depend,
)
from .lockstep import Lockstep
from .outputs import loss_alone, without_caches
from .passes import NotInPasses, Passes, SplitCall
from .recomputing import recomputed, recomputed_at_once
from .repeating import Repeats
from .sizes import KnownSizes
from .slicing import (
    LENGTH_STEP,
    CannotSplit,
    Chunk,
    parts,
    rows_of,
    segment_chunks,
    sequences_of,
    shape_of_call,
    spans,
    trimmed,
    used_lengths,
)


logger = logging.getLogger("self_healing")

_MADE_TOGETHER = "other ranks take part in a forward of the model, as often as this one makes it"
_CHANGES_BUFFERS = "a forward pass changes what the model keeps (its buffers)"
_OTHERWISE = (
    "computed again in the backward pass, its forward gives something else (another adapter or mode was set meanwhile)"
)

_UNCLEAR = (
    "Step %d: a part of the batch, computed again in the backward pass, gave a slightly different result: more than "
    "repetitions usually differ, but no more than another kernel explains. The step goes on, and this is logged "
    "once. If the loss looks odd from here on, look for code that changes the model between forward and backward, or "
    "lower per_device_train_batch_size, so that nothing is split."
)


class SplitCalls:
    """
    Runs the calls of one module over as many rows at a time as fit.

    Args:
        module (`torch.nn.Module`):
            The module.
        sizes ([`KnownSizes`]):
            What fits.
        loss_only (`bool`, *optional*, defaults to `False`):
            Whether of a call with labels nothing but the loss is used, so that the logits need not be kept.
        passes ([`Passes`], *optional*):
            Those of the training steps, where these can be computed in passes.
        autocast (`torch.dtype`, *optional*):
            What its calls are cast to, if it is inside of them, where it does not show.
        lockstep ([`Lockstep`], *optional*):
            Of the ranks that call the module together, where it is sharded.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        sizes: KnownSizes,
        loss_only: bool = False,
        passes: Passes | None = None,
        autocast: torch.dtype | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        self._module = module
        self._lockstep = lockstep
        self._sizes = sizes
        self._loss_only = loss_only
        self._passes = passes
        self._inside = False
        self._device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self._additivity = Additivity(module, self._device, autocast)
        self._repeats = Repeats(module, self._device, autocast)
        self._proven = False
        self.given_up = ""
        self._suspected = self._warned = False
        self.refused = ""
        self.pieces = 1

    def call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of the module."""
        if self._inside:
            return original(*args, **kwargs)
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self._module.parameters())
        shape = shape_of_call("train" if trains else "forward", args, kwargs)
        if shape is None:
            return original(*args, **kwargs)
        passes = self._passes if self._passes is not None and self._passes.open else None
        if passes is not None and passes.later:
            return self._later_pass(passes, original, shape, kwargs)
        if self._lockstep is not None:
            in_passes = passes if trains else None
            result, split = self._split_together(original, self._lockstep, shape, in_passes, args, kwargs)
        else:
            in_passes = passes if trains and not self._wants_whole_gradients() else None
            result, split = self._split_if_needed(original, shape, in_passes, args, kwargs)
        if not split:
            with self.running(shape):
                result = original(*args, **kwargs)
            self._sizes.ran(shape)
        if passes is not None and not (split and in_passes is not None):
            passes.note(self._module, shape, result)
        return result

    def _split_if_needed(
        self,
        original: Callable[..., Any],
        shape: CallShape,
        passes: Passes | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, bool]:
        """Gives the output of the call, and whether it was split; if not, the call has to be made."""
        allowed = self._sizes.rows_for(shape)
        if allowed >= shape.rows:
            return None, False
        before = _Before(self._module, self._device, self._proven)
        try:
            self.check_made_alone()
            if passes is not None:
                groups = _pairs(shape, allowed, args, kwargs) if passes.paired else None
                return self._first_pass(original, passes, shape, allowed, groups, args, kwargs)
            if self.given_up:
                raise CannotSplit(self.given_up)
            chunks = self._chunks(shape, allowed, args, kwargs)
            return (self._split(original, chunks, args, kwargs), True) if len(chunks) > 1 else (None, False)
        except CannotSplit as refusal:
            before.put_back()
            self.refused = str(refusal)
            return None, False

    def _split_together(
        self,
        original: Callable[..., Any],
        lockstep: Lockstep,
        shape: CallShape,
        passes: Passes | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, bool]:
        """Likewise, for a call that all ranks make: into as many chunks on each, or on none into any."""
        if shape.kind == "train" and passes is None:
            # With a backward only in passes: each is a forward and a backward, as the trainer makes them.
            return None, False
        per_unit = 2 if passes is not None and passes.paired else 1
        units, allowed = shape.rows // per_unit, max(self._sizes.rows_for(shape) // per_unit, 1)
        wanted = -(-units // allowed)
        refusal = self._why_not_together(shape, per_unit, args, kwargs)
        count = lockstep.chunks(wanted, 1 if refusal else units)
        if count == 1:
            if wanted > 1:
                self.refused = refusal or "another rank cannot split its part of it"
            return None, False
        bounds = parts(units, count)
        groups = [_pairs_between(units, *bound) if per_unit == 2 else list(range(*bound)) for bound in bounds]
        before = _Before(self._module, self._device, self._proven)
        try:
            if passes is not None:
                return self._first_pass(original, passes, shape, allowed, groups, args, kwargs)
            return self._split(original, self._chunks(shape, allowed, args, kwargs, groups), args, kwargs), True
        except CannotSplit as refused:
            # For what the model is or does, which is the same on all ranks.
            before.put_back()
            self.refused = str(refused)
            return None, False

    def _why_not_together(self, shape: CallShape, per_unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Says why a call is not split in lockstep; empty if it can be."""
        if shape.rows % per_unit:
            return "an odd number of rows, in pairs"
        if sequences_of(args, kwargs) is not None:
            return "the sequences of a flattened batch are not told apart on all ranks at once"
        if not (is_language_model(self._module, kwargs) or is_classifier(self._module, kwargs)):
            return "how its loss adds up is not known, and cannot be tried on all ranks at once"
        if not all(map(is_of_deepspeed, hooks_on_gradients(self._module))):
            return "a hook on a parameter looks at its whole gradient"
        try:
            # What cannot be cut shows in the first row.
            self._chunks(shape, 1, args, kwargs, [[0]])
        except CannotSplit as refusal:
            return str(refusal)
        return ""

    @contextlib.contextmanager
    def running(self, shape: CallShape) -> Iterator[None]:
        """While a call of this size runs, calls inside of it pass through."""
        self._sizes.begins(shape)
        inside, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = inside

    def check_made_alone(self) -> None:
        """
        Looks whether other ranks take part in calls of the module: these are made as often as there.

        Raises:
            CannotSplit: If they do.
        """
        if self._sizes.made_together and self._lockstep is None:
            raise CannotSplit(_MADE_TOGETHER)

    def _made_alone(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """
        Has a call looked at while no part of one has come through yet: one that meets other ranks has met them where
        they make another one, and nothing that comes of it can be used.
        """
        if self._proven or self._lockstep is not None or consensus.world_size() == 1:
            return original

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._proven:
                # In a backward pass: gradients may be on their way meanwhile.
                return original(*args, **kwargs)
            begun = consensus.collectives_begun()
            try:
                return original(*args, **kwargs)
            finally:
                if consensus.collectives_begun() != begun:
                    self._sizes.made_together, self.refused = True, _MADE_TOGETHER
                    raise consensus.Stranded(f"a call was split on this rank, and {_MADE_TOGETHER}")

        return watched

    # ---- chunks ----

    def _chunks(
        self,
        shape: CallShape,
        allowed: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        groups: list[list[int]] | None = None,
    ) -> list[Chunk]:
        why = why_rows_depend(self._module, args, kwargs)
        if why:
            raise CannotSplit(why)
        segments = sequences_of(args, kwargs)
        if segments is not None:
            return segment_chunks(shape, allowed, args, kwargs, segments)
        total, length = shape.rows, shape.length
        used = used_lengths(kwargs, total) if self._may_trim(kwargs) else None
        chunks = []
        picked: list[slice | list[int]] = [slice(start, stop) for start, stop in spans(total, allowed)]
        for rows in groups or picked:
            part = {name: rows_of(value, total, rows, name) for name, value in kwargs.items()}
            positional = tuple(rows_of(value, total, rows) for value in args)
            numbers = range(total)[rows] if isinstance(rows, slice) else rows
            keep = length
            if used is not None:
                keep = min(max(-(-max(used[row] for row in numbers) // LENGTH_STEP), 1) * LENGTH_STEP, length)
            if keep < length:
                part = {name: trimmed(value, name, keep) for name, value in part.items()}
            size = CallShape(shape.kind, len(numbers), keep)
            chunks.append(Chunk(positional, part, len(numbers), size, cut=length - keep))
        return chunks

    def _adds_noise_by_length(self) -> bool:
        """NEFTune scales its noise by the length there is."""
        embeddings = getattr(self._module, "get_input_embeddings", lambda: None)()
        return getattr(embeddings, "neftune_noise_alpha", None) is not None

    def _may_trim(self, kwargs: dict[str, Any]) -> bool:
        """
        Whether padding on the right may be cut off: only where the outputs at these places are zero (TRL's fused head)
        or not used, and nothing else depends on it.
        """
        if not (kwargs.get("fused_lm_head") or self._only_loss(kwargs)):
            return False
        if self._adds_noise_by_length():
            return False
        return is_language_model(self._module, kwargs) and not rope_by_length(self._module)

    def _only_loss(self, kwargs: dict[str, Any]) -> bool:
        return self._loss_only and kwargs.get("labels") is not None and torch.is_grad_enabled()

    # ---- one after the other ----

    def _split(
        self, original: Callable[..., Any], chunks: list[Chunk], args: tuple[Any, ...], whole: dict[str, Any]
    ) -> Any:
        original = self._made_alone(original)
        rule = self._additivity.rule(original, chunks, args, whole)
        only_loss = self._only_loss(whole)
        before = self._kept_state()
        outputs = []
        for index, chunk in enumerate(chunks):
            run = self._runner(original, chunk, only_loss)
            last = index == len(chunks) - 1
            if chunk.shape.kind != "train" or last:
                # The backward of the last one comes first: its activations need not be made twice.
                outputs.append(run())
            elif self._wants_whole_gradients():
                outputs.append(recomputed_at_once(run, self._device))
            else:
                outputs.append(
                    recomputed(run, self._device, self._trained(), self._differs, self._repeats, self._may_differ)
                )
            if index == 0 and self._kept_state() != before:
                raise CannotSplit(_CHANGES_BUFFERS)
            self._sizes.ran(chunk.shape)
        result = merge(outputs, chunks, whole, rule)
        self._proven = True
        self.pieces = max(self.pieces, len(chunks))
        return result

    # ---- one in each pass ----

    def _first_pass(
        self,
        original: Callable[..., Any],
        passes: Passes,
        shape: CallShape,
        allowed: int,
        groups: list[list[int]] | None,
        args: tuple[Any, ...],
        whole: dict[str, Any],
    ) -> tuple[Any, bool]:
        chunks = self._chunks(shape, allowed, args, whole, groups)
        if len(chunks) == 1:
            return None, False
        rule = self._additivity.rule(original, chunks, args, whole)
        order = None if groups is None else [row for group in groups for row in group]
        call, before = SplitCall(self._module, shape, chunks, rule, order), self._kept_state()
        result = self._next_chunk(original, call, whole)
        if self._kept_state() != before:
            raise CannotSplit(_CHANGES_BUFFERS)
        passes.begin(call)
        self._proven = True
        self.pieces = max(self.pieces, len(chunks))
        return result, True

    def _later_pass(
        self, passes: Passes, original: Callable[..., Any], shape: CallShape, whole: dict[str, Any]
    ) -> Any:
        call = passes.due(self._module, shape)
        if not isinstance(call, SplitCall):
            return call.result
        try:
            return self._next_chunk(original, call, whole)
        except CannotSplit as refusal:
            self.refused = str(refusal)
            passes.refuse()

    def _next_chunk(self, original: Callable[..., Any], call: SplitCall, whole: dict[str, Any]) -> Any:
        chunk = call.chunk
        output = self._runner(original, chunk, self._only_loss(whole))()
        self._sizes.ran(chunk.shape)
        return call.join(output, whole)

    def _differs(self) -> None:
        """A piece computed again gave something else: believed when it does so in the next attempt as well."""
        if self._suspected:
            self.given_up = self.refused = _OTHERWISE
        self._suspected = True

    def _may_differ(self) -> None:
        """A piece computed again lies further from what it was than repetitions lie from each other, and not far."""
        if not self._warned:
            logger.warning(_UNCLEAR, self._sizes.step)
        self._warned = True

    def on_success(self) -> None:
        """Called after a backward pass: what seemed otherwise in an attempt before was a fault that has passed."""
        self._suspected = False

    def _wants_whole_gradients(self) -> bool:
        """
        Whether gradients are taken as they come: by DistributedDataParallel, ZeRO, or a hook on a parameter. They must
        not come in portions; held back, they need the memory of a second set.
        """
        return consensus.world_size() > 1 or bool(hooks_on_gradients(self._module))

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    def _kept_state(self) -> list[tuple[str, int, int]]:
        """Says whether a forward pass wrote into buffers; tables of rotary embeddings may grow."""
        return [
            (name, id(buffer), 0 if buffer.is_inference() else buffer._version)
            for name, buffer in self._module.named_buffers()
            if not name.endswith("inv_freq")
        ]

    def _runner(self, original: Callable[..., Any], chunk: Chunk, only_loss: bool) -> Callable[[], Any]:
        def run() -> Any:
            with self.running(chunk.shape):
                output = original(*chunk.args, **chunk.kwargs)
            return loss_alone(output) if only_loss else without_caches(output)

        return run


def _pairs(shape: CallShape, allowed: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[int]]:
    """The rows of each chunk where the loss compares those of the first half with those of the second."""
    pairs, odd = divmod(shape.rows, 2)
    if odd or allowed < 2 or sequences_of(args, kwargs) is not None:
        raise NotInPasses
    return [_pairs_between(pairs, *bounds) for bounds in spans(pairs, allowed // 2)]


def _pairs_between(pairs: int, start: int, stop: int) -> list[int]:
    return [*range(start, stop), *range(pairs + start, pairs + stop)]


class _Before:
    """
    Random states and buffers from before a split that is tried, to put them back if it turns out not to be possible.

    Args:
        module (`torch.nn.Module`):
            The module.
        device (`torch.device`):
            Where it draws random numbers, besides the CPU.
        proven (`bool`):
            Whether its forward is known to leave buffers alone.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device, proven: bool) -> None:
        self._rng = RandomState.capture(device)
        self._buffers = [] if proven else [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

    def put_back(self) -> None:
        self._rng.restore()
        put_back(self._buffers)
