"""Calls of services that fail are made again; trackers that fail do not end training."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..failures.classify import http_status, is_error
from ..failures.recipes import Action, FailureType, NonFiniteReward, text_of
from ..failures.retry import Retry, RetryPolicy, may_pass
from ..hf.services import ServiceGuard
from ..journal.incident import Incident
from ..run.healer import Claim, Healer, claim_for
from ..run.run import Run


logger = logging.getLogger("self_healing")


# ---- calls ----


class ServiceCalls(Healer):
    """
    Calls of services that training needs: made again where that may help, with one incident for each call that failed.
    """

    def __init__(self, run: Run) -> None:
        self.policy = RetryPolicy.of(run.config, run.sleep)
        self._run = run
        # Of a call that was given up, until its exception has left train().
        self._claimed: Incident | None = None
        # Of the services whose rewards were not finite however often they were asked for.
        self._never_finite: dict[str, Incident] = {}

    def attach(self, first: bool) -> None:
        """Has the calls of services that training needs made through this object."""
        ServiceGuard(self._run.instrument, self).attach()

    def call(
        self, service: str, rewind: Callable[[], None], function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a function, again if need be."""
        with self._followed(service) as call:
            on_retry = partial(self._failed, call, rewind)
            call.answer = self._policy(service).call(function, *args, on_retry=on_retry, **kwargs)
        return call.answer

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
        with self._followed(service) as call:
            on_retry = partial(self._failed, call, rewind)
            call.answer = await self._policy(service).call_async(function, *args, on_retry=on_retry, **kwargs)
        return call.answer

    @contextlib.contextmanager
    def _followed(self, service: str) -> Iterator[_Call]:
        """While a call is made, and made again."""
        call = _Call(service)
        try:
            yield call
        except NonFiniteReward as error:
            # However often they are asked for: training goes on without them, if it can.
            with self._contained():
                self._take_in(call, error)
            call.answer = error.answer
        except BaseException as error:
            self._gave_up(call, error)
            raise
        else:
            self._succeeded(call)

    def _failed(self, call: _Call, rewind: Callable[[], None], retry: Retry) -> None:
        rewind()
        call.seconds += retry.seconds
        call.attempts = retry.attempt
        with self._contained():
            if call.service in self._never_finite and isinstance(retry.error, NonFiniteReward):
                return
            incident = call.incident or self._open(call, retry.error)
            logger.warning(
                "Step %d: %s failed (%s: %s); attempt %d of %d follows in %.1f s.",
                incident.step,
                call.service,
                type(retry.error).__name__,
                text_of(retry.error)[:200],
                retry.attempt + 1,
                self.policy.attempts,
                retry.seconds,
            )

    def _policy(self, service: str) -> RetryPolicy:
        """Gives the policy of a service; a failure that is known to last is not waited for."""
        return replace(self.policy, at_once=True) if service in self._never_finite else self.policy

    def _open(self, call: _Call, error: BaseException) -> Incident:
        journal = self._run.journal
        call.began = time.perf_counter()
        evidence = {"service": call.service, "message": text_of(error)[:500]}
        call.incident = incident = journal.open(self._run.step, type(error).__name__, evidence)
        if isinstance(error, NonFiniteReward):
            found: dict[str, Any] = {"completions": error.places[:20]}
            failure = FailureType.NONFINITE_REWARD
        else:
            status = http_status(error)
            found, failure = {} if status is None else {"http_status": status}, FailureType.NETWORK
        journal.diagnosed(incident, failure, call.service, found)
        return incident

    def _take_in(self, call: _Call, error: NonFiniteReward) -> None:
        run, lasting = self._run, self._never_finite.get(call.service)
        incident = lasting or call.incident or self._open(call, error)
        evidence = incident.evidence
        evidence["answers"] = evidence.get("answers", 0) + 1
        if lasting is None:
            self._never_finite[call.service] = incident
            if incident.failure is not FailureType.NONFINITE_REWARD:
                run.journal.diagnosed(incident, FailureType.NONFINITE_REWARD, call.service, {})
            self._acted(call, incident)
        stops = error.all_of_them and self._run.config.on_nonfinite != "warn"
        if stops and run.stop_incident is None:
            evidence["diagnosis"] = (
                f"{call.service}: {text_of(error)}, however often it is asked: nothing to learn from"
            )
            run.stop_incident = incident
        elif lasting is None:
            run.journal.acted(incident, Action.GO_ON_WITHOUT.value, rewards=len(error.places))
            run.dealing_with(incident).close("unresolved")

    def _succeeded(self, call: _Call) -> None:
        with self._contained():
            self._never_finite.pop(call.service, None)
            passed = self.take_back()
            if passed is not None:
                # The exception of an earlier call has not left train(): the user's code has let it pass.
                self._run.dealing_with(passed).close("self_recovered")
            if call.incident is not None:
                self._acted(call, call.incident)
                self._run.dealing_with(call.incident).close("resolved")

    def _gave_up(self, call: _Call, error: BaseException) -> None:
        incident, run = call.incident, self._run
        if incident is None:
            return
        with self._contained():
            self._acted(call, incident)
            if isinstance(error, Exception) and may_pass(error) and run.may_enter_again:
                self._claimed = incident
            else:
                run.dealing_with(incident).close("unresolved")

    @property
    def has_claim(self) -> bool:
        """Whether a call was given up, and its exception has not left `train()` yet."""
        return self._claimed is not None

    def claim(self, error: BaseException) -> Claim | None:
        """Claims the exception that training was left by after a call was given up."""
        return claim_for(self.take_back(), error)

    def take_back(self) -> Incident | None:
        """Gives the incident of the call that was given up, which is claimed no longer."""
        incident, self._claimed = self._claimed, None
        return incident

    def _contained(self) -> contextlib.AbstractContextManager[None]:
        instrument = self._run.attached
        return contextlib.nullcontext() if instrument is None else instrument.failsafe.contained()

    def _acted(self, call: _Call, incident: Incident) -> None:
        attempts = call.attempts + 1
        incident.seconds_lost += max(time.perf_counter() - call.began, call.seconds)
        incident.figures.append(f"{call.service}: {attempts} attempts, {call.seconds:.1f} s waited")
        self._run.journal.acted(
            incident,
            Action.RETRY_CALL.value,
            service=call.service,
            attempts=attempts,
            waited_seconds=round(call.seconds, 3),
        )


