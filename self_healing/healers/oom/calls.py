"""
The calls of a model, run over as many rows at a time as are known to fit; B rows of a batch, T tokens.

A loss is computed from what a model gives for a batch: here it sees the outputs of all rows, whichever way these were
computed. That is exact for every loss and every metric, as long as the model treats its rows one by one, and needs no
other rank. With gradients each chunk is computed again in the backward pass (`torch.utils.checkpoint`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, get_args

import torch
from torch.nn.functional import pad
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ...hf.batches import CallShape, Kind, Layout, segments_of, select_rows
from ...hf.patching import Replacements
from ...hf.state import is_sharded
from ...ranks import votes


# ---- sizes that fitted ----


# Steps after which a size that did not fit is tried again. The wait doubles whenever that fails.
PROBE_STEPS = 50


@dataclass(slots=True)
class _Frontier:
    """The largest sizes (rows, length) of one kind of call that did fit, and the smallest that did not."""

    fits: list[tuple[int, int]] = field(default_factory=list)
    fails: list[tuple[int, int]] = field(default_factory=list)

    def fit(self, rows: int, length: int) -> None:
        self.fits = [(r, n) for r, n in self.fits if r > rows or n > length] + [(rows, length)]
        self.fails = [(r, n) for r, n in self.fails if r > rows or n > length]

    def fail(self, rows: int, length: int) -> bool:
        """Notes a size that did not fit; whether as much had failed before."""
        again = any(rows >= r and length >= n for r, n in self.fails)
        self.fits = [(r, n) for r, n in self.fits if r < rows or n < length]
        self.fails = [(r, n) for r, n in self.fails if r < rows or n < length] + [(rows, length)]
        return again


class KnownSizes:
    """Remembers which sizes of model calls fitted, and tells how many rows of the next one may run at a time."""

    def __init__(self, probe_steps: int | None = None) -> None:
        self._base_wait = self._wait = PROBE_STEPS if probe_steps is None else probe_steps
        self._frontiers: dict[Kind, _Frontier] = {kind: _Frontier() for kind in get_args(Kind)}
        # Steps finished, and from how many on a size that has failed is tried again.
        self.step = self._next_retry = 0
        # Calls since the last failure: if one does not fit, it is the last one.
        self._seen: list[CallShape] = []
        # A number of rows that is tried beyond those known to fit.
        self._trying: CallShape | None = None
        # Where a failure ends the job (several processes): one row where nothing is known, unless one more failure can
        # most likely be healed; and half of what failed at most.
        self.failure_is_fatal = self.may_fail_once = False
        # Where every call has to be made whole, whatever fits: other ranks take part in it.
        self.made_together = False
        self.changed = False
        # Most pieces of one call or step since the last log, and why one was made whole, since the last incident.
        self.pieces = 1
        self.refused = ""
        # Whether a pass of a step, or an experiment, is computed: its calls have as many rows as they are to have.
        self.in_passes = False

    @property
    def limits(self) -> bool:
        """Whether anything has ever failed."""
        return any(frontier.fails for frontier in self._frontiers.values())

    # ---- how many rows ----

    def rows_for(self, shape: CallShape) -> int:
        """Gives how many rows of a call of this size may run at a time, at least 1; notes a size that is tried."""
        known, (most, failed) = self.known_rows(shape), self._known(shape)
        if not failed or self._trying is not None or known == shape.rows:
            return known
        rows = known
        if most > 0 or known == 1:
            # Of those that a call falls into evenly, half as many pieces; later, where they are known to fail.
            pieces = -(-shape.rows // known)
            rows = -(-shape.rows // -(-pieces // 2))
            waits = self.failure_is_fatal or any(rows >= r and shape.length >= n for r, n in failed)
            too_many = self.failure_is_fatal and rows > _half_of(failed, shape.length)
            if too_many or (waits and self.step < self._next_retry):
                return known
        self._trying = replace(shape, rows=rows)
        return rows

    def known_rows(self, shape: CallShape) -> int:
        """Gives how many of its rows are known to fit; where nothing is known, half as many tokens as failed."""
        most, failed = self._known(shape)
        if not failed:
            return shape.rows
        if most == 0:
            cautious = self.failure_is_fatal and not self.may_fail_once and shape.kind != "generate"
            most = 1 if cautious else _half_of(failed, shape.length)
        # What has failed itself counts more than what fitted with gradients (another model, another state of memory).
        below = min((rows - 1 for rows, length in failed if length <= shape.length), default=shape.rows)
        return max(min(most, shape.rows, below), 1)

    def _known(self, shape: CallShape) -> tuple[int, list[tuple[int, int]]]:
        """Gives the most rows of this length that are known to fit, 0 if none are, and all sizes that did not fit."""
        own = self._frontiers[shape.kind]
        fits, fails = own.fits, own.fails
        if shape.kind == "forward":
            # Without gradients a call needs no more than with; how much less is only known once it has run.
            fits, fails = fits + self._frontiers["train"].fits, fails + self._frontiers["train"].fails
        return max((rows for rows, length in fits if length >= shape.length), default=0), fails

    # ---- what ran ----

    def begins(self, shape: CallShape) -> None:
        """A call of this size begins; if it does not fit, this is the one."""
        self._seen.append(shape)

    def last_begun(self, kind: Kind | None = None) -> CallShape | None:
        """The last call, of any kind or of one, that began since the last failure."""
        return next((shape for shape in reversed(self._seen) if kind in (None, shape.kind)), None)

    def on_success(self) -> None:
        """Notes that everything which ran since the last failure fitted, backward included."""
        seen = self._seen
        self.forget_attempt()
        if not seen or not self.limits:
            return
        self._trying = None
        for shape in seen:
            frontier = self._frontiers[shape.kind]
            if any(r >= shape.rows and n >= shape.length for r, n in frontier.fits):
                continue
            failures = len(frontier.fails)
            frontier.fit(shape.rows, shape.length)
            self.changed = True
            if len(frontier.fails) < failures:
                # Growing as long as it goes well.
                self._wait = self._base_wait

    def failed(self, shape: CallShape, with_gradients: bool = True) -> None:
        """A call of this size did not fit; in an evaluation that says nothing about calls `with_gradients`."""
        self.forget_attempt()
        tried, self._trying = self._trying, None
        kinds: set[Kind] = {shape.kind}
        if with_gradients and shape.kind == "forward" and self._known(replace(shape, kind="train"))[0] < shape.rows:
            # With gradients it needs more; unless it did fit, and another model is the larger one.
            kinds.add("train")
        again = [self._frontiers[kind].fail(shape.rows, shape.length) for kind in kinds]
        if tried is not None and (self.failure_is_fatal or any(again)):
            self._wait *= 2
        self._next_retry = self.step + self._wait
        self.changed = True

    def is_tried(self, shape: CallShape) -> bool:
        """Whether a call of this size runs because it was to be tried, and not because it could not be split."""
        tried = self._trying
        return tried is not None and shape.kind == tried.kind and shape.rows <= tried.rows

    def forget_attempt(self) -> None:
        """Forgets the calls since the last failure: they run again."""
        self._seen = []

    def more_room(self) -> None:
        """Less memory is needed per row from now on: what failed may fit."""
        for kind in ("train", "forward"):
            self._frontiers[kind] = _Frontier()
        self._trying = None
        self.changed = True

    # ---- for other processes ----

    def state_dict(self) -> dict[str, Any]:
        frontiers: dict[str, Any] = {
            kind: {"fits": each.fits, "fails": each.fails} for kind, each in self._frontiers.items()
        }
        return {**frontiers, "made_together": self.made_together}

    def load_state_dict(self, state: Mapping[str, Any], own: bool = True) -> None:
        """
        Takes over what did not fit in another process; what did fit from an earlier start of this rank (`own`) only:
        another one may have more memory.
        """
        self.made_together |= bool(state.get("made_together"))
        for kind, frontier in self._frontiers.items():
            known = state.get(kind, {})
            for rows, length in known.get("fails", []):
                frontier.fail(int(rows), int(length))
            for rows, length in known.get("fits", []) if own else []:
                frontier.fit(int(rows), int(length))
        self._next_retry = self.step + self._wait


def _half_of(failed: list[tuple[int, int]], length: int) -> int:
    """Rows of this length with half as many tokens as the smallest call that failed."""
    return min(map(math.prod, failed)) // 2 // length


# ---- calls ----


IGNORED_LABEL = -100
# In the order in which they say how many rows a call has.
_MAIN_INPUTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "input_values", "input_features", "pixel_values")
# Arguments whose first dimension is never that of the rows.
_OF_NO_ROW = frozenset(
    {
        *("num_items_in_batch", "logits_to_keep", "cache_position"),
        *("generation_config", "bad_words_ids", "force_words_ids", "eos_token_id", "pad_token_id", "suppress_tokens"),
        *("begin_suppress_tokens", "sequence_bias", "stop_strings", "tokenizer", "processor"),
    }
)
# Arguments of `generate` that may know the rows by their place in the batch, or see one batch only.
_OF_THE_BATCH = (
    *("logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria", "streamer", "assistant_model"),
    "custom_generate",
)
# What an earlier call has left for this one, as transformers names it: the second from 5.24 on.
_CACHES = ("past_key_values", "cache", "cache_params", "past_buckets_states", "mems")
# Rotary embeddings of these kinds depend on the largest position in the batch.
_ROPE_BY_LENGTH = ("dynamic", "longrope")


class CannotSplit(Exception):
    """A call cannot be made for some rows after the other; the message says why, for the journal."""


@dataclass(slots=True)
class _KeptLoss:
    """A loss that a model was to compute for some rows: with what, and what it was given instead."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    placeholder: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a model, or of its `generate`; `segments` where its rows are the sequences of a flattened batch."""

    original: Callable[..., Any]
    shape: CallShape
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    segments: Layout | None = None

    def of(self, group: Sequence[int]) -> _Call:
        """The same call of some of its rows, or sequences."""
        if self.segments is not None:
            starts = self.segments.starts
            tokens = sum(starts[each + 1] - starts[each] for each in group)
            kwargs = select_rows(self.kwargs, self.segments, group)
            return replace(self, shape=replace(self.shape, rows=tokens), kwargs=kwargs)
        # A view, where they follow each other.
        rows = slice(group[0], group[-1] + 1) if group[-1] - group[0] == len(group) - 1 else [*group]
        total = self.shape.rows
        return replace(
            self,
            shape=replace(self.shape, rows=len(group)),
            args=tuple(_rows_of(value, total, rows) for value in self.args),
            kwargs={name: _rows_of(value, total, rows, name) for name, value in self.kwargs.items()},
        )


