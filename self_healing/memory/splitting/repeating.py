"""
Tells whether a computation was repeated, where kernels need not repeat bitwise.

Two computations of the same rows lie apart by the noise of the kernels: atomic sums, tiles that are chosen again. How
much of it arrives in an output, its precision does not say: in bfloat16 the log-probabilities of a small model move by
1e-4 of themselves, and the score of a reward model, a sum that nearly cancels, by a tenth. Dropout that is on in one
of the two and off in the other moves the former by 2e-3, which is less than the last place of a bfloat16. So the noise
is measured: what differs by more than was seen before is computed again a few times, and has to be one more of these.
"""

from __future__ import annotations

import enum
import math
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...random_state import RandomState
from ...repeatability import lowest_precision, tolerance


# How often something is computed again to see how far it lies apart from itself; more often where that does not decide
# what there was: a single number repeats by chance, and noise of less than a last place shows in few computations.
FEW, MANY = 4, 16
# Elements of each output that are kept to compare it by.
_SAMPLED = 4096
# What may lie apart, in distances of the repetitions from each other; and what may do so with a warning.
_NOISE, _UNCLEAR = 8.0, 32.0
# Last places that rounding may take from a single number.
_LAST_PLACES = 2
# What says of a layer with adapters how it computes.
_OF_AN_ADAPTER = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
# Pieces whose outputs say how large outputs are.
_PIECES = 64
# What costs no second look: another order of the same sums, relative to what is summed up.
_REORDERED = 1e-6
# No output: what masks put in its place, and what would overflow when it is squared.
_HUGE = 1e15


class Verdict(enum.Enum):
    """The verdict on two computations that lie apart."""

    SAME = enum.auto()
    UNCLEAR = enum.auto()
    OTHER = enum.auto()


@dataclass(frozen=True, slots=True)
class Trace:
    """
    A sample of a computation, to know it again.

    Args:
        sample (`list[torch.Tensor]`):
            Elements of each output.
        drawn ([`RandomState`]):
            Of the generators at its end, which says how many random numbers it drew.
        modes (`list[bool]`):
            Which modules were training.
        adapters (`list`):
            Which adapters were active.
        autocast (`torch.dtype`):
            What it was cast to, `None` if it was not.
    """

    sample: list[torch.Tensor]
    drawn: RandomState
    modes: list[bool]
    adapters: list[Any]
    autocast: torch.dtype | None

    def switched(self, other: Trace) -> bool:
        """Whether something was switched between the two, dropout for example, that may show in what comes out."""
        return self.modes != other.modes or not self.drawn.is_at(other.drawn)

    def comparable(self, other: Trace) -> bool:
        """Whether the outputs are of the same sizes and by the same adapters, whose weights get the gradients."""
        sizes = ([values.shape for values in each.sample] for each in (self, other))
        return next(sizes) == next(sizes) and self.adapters == other.adapters


@dataclass(slots=True)
class _Level:
    """
    The noise and the size of one output, as seen so far.

    Args:
        scale (`float`):
            The size of its elements.
        noise (`float`):
            How far two computations by the same kernels may lie apart.
        accepted (`float`):
            How far two may that need not be by the same kernels.
        sizes (`deque[torch.Tensor]`):
            Of its elements in the pieces of late, still on the device.
    """

    scale: float = 0.0
    noise: float = 0.0
    accepted: float = 0.0
    sizes: deque[torch.Tensor] = field(default_factory=lambda: deque(maxlen=_PIECES))

    def look_at_sizes(self) -> None:
        """Reads how large the output was in other pieces of the batch."""
        if self.sizes:
            self.scale = max(self.scale, float(torch.stack([*self.sizes]).max()))
            self.sizes.clear()

    def at_most(self, dtype: torch.dtype) -> float:
        """Gives the distance up to which the noise of kernels explains a difference."""
        return max(_UNCLEAR / _NOISE * self.noise, tolerance(dtype) * self.scale)


