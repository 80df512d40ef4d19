"""Tells whether an `optimizer.step()` that raised has changed anything, from what is noted before it."""

from __future__ import annotations

from typing import Any

import torch

from ..hf.state import innermost


# Optimizers that write to tensors through torch, which counts it; kernels of others may go around the counter.
_COUNTED = ("torch", "transformers")


class StepMark:
    """Notes the versions of the parameters before the step in which the optimizer makes its state, the first one."""

    def __init__(self, optimizer: Any) -> None:
        inner = innermost(optimizer)
        counted = type(inner).__module__.partition(".")[0] in _COUNTED
        self._optimizer = inner if isinstance(inner, torch.optim.Optimizer) and counted else None
        self._before: dict[torch.Tensor, int] | None = None

    def set(self) -> None:
        """Notes the versions, right before the step."""
        self._before = None
        if self._optimizer is not None and not self._optimizer.state:
            self._before = {
                parameter: parameter._version
                for group in self._optimizer.param_groups
                for parameter in group["params"]
            }

    def undo(self) -> bool:
        """Clears the state that a step which raised has made, which may be incomplete."""
        if self._optimizer is None or self._before is None:
            return False
        if any(parameter._version != version for parameter, version in self._before.items()):
            return False
        state = self._optimizer.state
        if self._fused and any(_counts(each) for each in state.values()):
            return False
        state.clear()
        return True

    @property
    def _fused(self) -> bool:
        """Whether kernels are fused: they write to tensors without torch counting it, but count their steps."""
        return self._optimizer is not None and any(group.get("fused") for group in self._optimizer.param_groups)


def _counts(state: Any) -> bool:
    """Whether an update has been made with this state, or may have been."""
    return "step" not in state or float(state["step"]) != 0
