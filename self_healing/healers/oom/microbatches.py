"""
A training step in passes: forward, loss and backward once for each chunk of the rows of a micro-batch.

Nothing is computed twice and the logits of a few rows are all there are, but losses do not all add up alike. What the
loss of a chunk counts for is what an experiment says: one (a sum, divided by what the whole step has), its share of
the labels or its share of the rows, whichever reproduces loss *and* gradients of as many rows as are known to fit. The
loss alone is no test: where the ratio of an online trainer is one, any weights give the same. What none of them
reproduces, or no gradient confirms, is not computed in passes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ...hf.adapter import Instrument
from ...hf.batches import CallShape, Layout, layout_of, preparing, select_rows
from ...hf.objective import has_own_loss
from ...hf.oom import ASKING
from ...hf.patching import Replacements
from .calls import IGNORED_LABEL, CannotSplit, KnownSizes, groups_of_segments, main_input, spans


# What the loss of some rows may count for.
_RULES = ("one", "labels", "rows")
# Of so many of the smallest tensors an experiment takes gradients.
_TRIED = 64
# By how much the tensors are moved for it: where a policy is still its reference, rows are not told apart.
_MOVED = 0.02


@dataclass(slots=True)
class _Pass:
    """Some rows of a micro-batch; what their loss counts for, by each rule and in the end, and what it asked for."""

    batch: Any
    weights: dict[str, float]
    weight: float = math.nan
    asked: list[tuple[str, torch.Tensor]] = field(default_factory=list)


def may_compute_in_passes(instrument: Instrument) -> bool:
    """
    Whether a training step may be computed in passes over its rows: no other process takes part in it, and its loss is
    one of the libraries that compare no rows (DPO's `aot` sorts the batch), of a model that does not either.
    """
    trainer, view = instrument.trainer, instrument.view
    known = instrument.objective.name in ("generic", "sft", "dpo", "reward", "grpo", "rloo")
    alone = view.world_size == 1 and not view.under_deepspeed
    own_loss = has_own_loss(trainer) or "compute_loss" in vars(trainer)
    compares = "aot" in str(getattr(trainer, "loss_types", None))
    # An experiment would not tell: in it, the statistics are not those of its rows.
    compares |= any(isinstance(each, _BatchNorm) for each in trainer.model.modules())
    return known and alone and not own_loss and not compares


class Microbatches:
    """Computes training steps in passes."""

    def __init__(self, instrument: Instrument, sizes: KnownSizes) -> None:
        self._instrument = instrument
        self._trainer = instrument.trainer
        self._sizes = sizes
        # Weights that no experiment has refuted; before the first one, none is used.
        self._rules: list[str] = []
        # By which the numbers for the log add up that a loss asks accelerate for, by their place.
        self._numbers: list[str] = []
        self._hopeless = False
        # Micro-batches that an experiment could have been made with: it is, with the first, second, fourth, eighth.
        self._undecided = 0
        # By how much kernels for other sizes may differ: on GPUs, products in float32 may be computed in TF32.
        self._looseness = 1e-4 if instrument.view.device.type == "cpu" else 3e-3
        dtypes = {each.dtype for each in instrument.trainer.model.parameters()}
        if instrument.view.autocast_dtype is not None or not dtypes <= {torch.float32, torch.float64}:
            self._looseness = 0.03

    def run(self, compute: Callable[[], torch.Tensor], model: Any, items: Any) -> torch.Tensor:
        """Computes a training step, in passes if it has to be and can be."""
        ledger, trainer, state = self._instrument.ledger, self._trainer, self._trainer.state
        passes: list[_Pass] = []
        before: list[Any] = []

        def begin(batch: Any) -> Any:
            passes.extend(self._plan(model, batch, items))
            if not passes:
                return batch
            before.extend((ledger.capture(), state.num_input_tokens_seen))
            self._sizes.in_passes = True
            # A copy: `compute_loss` may pop keys from the batch it is given.
            return copy.copy(passes[0].batch)

        try:
            with self._weighing(passes):
                with preparing(trainer, begin):
                    loss = compute()
                if not passes:
                    return loss
                loss = loss * passes[0].weight
                for each in passes[1:]:
                    # The last pass alone is counted, with the numbers of all.
                    ledger.rewind_counts(before[0])
                    state.num_input_tokens_seen = before[1]
                    with preparing(trainer, lambda batch: batch, prepared=each.batch):
                        loss = loss + compute() * each.weight
        finally:
            self._sizes.in_passes = False
        self._sizes.pieces = max(self._sizes.pieces, len(passes))
        return loss

    @contextlib.contextmanager
    def _weighing(self, passes: list[_Pass]) -> Iterator[None]:
        """Weighs the loss of each pass, and has the last one see the numbers for the log of all."""
        done: list[_Pass] = []

        def backward(original: Callable[..., None], loss: torch.Tensor, **kwargs: Any) -> None:
            if passes:
                done.append(passes[len(done)])
                loss = loss * done[-1].weight
            original(loss, **kwargs)

        def answer(name: str, value: torch.Tensor) -> torch.Tensor:
            if not passes:
                return value
            own = passes[len(done)].asked
            own.append((name, value.detach()))
            place = len(own) - 1
            if len(done) < len(passes) - 1 or place >= len(self._numbers):
                return value
            parts = [each.asked[place] for each in passes if len(each.asked) > place]
            if len(parts) < len(passes) or any(other != name for other, _ in parts):
                return value
            # What this pass gives may have gradients, which are those of its own rows.
            values = [*(each for _, each in parts[:-1]), value]
            return _added(values, passes, self._numbers[place])

        with Replacements() as replaced:
            replaced.wrap(self._trainer.accelerator, "backward", backward)
            _listen(replaced, self._trainer.accelerator, answer)
            yield

    # ---- which rows, and what they count for ----

    def _plan(self, model: Any, batch: Any, items: Any) -> list[_Pass]:
        """The passes of a micro-batch: one, if all rows are tried; none where its calls are split, or made whole."""
        layout = layout_of(batch, self._instrument.objective)
        if layout is None or layout.rows == 1:
            return []
        shape = _shape_of_batch(batch, layout)
        known = self._sizes.known_rows(shape)
        if known >= shape.rows:
            return []
        try:
            chunks = _chunks(batch, layout, known)
            passes = _passes(batch, layout, chunks)
            if not self._is_decided(passes):
                self._experiment(model, batch, layout, len(chunks[0]), items)
            if not self._is_decided(passes):
                return []
            passes = _passes(batch, layout, _chunks(batch, layout, self._sizes.rows_for(shape)))
        except CannotSplit:
            return []
        # The mean over no labels at all is NaN, and counts nothing.
        return [each for each in passes if each.weight] if self._is_decided(passes) else []

    def _is_decided(self, passes: Sequence[_Pass]) -> bool:
        """Weighs passes: whether all rules that are left give the same weights; no labels at all give none."""
        if not self._rules:
            return False
        for each in passes:
            weights = [each.weights[rule] for rule in self._rules]
            each.weight = weights[0]
            if not max(weights) - min(weights) <= 1e-6 * max(weights):
                return False
        return True

    # ---- the experiment ----

    def _experiment(self, model: Any, batch: Any, layout: Layout, rows: int, items: Any) -> None:
        """
        Finds the rules by which loss and gradients of some rows, from both ends of the label counts, come of those of
        two parts of them; without a gradient nothing is known.
        """
        order = sorted(range(layout.rows), key=lambda row: _labels_in(select_rows(batch, layout, [row])))
        low, high = order[: rows // 2], order[layout.rows - (rows - rows // 2) :]
        if self._hopeless or not low:
            return
        (whole,), parts = _passes(batch, layout, [[*low, *high]]), _passes(batch, layout, [low, high])
        if self._is_decided(parts):
            # Of these rows nothing new can be learned.
            return
        self._undecided += 1
        if self._undecided & (self._undecided - 1):
            return
        with self._trying(model) as tensors:
            computed = [self._computed(model, each, items, tensors) for each in (whole, *parts)]
        (loss, *losses), (gradient, *gradients) = zip(*computed, strict=True)
        if not bool(gradient.any()):
            return
        self._rules = [
            rule
            for rule in self._rules or _RULES
            if self._adds_up(losses, loss, parts, rule) and self._adds_up(gradients, gradient, parts, rule)
        ]
        self._numbers = [self._rule_of_number(place, whole, parts) for place in range(len(whole.asked))]
        # Then the loss compares rows, or does otherwise what no weight makes good.
        self._hopeless = not self._rules

    @contextlib.contextmanager
    def _trying(self, model: Any) -> Iterator[list[torch.Tensor]]:
        """While something is computed that leaves no trace, without dropout and with some weights beside their own."""
        instrument, trainer = self._instrument, self._trainer
        trained = [each for each in model.parameters() if each.requires_grad and each.is_floating_point()]
        tensors = sorted(trained, key=torch.Tensor.numel)[:_TRIED]
        before, tokens = instrument.ledger.capture(), trainer.state.num_input_tokens_seen
        modes = {module: module.training for module in model.modules()}
        values = [tensor.detach().clone() for tensor in tensors]
        self._sizes.in_passes = True
        try:
            with torch.no_grad():
                for tensor in tensors:
                    tensor.add_(torch.randn_like(tensor), alpha=_MOVED)
            model.eval()
            # Trainers ask it whether they train.
            trainer.model.training = True
            yield tensors
        finally:
            self._sizes.in_passes = False
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
            for module, mode in modes.items():
                module.training = mode
            instrument.ledger.rewind_step(before)
            trainer.state.num_input_tokens_seen = tokens

    def _computed(
        self, model: Any, part: _Pass, items: Any, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and gradients of some rows; what it asks for is noted."""
        trainer = self._trainer

        def note(name: str, value: torch.Tensor) -> torch.Tensor:
            part.asked.append((name, value.detach()))
            return value

        with Replacements() as replaced:
            _listen(replaced, trainer.accelerator, note)
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, copy.copy(part.batch), num_items_in_batch=items)
            gradients = torch.autograd.grad(loss, tensors, materialize_grads=True)
        return loss.detach().float(), torch.cat([each.flatten().to(loss.device, torch.float32) for each in gradients])

    def _adds_up(
        self, values: Sequence[torch.Tensor], wanted: torch.Tensor, parts: Sequence[_Pass], rule: str
    ) -> bool:
        apart = (_added(values, parts, rule) - wanted).float().norm()
        return float(apart) <= self._looseness * float(wanted.float().norm()) + 1e-7

    def _rule_of_number(self, place: int, whole: _Pass, parts: Sequence[_Pass]) -> str:
        """How a number for the log adds up: one of each row, a sum, a mean over labels or rows; empty if otherwise."""
        name, wanted = whole.asked[place]
        if any(len(part.asked) <= place or part.asked[place][0] != name for part in parts):
            return ""
        values = [part.asked[place][1] for part in parts]
        if wanted.dim() and wanted.size(0) == sum(value.size(0) for value in values):
            return "each"
        if any(value.shape != wanted.shape for value in values):
            return ""
        return next((rule for rule in _RULES if self._adds_up(values, wanted, parts, rule)), "")


