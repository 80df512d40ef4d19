"""
A training step in passes: forward, loss and backward once for each chunk of the rows, and nothing computed twice.

The loss of a batch needs the outputs of all rows, but most losses need of them only those of one row (or pair) for its
gradient. So each pass runs the model over one chunk, puts the outputs of that chunk in place of those that are not
known yet, and goes through the trainer's own loss and backward. The last pass has the outputs of all rows: its loss is
that of the whole batch, and so are its metrics. It also shows what the gradient of each output is when all are known,
and if any chunk was given another one, the loss does not treat its rows one by one: the step is thrown away.

What gives weights a gradient past the outputs of the model (a penalty on their norm) would do so in every pass. It is
found in the first one, before its backward, and the step is not computed in passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch

from ...call_shape import CallShape
from .additivity import Rule, merge
from .lockstep import Lockstep
from .outputs import filled, flattened, parts_of
from .recomputing import ComputedOtherwise
from .slicing import CannotSplit, Chunk


_T = TypeVar("_T")

# By how much the gradient of an output may differ, in last places and at least: the loss computes it with the same
# kernels on tensors of the same sizes, but they may add up in another order.
_LAST_PLACES, _SAME = 2, 1e-5
# It is summed up in this many parts.
_PARTS = 64
# Steps in a row that could not be computed in passes, after which it is not tried any more.
_ENOUGH = 2


class NotInPasses(Exception):
    """This step cannot be computed in passes; nothing has been added to any gradient yet."""


@dataclass(slots=True)
class _KeptCall:
    """
    A call without gradients, made in the first pass.

    Args:
        module (`torch.nn.Module`), shape ([`CallShape`]):
            What was called, and with how much.
        result (`Any`):
            What it gave.
        versions (`list[int]`):
            Of the tensors in it, which tell whether they have been written to.
    """

    module: torch.nn.Module
    shape: CallShape
    result: Any
    versions: list[int]


@dataclass(slots=True)
class SplitCall:
    """
    A call with gradients, of which each pass runs one chunk.

    Args:
        module (`torch.nn.Module`), shape ([`CallShape`]):
            What is called, and with how much.
        chunks (`list[Chunk]`):
            Its rows.
        rule (`str`):
            How the losses of the chunks add up.
        order (`list[int]`, *optional*):
            The rows in the order in which the chunks have them, if that is another one.
        origins (`list`):
            Where the gradients of this pass enter the model: the nodes that its outputs came from.
    """

    module: torch.nn.Module
    shape: CallShape
    chunks: list[Chunk]
    rule: Rule
    order: list[int] | None = None
    _outputs: list[tuple[Any, list[torch.Tensor]]] = field(default_factory=list)
    _gradients: list[dict[int, torch.Tensor]] = field(default_factory=list)
    _known: list[list[torch.Tensor]] = field(default_factory=list)
    origins: list[Any] = field(default_factory=list)

    @property
    def chunk(self) -> Chunk:
        """The one whose turn it is."""
        return self.chunks[len(self._outputs)]

    def join(self, output: Any, whole: Mapping[str, Any]) -> Any:
        """Gives what the model would have given for all rows, from the output of the chunk whose turn it is."""
        tensors: list[torch.Tensor] = []
        structure, live = flattened(output, tensors), len(self._outputs)
        self._watch(tensors)
        self.origins = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        if live == len(self.chunks) - 1:
            self._ask_for_gradients(tensors)
        known = [
            filled(structure_of_chunk, given)
            for (structure_of_chunk, _), given in zip(self._outputs, self._known, strict=True)
        ]
        detached = [tensor.detach() for tensor in tensors]
        self._outputs.append((structure, detached))
        self._known.append(detached)
        unknown = [
            filled(structure, [_in_place_of(tensor, self.chunks[live], other) for tensor in detached])
            for other in self.chunks[live + 1 :]
        ]
        together = merge([*known, filled(structure, tensors), *unknown], self.chunks, whole, self.rule, knows=live)
        return together if self.order is None else _in_order(together, self.order)

    def _watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Notes the gradients that the outputs of this chunk get in this pass."""
        found: dict[int, torch.Tensor] = {}
        self._gradients.append(found)

        def note(place: int) -> Callable[[torch.Tensor], None]:
            return lambda gradient: found.update({place: fingerprint(gradient)})

        for place, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(note(place))  # type: ignore[no-untyped-call]

    def _ask_for_gradients(self, like: Sequence[torch.Tensor]) -> None:
        """In the last pass the outputs of the other chunks get gradients as well, to compare them."""
        for given in self._known:
            for place, tensor in enumerate(given):
                if place < len(like) and like[place].requires_grad:
                    given[place] = tensor.detach().requires_grad_()

    def agreeing(self) -> list[torch.Tensor]:
        """Tells of each output whether it was given the gradient that it gets when all others are known."""
        found: list[torch.Tensor] = []
        for given, tensors in zip(self._gradients[:-1], self._known[:-1], strict=True):
            for place, tensor in enumerate(tensors):
                if tensor.requires_grad:
                    nothing = torch.zeros(2, device=tensor.device)
                    due = nothing if tensor.grad is None else fingerprint(tensor.grad)
                    found.append(_agree(given.get(place, nothing), due, tensor.dtype))
        return found


