"""Finds out whether rows of a model call are independent, and how losses of some add up to that of all."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from ... import consensus
from ...call_shape import CallShape
from ...classify import classify_exception, describe_exception
from ...failures import FailureType
from ...instrument import free_memory, is_out_of_memory
from .outputs import alike, flattened, furthest, merged, without_caches
from .recomputing import random_states_kept
from .repeating import FEW, MANY
from .slicing import (
    IGNORED_LABEL,
    CannotSplit,
    Chunk,
    goes_on,
    main_input,
    picked_rows,
    segment_chunk,
    sequences_of,
    tensors_in,
)


logger = logging.getLogger("self_healing")

Rule = Literal["sum", "rows", "tokens", "labels", "none"]
_RULES: tuple[Rule, ...] = ("sum", "tokens", "labels", "rows")
_ALL: tuple[Rule, ...] = (*_RULES, "none")
# The outputs that are the loss: by name, first of a tuple, or all there is.
_LOSS = ("loss", "0", "")
# Rotary embeddings of these kinds depend on the longest row of the batch.
_ROPE_BY_LENGTH = ("dynamic", "longrope")


# Variables in the forward of models that do not leave all of the loss to `loss_function` (Bamba, Git, CSM).
_OTHER_LOSSES = frozenset({"z_loss", "shift_labels", "shifted_logits"})
# Of a sum in another order, in float32.
_ROUNDING = 2e-6
# Where nothing fits, rows are computed again to see whether that is the noise of the kernels: how many times as far as
# these repetitions lie apart from each other something else may, and how far at most.
_NOISE, _AT_MOST = 8.0, 0.1
_DEPEND = "its rows depend on each other: computed one after the other, two of them give something else than together"


# Adapters that leave the loss as it is.
_PLAIN_ADAPTERS = frozenset({"LORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "VERA", "HRA", "FOURIERFT", "LN_TUNING"})


class _NoLabels(CannotSplit):
    """A rule that counts labels, and there are none."""


# ---- how losses add up ----


def merge(
    outputs: Sequence[Any], chunks: Sequence[Chunk], whole: Mapping[str, Any], rule: Rule, knows: int = -1
) -> Any:
    """
    Merges outputs of chunks into what the model would have given for all rows.

    Args:
        outputs (`Sequence`):
            What it gave for each chunk.
        chunks (`Sequence[Chunk]`):
            The chunks.
        whole (`Mapping`):
            Keyword arguments of the call.
        rule (`str`):
            How the losses add up.
        knows (`int`, *optional*, defaults to -1):
            The chunk whose outputs say what needs gradients.
    """

    def number(name: str, values: list[torch.Tensor]) -> torch.Tensor:
        if name not in _LOSS:
            raise CannotSplit(f"the model gives `{name}`, one number for all rows")
        return _added(values, _weights(rule, chunks, whole))

    return merged("", list(outputs), list(chunks), number, knows)


def _added(values: list[torch.Tensor], weights: list[Any]) -> torch.Tensor:
    total = torch.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        if isinstance(weight, torch.Tensor):
            weight = weight.to(value.device)
            # The mean over no label at all is NaN, and counts nothing.
            value = torch.where(weight > 0, value, torch.zeros_like(value))
        total = total + (value * weight).to(total.dtype)
    return total


def _weights(rule: Rule, chunks: Sequence[Chunk], whole: Mapping[str, Any]) -> list[Any]:
    """The weight of each chunk in a mean over rows, over next-token labels or over labels; 1 for a sum."""
    if rule == "none":
        raise CannotSplit("the model gives a number for all rows that it did not give when two of them were tried")
    if rule == "sum":
        return [1.0] * len(chunks)
    if rule == "rows":
        total = sum(chunk.rows for chunk in chunks)
        return [chunk.rows / total for chunk in chunks]
    counts: torch.Tensor = torch.stack([_count(chunk.kwargs, whole, rule) for chunk in chunks])
    total_count = counts.sum()
    # Of no labels at all the first chunk says what the mean is: NaN, or 0.
    only_first = torch.zeros_like(counts)
    only_first[0] = 1.0
    return list(torch.where(total_count > 0, counts / total_count.clamp(min=1), only_first).unbind())


def _count(kwargs: Mapping[str, Any], whole: Mapping[str, Any], rule: Rule) -> torch.Tensor:
    """Counts the labels of a chunk."""
    if isinstance(whole.get("shift_labels"), torch.Tensor):
        return _count_of(kwargs["shift_labels"])
    labels = kwargs.get("labels")
    if not isinstance(labels, torch.Tensor):
        raise _NoLabels("its loss is a mean over labels, and there are none in the call")
    if rule == "tokens":
        if labels.dim() < 2:
            raise _NoLabels("its loss would be a mean over next tokens, and there is one label for each row")
        labels = labels[..., 1:]
    return _count_of(labels)


def _count_of(labels: torch.Tensor) -> torch.Tensor:
    counted = torch.ones_like(labels) if labels.is_floating_point() else labels != IGNORED_LABEL
    return counted.sum().double()


# ---- models of which it is known ----


def is_language_model(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """
    Whether it is a causal language model of transformers with its usual loss, or TRL's fused head on top of one: rows
    are computed one by one, nothing depends on padding to the right, and the loss is one of next tokens.
    """
    adapter: Any = getattr(module, "active_peft_config", None)
    if adapter is not None and str(getattr(adapter.peft_type, "value", adapter.peft_type)) not in _PLAIN_ADAPTERS:
        # Virtual tokens in front, whose first label counts as well; terms that are added to the loss (AdaLoRA).
        return False
    if any(map(_may_change_outputs, module._forward_hooks.values())) and not kwargs.get("fused_lm_head"):
        return False
    inner: Any = innermost(module)
    cls = class_of(inner)
    if not cls.__name__.endswith(("ForCausalLM", "LMHeadModel")) or not hasattr(inner, "loss_type"):
        return False
    forward: Any = inspect.unwrap(inner.forward)
    if any((each.__module__ or "").partition(".")[0] != "transformers" for each in (cls, forward)):
        return False
    if kwargs.get("fused_lm_head") or (kwargs.get("labels") is None and kwargs.get("shift_labels") is None):
        return True
    from transformers.loss.loss_utils import ForCausalLMLoss

    code: Any = getattr(forward, "__code__", None)
    if code is None or "loss_function" not in code.co_names or _OTHER_LOSSES.intersection(code.co_varnames):
        return False
    return bool(inner.loss_function is ForCausalLMLoss)


def is_classifier(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether it is a sequence classifier of transformers that is asked for logits only (a reward model)."""
    cls = class_of(innermost(module))
    known = cls.__module__.partition(".")[0] == "transformers"
    return known and cls.__name__.endswith("ForSequenceClassification") and kwargs.get("labels") is None


