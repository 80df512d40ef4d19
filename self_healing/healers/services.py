"""Calls of services that fail are made again; trackers that fail do not end training."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ..failures.classify import add_note, classify_exception, http_status, is_error
from ..failures.recipes import Action, FailureType, NonFiniteReward, text_of
from ..failures.retry import Retry, RetryPolicy, may_pass
from ..hf.adapter import Instrument
from ..hf.patching import Replacements
from ..hf.saving import wrap_pushes
from ..journal.incident import Incident, counted
from ..ranks import votes
from ..run.healer import Claim, Healer, claim_for
from ..run.run import Run
from ..system import processes
from ..system.random_state import RandomState


logger = logging.getLogger("self_healing")


# Of a vLLM client: what can be asked twice. Weights are sent by collectives, which one side cannot begin again.
_VLLM_REQUESTS = (
    *("generate", "chat", "image_features", "get_sequence_logprobs"),
    *("reset_prefix_cache", "get_server_info", "get_world_size"),
)
# `max_bad_fraction` is of this many completions at least, as it is of samples.
_FEWEST_COMPLETIONS = 100


class ServiceCalls(Healer):
    """
    Calls of services that training needs: made again where that may help, with one incident for each call that failed.
    """

    def __init__(self, run: Run, quarantine: Any) -> None:
        self.policy = RetryPolicy.of(run.config, run.sleep)
        self._run = run
        # `Quarantine`, of a family that this one does not import.
        self._quarantine = quarantine
        self._instrument: Instrument
        # Of a call that was given up, until its exception has left train().
        self.claimed: Incident | None = None
        # Of the services whose rewards were not finite however often they were asked for.
        self._never_finite: dict[str, Incident] = {}
        # What stands in for a reward function, and the function.
        self._rewards: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
        # Of each reward function, two of which may have one name: what it was given for a completion that it has
        # answered for.
        self._answered: dict[int, dict[str, Any]] = {}
        # Completions that a reward function has raised for.
        self._without_value = 0

    # ---- what is called: rewards, a rollout function, a vLLM server, on several ranks code of the user's ----

    def attach(self, first: bool) -> None:
        instrument = self._instrument = self._run.instrument
        trainer = instrument.trainer
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
        async def ask(**arguments: Any) -> Any:
            return reward(**arguments)

        @functools.wraps(reward)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            asked = _Asked(service, ask, kwargs, self._mark())
            return self.call(service, asked.rewind, answered, asked, *args, **kwargs)

        def answered(asked: _Asked, *args: Any, **kwargs: Any) -> Any:
            try:
                return self._answer(asked, reward(*args, **kwargs))
            except BaseException as error:
                failed = self._of_completions(error, asked)
            # Outside the handler, so that the exception keeps the context it came with.
            return _result_of(self._ask_again(asked, failed))

        # Partials and callable objects have no name that `functools.wraps` could copy; metrics are named after it.
        guarded.__name__ = _name(reward)
        return guarded

    def _coroutine(self, reward: Callable[..., Any], service: str, alone: bool) -> Callable[..., Any]:
        @functools.wraps(reward)
        async def guarded(*args: Any, **kwargs: Any) -> Any:
            # Of several that run at the same time, none can take back what the others have drawn or logged.
            asked = _Asked(service, reward, kwargs, self._mark() if alone else lambda: None)
            return await self.call_async(service, asked.rewind, answered, asked, *args, **kwargs)

        async def answered(asked: _Asked, *args: Any, **kwargs: Any) -> Any:
            try:
                return self._answer(asked, await reward(*args, **kwargs))
            except Exception as error:
                failed = self._of_completions(error, asked)
            return await self._ask_again(asked, failed)

        guarded.__name__ = _name(reward)
        return guarded

    def _guard_method(self, holder: Any, name: str, service: str) -> None:
        def guarded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self.call(service, self._mark(), original, *args, **kwargs)

        self._instrument.replace(holder, name, guarded)

    def _guard_alone(self, holder: Any, name: str, service: str) -> None:
        """Guards what each rank calls by itself; one that has met the others in it cannot begin it again alone."""

        def guarded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            begun, rewind, failed = votes.collectives_begun(), self._mark(), list[Exception]()
            try:
                answer = original(*args, **kwargs)
            except Exception as error:
                if begun is None or votes.collectives_begun() != begun or not may_pass(error):
                    raise
                failed.append(error)
            else:
                # In each step: what follows takes ten times as long.
                if self.claimed is not None:
                    self._succeeded(_Call(service))
                return answer

            def attempt(*args: Any, **kwargs: Any) -> Any:
                if failed:
                    raise failed.pop()
                try:
                    return original(*args, **kwargs)
                except Exception as error:
                    if votes.collectives_begun() != begun:
                        raise _MetOthers(error) from None
                    raise

            try:
                return self.call(service, rewind, attempt, *args, **kwargs)
            except _MetOthers as met:
                failed.append(met.error)
            # Outside the handler, so that the exception keeps the context it came with.
            raise failed.pop()

        self._instrument.replace(holder, name, guarded)

    def _mark(self) -> Callable[[], None]:
        """Notes random states and the metrics a reward may log; the function it returns puts them back."""
        rng = RandomState.capture(self._instrument.view.device)
        stores = self._instrument.ledger.mark_stores()

        def rewind() -> None:
            with self._instrument.failsafe.contained():
                rng.restore()
                self._instrument.ledger.rewind_stores(stores)

        return rewind

    # ---- a reward function that raises: for which completions? ----

    def _answer(self, asked: _Asked, answer: Any) -> Any:
        answer = _checked(answer)
        if id(asked.ask) not in self._answered and asked.count:
            self._answered[id(asked.ask)] = asked.part([0])
        return answer

    def _of_completions(self, error: BaseException, asked: _Asked) -> BaseException:
        """Gives the exception back if completions may be to blame for it; raises it else."""
        # One that has met other ranks cannot begin again alone.
        alone = None is not asked.begun == votes.collectives_begun()
        # A coroutine cannot raise it again.
        wanted = not isinstance(error, StopIteration) and self._run.config.on_bad_sample != "raise"
        if alone and wanted and _is_of_the_code(error) and asked.count > 0:
            return error
        raise error

    async def _ask_again(self, asked: _Asked, error: BaseException) -> list[Any]:
        """Asks once more, then without the completions that the function raises for; raises if it is the code."""
        began = time.perf_counter()
        rewards, bad = await asked.answers(range(asked.count)), list[int]()
        if rewards is None:
            bad = await self._at_fault(asked, error)
            left = [place for place in range(asked.count) if place not in bad]
            answers = await asked.answers(left) if left else []
            if answers is None:
                raise error
            rewards = _spread(answers, left, asked.count)
        _checked(rewards)
        with self._contained():
            self._tell_of(asked, error, bad, time.perf_counter() - began)
        return rewards

    async def _at_fault(self, asked: _Asked, error: BaseException) -> list[int]:
        """Finds the completions that the function raises for by themselves, by halves; raises where it is the code."""
        known = self._answered.get(id(asked.ask))
        if known is not None and await asked.answers([0], known) is None:
            # It had an answer for this one.
            raise error
        drawn = max((self._run.step + 1) * asked.count, _FEWEST_COMPLETIONS)
        limit = int(self._run.config.max_bad_fraction * drawn) - self._without_value
        bad, parts = list[int](), _halves(range(asked.count))
        while parts and len(bad) <= limit:
            part = parts.pop()
            if await asked.answers(part) is not None:
                continue
            if len(part) == 1:
                bad += part
            else:
                parts += _halves(part)
        if known is None and len(bad) == asked.count:
            raise error
        if len(bad) > limit:
            raised = counted(self._without_value + len(bad), "completion")
            add_note(error, f"{asked.service} has raised for {raised}, more than max_bad_fraction allows.")
            raise error
        return bad

    def _tell_of(self, asked: _Asked, error: BaseException, bad: list[int], seconds: float) -> None:
        run, service = self._run, asked.service
        # It may quote a completion.
        message = text_of(error)[:500] if run.config.quarantine_text else ""
        cause = f"{service}, {len(bad)} of {counted(asked.count, 'completion')}" if bad else service
        self._without_value += len(bad)
        with run.incident(run.step, type(error).__name__, {"service": service, "message": message}) as opened:
            opened.incident.seconds_lost = seconds
            opened.diagnosed(FailureType.BAD_DATA, cause)
            opened.acted(Action.RETRY_CALL, service=service)
            if bad:
                self._quarantine.add_completions(asked.part(bad), service, error, opened.incident)
                opened.acted(Action.QUARANTINE_SAMPLE, file=str(self._quarantine.path), completions=bad)
            opened.close("resolved")

    # ---- a call, again if need be ----

    def call(
        self, service: str, rewind: Callable[[], None], function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a function, again if need be."""
        with self._followed(service) as call:
            on_retry = functools.partial(self._failed, call, rewind)
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
            on_retry = functools.partial(self._failed, call, rewind)
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
        """Gives the policy of a service; rewards that are known to stay as they are are not waited for."""
        return replace(self.policy, at_once=service in self._never_finite)

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
        else:
            # It could not be reached first, which has passed.
            self._reached(call)
        stops = error.all_of_them and self._run.config.on_nonfinite != "watch"
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
            self._reached(call)

    def _reached(self, call: _Call) -> None:
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
                self.claimed = incident
            else:
                run.dealing_with(incident).close("unresolved")

    def claim(self, error: BaseException) -> Claim | None:
        """Claims the exception that training was left by after a call was given up."""
        return claim_for(self.take_back(), error)

    def take_back(self) -> Incident | None:
        """Gives the incident of the call that was given up, which is claimed no longer."""
        incident, self.claimed = self.claimed, None
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


