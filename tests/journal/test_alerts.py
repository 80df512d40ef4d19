"""Someone is told at 3 a.m.: alerts of wandb, and a webhook, which costs the training nothing."""

from __future__ import annotations

import enum
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import OutputFault, RaisingForward, journal, sft_trainer

from self_healing import (
    FailureType,
    HealingConfig,
    SelfHealingCallback,
    SelfHealingTrainer,
    UnrecoverableTrainingError,
)
from self_healing.journal.alerts import WEBHOOK, Webhook
from self_healing.journal.journal import Journal


class Server(ThreadingHTTPServer):
    """Takes messages, each after some seconds; after `delay=None` never."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.delay: float | None = 0.0
        self.messages: list[dict[str, Any]] = []
        self.asked = threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}/services/T0/secret"

    def wait_for(self, count: int) -> list[dict[str, Any]]:
        ends = time.monotonic() + 20
        while len(self.messages) < count and time.monotonic() < ends:
            time.sleep(0.01)
        # One too many would come at once as well.
        time.sleep(0.2)
        return self.messages


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.set()
        time.sleep(3600 if self.server.delay is None else self.server.delay)
        self.server.messages.append(json.loads(body))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as server:
        monkeypatch.setenv(WEBHOOK, server.address)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def always_nan(output_dir: Path, tokenizer: Any, **arguments: Any) -> Any:
    trainer = sft_trainer(output_dir, tokenizer, **arguments)
    OutputFault(trainer.model, strike=lambda forward: forward > 2)
    return trainer


# ---- webhook: what is posted ----


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_run_that_stops_posts_one_message(tmp_path: Path, tokenizer: Any, server: Server, wrapped: bool) -> None:
    config = HealingConfig(on_nonfinite="raise")
    callbacks = [] if wrapped else [SelfHealingCallback(config)]
    trainer = always_nan(tmp_path, tokenizer, callbacks=callbacks)
    with pytest.raises(UnrecoverableTrainingError):
        (SelfHealingTrainer(trainer, config) if wrapped else trainer).train()
    (message,) = server.wait_for(1)
    text = message.pop("text")
    run = journal(tmp_path)[0]["run"]
    assert message == {"run": run, "step": 1, "kind": "nonfinite_undiagnosed", "outcome": "stopped"}
    assert text.startswith("self_healing: step 1: training stopped")
    assert "What to do: " in text
    assert f"Run {run} on {socket.gethostname()}. More: self-healing report {tmp_path}" in text


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_exception_of_the_training_code_is_posted_without_what_it_says(
    tmp_path: Path, tokenizer: Any, server: Server, wrapped: bool
) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()])
    RaisingForward(trainer.model, lambda forward: forward == 3, lambda: ValueError("no number: 'a patient said'"))
    with pytest.raises(ValueError, match="a patient said"):
        (SelfHealingTrainer(trainer) if wrapped else trainer).train()
    (message,) = server.wait_for(1)
    assert (message["step"], message["kind"], message["outcome"]) == (1, "user_code", "stopped")
    assert "training stopped by ValueError" in message["text"]
    assert "patient" not in json.dumps(message)
    # The wrapper has saved what there was.
    assert ("To resume: trainer.train(" in message["text"]) is wrapped


def no_room(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_an_incident_of_error_severity_is_posted_while_training_goes_on(
    tmp_path: Path, tokenizer: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = sft_trainer(
        tmp_path, tokenizer, callbacks=[SelfHealingCallback()], max_steps=4, save_strategy="steps", save_steps=2
    )
    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", no_room)
    trainer.train()
    assert trainer.state.global_step == 4
    message = server.wait_for(1)[0]
    assert (message["step"], message["kind"]) == (2, "disk")
    assert "checkpoint not written" in message["text"]


def test_what_was_healed_without_loss_wakes_nobody(tmp_path: Path, tokenizer: Any, server: Server) -> None:
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()])
    OutputFault(trainer.model, strike=lambda forward: forward == 5)
    trainer.train()
    assert len(journal(tmp_path, "outcome")) == 1
    assert server.wait_for(0) == []


def test_of_several_ranks_the_first_one_tells(tmp_path: Path, server: Server) -> None:
    for rank in (1, 0):
        Journal(tmp_path, HealingConfig(), "run", rank).ended(rank, FailureType.HANG, None)
    assert [message["step"] for message in server.wait_for(1)] == [0]


# ---- webhook: never in the way ----


def test_a_server_that_does_not_answer_holds_up_nothing(server: Server) -> None:
    server.delay = None
    webhook, began = Webhook(), time.monotonic()
    for step in range(50):
        webhook.post({"step": step})
    assert time.monotonic() - began < 2
    # Nor do threads gather.
    assert sum(thread.name == "self_healing webhook" for thread in threading.enumerate()) <= 8


def test_a_server_that_takes_nothing_is_spoken_of_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.socket.close()
    webhook = Webhook()
    for step in range(3):
        webhook.post({"step": step})
        webhook.flush()
    (record,) = caplog.records
    assert f"A message to {WEBHOOK} (127.0.0.1) did not get through" in record.getMessage()
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    "address", ["hooks.slack.com/services/secret", "ftp://host/secret", "https:///secret", "http://host:x/secret"]
)
def test_what_is_no_address_is_said_when_training_begins(
    tmp_path: Path,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    address: str,
) -> None:
    monkeypatch.setenv(WEBHOOK, address)
    trainer = always_nan(tmp_path, tokenizer, callbacks=[SelfHealingCallback(HealingConfig(on_nonfinite="raise"))])
    with pytest.raises(UnrecoverableTrainingError):
        trainer.train()
    (said,) = [record.getMessage() for record in caplog.records if WEBHOOK in record.getMessage()]
    assert repr(address[:10]) in said
    assert "Please give all of it, http:// or https:// with a host" in said
    assert "secret" not in caplog.text


# ---- webhook: the process ends ----


ENDS = """
import sys
from self_healing.journal.alerts import Webhook
from self_healing.system.processes import end_at_once

