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
from ...hf.state import Search, named_gradients_of
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
        # Of the step that is asked about: whether it is bad, and what stood before it.
        self._step: int | None = None
        self._bad = False
        self._before: tuple[int, float | None, int | None] = (0, None, None)

    def check_loss(self, loss: float | torch.Tensor, step: int) -> bool:
        """
        Whether the loss of a step, or of one of its micro-batches, is finite on all ranks. Of a tensor it waits for
        the device.

        Raises:
            UnrecoverableTrainingError: If it is not, with `action="raise"`.
        """
        device = loss.device if isinstance(loss, torch.Tensor) else _device()
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self.state.history.append((step, value))
        good = self._is_good(math.isfinite(value), f"loss is {value}", "loss", step, device)
        if good and not self._bad:
            self.state.last_good_loss, self.state.last_good_step = value, step
        return good

    def check_gradients(self, model: nn.Module, step: int) -> bool:
        """
        Whether the gradients of a model, after `backward()`, are finite on all ranks. It waits for the device.

        Raises:
            UnrecoverableTrainingError: If they are not, with `action="raise"`.
        """
        search, device = Search(), _device()
        for name, gradient in named_gradients_of(model):
            search.add(name, gradient, inf=True)
            device = gradient.device
        return self._is_good(not search.nonfinite(), "a gradient is NaN or Inf", "a gradient", step, device)

    @property
    def should_rollback(self) -> bool:
        """Whether so many steps in a row were not finite that leaving them out does not help."""
        return self.state.consecutive >= self.max_consecutive

    def _is_good(self, here: bool, seen: str, what: str, step: int, device: torch.device) -> bool:
        state = self.state
        if step != self._step:
            self._step, self._bad = step, False
            self._before = state.consecutive, state.last_good_loss, state.last_good_step
        if not votes.any_rank("a value is not finite", not here, device):
            state.consecutive = state.consecutive if self._bad else 0
            return True
        if not self._bad:
            self._bad = True
            before, state.last_good_loss, state.last_good_step = self._before
            state.consecutive, state.total = before + 1, state.total + 1
        seen = f"{what} is not finite on another rank" if here else seen
        told = f"Step {step}: {seen} (rank {own_rank()}), {state.consecutive} in a row; the step is to be left out."
        if self.action == "raise":
            raise UnrecoverableTrainingError(told, failure=FailureType.NONFINITE_UNDIAGNOSED)
        if self.action == "warn" or self.should_rollback:
            logger.warning("%s", told)
        return False


def _device() -> torch.device:
    """Where ranks vote on a number: NCCL takes nothing but what lies on its device."""
    if world_size() > 1 and torch.distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