class ModelCalls:
    """Runs the calls of one module, and its generation, over as many rows at a time as fit."""

    def __init__(self, module: torch.nn.Module, sizes: KnownSizes, device: torch.device) -> None:
        self._module = module
        self._sizes = sizes
        self._device = device
        # Weights are gathered from all ranks, which make each call together.
        self._together = is_sharded(module)
        self._inside = False
        # Why calls of a kind are made whole for good.
        self._given_up: dict[Kind, str] = {}

    def call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of the module."""
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self._module.parameters())
        shape = None if self._inside else shape_of_call("train" if trains else "forward", args, kwargs)
        if shape is None:
            return original(*args, **kwargs)
        call = _Call(original, shape, args, kwargs, segments_of(kwargs))
        return self._run(call) if trains and self._sizes.in_passes else self._as_it_fits(call, self._in_chunks)

    def generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of `generate`: the same prompts and the same distribution, other draws."""
        shape = shape_of_call("generate", args, kwargs)
        if shape is None:
            return original(*args, **kwargs)
        call = _Call(original, shape, args, kwargs)
        new, most = self._setting("max_new_tokens", call), self._setting("max_length", call)
        longest = max(shape.length, int(most or 0)) if new is None else shape.length + int(new)
        return self._as_it_fits(replace(call, shape=replace(shape, length=longest)), self._generated_in_chunks)

    def _as_it_fits(self, call: _Call, in_chunks: Callable[[_Call, Sequence[Sequence[int]]], Any]) -> Any:
        groups = self._groups(call)
        if groups:
            try:
                return in_chunks(call, groups)
            except CannotSplit as refusal:
                self._sizes.refused = self._given_up[call.shape.kind] = str(refusal)
        return self._run(call)

    def _run(self, call: _Call) -> Any:
        """Makes a call; calls inside of it pass through."""
        self._sizes.begins(call.shape)
        inside, self._inside = self._inside, True
        try:
            return call.original(*call.args, **call.kwargs)
        finally:
            self._inside = inside

    # ---- which rows ----

    def _groups(self, call: _Call) -> list[Sequence[int]]:
        """The rows, or sequences, of each chunk; none where the call is made whole."""
        shape, segments = call.shape, call.segments
        allowed = self._sizes.rows_for(shape)
        wanted, groups = -(-shape.rows // allowed), list[Sequence[int]]()
        if wanted == 1 and not self._together:
            return []
        refusal = self._given_up.get(shape.kind, "") or self._why_whole(call)
        if segments is not None and not refusal:
            try:
                groups.extend(groups_of_segments(call.kwargs, segments, allowed))
            except CannotSplit as refused:
                refusal = str(refused)
        count = 1 if refusal else wanted
        if self._together:
            # Each call gathers weights from all ranks: they make equally many.
            most = 1 if refusal or segments is not None else shape.rows
            most_wanted, fewest = votes.largest("the chunks of a call", [wanted, -most], self._device)
            count = round(min(most_wanted, -fewest))
        if wanted > 1 and count == 1:
            self._sizes.refused = refusal or "another rank cannot split its part of it"
        return [] if count == 1 else groups or [*spans(shape.rows, count)]

    def _why_whole(self, call: _Call) -> str:
        """Says why the rows of a call are not computed one after the other; empty if they can be."""
        kwargs = call.kwargs
        refusal = self._why_generated_whole(call) if call.shape.kind == "generate" else ""
        if refusal:
            return refusal
        if self._sizes.made_together and not self._together:
            return "other ranks take part in a forward of the model, as often as this one makes it"
        modules = list(self._module.modules())
        if any(isinstance(each, _BatchNorm) and each.training for each in modules):
            return "batch normalisation computes its statistics over all rows of the batch"
        if any(not isinstance(kwargs.get(name), bool | None) for name in _CACHES) or any(map(_is_cache, call.args)):
            return "the call goes on from cached keys and values"
        by_length = any(getattr(each, "rope_type", None) in _ROPE_BY_LENGTH for each in modules)
        if by_length and kwargs.get("position_ids") is not None:
            return "its rotary embedding depends on the largest position in the batch"
        if call.shape.kind != "generate" and kwargs.get("use_cache"):
            return "the call asks for cached keys and values (use_cache=True)"
        return "a flattened batch with positional arguments" if call.segments is not None and call.args else ""

    def _why_generated_whole(self, call: _Call) -> str:
        for name in _OF_THE_BATCH:
            if call.kwargs.get(name):
                return f"`{name}` may look at the whole batch"
        if any(callable(value) and not isinstance(value, torch.Tensor) for value in call.args):
            return "a function among the positional arguments may look at the whole batch"
        if self._setting("return_dict_in_generate", call):
            return "generation returns more than the tokens (return_dict_in_generate=True)"
        return ""

    # ---- chunks ----

    def _in_chunks(self, call: _Call, groups: Sequence[Sequence[int]]) -> Any:
        chunks = [call.of(group) for group in groups]
        outputs, losses = [], []
        for chunk in chunks:
            output, loss = self._chunk(chunk)
            outputs.append(output)
            losses.append(loss)
        shapes, flat = [chunk.shape for chunk in chunks], call.segments is not None
        of_all: dict[int, Any] = {}
        if losses[0] is not None:
            # The loss of all rows, from the logits of all rows.
            positional, named = _joined([(each.args, each.kwargs) for each in losses], shapes, flat, {})
            of_all[id(losses[0].placeholder)] = _innermost(self._module).loss_function(*positional, **named)
        elif call.kwargs.get("fused_lm_head"):
            # Of TRL, which has the model give the log-probability of each token.
            items = call.kwargs.get("num_items_in_batch")
            count = sum(each.label_mask.sum() for each in outputs).clamp(min=1) if items is None else items
            of_all[id(outputs[0].loss)] = -sum(each.log_probs.sum() for each in outputs) / count
        result = _joined(outputs, shapes, flat, of_all)
        self._sizes.pieces = max(self._sizes.pieces, len(groups))
        return result

    def _chunk(self, call: _Call) -> tuple[Any, Any]:
        """The outputs for some rows, and what their loss is computed from, if the model computes one."""

        def compute(_: Any) -> tuple[Any, Any]:
            with _losses_kept(_innermost(self._module), call.kwargs) as kept:
                output = self._run(call)
            if any(loss.placeholder._version for loss in kept):
                raise CannotSplit("the model adds something to its loss")
            return output, kept[0] if kept else None

        main = main_input(call.args, call.kwargs)
        if call.shape.kind != "train":
            return compute(main)
        # ZeRO-3 has let go of gathered weights by the time that their sizes are compared.
        check = "none" if self._together else "default"
        again = functools.partial(checkpoint, use_reentrant=False, determinism_check=check)
        if call.kwargs.get("fused_lm_head") and any(hasattr(each, "ds_id") for each in self._module.parameters()):
            # The backward of TRL's head asks the weight itself whether it is gathered; a checkpoint gives it a copy.
            with Replacements() as replaced:
                replaced.wrap(_innermost(self._module).base_model, "forward", again)
                return compute(main)
        # What it is given says on which device random states are kept for the backward pass.
        return again(compute, main)  # type: ignore[no-any-return]

    def _generated_in_chunks(self, call: _Call, groups: Sequence[Sequence[int]]) -> torch.Tensor:
        pieces = []
        for chunk in map(call.of, groups):
            piece = self._run(chunk)
            if not isinstance(piece, torch.Tensor) or piece.dim() != 2 or piece.size(0) % chunk.shape.rows:
                raise CannotSplit("generation returns something else than the tokens")
            pieces.append(piece)
        self._sizes.pieces = max(self._sizes.pieces, len(pieces))
        padding = self._setting("pad_token_id", call)
        if padding is None:
            # One token, or several.
            padding = self._setting("eos_token_id", call)
        value = int(torch.as_tensor(0 if padding is None else padding).flatten()[0])
        longest = max(piece.size(1) for piece in pieces)
        return torch.cat([pad(piece, (0, longest - piece.size(1)), value=value) for piece in pieces])

    def _setting(self, name: str, call: _Call) -> Any:
        """As `generate` takes it: from its arguments, their configuration, the model's."""
        configs = [call.kwargs.get("generation_config"), *call.args, getattr(self._module, "generation_config", None)]
        values = [call.kwargs.get(name), *(getattr(config, name, None) for config in configs if _is_config(config))]
        return next((value for value in values if value is not None), None)


@contextlib.contextmanager
def _losses_kept(model: Any, kwargs: Mapping[str, Any]) -> Iterator[list[_KeptLoss]]:
    """Keeps what a model of transformers gives to its `loss_function`, to be computed for all rows at once."""
    kept: list[_KeptLoss] = []
    if not hasattr(model, "loss_function") or all(kwargs.get(each) is None for each in ("labels", "shift_labels")):
        yield kept
        return
    function, own = model.loss_function, "_loss_function" in vars(model)

    def keep(*args: Any, **named: Any) -> torch.Tensor:
        main = main_input(args, named)
        kept.append(_KeptLoss(args, named, torch.zeros((), device=None if main is None else main.device)))
        return kept[-1].placeholder

    model.loss_function = keep
    try:
        yield kept
    finally:
        if own:
            model.loss_function = function
        else:
            del model._loss_function


def _innermost(module: torch.nn.Module) -> Any:
    """The model below adapters and compilation."""
    unwrapped: Any = getattr(module, "get_base_model", lambda: module)()
    return getattr(unwrapped, "_orig_mod", unwrapped)


def _is_config(value: Any) -> bool:
    return hasattr(value, "pad_token_id") and hasattr(value, "eos_token_id") and not callable(value)


def _is_cache(value: Any) -> bool:
    return "Cache" in type(value).__name__


# ---- rows of what a model is called with, and of what it gives ----


def main_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor that says how many rows a call has; `None` if it has none."""
    for value in (*map(kwargs.get, _MAIN_INPUTS), *args, *kwargs.values()):
        found = main_input((), value) if isinstance(value, Mapping) else value
        if isinstance(found, torch.Tensor) and found.dim() > 0:
            return found
    return None


def shape_of_call(kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallShape | None:
    """The size of a call; `None` if there is no tensor in it."""
    main = main_input(args, kwargs)
    if main is None:
        return None
    if kind != "generate" and segments_of(kwargs) is not None:
        return CallShape(kind, main.size(1), 1)
    return CallShape(kind, main.size(0), main.size(1) if main.dim() > 1 else 1)


def spans(total: int, count: int) -> list[range]:
    """The rows of each of so many chunks: of even sizes, so that none is a mere rest."""
    return [range(total * index // count, total * (index + 1) // count) for index in range(count)]


def groups_of_segments(batch: Mapping[str, Any], segments: Layout, allowed: int) -> list[list[int]]:
    """Groups of whole sequences of a flattened batch, of at most `allowed` tokens and at least one sequence."""
    labels, starts = batch.get("labels"), segments.starts
    inner = list(starts[1:-1])
    if isinstance(labels, torch.Tensor) and inner and bool((labels[0, inner] != IGNORED_LABEL).any()):
        raise CannotSplit("sequences of a flattened batch predict the first token of the next one")
    groups: list[list[int]] = []
    filled = allowed
    for segment in range(segments.rows):
        tokens = starts[segment + 1] - starts[segment]
        if filled + tokens > allowed:
            groups.append([])
            filled = 0
        groups[-1].append(segment)
        filled += tokens
    return groups


def _rows_of(value: Any, total: int, rows: slice | list[int], name: str = "") -> Any:
    """The part of an argument that belongs to some rows; what belongs to no row stays."""
    if name in _OF_NO_ROW or _is_config(value) or isinstance(value, (str, bool, int, float, torch.dtype, type(None))):
        return value
    if isinstance(value, torch.Tensor):
        if name == "position_ids" and value.dim() == 3 and value.size(1) == total:
            # Positions in time, height and width: (3, B, T).
            return value[:, rows]
        if value.dim() > 0 and value.size(0) == total:
            return value[rows]
        if value.dim() > 1 and value.size(0) != 1:
            raise CannotSplit(
                f"`{name or 'an input'}` has {value.size(0)} entries for {total} rows: it is not known which belong "
                "to which (images laid out by patch)"
            )
        return value
    if isinstance(value, Mapping):
        parts = {key: _rows_of(inner, total, rows, str(key)) for key, inner in value.items()}
        make: Any = type(value)
        return make(**parts) if is_dataclass(value) else make(parts)
    if isinstance(value, list) and len(value) == total:
        return value[rows] if isinstance(rows, slice) else [value[row] for row in rows]
    if isinstance(value, (list, tuple)):
        return type(value)(_rows_of(inner, total, rows, name) for inner in value)
    raise CannotSplit(f"`{name or 'an input'}` is a {type(value).__name__}, of which the rows are not known")


def _joined(values: Sequence[Any], shapes: Sequence[CallShape], flat: bool, of_all: Mapping[int, Any]) -> Any:
    """Puts together what was given for some rows after the other."""
    leaves, structures = zip(*(tree_flatten(value, is_leaf=_is_cache) for value in values), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise CannotSplit("the model gives something for some rows that it does not give for others")
    joined = [
        of_all[id(each[0])] if id(each[0]) in of_all else _joined_leaf(each, shapes, flat)
        for each in zip(*leaves, strict=True)
    ]
    return tree_unflatten(joined, structures[0])


def _joined_leaf(values: Sequence[Any], shapes: Sequence[CallShape], flat: bool) -> Any:
    first, dim = values[0], 1 if flat else 0
    if _is_cache(first):
        # Keys and values of some rows only are of no use.
        return None
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        if all(value is first or (not isinstance(first, torch.Tensor) and value == first) for value in values):
            return first
        raise CannotSplit("the model gives one value for all rows (a loss that its `loss_function` does not compute)")
    parts = []
    for place, (value, shape) in enumerate(zip(values, shapes, strict=True)):
        missing = shape.rows - value.size(dim) if value.dim() > dim else -1
        # Predictions of the next token have no entry for a chunk's last one, where the whole batch has one (ignored).
        if missing not in ((0, 1) if flat else (0,)):
            raise CannotSplit(f"the model gives a tensor of size {tuple(value.shape)} for {shape}")
        padded = missing == 1 and place < len(values) - 1
        parts.append(pad(value, (*(0, 0) * (value.dim() - 2), 0, 1)) if padded else value)
    if len({(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}) > 1:
        raise CannotSplit("the model gives tensors of sizes that depend on the rows it is given")
    return torch.cat(parts, dim=dim)
