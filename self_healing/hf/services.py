"""Services that training calls (rewards, vLLM, trackers, the Hub), and what happens when a call fails."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ..failures.recipes import NonFiniteReward
from ..ranks import votes
from ..system import processes
from ..system.random_state import RandomState
from .adapter import Instrument
from .patching import Replacements


logger = logging.getLogger(__name__)


# Of a vLLM client: what can be asked twice. Weights are sent by collectives, which one side cannot begin again.
_VLLM_REQUESTS = (
    "generate",
    "chat",
    "image_features",
    "get_sequence_logprobs",
    "reset_prefix_cache",
    "get_server_info",
    "get_world_size",
)


class ServiceGuard:
    """
    Passes the calls of services that training needs to a healer, which makes them again: reward functions, a rollout
    function, the requests to a vLLM server.
    """

    def __init__(self, instrument: Instrument, healer: Any) -> None:
        self._instrument = instrument
        self._healer = healer
        self._rewards: list[tuple[Callable[..., Any], Callable[..., Any]]] = []

    def attach(self) -> None:
        trainer, instrument = self._instrument.trainer, self._instrument
        rewards = getattr(trainer, "reward_funcs", None)
        if isinstance(rewards, list):
            instrument.on_detach.append(self._give_rewards_back)
            self._guard_rewards(rewards)
        if callable(getattr(trainer, "rollout_func", None)):
            self._guard_method(trainer, "rollout_func", "rollout function")
        for holder in (trainer, getattr(trainer, "vllm_generation", None)):
            client = getattr(holder, "vllm_client", None)
            for name in _VLLM_REQUESTS:
                if callable(getattr(client, name, None)):
                    self._guard_method(client, name, f"vLLM server ({name})")
        if processes.world_size() > 1:
            self._guard_user_code()

    def _guard_user_code(self) -> None:
        trainer = self._instrument.trainer
        if callable(getattr(trainer, "compute_metrics", None)):
            self._guard_alone(trainer, "compute_metrics", "compute_metrics")
        for callback in trainer.callback_handler.callbacks:
            library = type(callback).__module__.partition(".")[0]
            own = library in (__name__.partition(".")[0], "transformers")
            if own or is_tracker(callback) or not hasattr(callback, "__dict__"):
                continue
            for event in events_of(callback):
                self._guard_alone(callback, event, f"callback {type(callback).__name__} ({event})")

    def _guard_rewards(self, rewards: list[Any]) -> None:
        alone = sum(_is_async(reward) for reward in rewards) == 1
        for place, reward in enumerate(rewards):
            if isinstance(reward, torch.nn.Module):
                continue
            service = f"reward {_name(reward)}"
            guarded = self._coroutine(reward, service, alone) if _is_async(reward) else self._function(reward, service)
            self._rewards.append((guarded, reward))
            # In place: the list may be the user's own.
            rewards[place] = guarded

    def _give_rewards_back(self) -> None:
        originals = {id(guarded): original for guarded, original in self._rewards}
        rewards = self._instrument.trainer.reward_funcs
        for place, reward in enumerate(rewards):
            # Not by its place: the list may have been changed meanwhile.
            rewards[place] = originals.get(id(reward), reward)
        self._rewards.clear()

    def _function(self, reward: Callable[..., Any], service: str) -> Callable[..., Any]:
        @functools.wraps(reward)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return self._healer.call(service, self._mark(), answered, *args, **kwargs)

        def answered(*args: Any, **kwargs: Any) -> Any:
            return _checked(reward(*args, **kwargs))

        # Partials and callable objects have no name that `functools.wraps` could copy; metrics are named after it.
        guarded.__name__ = _name(reward)
        return guarded

    def _coroutine(self, reward: Callable[..., Any], service: str, alone: bool) -> Callable[..., Any]:
        @functools.wraps(reward)
        async def guarded(*args: Any, **kwargs: Any) -> Any:
            # Of several that run at the same time, none can take back what the others have drawn or logged.
            rewind = self._mark() if alone else _nothing
            return await self._healer.call_async(service, rewind, answered, *args, **kwargs)

        async def answered(*args: Any, **kwargs: Any) -> Any:
            return _checked(await reward(*args, **kwargs))

        guarded.__name__ = _name(reward)
        return guarded

    def _guard_method(self, holder: Any, name: str, service: str) -> None:
        def guarded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self._healer.call(service, self._mark(), original, *args, **kwargs)

        self._instrument.replace(holder, name, guarded)

    def _guard_alone(self, holder: Any, name: str, service: str) -> None:
        """Guards what each rank calls by itself; one that has met the others in it cannot begin it again alone."""

        def attempt(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            begun = votes.collectives_begun()
            try:
                return original(*args, **kwargs)
            except Exception as error:
                if begun is None or votes.collectives_begun() != begun:
                    raise _MetOthers(error) from None
                raise

        def guarded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return self._healer.call(service, self._mark(), attempt, original, *args, **kwargs)
            except _MetOthers as met:
                failed = met.error
            # Outside the handler, so that the exception keeps the context it came with.
            raise failed

        self._instrument.replace(holder, name, guarded)

    def _mark(self) -> Callable[[], None]:
        """Notes random states and the metrics a reward may log; the function it returns puts them back."""
        rng = self._instrument.ledger.random_state()
        stores = self._instrument.ledger.mark_stores()

        def rewind() -> None:
            with self._instrument.failsafe.contained():
                rng.restore()
                self._instrument.ledger.rewind_stores(stores)

        return rewind


class _MetOthers(Exception):
    """Carries an exception past the retries."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def _nothing() -> None: ...


