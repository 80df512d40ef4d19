"""NaNDetector: losses and gradients that are not finite, in a training loop of one's own."""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import nn

from ...config.schema import ConfigurationError
from ...failures.recipes import FailureType, UnrecoverableTrainingError
from ...hf.state import total_gradient_norm
from ...ranks import votes
from ...system.processes import own_rank, world_size


logger = logging.getLogger("self_healing")

Reaction = Literal["warn", "skip", "raise"]
# Losses that are remembered.
_HISTORY = 100


@dataclass(slots=True)
class NaNState:
    """
    What a [`NaNDetector`] has seen.

    Args:
        consecutive (`int`), total (`int`):
            Steps that were not finite, in a row until now, and in all.
        last_good_loss (`float`, *optional*), last_good_step (`int`, *optional*):
            Of the last step that was finite.
        history (`deque[tuple[int, float]]`):
            The last 100 steps, each with its loss as it was.
    """

    consecutive: int = 0
    total: int = 0
    last_good_loss: float | None = None
    last_good_step: int | None = None
    history: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_HISTORY))


class NaNDetector:
    """
    Says of each step of a loop of your own whether it may be applied. On several ranks they vote, and all of them get
    the same answer: every rank has to ask.

    Args:
        action (`str`, *optional*, defaults to `"warn"`):
            `"warn"` logs a step that is not finite, `"skip"` says nothing until there are `max_consecutive` of them in
            a row, `"raise"` raises at the first one. The step is to be left out either way.
        max_consecutive (`int`, *optional*, defaults to 5):
            Steps in a row after which [`should_rollback`] says that leaving out does not help.

    Example:

    ```python
    detector = NaNDetector(action="skip", max_consecutive=5)
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        loss.backward()
        if detector.check_loss(loss, step) and detector.check_gradients(model, step):
            optimizer.step()
        elif detector.should_rollback:
            model.load_state_dict(last_good)
        optimizer.zero_grad()
    ```
    """

    def __init__(self, action: Reaction = "warn", max_consecutive: int = 5) -> None:
        if action not in get_args(Reaction):
            raise ConfigurationError(f"`action` is {action!r}, but must be one of {', '.join(get_args(Reaction))}.")
        if max_consecutive < 1:
            raise ConfigurationError(f"`max_consecutive` is {max_consecutive!r}, but must be at least 1.")
        self.action = action
        self.max_consecutive = max_consecutive
        self.state = NaNState()
        # As before the step whose loss was good last: its gradients may still be bad.
        self._before: tuple[int, float | None, int | None] = (0, None, None)

    def check_loss(self, loss: float | torch.Tensor, step: int) -> bool:
        """
        Whether the loss of a step is finite on all ranks. Of a tensor it waits for the device.

        Raises:
            UnrecoverableTrainingError: If it is not, with `action="raise"`.
        """
        device = loss.device if isinstance(loss, torch.Tensor) else _device()
        value = float(loss)
        self.state.history.append((step, value))
        if self._refuses("loss", value, step, device):
            return False
        state = self.state
        self._before = state.consecutive, state.last_good_loss, state.last_good_step
        state.consecutive, state.last_good_loss, state.last_good_step = 0, value, step
        return True

    def check_gradients(self, model: nn.Module, step: int) -> bool:
        """
        Whether the gradients of a model, after `backward()`, are finite on all ranks. It waits for the device.

        Raises:
            UnrecoverableTrainingError: If they are not, with `action="raise"`.
        """
        norm = total_gradient_norm(model)
        return not self._refuses("gradient norm", float(norm), step, norm.device)

    @property
    def should_rollback(self) -> bool:
        """Whether so many steps in a row were not finite that leaving them out does not help."""
        return self.state.consecutive >= self.max_consecutive

    def _refuses(self, what: str, value: float, step: int, device: torch.device) -> bool:
        here = not math.isfinite(value)
        if not votes.any_rank("a value is not finite", here, device):
            return False
        state = self.state
        if state.last_good_step == step:
            state.consecutive, state.last_good_loss, state.last_good_step = self._before
        state.consecutive += 1
        state.total += 1
        seen = f"{what} is {value}" if here else f"{what} is not finite on another rank"
        told = f"Step {step}: {seen} (rank {own_rank()}), {state.consecutive} in a row; the step is to be left out."
        if self.action == "raise":
            raise UnrecoverableTrainingError(told, failure=FailureType.NONFINITE_UNDIAGNOSED)
        if self.action == "warn" or self.should_rollback:
            logger.warning("%s", told)
        return True


def _device() -> torch.device:
    """Where ranks vote on a number: NCCL takes nothing but what lies on its device."""
    if world_size() > 1 and torch.distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
