"""Trackers and the Hub: what fails there is reported once, tried again with what is logged next, and never matters."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..failures.classify import is_error
from ..failures.recipes import Action, FailureType, text_of
from ..failures.retry import RetryPolicy
from ..journal.incident import Incident
from ..run.run import RunContext


logger = logging.getLogger("self_healing")

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

    def __init__(self, run: RunContext, clock: Callable[[], float] = time.monotonic) -> None:
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

    def call(
        self,
        service: str,
        step: int,
        rewind: Callable[[], None],
        function: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls a function; what it raises is reported."""
        known = self._services.setdefault(service, _Service())
        began = self._clock()
        if began < known.silent_until:
            known.missed += 1
            return None
        retried = 0

        def on_retry(_: Any) -> None:
            nonlocal retried
            retried += 1
            rewind()

        try:
            if known.failing:
                result = function(*args, **kwargs)
            else:
                result = self._policy.call(function, *args, on_retry=on_retry, **kwargs)
        except BaseException as error:
            if not is_error(error):
                raise
            rewind()
            self.failed(service, step, error, retried)
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
