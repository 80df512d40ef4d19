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

from ...hf.adapter import Instrument
from ...hf.batches import CallShape, Layout, layout_of, select_rows
from ...hf.objective import has_own_loss
from ...hf.patching import Replacements
from .calls import IGNORED_LABEL, CannotSplit, KnownSizes, groups_of_segments, main_input, spans


# What the loss of some rows may count for.
_RULES = ("one", "labels", "rows")
# Of so many of the smallest tensors an experiment takes gradients, and compares so many that are not zero: LoRA begins
# with gradients of zero for one of its two matrices.
_TRIED, _COMPARED = 64, 8
# By how much the tensors are moved for it: where a policy is still its reference, rows are not told apart.
_MOVED = 0.02
# What losses ask accelerate for, with numbers for the log.
_ASKING = ("gather", "gather_for_metrics", "reduce")


@dataclass(slots=True)
class _Pass:
    """Some rows of a micro-batch; what their loss counts for by each rule, and what it asked accelerate for."""

    batch: Any
    weights: dict[str, float]
    asked: list[tuple[str, torch.Tensor]] = field(default_factory=list)


def may_compute_in_passes(instrument: Instrument) -> bool:
    """
    Whether a training step may be computed in passes over its rows: no other process takes part in it, and its loss is
    one of the libraries that compare no rows (DPO's `aot` sorts the batch).
    """
    trainer, view = instrument.trainer, instrument.view
    known = instrument.objective.name in ("generic", "sft", "dpo", "reward", "grpo", "rloo")
    sorts = any(str(kind).startswith("aot") for kind in getattr(trainer, "loss_types", None) or [])
    own_loss = has_own_loss(trainer) or "compute_loss" in vars(trainer)
    return known and view.world_size == 1 and not view.under_deepspeed and not sorts and not own_loss


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

    def run(self, compute: Callable[[], torch.Tensor], model: Any, items: Any) -> torch.Tensor:
        """Computes a training step, in passes if it has to be and can be."""
        instrument, state = self._instrument, self._trainer.state
        passes: list[_Pass] = []
        before: list[Any] = []

        def begin(batch: Any) -> Any:
            passes.extend(self._plan(model, batch, items))
            if not passes:
                return batch
            before.extend((instrument.ledger.capture(), state.num_input_tokens_seen))
            self._sizes.in_passes = True
            # A copy: `compute_loss` may pop keys from the batch it is given.
            return copy.copy(passes[0].batch)

        try:
            with self._weighing(passes):
                with instrument.engine.preparing(begin):
                    loss = compute()
                if not passes:
                    return loss
                loss = loss * self._weight(passes[0])
                for each in passes[1:]:
                    # The last pass alone is counted, with the numbers of all.
                    instrument.ledger.rewind_counts(before[0])
                    state.num_input_tokens_seen = before[1]
                    with instrument.engine.preparing(lambda batch: batch, prepared=each.batch):
                        loss = loss + compute() * self._weight(each)
        finally:
            self._sizes.in_passes = False
        self._sizes.pieces = max(self._sizes.pieces, len(passes))
        return loss

    def _weight(self, part: _Pass) -> float:
        return part.weights[self._rules[0]]

    @contextlib.contextmanager
    def _weighing(self, passes: list[_Pass]) -> Iterator[None]:
        """Weighs the loss of each pass, and has the last one see the numbers for the log of all."""
        done: list[_Pass] = []

        def backward(original: Callable[..., None], loss: torch.Tensor, **kwargs: Any) -> None:
            if passes:
                done.append(passes[len(done)])
                loss = loss * self._weight(done[-1])
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
            return _added(values, [each.weights for each in passes], self._numbers[place])

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
        try:
            passes = _passes(batch, layout, _chunks(batch, layout, known))
            if len(passes) < 2:
                return []
            if not self._is_decided(passes) and not self._experiment(model, batch, layout, known, items):
                return []
            passes = _passes(batch, layout, _chunks(batch, layout, self._sizes.rows_for(shape)))
        except CannotSplit:
            return []
        if not self._is_decided(passes):
            return []
        # The mean over no labels at all is NaN, and counts nothing.
        return [each for each in passes if self._weight(each)]

    def _is_decided(self, passes: Sequence[_Pass]) -> bool:
        """Whether all rules that are left give the same weights."""
        if not self._rules or any(rule not in each.weights for each in passes for rule in self._rules):
            return False
        return all(
            math.isclose(each.weights[rule], self._weight(each), rel_tol=1e-6)
            for each in passes
            for rule in self._rules
        )

    # ---- the experiment ----

    def _experiment(self, model: Any, batch: Any, layout: Layout, known: int, items: Any) -> bool:
        """
        Finds the rules by which loss and gradients of some rows, from both ends of the label counts, come of those of
        two parts of them. Whether all that are left then give the same weights; without a gradient nothing is known.
        """
        rows = len(_chunks(batch, layout, known)[0])
        labels = [_labels_in(select_rows(batch, layout, [row])) for row in range(layout.rows)]
        order = sorted(range(layout.rows), key=labels.__getitem__)
        low, high = order[: rows // 2], order[layout.rows - (rows - rows // 2) :]
        whole, *parts = (*_passes(batch, layout, [[*low, *high]]), *_passes(batch, layout, [low, high] if low else []))
        if self._hopeless or not low or self._is_decided(parts):
            # Of these rows nothing new can be learned.
            return False
        self._undecided += 1
        if self._undecided & (self._undecided - 1):
            return False
        smallest = sorted((each for each in model.parameters() if each.requires_grad), key=torch.Tensor.numel)
        tensors = [each for each in smallest if each.is_floating_point()][:_TRIED]
        with self._trying(model, tensors):
            wanted, of_low, of_high = (self._computed(model, each, items, tensors) for each in (whole, *parts))
            # A loss that goes by what it asks for goes by numbers of all rows.
            moved = (
                self._computed(model, _Pass(parts[0].batch, {}), items, tensors, moved=1) if whole.asked else of_low
            )
        telling = [place for place, value in enumerate(wanted) if place == 0 or bool(value.any())][: _COMPARED + 1]
        if len(telling) == 1:
            return False
        self._rules = [
            rule
            for rule in self._rules or _RULES
            if all(self._adds_up([of_low[place], of_high[place]], wanted[place], parts, rule) for place in telling)
            and all(torch.allclose(moved[place], of_low[place], rtol=self._looseness, atol=1e-7) for place in telling)
        ]
        self._numbers = [self._rule_of_number(place, whole, parts) for place in range(len(whole.asked))]
        # Then the loss compares rows, or does otherwise what no weight makes good.
        self._hopeless = not self._rules
        return self._is_decided(parts)

    @contextlib.contextmanager
    def _trying(self, model: Any, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """While something is computed that leaves no trace, without dropout and with some weights beside their own."""
        instrument, trainer = self._instrument, self._trainer
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
            yield
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
        self, model: Any, part: _Pass, items: Any, tensors: Sequence[torch.Tensor], moved: int = 0
    ) -> list[torch.Tensor]:
        """Loss and gradients of some rows, with what it asks for answered so much too high."""
        trainer = self._trainer

        def answer(name: str, value: torch.Tensor) -> torch.Tensor:
            part.asked.append((name, value.detach()))
            return value + moved if moved else value

        with Replacements() as replaced:
            _listen(replaced, trainer.accelerator, answer)
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, copy.copy(part.batch), num_items_in_batch=items)
            gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
        return [
            loss.detach().float(),
            *(
                torch.zeros_like(tensor) if gradient is None else gradient.float()
                for tensor, gradient in zip(tensors, gradients, strict=True)
            ),
        ]

    def _adds_up(
        self, values: Sequence[torch.Tensor], wanted: torch.Tensor, parts: Sequence[_Pass], rule: str
    ) -> bool:
        if any(rule not in part.weights for part in parts) or any(value.shape != wanted.shape for value in values):
            return False
        apart = (_added(values, [part.weights for part in parts], rule) - wanted).float().norm()
        return float(apart) <= self._looseness * float(wanted.float().norm()) + 1e-7

    def _rule_of_number(self, place: int, whole: _Pass, parts: Sequence[_Pass]) -> str:
        """How a number for the log adds up: one of each row, a sum, a mean over labels or rows; empty if otherwise."""
        name, wanted = whole.asked[place]
        if any(len(part.asked) <= place or part.asked[place][0] != name for part in parts):
            return ""
        values = [part.asked[place][1] for part in parts]
        if wanted.dim() and wanted.size(0) == sum(value.size(0) for value in values):
            return "each"
        return next((rule for rule in _RULES if self._adds_up(values, wanted, parts, rule)), "")

    @property
    def _looseness(self) -> float:
        """By how much kernels for other sizes may differ."""
        view = self._instrument.view
        exact = {each.dtype for each in self._trainer.model.parameters()} <= {torch.float32, torch.float64}
        if view.autocast_dtype is not None or not exact:
            return 0.03
        # On GPUs, products in float32 may be computed in TF32.
        return 1e-4 if view.device.type == "cpu" else 3e-3


