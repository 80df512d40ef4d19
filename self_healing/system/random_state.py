"""Every generator that a training step draws from, and whether a step that is computed again repeats."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch

from . import processes


# ---- random state: the states of all generators that a training step draws from ----


# Of numpy's generator: its words, and the place among them.
_MT19937_BYTES = 625 * 4
# In the tuple of `numpy.random.get_state`.
_HAS_GAUSS = 3
_python: Any = random.getstate.__self__  # type: ignore[attr-defined]
_python_words: Any = super(random.Random, _python).getstate
# Its words at the last capture, and the state of which they are: to make that takes a hundred times as long.
_numpy_before: dict[bytes, Any] = {}


@dataclass(slots=True)
class RandomState:
    """The state of every generator a training step draws from."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    devices: list[torch.Tensor]
    device_type: str

    @classmethod
    def capture(cls, device: torch.device | None = None) -> RandomState:
        """Captures the states as of now; those of a GPU lie in host memory, so nothing waits for the device."""
        kind = "cpu" if device is None else device.type
        # As `random.getstate` and `torch.get_rng_state` do, without a call of Python in each step.
        python = (_python.VERSION, _python_words(), _python.gauss_next)
        devices = [] if kind == "cpu" else _on_devices(device)
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        words = _words_of(generator).raw if type(generator) is np.random.MT19937 else b""
        numpy = _numpy_before.get(words)
        # The words do not show whether the number that is kept from the last pair was used up.
        if numpy is None or numpy[_HAS_GAUSS]:
            numpy = np.random.get_state()
            _numpy_before.clear()
            if words:
                _numpy_before[words] = numpy
        return cls(python, numpy, torch.default_generator.get_state(), devices, kind)

    def restore(self) -> None:
        """Sets all generators to the captured states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        _numpy_before.clear()
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
        """Makes the states of what [`to_plain`] gave in an earlier process."""
        name, words, *rest = states["numpy"]
        numpy = (name, np.asarray(words, dtype=np.uint32), *rest)
        return cls(states["python"], numpy, states["cpu"], list(states["devices"]), states["device_type"])


@lru_cache(maxsize=1)
def _words_of(generator: Any) -> Any:
    return (ctypes.c_char * _MT19937_BYTES).from_address(int(generator.ctypes.state_address))


def _on_devices(device: torch.device | None) -> list[torch.Tensor]:
    module = torch.get_device_module(device)
    # A model spread over several devices (`device_map`, `nn.DataParallel`) draws on each of them.
    if processes.world_size() == 1 and module.device_count() > 1 and hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state()]


# ---- repeatability: compares two computations of the same step: kernels need not repeat bitwise ----


# What may lie apart: matrix products in single precision may be computed in TF32, with ten bits, and a sum in half
# precision may be off by several steps of its last place.
_LEAST, _LAST_PLACES = 1e-3, 8
# Of each gradient: how many elements are kept.
_SAMPLE = 1024


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
    norms: torch.Tensor
    sample: torch.Tensor

    @classmethod
    def of(cls, loss: float, gradients: Sequence[torch.Tensor]) -> Self:
        """
        Reads every gradient once and copies none: of a model of 8B parameters and 300 tensors, 5 MB at most are kept.
        """
        # Of a sharded gradient the part that this process has.
        local = [each.to_local() if hasattr(each, "to_local") else each for each in gradients]
        flat = [each.detach().reshape(-1) for each in local]
        # Of a model on several devices; read from one.
        device = flat[0].device
        norms = torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64).to(device) for each in flat])
        sample = torch.cat([each[:: max(len(each) // _SAMPLE, 1)].double().to(device) for each in flat])
        return cls(loss, norms.cpu(), sample.cpu())

    def apart_from(self, other: StepPrint, dtype: torch.dtype) -> Repeatability | None:
        """Compares two computations; `None` if they are not of the same gradients, or not finite."""
        if self.norms.shape != other.norms.shape or self.sample.shape != other.sample.shape:
            return None
        scale = float(self.sample.norm())
        apart = float((self.sample - other.sample).norm()) / scale if scale > 0 else 0.0
        if apart == 0 and not torch.equal(self.norms, other.norms):
            # Less than the sample shows.
            apart = torch.finfo(torch.float32).eps
        loss = 0.0 if self.loss == other.loss else abs(self.loss - other.loss) / max(abs(self.loss), abs(other.loss))
        found = Repeatability(loss, apart, tolerance(dtype))
        return found if found.loss + found.gradient < float("inf") else None
