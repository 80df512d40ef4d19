"""
Calls of services that may fail for the moment: which errors are tried again, how often, how long is waited, and what
of it is written down. Nothing here knows a trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Self, TypeVar

import tenacity
from tenacity import RetryCallState

from .config import HealingConfig
from .failures import Action, FailureType, attribute_of, classify_exception, http_status, text_of
from .instrument import NonFiniteReward
from .journal import Incident
from .session import Session


logger = logging.getLogger("self_healing")

T = TypeVar("T")

# Of its own: the run has seeded `random`, and every job with that seed would come back at the same moment.
_JITTER = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Retry:
    """
    A call that failed and will be made again.

    Args:
        error (`Exception`):
            What it raised.
        attempt (`int`):
            Which attempt that was, from 1.
        seconds (`float`):
            How long is waited before the next one.
    """

    error: BaseException
    attempt: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """
    How calls of services are made again when they fail for a reason that may pass: no connection, a timeout, HTTP 408,
    425, 429 and 5xx. Any other error surfaces at once, and the last one surfaces unchanged. Can be pickled.

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
            How waiting is done.
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
        The policy of a configuration.

        Args:
            config ([`HealingConfig`]):
                With the settings that begin with `retry_`.
            sleep (`Callable[[float], None]`, *optional*, defaults to `time.sleep`):
                How waiting is done.
        """
        return cls(
            attempts=config.retry_attempts,
            initial_seconds=config.retry_initial_seconds,
            max_seconds=config.retry_max_seconds,
            total_seconds=config.retry_total_seconds,
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
        Calls a function, again if need be.

        Args:
            function (`Callable`):
                What to call, with the further arguments.
            on_retry (`Callable[[Retry], None]`, *optional*):
                Told of each failure after which it is called again, before the wait.

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
        Awaits a coroutine function, again if need be; other tasks go on during the waits.

        Args:
            function (`Callable`):
                What to await, with the further arguments.
            on_retry (`Callable[[Retry], None]`, *optional*):
                Told of each failure after which it is awaited again, before the wait.

        Raises:
            Exception: The last error, unchanged.
        """

        async def sleep(seconds: float) -> None:
            # In a thread: what is injected blocks.
            await asyncio.to_thread(self.sleep, seconds)

        async def awaited(*args: Any, **kwargs: Any) -> T:
            return await function(*args, **kwargs)

        retrying = tenacity.AsyncRetrying(sleep=sleep, **self._settings(on_retry))
        return await retrying(awaited, *args, **kwargs)

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
        if self.at_once and isinstance(_error_of(state), NonFiniteReward):
            return 0.0
        bound = tenacity.wait_exponential(multiplier=self.initial_seconds, max=self.max_seconds)(state)
        asked = retry_after(_error_of(state)) or 0.0
        return min(asked + _JITTER.uniform(0, float(bound)), self.max_seconds)

    def _is_spent(self, state: RetryCallState) -> bool:
        # The waits are counted as well, for a `sleep` that does not take the time it stands for.
        gone = max(state.seconds_since_start or 0.0, state.idle_for)
        at_once = self.at_once and isinstance(_error_of(state), NonFiniteReward)
        attempts = min(self.attempts, 2) if at_once else self.attempts
        return state.attempt_number >= attempts or gone + state.upcoming_sleep > self.total_seconds


