"""Services that fail: reward functions and vLLM calls are called again; trackers and the Hub never stop a run."""

from __future__ import annotations

import contextlib
import functools
import http.client
import inspect
import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from conftest import (
    assert_same_weights,
    grpo_trainer,
    journal,
    logged,
    plain_trainer,
    quarantined,
    rloo_trainer,
    slowly,
    weights,
)
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback
from trl.generation.vllm_client import VLLMClient

from self_healing import (
    HealingConfig,
    SelfHealingCallback,
    SelfHealingTrainer,
    UnrecoverableTrainingError,
)
from self_healing.failures.retry import RetryPolicy
from self_healing.healers.assembly import assemble
from self_healing.healers.services import Reporting


DROP = "drop"  # the connection is closed without an answer


class FlakyServer:
    """A real HTTP server that answers its first requests as it is told, and every other one with 200 and a body."""

    def __init__(self, answers: Sequence[Any] = (), body: Any = None, always: Any = 200) -> None:
        self.answers = list(answers)
        self.requests: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                self.rfile.read(length)
                outer.requests.append(self.path)
                answer = outer.answers.pop(0) if outer.answers else always
                if answer == DROP:
                    self.close_connection = True
                    self.connection.close()
                    return
                status, headers = answer if isinstance(answer, tuple) else (answer, {})
                content = json.dumps(body if status == 200 else {"error": "busy"}).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_HEAD = do_PUT = _answer

            def log_message(self, *_: Any) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError, ValueError):
                    super().handle()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., FlakyServer]]:
    servers: list[FlakyServer] = []

    def start(*args: Any, **kwargs: Any) -> FlakyServer:
        servers.append(FlakyServer(*args, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def http_error(status: int, **headers: str) -> urllib.error.HTTPError:
    message = Message()
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    return urllib.error.HTTPError("http://reward", status, "busy", message, None)


def failing(*errors: Exception) -> Callable[[], str]:
    """A function that raises these, one each time, and then works."""
    left = list(errors)

    def function() -> str:
        if left:
            raise left.pop(0)
        return "answer"

    return function


# ---- which errors, how often, how long ----


def policy(**settings: Any) -> tuple[RetryPolicy, list[float]]:
    waits: list[float] = []
    return RetryPolicy(sleep=waits.append, **settings), waits


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("reset"),
        TimeoutError("late"),
        http.client.RemoteDisconnected("gone"),
        httpx.ConnectError("refused"),
        *[http_error(status) for status in (429, 503)],
        Exception("Request failed: 503, Service Unavailable"),
        RuntimeError("Data processing error: CAS service error : Error : single flight error: Real call failed: x"),
    ],
    ids=lambda error: f"{type(error).__name__}{getattr(error, 'code', '')}",
)
def test_a_call_is_made_again_after_an_error_that_may_pass(error: Exception) -> None:
    retry, waits = policy()
    assert retry.call(failing(error)) == "answer"
    assert len(waits) == 1


def test_no_attempt_follows_that_would_exceed_the_total_time() -> None:
    retry, waits = policy(attempts=100, initial_seconds=8.0, max_seconds=8.0, total_seconds=60.0)
    with pytest.raises(ConnectionError):
        retry.call(failing(*[ConnectionError()] * 100))
    assert 45.0 < sum(waits) <= 60.0


@pytest.mark.parametrize(("asked", "at_least"), [("3", 3.0), ("100", 7.0), ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0)])
def test_retry_after_is_honoured_up_to_the_longest_wait(asked: str, at_least: float) -> None:
    retry, waits = policy(initial_seconds=0.5, max_seconds=7.0)
    retry.call(failing(http_error(429, Retry_After=asked)))
    assert at_least <= waits[0] <= 7.0


# ---- reward functions ----


def score(completions: list[str]) -> list[float]:
    return [float(len(set(text))) + 0.1 * len(text) for text in completions]


def ask(url: str) -> None:
    with urllib.request.urlopen(url, timeout=10) as response:
        response.read()