def _passes(batch: Any, layout: Layout, groups: Sequence[Sequence[int]]) -> list[_Pass]:
    parts = [select_rows(batch, layout, group) for group in groups]
    labels = [_labels_in(part) for part in parts]
    passes = []
    for part, group, own in zip(parts, groups, labels, strict=True):
        weights = {"one": 1.0, "rows": len(group) / sum(map(len, groups))}
        passes.append(_Pass(part, weights | ({"labels": own / sum(labels)} if any(labels) else {})))
    return passes


def _shape_of_batch(batch: Mapping[str, Any], layout: Layout) -> CallShape:
    """The size of the model's call for a prepared batch."""
    if layout.kind == "segments":
        return CallShape("train", layout.starts[-1], 1)
    # Prompts and completions are called with side by side.
    sides = [batch.get(name) for name in ("prompt_ids", "completion_ids")]
    sides = sides if isinstance(sides[1], torch.Tensor) else [main_input((), batch)]
    length = sum(each.size(1) for each in sides if isinstance(each, torch.Tensor) and each.dim() > 1)
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
    """Has the tensors that a loss asks accelerate about pass through `answer`."""
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

    for name in _ASKING:
        replaced.wrap(accelerator, name, functools.partial(ask, name))


def _added(values: Sequence[torch.Tensor], weights: Sequence[Mapping[str, float]], rule: str) -> torch.Tensor:
    """The values of some rows after the other, as one value of all; by no rule, that of the last."""
    if rule == "each":
        return torch.cat([*values])
    if rule not in _RULES:
        return values[-1]
    total = torch.stack([value * weight[rule] for value, weight in zip(values, weights, strict=True)]).sum(0)
    return total if values[0].is_floating_point() else total.round().to(values[0].dtype)
