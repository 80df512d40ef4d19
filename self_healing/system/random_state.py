"""Every generator that a training step draws from, and whether a step that is computed again repeats."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch

from . import processes


# ---- random state: the states of all generators that a training step draws from ----


# Of a Mersenne Twister: 624 words and the place among them, each of 4 bytes. numpy has the place last (`mt19937_state`
# in mt19937.h), Python first (`RandomObject` in Modules/_randommodule.c).
_MT19937_BYTES = 625 * 4
_PLACE_AND_WORDS = struct.Struct("=I624I")
# From numpy 1.24 on.
_bit_generator = getattr(np.random, "get_bit_generator", lambda: None)
# In the tuple of `numpy.random.get_state`: whether a second normal number is kept from the last pair.
_HAS_GAUSS = 3
# In that of `random.getstate`: the number that is kept from the last pair, if any.
_GAUSS_NEXT = 2


@dataclass(slots=True)
class RandomState:
    """The state of every generator a training step draws from."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    devices: list[torch.Tensor]
    device_type: str
    # Memory of the generators of Python and numpy when they were captured.
    _python_words: bytes | None = field(default=None, repr=False)
    _numpy_words: bytes | None = field(default=None, repr=False)
    _kept_put_back: int = field(default=0, repr=False)
    # How often numpy was given a kept number back: it has one generator for the process.
    _kept_put_back_so_far: ClassVar[int] = 0

    @classmethod
    def capture(cls, device: torch.device | None = None, since: RandomState | None = None) -> RandomState:
        """Captures the states as of now; those of a GPU lie in host memory, so nothing waits for the device."""
        # Read first: the next capture notices what another thread draws meanwhile.
        python_words, numpy_words = _python_words(), _numpy_words()
        return cls(
            python=since.python if since and since._python_is_at(python_words) else random.getstate(),
            numpy=since.numpy if since and since._numpy_is_at(numpy_words) else np.random.get_state(),
            cpu=torch.get_rng_state(),
            devices=_on_devices(device),
            device_type="cpu" if device is None else device.type,
            _python_words=python_words,
            _numpy_words=numpy_words,
            _kept_put_back=cls._kept_put_back_so_far,
        )

    def _python_is_at(self, words: bytes | None) -> bool:
        kept: float | None = self.python[_GAUSS_NEXT]
        return words is not None and words == self._python_words and kept == _python_generator().gauss_next

    def _numpy_is_at(self, words: bytes | None) -> bool:
        # The words do not show that the kept number was used up, or put back.
        kept = self.numpy[_HAS_GAUSS] or self._kept_put_back != RandomState._kept_put_back_so_far
        return words is not None and words == self._numpy_words and not kept

    def restore(self) -> None:
        """Sets all generators to the captured states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        RandomState._kept_put_back_so_far += self.numpy[_HAS_GAUSS]
        torch.set_rng_state(self.cpu)
        if len(self.devices) == 1:
            torch.get_device_module(self.device_type).set_rng_state(self.devices[0])
        elif self.devices:
            torch.get_device_module(self.device_type).set_rng_state_all(self.devices)

    # ---- in a file ----

    def to_plain(self) -> dict[str, Any]:
        """Gives the states as tensors and plain values, which `torch.load` reads with `weights_only=True`."""
        name, words, *rest = self.numpy
        return {
            "python": self.python,
            "numpy": (name, words.tolist(), *rest),
            "cpu": self.cpu,
            "devices": self.devices,
            "device_type": self.device_type,
        }

    @classmethod
    def from_plain(cls, states: Mapping[str, Any]) -> RandomState:
        """Makes the states of what [`to_plain`] gave in an earlier process, for the generators there are here."""
        here = cls.capture()
        name, words, *rest = states.get("numpy", here.numpy)
        return cls(
            states["python"],
            (name, np.asarray(words, dtype=np.uint32), *rest),
            states["cpu"],
            list(states["devices"]),
            states.get("device_type", "cpu"),
        )


def _python_generator() -> Any:
    """The generator whose methods the functions of `random` are: another one after a reload of that module."""
    return getattr(random.getstate, "__self__", None)


class _Memory:
    """Where a generator keeps its words."""

    def __init__(self, address_of: Callable[[Any], int]) -> None:
        self._address_of = address_of
        # Held, so that the address stays its own.
        self._generator: Any = None
        self._words: Any = None

    def words_of(self, generator: Any) -> bytes:
        """Reads the words."""
        if generator is not self._generator:
            # Twelve times as fast as `ctypes.string_at` with the address asked for, several times a step.
            self._words = (ctypes.c_char * _MT19937_BYTES).from_address(self._address_of(generator))
            self._generator = generator
        words: bytes = self._words.raw
        return words


_python_memory = _Memory(lambda generator: id(generator) + object.__basicsize__)
_numpy_memory = _Memory(lambda generator: int(generator.ctypes.state_address))


def _python_words_are_in_memory() -> bool:
    """Whether the words of Python's generator lie where CPython 3.11 to 3.14 has them."""
    if sys.implementation.name != "cpython" or not isinstance(_python_generator(), random.Random):
        return False
    place, *words = _PLACE_AND_WORDS.unpack(_python_memory.words_of(_python_generator()))
    state: tuple[int, ...] = random.getstate()[1]
    return (*words, place) == state


