"""
Exact splitting of a model call that did not fit, and the memory of what sizes did.

A loss is computed from what the model gives for a batch. So the batch is not split there, where every loss adds up in
a way of its own and some (a sort over the batch, a statistic of it) do not add up at all, but at the call of the
model: it runs over some rows after the other, and the loss sees the outputs of all of them. Of all chunks but the last
only the outputs are kept; in the backward pass each is computed again, with its activations, and its gradients are
added to those of the others. That is exact for every loss and every metric as long as the model treats its rows one by one.

Shape suffixes: B rows of a batch, T tokens, S segments of a flattened batch.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from . import consensus
from .instrument import RandomState
from .objectives import Layout, segments_of, select_rows


Kind = Literal["train", "forward", "generate"]
# Trimmed lengths are rounded up to this, for kernels that like it and so that few new shapes come up.
_LENGTH_STEP = 8
_IGNORED_LABEL = -100


class CannotSplit(Exception):
    """A model call cannot be split by rows; the message says why, for the journal."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """
    The size of one model call.

    Args:
        kind (`"train"`, `"forward"` or `"generate"`):
            With or without gradients, or generation.
        rows (`int`):
            Rows, B; of a flattened batch its tokens.
        length (`int`):
            Padded length, T, in tokens (of generation: with what may be generated); 1 for a flattened batch.
    """

    kind: Kind
    rows: int
    length: int

    def __str__(self) -> str:
        return f"{self.rows} tokens" if self.length == 1 else f"{self.rows} rows x {self.length}"


@dataclass(slots=True)
class _Frontier:
    """Sizes that are known: `fits` holds the largest that did, `fails` the smallest that did not."""

    fits: list[tuple[int, int]] = field(default_factory=list)
    fails: list[tuple[int, int]] = field(default_factory=list)

    def fit(self, rows: int, length: int) -> bool:
        """Takes in a size that fitted; whether that is news."""
        if self.known_to_fit(rows, length):
            return False
        self.fits = [(r, n) for r, n in self.fits if not (r <= rows and n <= length)] + [(rows, length)]
        self.fails = [(r, n) for r, n in self.fails if not (r <= rows and n <= length)]
        return True

    def fail(self, rows: int, length: int) -> None:
        """Takes in a size that did not."""
        self.fits = [(r, n) for r, n in self.fits if not (r >= rows and n >= length)]
        self.fails = [(r, n) for r, n in self.fails if not (r >= rows and n >= length)] + [(rows, length)]

    def known_to_fit(self, rows: int, length: int) -> bool:
        return any(r >= rows and n >= length for r, n in self.fits)

    def known_to_fail(self, rows: int, length: int) -> bool:
        return any(r <= rows and n <= length for r, n in self.fails)


class SizeMemory:
    """
    What sizes of model calls fitted and which did not, and with it how many rows of the next one may run at a time.

    Sizes are compared in both directions at once (as many rows *and* as long): memory grows linearly with one and
    faster than that with the other, so their product alone says too little.

    Before anything has failed, everything is allowed. After that only what is known to fit is, and one row where
    nothing is; a larger size is tried again after `probe_steps` optimizer steps, later after twice as many whenever
    that failed.

    Args:
        probe_steps (`int`):
            Optimizer steps until a larger size is tried again.
    """

    def __init__(self, probe_steps: int) -> None:
        self._base_wait = self._wait = probe_steps
        self._frontiers: dict[Kind, _Frontier] = {
            "train": _Frontier(),
            "forward": _Frontier(),
            "generate": _Frontier(),
        }
        self._step = self._next_probe = 0
        self._seen: list[CallShape] = []
        self._probing: CallShape | None = None
        self.begun: dict[Kind, CallShape] = {}
        self.last_begun: CallShape | None = None
        self.changed = False

    @property
    def limits(self) -> bool:
        """Whether anything has ever failed."""
        return any(frontier.fails for frontier in self._frontiers.values())

    def begin_step(self, step: int) -> None:
        """An optimizer step begins."""
        self._step = step

    def rows_for(self, shape: CallShape) -> int:
        """How many rows of a call of this size may run at a time, at least 1."""
        rows, length = shape.rows, shape.length
        if not self._fails(shape.kind):
            return rows
        if self._fits(shape.kind, rows, length):
            return rows
        known = max((r for frontier in self._fitting(shape.kind) for r, n in frontier.fits if n >= length), default=1)
        known = min(known, rows)
        if self._step >= self._next_probe and self._probing is None and known < rows:
            tried = self._larger(shape.kind, known, rows, length)
            self._probing = dataclasses.replace(shape, rows=tried)
            return tried
        return known

    def _larger(self, kind: Kind, known: int, rows: int, length: int) -> int:
        """Doubled, as long as that is not known to fail; then half-way; at last what failed, which may fit by now."""
        failed = min(
            (r for frontier in self._failing(kind) for r, n in frontier.fails if n <= length), default=rows + 1
        )
        if 2 * known < failed:
            return min(2 * known, rows)
        return min(max((known + failed) // 2, known + 1), rows)

    def begins(self, shape: CallShape) -> None:
        """A call of this size begins; if it does not fit, this is the one."""
        self.begun[shape.kind] = self.last_begun = shape

    def ran(self, shape: CallShape) -> None:
        """A call of this size came through its forward pass; what is known of it waits for its backward."""
        self._seen.append(shape)

    def came_through(self) -> None:
        """Everything that ran since the last failure fitted, backward included."""
        if not self._seen:
            return
        seen, self._seen = self._seen, []
        if not self.limits:
            return
        for shape in seen:
            self.changed |= self._frontiers[shape.kind].fit(shape.rows, shape.length)
        if self._probing is not None and self._probing in seen:
            # Growing as long as it goes well.
            self._probing, self._wait, self._next_probe = None, self._base_wait, self._step + 1

    def failed(self, shape: CallShape) -> None:
        """A call of this size did not fit."""
        self._seen.clear()
        self._frontiers[shape.kind].fail(shape.rows, shape.length)
        if self._probing is not None:
            self._wait *= 2
        self._probing = None
        self._next_probe = self._step + self._wait
        self.changed = True

    def is_probe(self) -> bool:
        """Whether a size that is larger than what is known to fit is being tried."""
        return self._probing is not None

    def forget_attempt(self) -> None:
        """What ran since the last failure says nothing: it runs again."""
        self._seen.clear()

    def more_room(self) -> None:
        """Less memory is needed per row from now on: what failed may fit."""
        for kind in ("train", "forward"):
            frontier = self._frontiers[kind]
            # A size nobody has: it says that something did fail, and so that only what is known to fit is safe.
            frontier.fails = [(r, n + (1 << 30)) for r, n in frontier.fails[:1]]
        self.changed = True

    def _fitting(self, kind: Kind) -> Sequence[_Frontier]:
        """What fits with gradients fits without."""
        own = self._frontiers[kind]
        return (own, self._frontiers["train"]) if kind == "forward" else (own,)

    def _failing(self, kind: Kind) -> Sequence[_Frontier]:
        """Without gradients a call needs less; how much less is only known once it has run."""
        own = self._frontiers[kind]
        return (own, self._frontiers["train"]) if kind == "forward" else (own,)

    def _fits(self, kind: Kind, rows: int, length: int) -> bool:
        return any(frontier.known_to_fit(rows, length) for frontier in self._fitting(kind))

    def _fails(self, kind: Kind) -> bool:
        return any(frontier.fails for frontier in self._failing(kind))

    def state_dict(self) -> dict[str, Any]:
        """What is known, as JSON."""
        return {kind: {"fits": frontier.fits, "fails": frontier.fails} for kind, frontier in self._frontiers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what an earlier process knew."""
        for kind, frontier in self._frontiers.items():
            known = state.get(kind, {})
            frontier.fits = [(int(r), int(n)) for r, n in known.get("fits", [])]
            frontier.fails = [(int(r), int(n)) for r, n in known.get("fails", [])]
        self._next_probe = self._base_wait