def rewards_by(server: FlakyServer) -> dict[str, Any]:
    """The forms a reward function comes in, all of which ask the server, and draw random numbers before they do."""

    def remote_reward(completions: list[str], log_metric: Any = None, **_: Any) -> list[float]:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        if log_metric is not None:
            log_metric("asked", 1.0)
        ask(server.url)
        return [value + noise for value in score(completions)]

    class AsyncCallableReward:
        async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            return remote_reward(completions, **kwargs)

    return {
        "function": remote_reward,
        "async object": AsyncCallableReward(),
        "partial": functools.partial(remote_reward),
    }


TROUBLE = [DROP, DROP, (503, {"Retry-After": "1"})]


def trained(trainer: Any, config: HealingConfig | None = None) -> list[float]:
    waits: list[float] = []
    SelfHealingTrainer(trainer, config, sleep=waits.append).train()
    return waits


@pytest.mark.parametrize("form", ["function", *slowly("async object")])
def test_a_reward_that_fails_three_times_and_then_works_leaves_no_trace_in_the_weights(
    form: str, tmp_path: Path, tokenizer: Any, serve: Any
) -> None:
    clean = grpo_trainer(tmp_path / "clean", tokenizer, reward_funcs=rewards_by(serve())[form], max_steps=2)
    clean.train()
    server = serve([200, *TROUBLE])
    trainer = grpo_trainer(tmp_path / "run", tokenizer, reward_funcs=rewards_by(server)[form], max_steps=2)
    waits = trained(trainer)
    assert len(waits) == 3
    assert waits[2] >= 1.0
    assert_same_weights(weights(trainer), weights(clean))
    assert logged(trainer) == logged(clean)
    [diagnosed] = journal(tmp_path / "run", "diagnosed")
    assert diagnosed["failure"] == "network"
    [action] = journal(tmp_path / "run", "action")
    assert (action["action"], action["attempts"]) == ("retry_call", 4)
    assert action["waited_seconds"] == pytest.approx(sum(waits), abs=1e-3)
    [outcome] = journal(tmp_path / "run", "outcome")
    assert outcome["outcome"] == "resolved"


@pytest.mark.heals("service", "callback")
def test_with_the_callback_alone_a_reward_is_called_again_as_well(
    tmp_path: Path, tokenizer: Any, serve: Any, monkeypatch: Any
) -> None:
    clean = rloo_trainer(tmp_path / "clean", tokenizer, max_steps=2)
    clean.train()
    server = serve(TROUBLE)
    config = HealingConfig(api_retry_base_delay=0.01, api_retry_max_delay=0.02)
    callback = SelfHealingCallback(config)
    trainer = rloo_trainer(tmp_path / "run", tokenizer, callbacks=[callback], max_steps=2)
    plain = trainer.reward_funcs[0]

    def remote(*args: Any, **kwargs: Any) -> Any:
        ask(server.url)
        return plain(*args, **kwargs)

    trainer.reward_funcs[0] = remote
    trainer.train()
    assert len(server.requests) > 3
    assert_same_weights(weights(trainer), weights(clean))
    assert [event["outcome"] for event in journal(tmp_path / "run", "outcome")] == ["resolved"]


