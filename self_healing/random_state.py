"""Every generator a training step draws from."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import consensus


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

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """The states as of now; on a GPU they lie in host memory, so nothing waits for the device."""
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), _on_devices(device), device.type)

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


def _on_devices(device: torch.device) -> list[torch.Tensor]:
    if device.type == "cpu":
        return []
    module = torch.get_device_module(device)
    # A model spread over several devices (`device_map`, `nn.DataParallel`) draws on each of them.
    if consensus.world_size() == 1 and module.device_count() > 1 and hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state()]