_HAS_PYTHON_WORDS = _python_words_are_in_memory()


def _python_words() -> bytes | None:
    """Reads the memory of the generator behind `random`; `None` where that cannot be read."""
    generator = _python_generator()
    return _python_memory.words_of(generator) if _HAS_PYTHON_WORDS and isinstance(generator, random.Random) else None


def _numpy_words() -> bytes | None:
    """Reads the memory of the generator behind `numpy.random`; `None` for another one than numpy's default."""
    generator = _bit_generator()
    return _numpy_memory.words_of(generator) if type(generator) is np.random.MT19937 else None


def _on_devices(device: torch.device | None) -> list[torch.Tensor]:
    if device is None or device.type == "cpu":
        return []
    module = torch.get_device_module(device)
    # A model spread over several devices (`device_map`, `nn.DataParallel`) draws on each of them.
    if processes.world_size() == 1 and module.device_count() > 1 and hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state()]


# ---- repeatability: compares two computations of the same step: kernels need not repeat bitwise ----


# What may lie apart: matrix products in single precision may be computed in TF32, with ten bits, and a sum in half
# precision may be off by several steps of its last place.
_LEAST, _LAST_PLACES = 1e-3, 8
# Of each gradient: how many elements are kept, and how many are summed up at a time.
_SAMPLE, _CHUNK = 1024, 2**22
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Repeatability:
    """Relative difference of two computations of the same step."""

    loss: float
    gradient: float
    noise: float

    @property
    def bitwise(self) -> bool:
        """Whether they are the same, bit for bit."""
        return self.loss == 0 and self.gradient == 0

    @property
    def beyond_noise(self) -> bool:
        """Whether kernels do not explain the difference. By gradients alone: a loss may be near zero by itself."""
        return self.gradient > self.noise

    def __str__(self) -> str:
        if self.bitwise:
            return "bitwise"
        return "beyond noise" if self.beyond_noise else "within noise"


def tolerance(dtype: torch.dtype) -> float:
    """
    Returns the difference of two computations that is expected where nothing has been measured: of one element,
    relative to the largest of the elements compared; a sum of `n` of them may differ by the square root of `n` times
    that.
    """
    return max(_LEAST, _LAST_PLACES * torch.finfo(dtype).eps)


def lowest_precision(parameters: Iterable[torch.Tensor], *casts: torch.dtype | None) -> torch.dtype:
    """Returns the coarsest type of a computation: that of its weights, or the one they are cast to."""
    found = {each.dtype for each in parameters if each.is_floating_point() and each.itemsize > 1}
    found |= {dtype for dtype in casts if dtype is not None}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


@dataclass(frozen=True, slots=True)
class StepPrint:
    """A fingerprint of a computed step, to compare another computation of it with."""

    loss: float
    sums: torch.Tensor
    sample: torch.Tensor

    @classmethod
    def of(cls, loss: float, gradients: Sequence[torch.Tensor]) -> Self:
        """
        Reads every gradient once and copies none: of a model of 8B parameters and 300 tensors, 5 MB at most are kept.
        """
        flat = [_local(gradient).detach().reshape(-1) for gradient in gradients]
        if not flat:
            return cls(loss, torch.zeros(0), torch.zeros(0))
        # Of a model on several devices; read from one.
        device = flat[0].device
        sums = torch.stack([_sum_of_bits(each).to(device) for each in flat])
        sample = torch.cat([each[:: max(len(each) // _SAMPLE, 1)].double().to(device) for each in flat])
        return cls(loss, sums.cpu(), sample.cpu())

    def apart_from(self, other: StepPrint, dtype: torch.dtype) -> Repeatability | None:
        """Compares two computations; `None` if they are not of the same gradients, or not finite."""
        if self.sums.shape != other.sums.shape or self.sample.shape != other.sample.shape:
            return None
        scale = float(self.sample.norm())
        apart = float((self.sample - other.sample).norm()) / scale if scale > 0 else 0.0
        if apart == 0 and not torch.equal(self.sums, other.sums):
            # Less than the sample shows.
            apart = torch.finfo(torch.float32).eps
        loss = 0.0 if self.loss == other.loss else abs(self.loss - other.loss) / max(abs(self.loss), abs(other.loss))
        found = Repeatability(loss, apart, tolerance(dtype))
        return found if found.loss + found.gradient < float("inf") else None


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """Returns the part of a sharded gradient that this process has."""
    local = getattr(gradient, "to_local", None)
    return gradient if local is None else local()


def _sum_of_bits(flat: torch.Tensor) -> torch.Tensor:
    """Sums up the bits in pieces, because each is copied when it is summed up as integers."""
    bits = flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in _pieces(bits):
        total += piece.sum(dtype=torch.int64)
    return total


def _pieces(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, len(flat), _CHUNK):
        yield flat[start : start + _CHUNK]