def test_a_type_error_in_a_reward_surfaces_at_once(tmp_path: Path, tokenizer: Any) -> None:
    calls: list[int] = []

    def broken(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        raise TypeError("a reward function with a mistake")

    waits: list[float] = []
    trainer = grpo_trainer(tmp_path, tokenizer, reward_funcs=broken, max_steps=2)
    with pytest.raises(TypeError, match="with a mistake"):
        SelfHealingTrainer(trainer, sleep=waits.append).train()
    # Once more, then each completion alone: there is none that it has an answer for.
    assert len(calls) == 2 + 6 + 8
    assert waits == []
    assert not quarantined(tmp_path)


def test_a_reward_that_never_works_again_ends_the_run_with_its_own_error(
    tmp_path: Path, tokenizer: Any, serve: Any
) -> None:
    server = serve(always=503)
    reward = rewards_by(server)["function"]
    config = HealingConfig(api_retry_attempts=2, max_recovery_attempts=1)
    trainer = grpo_trainer(tmp_path, tokenizer, reward_funcs=reward, max_steps=2)
    before = weights(trainer)
    with pytest.raises(UnrecoverableTrainingError) as caught:
        trained(trainer, config)
    assert isinstance(caught.value.__cause__, urllib.error.HTTPError)
    # Two attempts in place, the run entered once more, two attempts again: and never a reward of 0.
    assert len(server.requests) == 4
    assert_same_weights(weights(trainer), before)
    symptoms = [event["symptom"] for event in journal(tmp_path, "detected")]
    assert symptoms == ["HTTPError", "HTTPError"], "the wrapper opened incidents of its own"
    assert [event["outcome"] for event in journal(tmp_path, "outcome")][-1] == "fatal"


def test_guarded_rewards_look_like_the_user_s_own(tmp_path: Path, tokenizer: Any, serve: Any) -> None:
    forms = rewards_by(serve())
    rewards, seen = [forms["async object"], forms["partial"]], list[Any]()

    class Look(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            seen.extend(trainer.reward_funcs)

    trainer = grpo_trainer(tmp_path, tokenizer, reward_funcs=list(rewards), max_steps=1, callbacks=[Look()])
    names = list(trainer.reward_func_names)
    trained(trainer)
    assert [each is not reward for each, reward in zip(seen, rewards, strict=True)] == [True, True]
    assert [inspect.iscoroutinefunction(each) for each in seen] == [True, False]
    assert [each.__name__ for each in seen] == names
    assert trainer.reward_funcs == rewards


# ---- rewards that are not finite ----


def not_finite(calls: Callable[[int], bool], places: Sequence[int] = (0,), value: float = torch.nan) -> Any:
    """A reward that is not finite for some completions, in those of its calls (from 1) for which `calls` says so."""
    asked: list[int] = []

    def reward(completions: list[str], **_: Any) -> Any:
        asked.append(1)
        rewards = score(completions)
        if calls(len(asked)):
            rewards = [value if place in places else reward for place, reward in enumerate(rewards)]
        return rewards

    return reward


def test_a_reward_that_is_nan_once_leaves_no_trace(tmp_path: Path, tokenizer: Any) -> None:
    clean = grpo_trainer(tmp_path / "clean", tokenizer, reward_funcs=not_finite(lambda _: False), max_steps=2)
    clean.train()
    reward = not_finite(lambda call: call == 2)
    trainer = grpo_trainer(tmp_path / "run", tokenizer, reward_funcs=reward, max_steps=2)
    assert len(trained(trainer)) == 1
    assert_same_weights(weights(trainer), weights(clean))
    assert logged(trainer) == logged(clean)
    [outcome] = journal(tmp_path / "run", "outcome")
    assert (outcome["failure"], outcome["outcome"]) == ("nonfinite_reward", "resolved")


def test_a_reward_that_stays_not_finite_for_a_completion_is_one_incident(tmp_path: Path, tokenizer: Any) -> None:
    calls: list[int] = []
    reward = not_finite(lambda call: calls.append(call) is None, value=torch.inf)
    trainer = grpo_trainer(tmp_path, tokenizer, reward_funcs=reward, max_steps=3)
    waits = trained(trainer, HealingConfig(api_retry_attempts=3))
    # Known to be lasting, it is asked for twice, and not waited for.
    assert len(calls) == 3 + 2 + 2
    assert len([wait for wait in waits if wait > 0]) == 2
    assert trainer.state.global_step == 3
    [incident] = journal(tmp_path, "diagnosed")
    assert (incident["failure"], incident["evidence"]["completions"]) == ("nonfinite_reward", [0])
    assert [event["action"] for event in journal(tmp_path, "action")] == ["retry_call", "go_on_without"]


def test_without_a_single_reward_the_run_stops(tmp_path: Path, tokenizer: Any) -> None:
    reward = not_finite(lambda call: call > 1, places=range(8))
    trainer = grpo_trainer(tmp_path, tokenizer, reward_funcs=reward)
    with pytest.raises(UnrecoverableTrainingError, match="8 of 8 rewards are NaN or infinite"):
        trained(trainer, HealingConfig(api_retry_attempts=2, api_retry_base_delay=0.01))
    assert trainer.state.global_step == 1
    assert len(journal(tmp_path, "detected")) == 1


def test_none_says_that_a_reward_does_not_apply(tmp_path: Path, tokenizer: Any) -> None:
    def sometimes(completions: list[str], **_: Any) -> list[float | None]:
        return [None if place % 2 else reward for place, reward in enumerate(score(completions))]

    trained(grpo_trainer(tmp_path, tokenizer, reward_funcs=sometimes, max_steps=1))
    assert journal(tmp_path, "run_ended")
    assert not journal(tmp_path, "detected")


# ---- a vLLM server ----


def client_of(server: FlakyServer) -> VLLMClient:
    """TRL's client without vLLM: only its constructor asks for that, and httpx answers like requests."""
    client = VLLMClient.__new__(VLLMClient)
    client.session, client.base_url, client.model = httpx.Client(), server.url, "tiny"
    return client


COMPLETION = {
    "choices": [{"prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": None}],
}


def test_requests_to_a_vllm_server_are_made_again(tmp_path: Path, tokenizer: Any, serve: Any) -> None:
    server = serve([503, DROP], body=COMPLETION)
    answers: list[Any] = []

    class Ask(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                answers.append(client.generate(["a prompt"]))

    trainer = plain_trainer(tmp_path, tokenizer, callbacks=[Ask()], max_steps=2)
    client = client_of(server)
    trainer.vllm_generation = SimpleNamespace(vllm_client=client)
    waits = trained(trainer)
    assert len(waits) == 2
    assert answers[0]["completion_ids"] == [[3]]
    assert journal(tmp_path, "diagnosed")[0]["cause"] == "vLLM server (generate)"
    assert "generate" not in vars(client)


# ---- trackers ----


class Unreachable(TensorBoardCallback):
    """A tracker whose server cannot be reached, and whose client draws the jitter of its own retries."""

    def __init__(self, url: str = "http://127.0.0.1:9", events: Sequence[str] = ("on_log",)) -> None:
        super().__init__(tb_writer=SimpleNamespace(add_scalar=lambda *_: None, close=lambda: None))
        self.calls: list[str] = []
        for event in events:
            setattr(self, event, self._send(event, url))

    def _send(self, event: str, url: str) -> Callable[..., None]:
        def send(*args: Any, **kwargs: Any) -> None:
            self.calls.append(event)
            random.random(), np.random.rand(), torch.rand(())
            ask(url)

        return send

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        pass

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.mark.heals("tracker", "callback")
@pytest.mark.heals("tracker", "wrapper")
@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapper", "callback"])
def test_a_tracker_that_always_fails_changes_nothing(wrapped: bool, tmp_path: Path, tokenizer: Any) -> None:
    clean = plain_trainer(tmp_path / "clean", tokenizer)
    clean.train()
    tracker = Unreachable(events=("on_log", "on_train_end"))
    callbacks: list[Any] = [tracker] if wrapped else [tracker, SelfHealingCallback()]
    trainer = plain_trainer(tmp_path / "run", tokenizer, callbacks=callbacks)
    if wrapped:
        trained(trainer)
    else:
        trainer.train()
    assert trainer.state.global_step == 6
    assert_same_weights(weights(trainer), weights(clean))
    assert logged(trainer) == logged(clean)
    # 6 steps and the end of the run, the first of them twice: every later log is tried again, without a retry.
    assert tracker.calls == ["on_log"] * 8 + ["on_train_end"]
    [incident] = journal(tmp_path / "run", "detected")
    assert incident["evidence"]["service"] == "Unreachable"
    assert journal(tmp_path / "run", "diagnosed")[0]["failure"] == "reporting"
    assert [event["action"] for event in journal(tmp_path / "run", "action")] == ["retry_call", "go_on_without"]
    assert [event["outcome"] for event in journal(tmp_path / "run", "outcome")] == ["reported"]
    assert journal(tmp_path / "run", "noticed")[-1]["missed"] == 8


def test_the_wrapper_survives_a_tracker_that_cannot_even_begin(tmp_path: Path, tokenizer: Any) -> None:
    class CannotBegin(TensorBoardCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            raise PermissionError("log in first")

    tracker = CannotBegin(tb_writer=SimpleNamespace(add_scalar=lambda *_: None, flush=lambda: None))
    trainer = plain_trainer(tmp_path, tokenizer, callbacks=[tracker], max_steps=2)
    trained(trainer)
    assert trainer.state.global_step == 2
    assert journal(tmp_path, "detected")[0]["symptom"] == "PermissionError"


def test_callbacks_that_are_no_trackers_are_left_alone(tmp_path: Path, tokenizer: Any) -> None:
    class Own(TrainerCallback):
        def on_log(self, *args: Any, **kwargs: Any) -> None:
            raise ValueError("meant to stop the run")

    trainer = plain_trainer(tmp_path, tokenizer, callbacks=[Own()], max_steps=2)
    with pytest.raises(ValueError, match="meant to stop"):
        trained(trainer)


class Tracked:
    """`Reporting` with a clock that is set by hand."""

    def __init__(self, directory: Path) -> None:
        self.now, self.waits, self.calls = 0.0, list[float](), 0
        self.fails, self.takes = True, 0.0
        run = assemble(HealingConfig(), directory, sleep=self.waits.append)
        self.reporting = Reporting(run, clock=lambda: self.now)
        self.incidents = run.journal.incidents

    def _send(self) -> str:
        self.calls += 1
        self.now += self.takes
        if self.fails:
            raise ConnectionError("down")
        return "sent"

    def log(self) -> Any:
        return self.reporting.call("tracker", 1, lambda: None, self._send)


def test_a_tracker_that_comes_back_works_again_and_is_waited_for_again(tmp_path: Path) -> None:
    tracked = Tracked(tmp_path)
    assert [tracked.log() for _ in range(3)] == [None] * 3
    assert (tracked.calls, len(tracked.waits)) == (4, 1)
    tracked.fails = False
    assert tracked.log() == "sent"
    tracked.fails = True
    tracked.log()
    assert (tracked.calls, len(tracked.waits)) == (7, 2)
    assert len(tracked.incidents) == 1
    assert tracked.incidents[0].evidence["missed"] == 4


def test_a_tracker_that_is_slow_to_fail_is_not_asked_at_every_log(tmp_path: Path) -> None:
    tracked = Tracked(tmp_path)
    tracked.takes = 30.0
    tracked.log()
    made = tracked.calls
    for _ in range(10):
        tracked.log()
    assert tracked.calls == made
    tracked.now += 301
    tracked.fails, tracked.takes = False, 0.0
    assert tracked.log() == "sent"


# ---- the Hub ----


def test_a_push_that_fails_before_it_is_sent_does_not_stop_the_run(tmp_path: Path, tokenizer: Any) -> None:
    clean = plain_trainer(tmp_path / "clean", tokenizer, save_strategy="steps", save_steps=2)
    clean.train()
    trainer = plain_trainer(tmp_path / "run", tokenizer, save_strategy="steps", save_steps=2)
    # As `init_hf_repo` leaves it.
    trainer.args.push_to_hub, trainer.hub_model_id, trainer.push_in_progress = True, "me/model", None
    # Where the arguments are to be written.
    (tmp_path / "run" / "training_args.bin").mkdir(parents=True)
    trained(trainer)
    assert_same_weights(weights(trainer), weights(clean))
    assert [event["failure"] for event in journal(tmp_path / "run", "diagnosed")] == ["reporting"]
    assert all((tmp_path / "run" / f"checkpoint-{step}" / "healing.json").exists() for step in (2, 4, 6))