class Passes:
    """
    The passes of the training step that is being computed, if it is.

    Args:
        paired (`bool`):
            Whether the loss compares each row of the first half of a batch with one of the second.
        lockstep ([`Lockstep`], *optional*):
            Of the ranks that make these passes together.
    """

    def __init__(self, paired: bool, lockstep: Lockstep | None = None) -> None:
        self.paired = paired
        self._lockstep = lockstep
        self.open = False
        self._calls: list[_KeptCall | SplitCall] = []
        self._next = self._pass = 0
        self._whole = False
        self._refused = 0

    @property
    def wanted(self) -> bool:
        """Whether steps are computed in passes."""
        return self._refused < _ENOUGH

    @property
    def later(self) -> bool:
        """Whether this pass is not the first of its step."""
        return self._pass > 0

    @property
    def last(self) -> bool:
        """Whether no pass follows this one; known once the calls of the first one have been made."""
        return self._pass == self._count - 1

    def look_at(self, loss: Any) -> None:
        """
        Looks at the loss of a pass before its backward.

        Args:
            loss (`Any`):
                What the backward pass begins from.

        Raises:
            NotInPasses: If weights get gradients from it past the outputs of the calls that are split.
        """
        if self.later or not self._splits or not isinstance(loss, torch.Tensor):
            return
        outputs = {node for call in self._splits for node in call.origins}
        if _reaches_weights(loss.grad_fn, outputs):
            raise NotInPasses

    def run(self, first: Callable[[], _T], again: Callable[[], _T], plain: Callable[[], _T]) -> _T:
        """
        Computes a training step in as many passes as its calls are split into chunks.

        Args:
            first (`Callable`), again (`Callable`):
                The first pass, and each later one.
            plain (`Callable`):
                The step as if there had not been a first pass.

        Raises:
            ComputedOtherwise: If the gradients are not those of the whole batch.
        """
        self.open = True
        try:
            result = first()
            for _ in range(1, self._count):
                self._pass, self._next = self._pass + 1, 0
                result = again()
            self._compare()
            return result
        except NotInPasses:
            self._refused += 1
        finally:
            self._close()
        return plain()

    @property
    def _splits(self) -> list[SplitCall]:
        return [call for call in self._calls if isinstance(call, SplitCall)]

    @property
    def _count(self) -> int:
        return max((len(call.chunks) for call in self._splits), default=1)

    def _compare(self) -> None:
        agreeing = [each for call in self._splits for each in call.agreeing()]
        # Of a model on several devices outputs may be as well; they are read together.
        differs = bool(agreeing) and not torch.stack([each.to(agreeing[0].device) for each in agreeing]).all()
        if self._lockstep is not None and self._splits:
            differs = self._lockstep.any_rank(differs)
        if differs:
            self.refuse()
        self._refused = 0

    def refuse(self) -> NoReturn:
        """The gradients there are must not be used; the step is computed again."""
        self._refused += 1
        raise ComputedOtherwise("in parts the batch")

    def _close(self) -> None:
        self.open, self._whole = False, False
        self._calls, self._next, self._pass = [], 0, 0

    # ---- the calls of a step, in the first pass ----

    def begin(self, call: SplitCall) -> None:
        """A call is split, and its first chunk has run."""
        if self._whole or any(len(each.chunks) != len(call.chunks) for each in self._splits):
            raise NotInPasses
        self._calls.append(call)

    def note(self, module: torch.nn.Module, shape: CallShape, result: Any) -> None:
        """A call was made that is not split among the passes."""
        if shape.kind == "train":
            # Each pass would add its gradients again.
            self._whole = True
            if self._splits:
                raise NotInPasses
            return
        tensors: list[torch.Tensor] = []
        try:
            flattened(result, tensors)
        except CannotSplit as refusal:
            raise NotInPasses from refusal
        if any(tensor.requires_grad for tensor in tensors):
            raise NotInPasses
        self._calls.append(_KeptCall(module, shape, result, _versions(result)))

    # ---- and in the later ones ----

    def due(self, module: torch.nn.Module, shape: CallShape) -> _KeptCall | SplitCall:
        """The call whose turn it is, as the first pass made it."""
        call = self._calls[self._next] if self._next < len(self._calls) else None
        self._next += 1
        if call is None or call.module is not module or call.shape != shape:
            self.refuse()
        if isinstance(call, _KeptCall) and _versions(call.result) != call.versions:
            self.refuse()
        return call