class Repeats:
    """
    Learns how closely a module repeats what it computes.

    Distances and sizes are root mean squares over the elements of an output. They are not relative: a number that
    happens to be near zero is not less noisy for it.

    Args:
        module (`torch.nn.Module`, *optional*):
            The module.
        device (`torch.device`, *optional*):
            Where it draws random numbers, besides the CPU.
        autocast (`torch.dtype`, *optional*):
            What its calls are cast to inside of them.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        device: torch.device | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._autocast = autocast
        self._module = torch.nn.Identity() if module is None else module
        self._device = torch.device("cpu") if device is None else device
        self._levels: dict[tuple[tuple[bool, torch.dtype], ...], list[_Level]] = {}

    def trace(self, tensors: Sequence[torch.Tensor]) -> Trace:
        """Samples the output, and notes the settings it was computed with."""
        kind, modules = self._device.type, list(self._module.modules())
        return Trace(
            sampled(tensors),
            RandomState.capture(self._device),
            [each.training for each in modules],
            _adapters(modules),
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        )

    def first_trace(self, tensors: Sequence[torch.Tensor]) -> Trace:
        """The same of a piece that is to be computed again."""
        trace = self.trace(tensors)
        for level, values in zip(self._of(trace), trace.sample, strict=True):
            level.sizes.append(_size(_usable(values)))
        return trace

    def near(self, first: Trace, again: Trace) -> bool:
        """Whether two computations are as near each other as they have been before. Reads from the device once."""
        if not first.comparable(again):
            return False
        near, switched = True, first.switched(again)
        for level, (distance, scale) in zip(self._of(first), _apart(first, again), strict=True):
            level.scale = max(level.scale, scale)
            allowed = level.noise if switched else max(level.noise, level.accepted)
            near &= distance <= allowed + _REORDERED * level.scale
        return near

    def judge(self, first: Trace, repeated: Sequence[Trace]) -> Verdict:
        """
        Judges whether a computation could have been one more of several repetitions.

        Where something was switched in between, nothing else explains what is more than their noise. Otherwise other
        kernels may have been chosen for it (by the memory there was, by what was tuned since), which does not show in
        how the repetitions differ.
        """
        if not all(first.comparable(each) for each in repeated):
            return Verdict.OTHER
        between = [_apart(repeated[0], each) for each in repeated[1:]]
        to_first = [_apart(first, each) for each in repeated]
        dtype, switched, verdict = self._lowest_precision(first), first.switched(repeated[0]), Verdict.SAME
        for place, (values, level) in enumerate(zip(first.sample, self._of(first), strict=True)):
            spread = max(pair[place][0] for pair in between)
            distance = min(each[place][0] for each in to_first)
            level.look_at_sizes()
            rounding = level.scale * _last_places(values, dtype) / math.sqrt(max(len(values), 1))
            level.noise = max(level.noise, _NOISE * spread + rounding)
            if distance <= level.noise:
                continue
            if switched or distance > level.at_most(dtype):
                return Verdict.OTHER
            verdict = Verdict.UNCLEAR
        return verdict

    def accept(self, first: Trace, again: Trace) -> bool:
        """
        Whether what was judged to be the same may be used: forward passes with and without gradients choose other
        kernels, so that the two may lie apart by more than repetitions do, and from here on they may.
        """
        if not first.comparable(again):
            return False
        pairs = [(level, distance) for level, (distance, _) in zip(self._of(first), _apart(first, again), strict=True)]
        dtype = self._lowest_precision(first)
        if any(distance > level.at_most(dtype) for level, distance in pairs):
            return False
        for level, distance in pairs:
            level.accepted = max(level.accepted, 2 * distance if distance > level.noise else 0.0)
        return True

    def _lowest_precision(self, trace: Trace) -> torch.dtype:
        """Of what a call computed in."""
        return lowest_precision(self._module.parameters(), self._autocast, trace.autocast)

    def _of(self, trace: Trace) -> list[_Level]:
        kind = tuple((len(values) == 1, values.dtype) for values in trace.sample)
        return self._levels.setdefault(kind, [_Level() for _ in trace.sample])


def sampled(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Elements from all over each tensor of floats. Nothing of its size is made, and nothing waits for the device."""
    return [_picked(tensor.detach()) for tensor in tensors if tensor.is_floating_point()]


def _picked(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() <= _SAMPLED:
        return tensor.flatten().clone()
    # Odd, so that it is not always the same column of a table.
    every = -(-tensor.numel() // _SAMPLED) | 1
    left, places = torch.arange(0, tensor.numel(), every, device=tensor.device), list[torch.Tensor]()
    for size in reversed(tensor.shape):
        places.append(left % size)
        left = left // size
    # By coordinates: what is not contiguous would be copied to be counted through.
    return tensor[tuple(reversed(places))]


def _apart(first: Trace, again: Trace) -> list[tuple[float, float]]:
    """
    Of each output the distance and its size. What is not finite says nothing about splitting: the step is judged by it
    soon enough.
    """
    found = []
    for one, other in zip(first.sample, again.sample, strict=True):
        precise = torch.promote_types(one.dtype, torch.float32)
        left, right = one.to(precise), other.to(precise)
        usable = _is_usable(one) & _is_usable(other)
        found += [_size(torch.where(usable, values, 0)) for values in (left - right, left)]
    # Of a model on several devices outputs may be as well; they are read together.
    numbers = torch.stack([each.to(found[0].device, torch.float32) for each in found]).tolist() if found else []
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _is_usable(values: torch.Tensor) -> torch.Tensor:
    return values.abs() < min(_HUGE, torch.finfo(values.dtype).max / 2)


def _usable(values: torch.Tensor) -> torch.Tensor:
    return torch.where(_is_usable(values), values, 0)


def _size(values: torch.Tensor) -> torch.Tensor:
    return values.float().square().sum().div(max(len(values), 1)).sqrt()


def _last_places(values: torch.Tensor, dtype: torch.dtype) -> float:
    """The relative error that rounding leaves in a single number."""
    usable, last_place = _usable(values), torch.finfo(values.dtype).eps
    # What was computed in fewer bits and cast is as coarse as these.
    if torch.equal(usable.to(dtype).to(values.dtype), usable):
        last_place = max(last_place, torch.finfo(dtype).eps)
    return _LAST_PLACES * last_place


def _adapters(modules: Sequence[torch.nn.Module]) -> list[Any]:
    """Gives which adapters are active in which layer, how strongly, and which are merged into it."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    # As text: what is kept must not change with the layer.
    return [
        [str(getattr(each, name, None)) for name in _OF_AN_ADAPTER]
        for each in modules
        if isinstance(each, BaseTunerLayer)
    ]
