"""Every generator a training step draws from."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from . import consensus


# Of numpy's Mersenne Twister: 624 words and the place among them, each of 4 bytes (`mt19937_state` in mt19937.h).
_MT19937_BYTES = 625 * 4
# From numpy 1.24 on.
_bit_generator = getattr(np.random, "get_bit_generator", lambda: None)
# In the tuple of `numpy.random.get_state`: whether a second normal number is kept from the last pair.
_HAS_GAUSS = 3


@dataclass(slots=True)
class RandomState:
    """
    The state of every generator a training step draws from.

    Args:
        python (`tuple`), numpy (`tuple`), cpu (`torch.Tensor`):
            Of `random`, `numpy.random` and torch on the CPU.
        devices (`list[torch.Tensor]`):
            Of torch on the accelerator: of this process's device, or of all devices if one process uses several.
        device_type (`str`):
            The kind of accelerator.
    """

    python: Any
    numpy: Any
    cpu: torch.Tensor
    devices: list[torch.Tensor]
    device_type: str
    # What lay in the memory of numpy's generator.
    _numpy_words: bytes | None = field(default=None, repr=False)

    @classmethod
    def capture(cls, device: torch.device | None = None, since: RandomState | None = None) -> RandomState:
        """
        The states as of now; on a GPU they lie in host memory, so nothing waits for the device.

        Args:
            device (`torch.device`, *optional*):
                Of the run. Defaults to none: what is watched draws on the host alone.
            since ([`RandomState`], *optional*):
                An earlier capture: what has not been drawn from since then is shared with it. numpy takes 0.1 ms to
                tell its state, longer than all the others together.
        """
        # Read first: what another thread draws meanwhile is noticed by the next capture.
        words = _numpy_words()
        drawn = since is None or words is None or words != since._numpy_words or since.numpy[_HAS_GAUSS]
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state() if drawn or since is None else since.numpy,
            cpu=torch.get_rng_state(),
            devices=_on_devices(device),
            device_type="cpu" if device is None else device.type,
            _numpy_words=words,
        )

    def is_at(self, other: RandomState) -> bool:
        """Whether torch would draw the same next."""
        mine, theirs = ([each.cpu, *each.devices] for each in (self, other))
        return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))

    def restore(self) -> None:
        """Sets all generators back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if len(self.devices) == 1:
            torch.get_device_module(self.device_type).set_rng_state(self.devices[0])
        elif self.devices:
            torch.get_device_module(self.device_type).set_rng_state_all(self.devices)


def _numpy_words() -> bytes | None:
    """What the generator behind `numpy.random` draws from next; `None` for another one than numpy's default."""
    generator = _bit_generator()
    return (
        None
        if type(generator) is not np.random.MT19937
        else ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    )


def _on_devices(device: torch.device | None) -> list[torch.Tensor]:
    if device is None or device.type == "cpu":
        return []
    module = torch.get_device_module(device)
    # A model spread over several devices (`device_map`, `nn.DataParallel`) draws on each of them.
    if consensus.world_size() == 1 and module.device_count() > 1 and hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state()]