Webhook().post({"step": 7})
print("told", flush=True)
"""


@pytest.mark.parametrize(
    ("last_line", "code"), [("", 0), ("raise RuntimeError", 1), ("sys.exit(3)", 3), ("end_at_once(75)", 75)]
)
def test_the_last_message_gets_out_however_the_process_ends(server: Server, last_line: str, code: int) -> None:
    server.delay = 1.0
    ended = subprocess.run([sys.executable, "-c", ENDS + last_line], stderr=subprocess.PIPE, check=False)
    assert ended.returncode == code
    assert [message["step"] for message in server.messages] == [7]


def test_a_process_does_not_wait_long_for_a_server_that_does_not_answer(server: Server) -> None:
    server.delay = None
    process = subprocess.Popen([sys.executable, "-c", ENDS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"told\n"
    began = time.monotonic()
    assert process.wait(60) == 0
    assert time.monotonic() - began < 10
    assert server.asked.is_set()


# ---- wandb ----


def test_wandb_raises_the_alerts_that_trackio_raises(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alerts: list[dict[str, Any]] = []
    # As in wandb 0.2x: `Run.alert(title, text, level=None, wait_duration=None)`.
    levels = enum.Enum("AlertLevel", {name: name for name in ("INFO", "WARN", "ERROR")})
    run = SimpleNamespace(alert=lambda title, text, level: alerts.append({"title": title, "text": text, "at": level}))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run, AlertLevel=levels))
    trainer = always_nan(tmp_path, tokenizer, callbacks=[SelfHealingCallback(HealingConfig(on_nonfinite="raise"))])
    with pytest.raises(UnrecoverableTrainingError):
        trainer.train()
    assert alerts[-1]["title"] == "self_healing: run ended"
    assert alerts[-1]["at"] is levels["ERROR"]


def test_a_directory_of_the_name_is_not_taken_for_wandb(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback()])
    OutputFault(trainer.model, strike=lambda forward: forward == 5)
    trainer.train()
    assert "wandb" not in caplog.text