def class_of(module: torch.nn.Module) -> type:
    """The class that a model was made of: FSDP2 gives each module that it shards a class of its own."""
    return next(cls for cls in type(module).__mro__ if not _of_fsdp(cls.__module__))


def _may_change_outputs(hook: Any) -> bool:
    # FSDP2 lets go of the weights in one.
    return not _of_fsdp(type(getattr(hook, "__self__", None)).__module__)


def _of_fsdp(module: str) -> bool:
    return module.startswith("torch.distributed.fsdp")


def why_rows_depend(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Says why the rows of a call cannot be computed one after the other, as far as can be seen; empty if they can."""
    if any(isinstance(each, torch.nn.modules.batchnorm._BatchNorm) and each.training for each in module.modules()):
        return "batch normalisation computes its statistics over all rows of the batch"
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if kwargs.get("output_router_logits") or getattr(text, "output_router_logits", False):
        return "the auxiliary loss of a mixture of experts balances all tokens of the batch"
    if goes_on(args, kwargs):
        return "the call goes on from cached keys and values"
    if kwargs.get("use_cache"):
        return "the call asks for cached keys and values (use_cache=True)"
    if rope_by_length(module) and kwargs.get("position_ids") is not None:
        return "its rotary embedding depends on the largest position in the batch"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
        return "its inputs need gradients"
    return ""


def rope_by_length(module: torch.nn.Module) -> bool:
    """Whether rotary embeddings depend on how long the longest row is."""
    return any(getattr(each, "rope_type", None) in _ROPE_BY_LENGTH for each in module.modules())


def innermost(module: torch.nn.Module) -> torch.nn.Module:
    """The model below adapters and compilation."""
    unwrapped: Any = getattr(module, "get_base_model", lambda: module)()
    inner: torch.nn.Module = getattr(unwrapped, "_orig_mod", unwrapped)
    return inner


# ---- models of which it is found out ----


class Additivity:
    """
    The way the losses of one module add up.

    Args:
        module (`torch.nn.Module`):
            The module.
        device (`torch.device`):
            Where it is.
        autocast (`torch.dtype`, *optional*):
            What its calls are cast to inside of them.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device, autocast: torch.dtype | None = None) -> None:
        self._module = module
        self._device = device
        self._autocast = autocast
        self._rules: dict[tuple[Any, ...], tuple[Rule, ...]] = {}
        self._asked: dict[tuple[Any, ...], int] = {}

    def rule(
        self, original: Callable[..., Any], chunks: Sequence[Chunk], args: tuple[Any, ...], whole: dict[str, Any]
    ) -> Rule:
        """
        Gives how the losses of these chunks add up; for an unknown model, found out by experiment.

        Raises:
            CannotSplit: If what comes out for some rows depends on others.
        """
        known: Rule | None = None
        if is_language_model(self._module, whole):
            known = "tokens" if whole.get("num_items_in_batch") is None else "sum"
        if chunks[0].flat:
            return self._rule_of_segments(original, chunks[0].shape, whole, known)
        if known is not None:
            return known
        if is_classifier(self._module, whole):
            # No labels, no loss: there is nothing to add up.
            return "none"
        total = sum(chunk.rows for chunk in chunks)
        (low, high), signature = _telling_rows(args, whole, total)
        asked = self._asked[signature] = self._asked.get(signature, 0) + 1
        rules = self._rules.get(signature)
        # Ever more rarely again, with other rows: what two of them do need not be what all do.
        if rules is None or asked & (asked - 1) == 0 or not _agree(rules, chunks, whole):
            shape = dataclasses.replace(chunks[0].shape, rows=total)
            picks = ([low], [high], [low, high], [low, low], [high, high])
            tried = [picked_rows(args, whole, shape, pick) for pick in picks]
            rules = self._find_out(original, tried, _ALL if rules is None else rules)
            rules = self._rules[signature] = self._borne_out_by_many(original, args, whole, shape, rules)
        if not rules:
            raise CannotSplit(_DEPEND)
        if not _agree(rules, chunks, whole):
            raise CannotSplit("two of its rows are too much alike to tell how its loss adds up")
        return rules[0]

    def _borne_out_by_many(
        self,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        whole: dict[str, Any],
        shape: CallShape,
        rules: tuple[Rule, ...],
    ) -> tuple[Rule, ...]:
        """
        Of these rules those that also hold for as many rows as there is memory for without gradients, all as a rule:
        the mean over the three hardest of four is, of two rows, the mean over both.
        """
        rows = shape.rows
        while rules and rows > 2:
            # One and all others: of two halves each may leave out what all of them do.
            picks = (range(1), range(1, rows), range(rows))
            tried = [picked_rows(args, whole, shape, list(pick)) for pick in picks]
            try:
                return self._find_out(original, tried, rules)
            except CannotSplit as refusal:
                if refusal.__cause__ is None or not is_out_of_memory(refusal.__cause__):
                    raise
            # Outside of the handler: what the failed one held is gone.
            free_memory(self._device)
            rows //= 2
        return rules

    def _rule_of_segments(
        self, original: Callable[..., Any], shape: CallShape, whole: dict[str, Any], known: Rule | None
    ) -> Rule:
        """Finds the rule of a flattened batch: whether its sequences see each other depends on the attention."""
        if known is None:
            raise CannotSplit("a flattened batch is only split for causal language models of transformers")
        signature = (*sorted(name for name, value in whole.items() if value is not None), whole.get("use_cache"))
        if signature not in self._rules:
            segments = sequences_of((), whole)
            assert segments is not None
            picks: tuple[tuple[list[int], bool], ...] = (([0], True), ([1], False), ([0, 1], False))
            tried = [segment_chunk(shape, whole, segments, pick, gap) for pick, gap in picks]
            self._rules[signature] = self._find_out(original, tried, (known,))
        if not self._rules[signature]:
            raise CannotSplit("sequences of the flattened batch see each other")
        return known

    def _find_out(
        self, original: Callable[..., Any], tried: Sequence[Chunk], possible: Sequence[Rule]
    ) -> tuple[Rule, ...]:
        """
        Of the possible rules those that an experiment bears out. That there are none is believed the third time only,
        and of kernels that do not repeat bitwise only beyond their noise.
        """
        for repetitions in (0, FEW, MANY):
            try:
                fitting = self._experiment(original, tried, repetitions)
            except CannotSplit as refusal:
                if repetitions:
                    raise
                logger.debug("The experiment is repeated: %s", refusal)
            else:
                found = tuple(rule for rule in fitting if rule in possible)
                if found:
                    return found
            # Outside of the handler: what a failed one held is gone.
            free_memory(self._device)
        return ()

    def _experiment(self, original: Callable[..., Any], tried: Sequence[Chunk], repetitions: int = 0) -> list[Rule]:
        """
        Computes two rows one after the other and together, without dropout. If what comes out is not the same, the
        model does not treat its rows one by one; and how its loss adds up, if it gives one, shows as well.

        Args:
            original (`Callable`):
                The call.
            tried (`Sequence[Chunk]`):
                A row, another one, both; and, to tell means apart by more than what other kernels for other sizes make
                of them, each of them twice.
            repetitions (`int`, *optional*, defaults to 0):
                How often both are computed again.
        """
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]
        try:
            with _without_dropout(self._module), torch.no_grad(), random_states_kept(self._device):
                first, second, both, *twice = (_computed(original, chunk) for chunk in tried)
                of_outputs, of_numbers = self._noise(original, tried[2], repetitions)
        except Exception as error:
            if isinstance(error, consensus.Stranded) or classify_exception(error) is FailureType.DEVICE:
                raise
            raise CannotSplit(f"two of its rows could not be tried: {describe_exception(error)}") from error
        finally:
            put_back(buffers)
        whole, numbers = tried[2].kwargs, _numbers(both)
        looseness, rounding = max(of_outputs, self._looseness), max(of_numbers, _ROUNDING)
        if not numbers:
            # There is nothing to add up.
            nothing: Rule = "none"
            return [nothing] if alike(merge([first, second], tried[:2], whole, nothing), both, looseness) else []
        fitting: list[Rule] = []
        for rule in _RULES:
            try:
                if not alike(merge([first, second], tried[:2], whole, rule), both, looseness):
                    continue
                if twice:
                    merged_twice = _numbers(merge(twice, tried[3:], whole, rule))
                    share = 0.5 if rule == "sum" else 1.0
                    if not alike([number * share for number in merged_twice], numbers, rounding):
                        continue
            except _NoLabels:
                continue
            fitting.append(rule)
        return fitting

    @property
    def _looseness(self) -> float:
        """By how much kernels for other sizes may differ, relative to the largest number."""
        dtypes = {parameter.dtype for parameter in self._module.parameters()}
        cast = self._autocast is not None or torch.is_autocast_enabled(self._device.type)
        if cast or not dtypes <= {torch.float32, torch.float64}:
            return 0.03
        # On GPUs, products in float32 may be computed in TF32.
        return 1e-4 if self._device.type == "cpu" else 3e-3

    def _noise(self, original: Callable[..., Any], chunk: Chunk, repetitions: int) -> tuple[float, float]:
        """Measures how far outputs, and single numbers among them, lie apart where the same draws are made."""
        outputs, numbers, first = 0.0, 0.0, None
        for _ in range(repetitions):
            with random_states_kept(self._device):
                again = _computed(original, chunk)
            first = again if first is None else first
            outputs = max(outputs, furthest(again, first))
            numbers = max(numbers, furthest(_numbers(again), _numbers(first)))
        return min(_NOISE * outputs, _AT_MOST), min(_NOISE * numbers, _AT_MOST)