@dataclass(slots=True)
class _Asked:
    """A call of a reward function, which can be asked again, for some of its completions."""

    service: str
    ask: Callable[..., Awaitable[Any]]
    arguments: dict[str, Any]
    rewind: Callable[[], None]
    begun: int | None = field(default_factory=votes.collectives_begun)

    @property
    def count(self) -> int:
        completions = self.arguments.get("completions")
        return len(completions) if isinstance(completions, list) else 0

    def part(self, places: Sequence[int]) -> dict[str, Any]:
        """What it is given for some completions: of each list the entries of these."""
        part = dict(self.arguments)
        for name, value in part.items():
            if isinstance(value, list) and len(value) == self.count:
                part[name] = [value[place] for place in places]
        if callable(log := part.get("log_extra")):
            part["log_extra"] = lambda column, values: log(column, _spread(values, places, self.count))
        return part

    async def answers(self, places: Sequence[int], arguments: dict[str, Any] | None = None) -> list[Any] | None:
        """Asks for some completions, or with other arguments; `None` if it raises, and not for want of a service."""
        self.rewind()
        try:
            rewards = list(await self.ask(**(arguments or self.part(places))))
        except BaseException as error:
            if not _is_of_the_code(error):
                raise
            return None
        return rewards if len(rewards) == len(places) else None


