"""`RetryPolicy`: which errors of a call are tried again, how often, and after which waits."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import tenacity
from tenacity import RetryCallState

from ..config.healing_config import HealingConfig
from .classify import attribute_of, causes_of, classify_exception
from .recipes import FailureType, NonFiniteReward


T = TypeVar("T")

# Of its own: the run has seeded `random`, and every job with that seed would come back at the same moment.
_JITTER = random.SystemRandom()
# Seconds that a call may take with all its attempts and waits, or so many of its longest waits if that is more.
LONGEST_CALL = 900.0
_LONGEST_WAITS = 3


@dataclass(frozen=True, slots=True)
class Retry:
    """A call that failed and will be made again."""

    error: BaseException
    attempt: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """
    Makes calls of services again when they fail for a reason that may pass: no connection, a timeout, HTTP 408, 425,
    429 and 5xx. Any other error surfaces at once, and the last one surfaces unchanged. Can be pickled.

    Args:
        attempts (`int`, *optional*, defaults to 8):
            Times a call is made.
        initial_seconds (`float`, *optional*, defaults to 5.0):
            Upper bound of the first wait. It doubles with every further one, and each is drawn at random below it; a
            `Retry-After` of the response is waited for on top.
        max_seconds (`float`, *optional*, defaults to 300.0):
            Longest wait.
        total_seconds (`float`, *optional*, defaults to 900.0):
            Longest time for all attempts and waits.
        sleep (`Callable[[float], None]`, *optional*, defaults to `time.sleep`):
            Function that waits.
        at_once (`bool`, *optional*, defaults to `False`):
            Whether a reward that is not finite is asked for only once more, without a wait.

    Example:

    ```python
    >>> RetryPolicy(attempts=3).call(max, 1, 2)
    2
    ```
    """

    attempts: int = 8
    initial_seconds: float = 5.0
    max_seconds: float = 300.0
    total_seconds: float = 900.0
    sleep: Callable[[float], None] = time.sleep
    at_once: bool = False

    @classmethod
    def of(cls, config: HealingConfig, sleep: Callable[[float], None] = time.sleep) -> Self:
        """
        Makes the policy of a configuration.

        Args:
            config ([`HealingConfig`]):
                With the settings that begin with `api_retry_`.
            sleep (`Callable[[float], None]`, *optional*, defaults to `time.sleep`):
                Function that waits.
        """
        return cls(
            attempts=config.api_retry_attempts,
            initial_seconds=config.api_retry_base_delay,
            max_seconds=config.api_retry_max_delay,
            total_seconds=max(LONGEST_CALL, _LONGEST_WAITS * config.api_retry_max_delay),
            sleep=sleep,
        )

    def call(
        self,
        function: Callable[..., T],
        *args: Any,
        on_retry: Callable[[Retry], None] | None = None,
        **kwargs: Any,
    ) -> T:
        """
        Calls a function, and again while its errors may pass.

        Args:
            function (`Callable`):
                Called with the further arguments.
            on_retry (`Callable[[Retry], None]`, *optional*):
                Called with each failure after which the function is called again, before the wait.

        Raises:
            Exception: The last error, unchanged.
        """
        retrying = tenacity.Retrying(sleep=self.sleep, **self._settings(on_retry))
        return retrying(function, *args, **kwargs)

    async def call_async(
        self,
        function: Callable[..., Awaitable[T]],
        *args: Any,
        on_retry: Callable[[Retry], None] | None = None,
        **kwargs: Any,
    ) -> T:
        """
        Awaits a coroutine function, and again while its errors may pass; other tasks run during the waits.

        Args:
            function (`Callable`):
                Awaited with the further arguments.
            on_retry (`Callable[[Retry], None]`, *optional*):
                Called with each failure after which the function is awaited again, before the wait.

        Raises:
            Exception: The last error, unchanged.
        """

        async def sleep(seconds: float) -> None:
            # In a thread: the function that waits blocks.
            await asyncio.to_thread(self.sleep, seconds)

        async def awaited(*args: Any, **kwargs: Any) -> T:
            return await function(*args, **kwargs)

        retrying = tenacity.AsyncRetrying(sleep=sleep, **self._settings(on_retry))
        return await retrying(awaited, *args, **kwargs)

    def draw_wait(self, attempt: int, error: BaseException | None = None) -> float:
        """
        Draws the wait after a failed attempt at random, from none of the run's generators.

        Args:
            attempt (`int`):
                Number of the attempt that failed, from 1.
            error (`BaseException`, *optional*):
                The exception it raised; a `Retry-After` in its response is waited for on top.

        Returns:
            `float`: Seconds.
        """
        # Beyond the thousandth doubling a float would overflow; every longest wait has been reached by then.
        bound = min(self.initial_seconds * 2.0 ** min(attempt - 1, 1000), self.max_seconds)
        return min((retry_after(error) or 0.0) + _JITTER.uniform(0, bound), self.max_seconds)

    def _settings(self, on_retry: Callable[[Retry], None] | None) -> dict[str, Any]:
        def before_sleep(state: RetryCallState) -> None:
            error = _error_of(state)
            if on_retry is not None and error is not None:
                on_retry(Retry(error, state.attempt_number, float(state.upcoming_sleep)))

        return {
            "retry": tenacity.retry_if_exception(may_pass),
            "wait": self._wait,
            "stop": self._is_spent,
            "before_sleep": before_sleep,
            "reraise": True,
        }

    def _wait(self, state: RetryCallState) -> float:
        return 0.0 if self._asks_at_once(state) else self.draw_wait(state.attempt_number, _error_of(state))

    def _is_spent(self, state: RetryCallState) -> bool:
        # The waits are counted as well, for a `sleep` that does not take the time it stands for.
        gone = max(state.seconds_since_start or 0.0, state.idle_for)
        attempts = min(self.attempts, 2) if self._asks_at_once(state) else self.attempts
        return state.attempt_number >= attempts or gone + state.upcoming_sleep > self.total_seconds

    def _asks_at_once(self, state: RetryCallState) -> bool:
        return self.at_once and isinstance(_error_of(state), NonFiniteReward)


def may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    if isinstance(error, NonFiniteReward):
        return True
    return isinstance(error, Exception) and classify_exception(error) is FailureType.NETWORK


def retry_after(error: BaseException | None) -> float | None:
    """
    Returns the seconds that the server asked to wait, from the `Retry-After` of the response that an exception, or its
    cause, carries; `None` without one.
    """
    for each in causes_of(error):
        for holder in (attribute_of(each, "response"), each):
            get = attribute_of(attribute_of(holder, "headers"), "get")
            found = get("Retry-After") or get("retry-after") if callable(get) else None
            # It may be a date as well, which is not waited for.
            if isinstance(found, str) and found.strip().isdigit():
                return float(found)
    return None


def _error_of(state: RetryCallState) -> BaseException | None:
    return None if state.outcome is None else state.outcome.exception()