def _checked(answer: Any) -> Any:
    """Returns the answer of a reward function, if none of its rewards is NaN or infinite."""
    if isinstance(answer, (torch.Tensor, np.ndarray)):
        rewards = answer.tolist()
    elif isinstance(answer, (list, tuple)):
        rewards = list(answer)
    else:
        # Whatever it is (a generator), the trainer is the first to look at it.
        return answer
    places = [place for place, reward in enumerate(rewards) if _is_not_finite(reward)]
    if places:
        bad = set(places)
        raise NonFiniteReward([None if at in bad else each for at, each in enumerate(rewards)], places, len(rewards))
    return answer


def _is_not_finite(reward: Any) -> bool:
    try:
        return reward is not None and not math.isfinite(float(reward))
    except (TypeError, ValueError):
        # No number at all: the trainer says so better.
        return False


def _is_async(function: Any) -> bool:
    function = _innermost(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _name(function: Any) -> str:
    function = _innermost(function)
    return str(getattr(function, "__name__", type(function).__name__))


class ReportingGuard:
    """Keeps what trackers and the Hub raise away from training, for as long as it is attached."""

    def __init__(self, trainer: Trainer, healer: Any, before_closing: Callable[[TrainerCallback], None]) -> None:
        self._trainer: Any = trainer
        self._healer = healer
        self._before_closing = before_closing
        self._replaced = Replacements()
        self._reported: set[Future[Any]] = set()

    def attach(self) -> None:
        trainer = self._trainer
        for callback in trainer.callback_handler.callbacks:
            if is_tracker(callback):
                for event in events_of(callback):
                    self._guard(callback, event, type(callback).__name__)
        if trainer.args.push_to_hub:
            self._replaced.wrap(trainer, "_push_from_checkpoint", self._push)
            self._replaced.wrap(trainer, "_finish_current_push", self._push)

    def detach(self) -> None:
        self._replaced.give_back()
        self._report_pushes()

    def _guard(self, callback: TrainerCallback, event: str, service: str) -> None:
        def guarded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if event == "on_train_end":
                self._before_closing(callback)
            return self._call(service, original, *args, **kwargs)

        self._replaced.wrap(callback, event, guarded)

    def _call(self, service: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A client that fails may have drawn the jitter of its own retries from the run's generators.
        rng, step = RandomState.capture(self._trainer.accelerator.device), int(self._trainer.state.global_step)
        return self._healer.call(service, step, rng.restore, functools.partial(function, *args, **kwargs))

    def _push(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._report_pushes()
        self._call("Hub", original, *args, **kwargs)

    def _report_pushes(self) -> None:
        """Reports uploads that failed: they run in the background, and the Trainer never asks what became of them."""
        for job in getattr(getattr(self._trainer, "push_in_progress", None), "jobs", ()):
            if isinstance(job, Future) and job.done() and not job.cancelled() and job not in self._reported:
                self._reported.add(job)
                if (error := job.exception()) is not None:
                    self._healer.failed("Hub", int(self._trainer.state.global_step), error)


def is_tracker(callback: Any) -> bool:
    return isinstance(callback, tuple(INTEGRATION_TO_CALLBACK.values()))


def events_of(callback: TrainerCallback) -> Iterator[str]:
    """Lists the events that a callback does something in."""
    for name in dir(TrainerCallback):
        if not name.startswith("on_"):
            continue
        # By whatever the object has: some are given a function of their own.
        own = getattr(callback, name)
        if getattr(own, "__func__", own) is not getattr(TrainerCallback, name):
            yield name