def _result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value


def _spread(values: Sequence[Any], places: Sequence[int], count: int) -> list[Any]:
    """Gives values their places among all; the others have none."""
    known = dict(zip(places, values, strict=False))
    return [known.get(place) for place in range(count)]


def _halves(part: Sequence[int]) -> list[Sequence[int]]:
    middle = max(len(part) // 2, 1)
    return [half for half in (part[middle:], part[:middle]) if half]


def _is_of_the_code(error: BaseException) -> bool:
    """Whether an exception is of the user's code, and of no service, memory or device; a request to end is none."""
    return is_error(error) and not may_pass(error) and classify_exception(error) is FailureType.USER_CODE


class _MetOthers(Exception):
    """Carries an exception past the retries."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def _checked(answer: Any) -> Any:
    """Returns the answer of a reward function, if none of its rewards is NaN or infinite."""
    if isinstance(answer, Iterator):
        # It may raise, too.
        answer = list(answer)
    if isinstance(answer, (torch.Tensor, np.ndarray)):
        rewards = answer.tolist()
    elif isinstance(answer, (list, tuple)):
        rewards = list(answer)
    else:
        # Whatever it is, the trainer is the first to look at it.
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


# ---- trackers and the Hub ----


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
    """Keeps what trackers and the Hub raise away from training, on which nothing of it depends."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._trainer: Any = None
        self._replaced = Replacements()
        self._services: dict[str, _Service] = {}
        self._reported: set[Future[Any]] = set()
        self._policy = RetryPolicy(
            attempts=_ATTEMPTS,
            initial_seconds=_LONGEST_WAIT,
            max_seconds=_LONGEST_WAIT,
            total_seconds=_SLOW,
            sleep=run.sleep,
        )

    def attach(self, trainer: Trainer) -> None:
        self._trainer = trainer
        for callback in trainer.callback_handler.callbacks:
            if is_tracker(callback):
                for event in events_of(callback):
                    guarded = functools.partial(self._guarded, type(callback).__name__)
                    self._replaced.wrap(callback, event, guarded)
        if trainer.args.push_to_hub:
            wrap_pushes(self._replaced, trainer, self._push)

    def detach(self) -> None:
        """At the end of a run: says what never came back."""
        self._replaced.give_back()
        self._report_pushes()
        for service, known in self._services.items():
            if known.failing:
                self._run.journal.event(
                    "noticed", self._step, symptom="not_told", service=service, missed=known.missed
                )
                logger.warning(
                    "%s missed %d calls, which failed or were skipped. All logs are in trainer_state.json.",
                    service,
                    known.missed,
                )

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)

    def _guarded(self, service: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A client that fails may have drawn the jitter of its own retries from the run's generators.
        rng = RandomState.capture(self._trainer.accelerator.device)
        return self.call(service, self._step, rng.restore, functools.partial(function, *args, **kwargs))

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
            self._failed(service, step, error, len(retries))
            if self._clock() - began > _SLOW:
                known.silent_until = self._clock() + _PAUSE
            return None
        if known.failing:
            known.failing = False
            logger.warning("Step %d: %s works again; %d of its calls were lost.", step, service, known.missed)
        return result

    def _failed(self, service: str, step: int, error: BaseException, retried: int = 0) -> None:
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

    def _push(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._report_pushes()
        self._guarded("Hub", original, *args, **kwargs)

    def _report_pushes(self) -> None:
        """Reports uploads that failed: they run in the background, and the Trainer never asks what became of them."""
        for job in getattr(getattr(self._trainer, "push_in_progress", None), "jobs", ()):
            if isinstance(job, Future) and job.done() and not job.cancelled() and job not in self._reported:
                self._reported.add(job)
                if (error := job.exception()) is not None:
                    self._failed("Hub", self._step, error)


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
