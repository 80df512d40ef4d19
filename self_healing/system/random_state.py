"""`RandomState`: the states of all generators that a training step draws from."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from ..ranks import votes


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

    def is_at(self, other: RandomState) -> bool:
        """Whether torch would draw the same numbers next."""
        mine, theirs = ([each.cpu, *each.devices] for each in (self, other))
        return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))

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
    if votes.world_size() == 1 and module.device_count() > 1 and hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state()]