def fingerprint(gradient: torch.Tensor) -> torch.Tensor:
    """Two numbers that tell a gradient from another one; the second is a sum of absolute values."""
    parts = (part.detach().float() for part in parts_of(gradient, _PARTS))
    return torch.stack([torch.stack([part.sum(), part.abs().sum()]) for part in parts]).sum(0)


def _agree(given: torch.Tensor, due: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Tells whether sums are those of the same gradient, but for rounding."""
    # They are as exact as what they are large against.
    near = (given - due).abs() <= max(_LAST_PLACES * torch.finfo(dtype).eps, _SAME) * given[1].abs()
    # A number that is not finite says nothing about splitting; the step is judged by it soon enough.
    return (near | ~given.isfinite() | ~due.isfinite()).all()


def _reaches_weights(begin: Any, ends: Collection[Any]) -> bool:
    """Whether a backward pass from a node comes to a leaf without going through one of the ends."""
    seen, waiting = set(ends), [begin]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        # What accumulates gradients is the only kind of node that knows whose.
        if hasattr(node, "variable"):
            return True
        seen.add(node)
        waiting.extend(before for before, _ in node.next_functions)
    return False


def _versions(result: Any) -> list[int]:
    tensors: list[torch.Tensor] = []
    flattened(result, tensors)
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _in_place_of(tensor: torch.Tensor, mine: Chunk, other: Chunk) -> torch.Tensor:
    """Some output of one chunk, of the size that another one's would have."""
    if tensor.dim() == 0:
        return tensor
    if mine.flat:
        missing = mine.shape.rows - tensor.size(1)
        return tensor[:, [token % tensor.size(1) for token in range(other.shape.rows - missing)]]
    rows = tensor
    if other.rows != tensor.size(0):
        rows = tensor[[row % tensor.size(0) for row in range(other.rows)]]
    longer = mine.cut - other.cut
    if longer == 0 or tensor.dim() < 2:
        return rows
    if longer < 0:
        return rows[:, :longer]
    return torch.nn.functional.pad(rows, (*(0, 0) * (rows.dim() - 2), 0, longer))


def _in_order(output: Any, order: Sequence[int]) -> Any:
    """An output whose rows are in the order of the chunks, in the order of the call."""
    back = sorted(range(len(order)), key=order.__getitem__)
    tensors: list[torch.Tensor] = []
    structure = flattened(output, tensors)
    return filled(structure, [tensor if tensor.dim() == 0 else tensor[back] for tensor in tensors])