def _computed(original: Callable[..., Any], chunk: Chunk) -> Any:
    return without_caches(original(*chunk.args, **chunk.kwargs))


def _numbers(output: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    flattened(output, tensors)
    return [tensor for tensor in tensors if tensor.dim() == 0]


def _telling_rows(
    args: Sequence[Any], whole: Mapping[str, Any], total: int
) -> tuple[tuple[int, int], tuple[Any, ...]]:
    """
    Two rows that differ in their numbers of labels and in their lengths where any do, so that means over these tell
    apart; and what the call looks like, so that an experiment is not taken for an answer about another kind of call.
    """
    labels, main = whole.get("labels"), main_input(args, whole)
    counts: list[list[int]] = []
    usable = list(range(total))
    if isinstance(labels, torch.Tensor) and labels.dim() > 1 and labels.size(0) == total:
        counts.append((labels[:, 1:] != IGNORED_LABEL).flatten(1).sum(1).tolist())
        # The mean over no labels says nothing.
        usable = [row for row in usable if counts[0][row]] or usable
    if isinstance(labels, torch.Tensor) and labels.dim() == 1 and not labels.is_floating_point():
        # Classes may be weighted: two rows of the same one would not show it.
        counts.append(labels.tolist())
    if isinstance(main, torch.Tensor) and main.dim() == 2 and not main.is_floating_point():
        # Padding repeats itself, whatever token it is.
        counts.append((main[:, 1:] == main[:, :-1]).sum(1).tolist())
    marks = [tuple(column[row] for column in counts) for row in range(total)]
    low, high = min(usable, key=marks.__getitem__), max(usable, key=marks.__getitem__)
    if low == high:
        high = next((row for row in (*usable, *range(total)) if row != low), low)
    differ = tuple(len({column[low], column[high]}) > 1 for column in counts)
    looks = tuple(
        sorted(
            (str(name), *_look(value, total))
            for name, value in (*enumerate(args), *whole.items())
            if value is not None
        )
    )
    return (low, high), (differ, looks)


def _look(value: Any, total: int) -> tuple[str, bool]:
    if isinstance(value, torch.Tensor):
        return f"{value.dim()} {value.dtype}", value.dim() > 0 and value.size(0) == total
    return type(value).__name__, isinstance(value, Sequence) and len(value) == total


def _agree(rules: Sequence[Rule], chunks: Sequence[Chunk], whole: Mapping[str, Any]) -> bool:
    """Whether all rules give these chunks the same weights."""
    if len(rules) == 1:
        return True
    found = [torch.tensor([float(weight) for weight in _weights(rule, chunks, whole)]) for rule in rules]
    return all(torch.allclose(found[0], other) for other in found[1:])


def put_back(buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Writes copies of buffers back into them."""
    with torch.no_grad():
        for buffer, value in buffers:
            if buffer.shape == value.shape:
                buffer.copy_(value)


@contextlib.contextmanager
def _without_dropout(module: torch.nn.Module) -> Iterator[None]:
    """
    Models of transformers do the same in evaluation but for dropout. Of others that is not known (some compute their
    loss in training only): they stay as they are, and only modules that drop out do not.
    """
    modes = {each: each.training for each in module.modules()}
    if class_of(innermost(module)).__module__.partition(".")[0] == "transformers":
        module.eval()
    for each in modes:
        if isinstance(each, torch.nn.modules.dropout._DropoutNd):
            each.eval()
    try:
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode
