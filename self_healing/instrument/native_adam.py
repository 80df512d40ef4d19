"""`NativeAdam`: what DeepSpeed's Adam for the CPU keeps in its library, beside the state that can be read."""

from __future__ import annotations

from typing import Any

import torch


class NativeAdam:
    """Knows the powers of the betas that DeepSpeed's Adam for the CPU multiplies from step to step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._entered_at = self._steps

    @staticmethod
    def is_in(optimizer: Any) -> bool:
        """Whether an optimizer is DeepSpeed's Adam for the CPU."""
        return hasattr(optimizer, "ds_opt_adam")

    def count_again(self) -> None:
        """Multiplies them up to the step of the state that was put in place."""
        adam, nothing = self._optimizer, torch.empty(0)
        native, first = adam.ds_opt_adam, adam.param_groups[0]
        settings = (first["lr"], *first["betas"], first["eps"], first["weight_decay"])
        native.create_adam(adam.opt_id, *settings, adam.adam_w_mode, False)
        for step in range(self._entered_at + 1, self._steps + 1):
            for group in adam.param_groups:
                of_group = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
                native.adam_update(adam.opt_id, step, *of_group, group["bias_correction"], *[nothing] * 4)

    @property
    def _steps(self) -> int:
        return max((int(state.get("step", 0)) for state in self._optimizer.state.values()), default=0)