def _passes(batch: Any, layout: Layout, groups: Sequence[Sequence[int]]) -> list[_Pass]:
    parts = [select_rows(batch, layout, group) for group in groups]
    labels, rows, passes = [*map(_labels_in, parts)], sum(map(len, groups)), []
    for part, group, own in zip(parts, groups, labels, strict=True):
        share = own / sum(labels) if any(labels) else math.nan
        passes.append(_Pass(part, {"one": 1.0, "labels": share, "rows": len(group) / rows}))
    return passes


def _shape_of_batch(batch: Mapping[str, Any], layout: Layout) -> CallShape:
    """The size of the model's call for a prepared batch."""
    if layout.kind == "segments":
        return CallShape("train", layout.starts[-1], 1)
    prompts, completions, main = batch.get("prompt_ids"), batch.get("completion_ids"), main_input((), batch)
    length = main.size(1) if main is not None and main.dim() > 1 else 1
    if isinstance(prompts, torch.Tensor) and isinstance(completions, torch.Tensor):
        # They are called with side by side.
        length = prompts.size(1) + completions.size(1)
    return CallShape("train", layout.rows * (2 if layout.kind == "pairs" else 1), max(length, 1))


def _chunks(batch: Mapping[str, Any], layout: Layout, allowed: int) -> list[Sequence[int]]:
    """The rows, pairs or sequences of each chunk."""
    if layout.kind == "segments":
        return [*groups_of_segments(batch, layout, allowed)]
    if layout.kind == "pairs" and allowed == 1:
        raise CannotSplit("the rows of a pair are compared with each other")
    at_a_time = allowed // (2 if layout.kind == "pairs" else 1)
    return [*spans(layout.rows, -(-layout.rows // at_a_time))]


def _labels_in(batch: Mapping[str, Any]) -> int:
    labels, mask = batch.get("labels"), batch.get("completion_mask")
    if isinstance(labels, torch.Tensor) and labels.dim() == 2:
        return int((labels[:, 1:] != IGNORED_LABEL).sum())
    return int(mask.sum()) if isinstance(mask, torch.Tensor) else 0


def _listen(replaced: Replacements, accelerator: Any, answer: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Has the tensors that a loss asks accelerate about, with numbers for the log, pass through `answer`."""

    asking = False

    def ask(name: str, original: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal asking
        if asking or not isinstance(value, torch.Tensor):
            return original(value, *args, **kwargs)
        asking = True
        try:
            return original(answer(name, value), *args, **kwargs)
        finally:
            asking = False

    for name in ASKING:
        replaced.wrap(accelerator, name, functools.partial(ask, name))


def _added(values: Sequence[torch.Tensor], parts: Sequence[_Pass], rule: str) -> torch.Tensor:
    """The values of some rows after the other, as one value of all; by no rule, that of the last."""
    if rule == "each":
        return torch.cat([*values])
    if rule not in _RULES:
        return values[-1]
    total = torch.stack([value * part.weights[rule] for value, part in zip(values, parts, strict=True)]).sum(0)
    return total if values[0].is_floating_point() else total.round().to(values[0].dtype)
