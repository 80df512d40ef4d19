"""Every generator a training step draws from."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(slots=True)
class RandomState:
    """Every generator a training step draws from."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    device: torch.Tensor | None
    device_type: str

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device, device.type)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.get_device_module(self.device_type).set_rng_state(self.device)
