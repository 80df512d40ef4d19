"""Faults of calls: connections that are lost, waits that take too long, and reward functions that have either."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import logging
from typing import Any

import torch

from .strikes import Strikes
from .waiting import wait_in_c, wait_in_python


logger = logging.getLogger("self_healing.chaos")


def lose_connection(strikes: Strikes, place: str) -> None:
    """Raises if a network error strikes at a place."""
    for number in strikes.due("network_error", place):
        with strikes.strike(number, where=place):
            raise ConnectionError(errno.ECONNRESET, "Connection reset by peer (rehearsed by self_healing.chaos)")


def wait(strikes: Strikes, place: str) -> None:
    """Waits if a slow step or a hang strikes at a place."""
    for kind in ("slow_step", "hang"):
        for number in strikes.due(kind, place):
            fault = strikes.faults[number]
            wait_for = wait_in_python if fault.get("wait") == "python" else wait_in_c
            with strikes.strike(number, where=place, seconds=fault.get("seconds")):
                wait_for(float(fault.get("seconds")))


def guard_rewards(strikes: Strikes, trainer: Any, undo: contextlib.ExitStack) -> None:
    """Lets network errors strike the first reward function, until `undo` is closed."""
    functions = getattr(trainer, "reward_funcs", None)
    if not functions:
        logger.warning("Chaos: %s has no reward functions to break.", type(trainer).__name__)
        return
    original = functions[0]
    if isinstance(original, torch.nn.Module):
        handle = original.register_forward_pre_hook(lambda module, inputs: lose_connection(strikes, "reward"))
        undo.callback(handle.remove)
        return
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def broken_async(*args: Any, **kwargs: Any) -> Any:
            lose_connection(strikes, "reward")
            return await original(*args, **kwargs)

        functions[0] = broken_async
    else:

        @functools.wraps(original)
        def broken(*args: Any, **kwargs: Any) -> Any:
            lose_connection(strikes, "reward")
            return original(*args, **kwargs)

        functions[0] = broken

    undo.callback(functions.__setitem__, 0, original)