@dataclass(slots=True)
class _Call:
    """A call, its failures so far, and its answer."""

    service: str
    incident: Incident | None = None
    attempts: int = 0
    seconds: float = 0.0
    began: float = 0.0
    answer: Any = None


# ---- reporting ----


# Training is waiting: one more attempt, at once or nearly so.
_ATTEMPTS, _LONGEST_WAIT = 2, 1.0
# A call that takes this many seconds to fail is not made at every log, but this much later.
_SLOW, _PAUSE = 5.0, 300.0


@dataclass(slots=True)
class _Service:
    """A tracker or the Hub, and how it does."""

    incident: Incident | None = None
    failing: bool = False
    missed: int = 0
    silent_until: float = 0.0


class Reporting:
    """Calls of trackers and of the Hub, on which nothing depends."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._services: dict[str, _Service] = {}
        self._policy = RetryPolicy(
            attempts=_ATTEMPTS,
            initial_seconds=_LONGEST_WAIT,
            max_seconds=_LONGEST_WAIT,
            total_seconds=_SLOW,
            sleep=run.sleep,
        )

    def call(self, service: str, step: int, rewind: Callable[[], None], function: Callable[[], Any]) -> Any:
        """Calls a function; what it raises is reported."""
        known = self._services.setdefault(service, _Service())
        began = self._clock()
        if began < known.silent_until:
            known.missed += 1
            return None
        retries: list[Retry] = []

        def on_retry(retry: Retry) -> None:
            retries.append(retry)
            rewind()

        try:
            result = function() if known.failing else self._policy.call(function, on_retry=on_retry)
        except BaseException as error:
            if not is_error(error):
                raise
            rewind()
            self.failed(service, step, error, len(retries))
            if self._clock() - began > _SLOW:
                known.silent_until = self._clock() + _PAUSE
            return None
        if known.failing:
            known.failing = False
            logger.warning("Step %d: %s works again; %d of its calls were lost.", step, service, known.missed)
        return result

    def failed(self, service: str, step: int, error: BaseException, retried: int = 0) -> None:
        """Takes in a failure."""
        known = self._services.setdefault(service, _Service())
        known.failing = True
        known.missed += 1
        if known.incident is not None:
            known.incident.evidence["missed"] = known.missed
            return
        evidence = {"service": service, "message": text_of(error)[:500], "missed": 1}
        with self._run.incident(step, type(error).__name__, evidence) as opened:
            known.incident = opened.incident
            opened.diagnosed(FailureType.REPORTING, service)
            if retried:
                opened.acted(Action.RETRY_CALL, service=service, attempts=retried + 1)
            opened.acted(Action.GO_ON_WITHOUT, service=service)
            logger.debug("The traceback of incident %s:", opened.incident.id, exc_info=error)
            opened.close("reported")

    def sum_up(self, step: int) -> None:
        """At the end of a run: says what never came back."""
        for service, known in self._services.items():
            if known.failing:
                self._run.journal.event("noticed", step, symptom="not_told", service=service, missed=known.missed)
                logger.warning(
                    "%s missed %d calls, which failed or were skipped. All logs are in trainer_state.json.",
                    service,
                    known.missed,
                )