# ---- what a call is made of ----

# In the order in which they say how many rows a call has.
_MAIN_INPUTS = (
    "input_ids",
    "inputs_embeds",
    "decoder_input_ids",
    "input_values",
    "input_features",
    "pixel_values",
    "inputs",
)


def main_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor that says how many rows a model call has; `None` if it has none."""
    named = [kwargs.get(name) for name in _MAIN_INPUTS]
    for value in (*named, *args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value
        if isinstance(value, Mapping):
            inner = main_input((), value)
            if inner is not None:
                return inner
    return None


def shape_of_call(kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallShape | None:
    """The size of a model call; `None` if there is no tensor in it."""
    main = main_input(args, kwargs)
    if main is None:
        return None
    if kind != "generate" and segments_of(kwargs) is not None:
        return CallShape(kind, main.size(1), 1)
    return CallShape(kind, main.size(0), main.size(1) if main.dim() > 1 else 1)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)


def _rows(value: Any, total: int, start: int, stop: int, name: str = "") -> Any:
    """The part of an argument that belongs to some rows; what belongs to no row stays as it is."""
    if isinstance(value, torch.Tensor):
        if value.dim() > 0 and value.size(0) == total:
            return value[start:stop]
        if name == "position_ids" and value.dim() == 3 and value.size(1) == total:
            # Positions in time, height and width: (3, B, T).
            return value[:, start:stop]
        if value.dim() > 1 and value.size(0) != 1:
            raise CannotSplit(
                f"`{name or 'an input'}` has {value.size(0)} entries for {total} rows: it cannot be told which belong "
                "to which (images laid out by patch)"
            )
        return value
    if isinstance(value, list) and len(value) == total:
        return value[start:stop]
    if isinstance(value, Mapping):
        return {key: _rows(inner, total, start, stop, str(key)) for key, inner in value.items()}
    return value


def _used_length(kwargs: Mapping[str, Any], rows: int) -> list[int] | None:
    """
    Where the padding on the right of each row begins, from its attention mask and labels; `None` if that is not known.
    One device sync.
    """
    mask, labels = kwargs.get("attention_mask"), kwargs.get("labels")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.size(0) != rows:
        return None
    if kwargs.get("past_key_values") is not None or kwargs.get("logits_to_keep"):
        return None
    length = mask.size(1)
    aligned = [value for value in kwargs.values() if isinstance(value, torch.Tensor) and value.dim() > 0]
    if any(value.dim() > 3 and value.size(-1) == length for value in aligned):
        return None
    used = mask != 0
    if isinstance(labels, torch.Tensor) and labels.shape == mask.shape:
        used = used | (labels != _IGNORED_LABEL)
    elif isinstance(labels, torch.Tensor) and labels.dim() > 1:
        return None
    places = torch.arange(1, length + 1, device=mask.device)
    return [int(last) for last in (used * places).amax(1).tolist()]


def _trimmed(value: Any, name: str, length: int, keep: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if name == "position_ids" and value.dim() == 3 and value.size(2) == length:
        return value[:, :, :keep]
    if value.dim() > 1 and value.size(1) == length:
        return value[:, :keep]
    return value


@dataclass(slots=True)
class _Chunk:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    shape: CallShape
    # Columns of padding that were cut off on the right.
    cut: int = 0
    # Whether another chunk of a flattened batch follows.
    gap: bool = False


# ---- how the scalar of several chunks becomes that of all ----

Rule = Literal["sum", "rows", "tokens", "labels"]
_RULES: tuple[Rule, ...] = ("sum", "tokens", "labels", "rows")


class _NoLabels(CannotSplit):
    """A rule that counts labels, and there are none."""


def _weights(rule: Rule, chunks: Sequence[_Chunk], whole: Mapping[str, Any]) -> list[Any]:
    """The weight of each chunk in a mean over rows, over next-token labels or over labels; 1 for a sum."""
    if rule == "sum":
        return [1.0] * len(chunks)
    if rule == "rows":
        total = sum(chunk.rows for chunk in chunks)
        return [chunk.rows / total for chunk in chunks]
    labels = whole.get("labels")
    if not isinstance(labels, torch.Tensor):
        raise _NoLabels("its loss is a mean over labels, and there are none in the call")
    counts = [_count(chunk.kwargs["labels"], shifted=rule == "tokens") for chunk in chunks]
    return [count / torch.stack(counts).sum() for count in counts]


def _count(labels: torch.Tensor, shifted: bool) -> torch.Tensor:
    if shifted:
        labels = labels[..., 1:]
    counted = labels != _IGNORED_LABEL if not labels.is_floating_point() else torch.ones_like(labels)
    return counted.sum().double()


def _known_rule(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> Rule | None:
    """How the losses of models of transformers add up; `None` for any other model, where it has to be found out."""
    inner = _innermost(module)
    if not _from_known_package(inner):
        return None
    if kwargs.get("num_items_in_batch") is not None:
        return "sum"
    name = type(inner).__name__
    if kwargs.get("fused_lm_head") or name.endswith(("ForCausalLM", "LMHeadModel")):
        return "tokens"
    labels = kwargs.get("labels")
    if name.endswith(("ForTokenClassification", "ForMaskedLM", "ForImageClassification")):
        return "labels"
    if name.endswith("ForSequenceClassification") and isinstance(labels, torch.Tensor):
        return "rows" if labels.is_floating_point() else "labels"
    return None


def _from_known_package(module: torch.nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in ("transformers", "peft", "trl")


def why_rows_depend(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> str:
    """Why the rows of a call cannot be computed one after the other, as far as that can be seen; empty if they can."""
    if module.training and any(
        isinstance(each, torch.nn.modules.batchnorm._BatchNorm) and each.training for each in module.modules()
    ):
        return "batch normalisation computes its statistics over all rows of the batch"
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if kwargs.get("output_router_logits") or getattr(text, "output_router_logits", False):
        return "the auxiliary loss of a mixture of experts balances all tokens of the batch"
    if kwargs.get("past_key_values") is not None:
        return "the call goes on from cached keys and values"
    if any(tensor.requires_grad for tensor in _tensors(kwargs)):
        return "its inputs need gradients"
    return ""


# ---- one module whose calls are split ----


class SplitCalls:
    """
    Runs the calls of one module over as many rows at a time as fit.

    Args:
        module (`torch.nn.Module`):
            The module.
        sizes ([`SizeMemory`]):
            What fits.
        loss_only (`bool`, *optional*, defaults to `False`):
            Whether of a call with labels nothing but the loss is used, so that the logits need not be kept.
    """

    def __init__(self, module: torch.nn.Module, sizes: SizeMemory, loss_only: bool = False) -> None:
        self._module = module
        self._sizes = sizes
        self._loss_only = loss_only
        self._inside = False
        self._rules: dict[tuple[str, ...], tuple[Rule, ...]] = {}
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
        allowed = self._sizes.rows_for(shape)
        if allowed < shape.rows:
            try:
                chunks = self._chunks(shape, allowed, args, kwargs)
                if len(chunks) > 1:
                    return self._split(original, chunks, kwargs)
            except CannotSplit as refusal:
                self.refused = str(refusal)
        with self.running(shape):
            result = original(*args, **kwargs)
        self._sizes.ran(shape)
        return result

    @contextlib.contextmanager
    def running(self, shape: CallShape) -> Iterator[None]:
        """While a call of this size runs, calls inside of it pass through."""
        self._sizes.begins(shape)
        inside, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = inside

    def _chunks(self, shape: CallShape, allowed: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Chunk]:
        why = why_rows_depend(self._module, kwargs)
        if why:
            raise CannotSplit(why)
        segments = segments_of(kwargs)
        if segments is not None:
            return _segment_chunks(shape, allowed, args, kwargs, segments)
        total = shape.rows
        # Evenly, so that none is a mere rest.
        count = -(-total // allowed)
        bounds = [total * index // count for index in range(count + 1)]
        trims = self._may_trim(kwargs)
        used = _used_length(kwargs, total) if trims else None
        chunks = []
        for start, stop in itertools.pairwise(bounds):
            part = {name: _rows(value, total, start, stop, name) for name, value in kwargs.items()}
            cut, length = 0, shape.length
            if used is not None:
                keep = -(-max(used[start:stop]) // _LENGTH_STEP) * _LENGTH_STEP
                if 0 < keep < length:
                    part = {name: _trimmed(value, name, length, keep) for name, value in part.items()}
                    cut, length = length - keep, keep
            positional = tuple(_rows(value, total, start, stop) for value in args)
            chunks.append(_Chunk(positional, part, stop - start, CallShape(shape.kind, stop - start, length), cut))
        return chunks

    def _may_trim(self, kwargs: Mapping[str, Any]) -> bool:
        """
        Whether padding on the right may be cut off: only where the outputs at these places are zero (TRL's fused head)
        or not used.
        """
        return bool(kwargs.get("fused_lm_head")) or self._only_loss(kwargs)

    def _only_loss(self, kwargs: Mapping[str, Any]) -> bool:
        return self._loss_only and kwargs.get("labels") is not None and torch.is_grad_enabled()

    def _split(self, original: Callable[..., Any], chunks: list[_Chunk], whole: dict[str, Any]) -> Any:
        rule = self._rule(original, chunks, whole)
        self.pieces = max(self.pieces, len(chunks))
        only_loss = self._only_loss(whole)
        outputs = []
        for index, chunk in enumerate(chunks):
            last = index == len(chunks) - 1
            run = self._runner(original, chunk, only_loss)
            if chunk.shape.kind != "train" or last:
                # The backward of the last one comes first: its activations need not be made twice.
                outputs.append(run())
            elif consensus.world_size() > 1:
                # DistributedDataParallel does not take gradients that arrive in several backward passes.
                outputs.append(checkpoint(run, use_reentrant=False))
            else:
                outputs.append(self._recomputed(run))
            self._sizes.ran(chunk.shape)
        return self._merge(outputs, chunks, whole, rule)

    def _runner(self, original: Callable[..., Any], chunk: _Chunk, only_loss: bool) -> Callable[[], Any]:
        def run() -> Any:
            with self.running(chunk.shape):
                # Copies: a model may take keys out of what it is given.
                output = original(*chunk.args, **copy.copy(chunk.kwargs))
            return _loss_alone(output) if only_loss else output

        return run

    def _recomputed(self, run: Callable[[], Any]) -> Any:
        # A graph begins at something that needs gradients; the parameters are in `run`.
        anchor = torch.zeros((), requires_grad=True)
        structure: list[Any] = []
        tensors = _Recomputed.apply(run, structure, _device_of(self._module), anchor)  # type: ignore[no-untyped-call]
        return _filled(structure[0], tensors)

    def _merge(self, outputs: list[Any], chunks: list[_Chunk], whole: Mapping[str, Any], rule: Rule) -> Any:
        def number(name: str, values: list[torch.Tensor]) -> torch.Tensor:
            if name not in ("loss", "0"):
                raise CannotSplit(f"the model gives `{name}`, one number for all rows")
            weights = _weights(rule, chunks, whole)
            total = values[0] * weights[0]
            for value, weight in zip(values[1:], weights[1:], strict=True):
                total = total + value * weight
            combined: torch.Tensor = total.to(values[0].dtype)
            return combined

        return _merged("", outputs, chunks, number)

    # ---- knowing that it is exact ----

    def _rule(self, original: Callable[..., Any], chunks: list[_Chunk], whole: dict[str, Any]) -> Rule:
        """How the losses of the chunks add up; for a model that is not known, found out by experiment."""
        known = _known_rule(self._module, whole)
        if known is not None:
            return known
        if whole.get("labels") is None and _from_known_package(_innermost(self._module)):
            # No labels, no loss: there is nothing to add up.
            return "rows"
        signature = tuple(sorted(name for name, value in whole.items() if value is not None))
        rules = self._rules.get(signature, ())
        if not rules or not _agree(rules, chunks, whole):
            found = self._rules_by_experiment(original, chunks, whole)
            rules = self._rules[signature] = tuple(rule for rule in found if not rules or rule in rules)
        if not rules:
            raise CannotSplit(
                "its rows depend on each other: computed one after the other, two of them give something else than "
                "together"
            )
        return rules[0]

    def _rules_by_experiment(
        self, original: Callable[..., Any], chunks: list[_Chunk], whole: dict[str, Any]
    ) -> list[Rule]:
        """
        Computes two rows together and one after the other, without dropout. If what comes out is not the same, the
        model does not treat its rows one by one; and how its loss adds up, if it gives one, shows as well.
        """
        if chunks[0].shape.length == 1:
            raise CannotSplit("a flattened batch is only split for models of transformers")
        total, labels = sum(chunk.rows for chunk in chunks), whole.get("labels")
        start = _unlike_neighbours(labels, total)
        spans = ((start, start + 1), (start + 1, start + 2), (start, start + 2))
        first, second, both = (self._plain_chunk(chunks[0].shape, whole, total, *span) for span in spans)
        with _evaluating(self._module), torch.no_grad(), _random_states_kept(_device_of(self._module)):
            apart = [original(*chunk.args, **copy.copy(chunk.kwargs)) for chunk in (first, second)]
            together = original(*both.args, **copy.copy(both.kwargs))
        fitting: list[Rule] = []
        for rule in _RULES:
            try:
                merged = self._merge(apart, [first, second], both.kwargs, rule)
            except _NoLabels:
                continue
            if _alike(merged, together):
                fitting.append(rule)
        return fitting

    @staticmethod
    def _plain_chunk(shape: CallShape, whole: Mapping[str, Any], total: int, start: int, stop: int) -> _Chunk:
        part = {name: _rows(value, total, start, stop, name) for name, value in whole.items()}
        return _Chunk((), part, stop - start, shape)


# ---- generation ----


class SplitGeneration:
    """
    Runs `generate` of one module over as many prompts at a time as fit: the same prompts and the same distribution,
    other draws.

    Args:
        module (`torch.nn.Module`):
            The module.
        sizes ([`SizeMemory`]):
            What fits.
        calls ([`SplitCalls`]):
            Of the same module, told when a generation is going on.
    """

    def __init__(self, module: torch.nn.Module, sizes: SizeMemory, calls: SplitCalls) -> None:
        self._module = module
        self._sizes = sizes
        self._calls = calls

    def call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of `generate`."""
        main = main_input(args, kwargs)
        if main is None:
            return original(*args, **kwargs)
        shape = CallShape("generate", main.size(0), main.size(1) + self._new_tokens(kwargs))
        allowed = self._sizes.rows_for(shape)
        if allowed < shape.rows:
            try:
                return self._split(original, shape, allowed, args, kwargs)
            except CannotSplit as refusal:
                self._calls.refused = str(refusal)
        with self._calls.running(shape):
            result = original(*args, **kwargs)
        self._sizes.ran(shape)
        return result

    def _split(
        self, original: Callable[..., Any], shape: CallShape, allowed: int, args: tuple[Any, ...], kwargs: Any
    ) -> torch.Tensor:
        config = kwargs.get("generation_config") or self._module.generation_config
        if kwargs.get("return_dict_in_generate", getattr(config, "return_dict_in_generate", False)):
            raise CannotSplit("generation returns more than the tokens (return_dict_in_generate=True)")
        count = -(-shape.rows // allowed)
        bounds = [shape.rows * index // count for index in range(count + 1)]
        pieces = []
        for start, stop in itertools.pairwise(bounds):
            part = {name: _rows(value, shape.rows, start, stop, name) for name, value in kwargs.items()}
            positional = tuple(_rows(value, shape.rows, start, stop) for value in args)
            chunk = dataclasses.replace(shape, rows=stop - start)
            with self._calls.running(chunk):
                pieces.append(original(*positional, **part))
            self._sizes.ran(chunk)
        self._calls.pieces = max(self._calls.pieces, count)
        longest, padding = max(piece.size(1) for piece in pieces), self._padding(config)
        return torch.cat(
            [torch.nn.functional.pad(piece, (0, longest - piece.size(1)), value=padding) for piece in pieces]
        )

    def _new_tokens(self, kwargs: Mapping[str, Any]) -> int:
        config = kwargs.get("generation_config") or getattr(self._module, "generation_config", None)
        asked = kwargs.get("max_new_tokens") or getattr(config, "max_new_tokens", None)
        return int(asked or 0)

    def _padding(self, config: Any) -> int:
        for holder in (config, self._module.generation_config):
            for name in ("pad_token_id", "eos_token_id"):
                found: Any = getattr(holder, name, None)
                found = found[0] if isinstance(found, (list, tuple)) and found else found
                if found is not None:
                    return int(found)
        return 0


# ---- a flattened batch ----


def _segment_chunks(
    shape: CallShape, allowed: int, args: tuple[Any, ...], kwargs: dict[str, Any], segments: Layout
) -> list[_Chunk]:
    """Groups of whole sequences of at most `allowed` tokens, and of at least one sequence."""
    if args:
        raise CannotSplit("a flattened batch with positional arguments")
    labels, starts = kwargs.get("labels"), segments.starts
    inner = list(starts[1:-1])
    if isinstance(labels, torch.Tensor) and inner and bool((labels[0, inner] != _IGNORED_LABEL).any()):
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
    chunks = []
    for group in groups:
        part = select_rows(kwargs, segments, group)
        tokens = starts[group[-1] + 1] - starts[group[0]]
        chunks.append(_Chunk((), part, 1, CallShape(shape.kind, tokens, 1), gap=True))
    chunks[-1].gap = False
    return chunks


# ---- putting outputs together ----


def _merged(
    name: str, values: list[Any], chunks: list[_Chunk], number: Callable[[str, list[torch.Tensor]], torch.Tensor]
) -> Any:
    """What the model would have given for all rows, from what it gave for some after the other."""
    first = values[0]
    if first is None or isinstance(first, (str, bool, int)):
        return first
    if isinstance(first, torch.Tensor):
        return number(name, values) if first.dim() == 0 else _joined(name, values, chunks)
    if isinstance(first, Mapping):
        found = {key: _merged(key, [value[key] for value in values], chunks, number) for key in first}
        return _mapping_like(first, found)
    if isinstance(first, (list, tuple)):
        parts = [
            _merged(name or str(place), [value[place] for value in values], chunks, number)
            for place in range(len(first))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    # A cache of keys and values, of which only the chunks could make use.
    return None


def _joined(name: str, values: list[torch.Tensor], chunks: list[_Chunk]) -> torch.Tensor:
    if chunks[0].shape.length == 1 and any(chunk.gap for chunk in chunks):
        # Predictions of the next token have no entry for a chunk's last one, where the whole batch has one (ignored).
        padded = [
            torch.nn.functional.pad(value, (*(0, 0) * (value.dim() - 2), 0, chunk.shape.rows - value.size(1)))
            if chunk.gap
            else value
            for value, chunk in zip(values, chunks, strict=True)
        ]
        return torch.cat(padded, dim=1)
    for value, chunk in zip(values, chunks, strict=True):
        if value.size(0) != chunk.rows:
            raise CannotSplit(f"the model gives `{name}` of size {tuple(value.shape)} for {chunk.rows} rows")
    if any(chunk.cut for chunk in chunks):
        longest = max(value.size(1) + chunk.cut for value, chunk in zip(values, chunks, strict=True))
        values = [
            torch.nn.functional.pad(value, (*(0, 0) * (value.dim() - 2), 0, longest - value.size(1)))
            for value in values
        ]
    return torch.cat(list(values))


def _mapping_like(like: Mapping[str, Any], content: dict[str, Any]) -> Any:
    """A dictionary, or an output class of transformers, of the same type."""
    make: Any = type(like)
    return make(**content) if dataclasses.is_dataclass(like) else make(content)


def _loss_alone(output: Any) -> Any:
    """Of what a model gives with labels, only the loss: the logits are large, and nobody asks for them."""
    if isinstance(output, Mapping) and "loss" in output:
        return {"loss": output["loss"]}
    return output[:1] if isinstance(output, tuple) else output


# ---- computing again ----


class _Recomputed(torch.autograd.Function):
    """
    Keeps what came out, computes it again in the backward pass, and adds the gradients to those there are.

    Not `torch.utils.checkpoint`: without re-entering, gradients of all parameters would be held a second time until
    all chunks are through; with it, outputs that nobody has used would be gone through with gradients of zero.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Any], held: list[Any], device: torch.device, anchor: torch.Tensor) -> Any:
        ctx.run, ctx.rng, ctx.device = run, RandomState.capture(device), device
        ctx.autocast = _autocast_now(device)
        ctx.set_materialize_grads(False)
        output = run()
        # What was cast without gradients must not be used by what needs them.
        torch.clear_autocast_cache()
        tensors: list[torch.Tensor] = []
        held.append(_flattened(output, tensors))
        ctx.mark_non_differentiable(*(tensor for tensor in tensors if not tensor.is_floating_point()))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None, None]:
        tensors: list[torch.Tensor] = []
        with _random_states_kept(ctx.device), contextlib.ExitStack() as stack:
            ctx.rng.restore()
            for context in ctx.autocast:
                stack.enter_context(torch.autocast(**context))
            with torch.enable_grad():
                _flattened(ctx.run(), tensors)
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(tensors, gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        return None, None, None, None


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


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor was."""

    index: int


def _flattened(output: Any, tensors: list[torch.Tensor]) -> Any:
    """The structure of an output, with its tensors taken out."""
    if isinstance(output, torch.Tensor):
        tensors.append(output)
        return _Place(len(tensors) - 1)
    if isinstance(output, Mapping):
        return _mapping_like(output, {key: _flattened(value, tensors) for key, value in output.items()})
    if isinstance(output, (list, tuple)):
        parts = [_flattened(value, tensors) for value in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output if isinstance(output, (str, bool, int, type(None))) else None


def _filled(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(structure, _Place):
        return tensors[structure.index]
    if isinstance(structure, Mapping):
        return _mapping_like(structure, {key: _filled(value, tensors) for key, value in structure.items()})
    if isinstance(structure, (list, tuple)):
        parts = [_filled(value, tensors) for value in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else type(structure)(parts)
    return structure


# ---- experiments ----


def _unlike_neighbours(labels: Any, total: int) -> int:
    """The first of two neighbouring rows with different numbers of labels, so that means over them tell apart."""
    if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.size(0) != total:
        return 0
    counts = (labels[:, 1:] != _IGNORED_LABEL).flatten(1).sum(1).tolist()
    return next((row for row in range(total - 1) if counts[row] != counts[row + 1]), 0)


def _agree(rules: Sequence[Rule], chunks: Sequence[_Chunk], whole: Mapping[str, Any]) -> bool:
    """Whether all rules give these chunks the same weights."""
    found = [[float(weight) for weight in _weights(rule, chunks, whole)] for rule in rules]
    return all(torch.allclose(torch.tensor(found[0]), torch.tensor(other)) for other in found[1:])


def _alike(one: Any, other: Any) -> bool:
    """Whether two outputs agree to what other kernels for other sizes may make of them."""
    first: list[torch.Tensor] = []
    second: list[torch.Tensor] = []
    _flattened(one, first)
    _flattened(other, second)
    if len(first) != len(second):
        return False
    for left, right in zip(first, second, strict=True):
        if left.shape != right.shape:
            return False
        if not left.is_floating_point():
            continue
        tolerance = 1e-4 if left.dtype in (torch.float32, torch.float64) else 0.03
        scale = float(right.detach().float().abs().max()) if right.numel() else 0.0
        if not torch.allclose(left.float(), right.float(), rtol=0.0, atol=tolerance * scale + 1e-7, equal_nan=True):
            return False
    return True


@contextlib.contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode


@contextlib.contextmanager
def _random_states_kept(device: torch.device) -> Iterator[None]:
    rng = RandomState.capture(device)
    try:
        yield
    finally:
        rng.restore()


def _device_of(module: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _innermost(module: torch.nn.Module) -> torch.nn.Module:
    unwrapped: Any = getattr(module, "get_base_model", lambda: module)()
    inner: torch.nn.Module = getattr(unwrapped, "_orig_mod", unwrapped)
    return inner