class ServiceCalls:
    """
    Calls of services that training needs: made again where that may help, with one incident for each call that failed.

    Args:
        config ([`HealingConfig`]):
            With the settings that begin with `retry_`.
        session ([`Session`]):
            The memory of the run.
    """

    def __init__(self, config: HealingConfig, session: Session) -> None:
        self.policy = RetryPolicy.of(config, session.sleep)
        self._config = config
        self._session = session
        self._handed_over: Incident | None = None
        # Of the services whose rewards were not finite however often they were asked for.
        self._never_finite: dict[str, Incident] = {}

    def call(
        self,
        service: str,
        rewind: Callable[[], None],
        function: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """
        Calls a function, again if need be.

        Args:
            service (`str`):
                What it is, for a person.
            rewind (`Callable[[], None]`):
                Takes back what a failed attempt left behind, before the next one.
            function (`Callable`):
                What to call, with the further arguments.
        """
        failures = _Failures(service, rewind)
        try:
            result = self._policy(service).call(
                function, *args, on_retry=lambda retry: self._failed(failures, retry), **kwargs
            )
        except NonFiniteReward as error:
            return self._go_on_with(failures, error)
        except BaseException as error:
            self._gave_up(failures, error)
            raise
        self._came_through(failures)
        return result

    async def call_async(
        self,
        service: str,
        rewind: Callable[[], None],
        function: Callable[..., Awaitable[Any]],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The same for a coroutine function."""
        failures = _Failures(service, rewind)
        try:
            result = await self._policy(service).call_async(
                function, *args, on_retry=lambda retry: self._failed(failures, retry), **kwargs
            )
        except NonFiniteReward as error:
            return self._go_on_with(failures, error)
        except BaseException as error:
            self._gave_up(failures, error)
            raise
        self._came_through(failures)
        return result

    def _failed(self, failures: _Failures, retry: Retry) -> None:
        failures.rewind()
        failures.seconds += retry.seconds
        failures.attempts = retry.attempt
        with self._contained():
            known = failures.service in self._never_finite and isinstance(retry.error, NonFiniteReward)
            if not known:
                self._write_down(failures, retry)

    def _policy(self, service: str) -> RetryPolicy:
        """What is known to be lasting is not waited for again and again."""
        return replace(self.policy, at_once=True) if service in self._never_finite else self.policy

    def _open(self, failures: _Failures, error: BaseException) -> Incident:
        journal, instrument = self._session.journal, self._session.instrument
        failures.began = time.perf_counter()
        evidence = {"service": failures.service, "message": text_of(error)[:500]}
        step = 0 if instrument is None else instrument.step
        failures.incident = incident = journal.open(step, type(error).__name__, evidence)
        if isinstance(error, NonFiniteReward):
            found: dict[str, Any] = {"completions": error.places[:20]}
            failure = FailureType.NONFINITE_REWARD
        else:
            status = http_status(error)
            found, failure = {} if status is None else {"http_status": status}, FailureType.NETWORK
        journal.diagnosed(incident, failure, failures.service, found)
        return incident

    def _write_down(self, failures: _Failures, retry: Retry) -> None:
        error, incident = retry.error, failures.incident or self._open(failures, retry.error)
        logger.warning(
            "Step %d: %s failed (%s: %s); attempt %d of %d follows in %.1f s.",
            incident.step,
            failures.service,
            type(error).__name__,
            text_of(error)[:200],
            retry.attempt + 1,
            self.policy.attempts,
            retry.seconds,
        )

    def _go_on_with(self, failures: _Failures, error: NonFiniteReward) -> Any:
        """Rewards that are not finite however often they are asked for: training goes on without them, if it can."""
        with self._contained():
            self._take_in(failures, error)
        return error.answer

    def _take_in(self, failures: _Failures, error: NonFiniteReward) -> None:
        session, lasting = self._session, self._never_finite.get(failures.service)
        incident = lasting or failures.incident or self._open(failures, error)
        evidence = incident.evidence
        evidence["answers"] = evidence.get("answers", 0) + 1
        if lasting is None:
            self._never_finite[failures.service] = incident
            if incident.failure is not FailureType.NONFINITE_REWARD:
                session.journal.diagnosed(incident, FailureType.NONFINITE_REWARD, failures.service, {})
            self._acted(failures, incident)
        stops = error.all_of_them and self._config.on_nonfinite != "warn"
        if stops and session.stop_for is None:
            evidence["diagnosis"] = (
                f"{failures.service}: {text_of(error)}, however often it is asked: nothing to learn from"
            )
            session.stop_for = incident
        elif lasting is None:
            session.journal.acted(incident, Action.GO_ON_WITHOUT.value, rewards=len(error.places))
            session.journal.dealt_with(incident)
            session.journal.closed(incident, "unresolved")

    def _came_through(self, failures: _Failures) -> None:
        with self._contained():
            self._never_finite.pop(failures.service, None)
            if self._handed_over is not None:
                # Whoever was to deal with it has let it pass.
                if self._session.handed_over is self._handed_over:
                    self._session.handed_over = None
                self._handed_over = None
            if failures.incident is not None:
                self._acted(failures, failures.incident)
                self._session.journal.dealt_with(failures.incident)
                self._session.journal.closed(failures.incident, "resolved")

    def _gave_up(self, failures: _Failures, error: BaseException) -> None:
        incident, session = failures.incident, self._session
        if incident is None:
            return
        with self._contained():
            self._acted(failures, incident)
            if isinstance(error, Exception) and may_pass(error) and session.may_enter_again:
                session.handed_over = self._handed_over = incident
            else:
                session.journal.dealt_with(incident)
                session.journal.closed(incident, "unresolved")

    def _contained(self) -> contextlib.AbstractContextManager[None]:
        instrument = self._session.instrument
        return contextlib.nullcontext() if instrument is None else instrument.contained()

    def _acted(self, failures: _Failures, incident: Incident) -> None:
        attempts = failures.attempts + 1
        incident.seconds_lost += max(time.perf_counter() - failures.began, failures.seconds)
        incident.figures.append(f"{failures.service}: {attempts} attempts, {failures.seconds:.1f} s waited")
        self._session.journal.acted(
            incident,
            Action.RETRY_CALL.value,
            service=failures.service,
            attempts=attempts,
            waited_seconds=round(failures.seconds, 3),
        )


@dataclass(slots=True)
class _Failures:
    """The failures of one call so far."""

    service: str
    rewind: Callable[[], None]
    incident: Incident | None = None
    attempts: int = 0
    seconds: float = 0.0
    began: float = 0.0


def may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    if isinstance(error, NonFiniteReward):
        return True
    return isinstance(error, Exception) and classify_exception(error) is FailureType.NETWORK


def retry_after(error: BaseException | None) -> float | None:
    """
    Seconds that the server asked to wait, in the `Retry-After` of the response that an exception, or what it was
    raised from, carries; `None` if it did not.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for holder in (attribute_of(error, "response"), error):
            get = attribute_of(attribute_of(holder, "headers"), "get")
            found = get("Retry-After") or get("retry-after") if callable(get) else None
            if isinstance(found, str):
                return _seconds(found)
        error = error.__cause__
    return None


def _seconds(value: str) -> float | None:
    """Of a `Retry-After` header: a number of seconds, or a date."""
    if value.strip().isdigit():
        return float(value)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return max((at - datetime.now(UTC)).total_seconds(), 0.0)


def _error_of(state: RetryCallState) -> BaseException | None:
    return None if state.outcome is None else state.outcome.exception()
