"""Ranks ask each other directly whether they are there, over real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from self_healing.ranks.link import Address, Echo, ask, is_open, own_host


@pytest.fixture
def echo() -> Iterator[Echo]:
    opened = Echo("127.0.0.1")
    yield opened
    opened.close()


def test_one_that_is_there_answers_each_time(echo: Echo) -> None:
    for _ in range(5):
        ask(echo.address, seconds=10.0)


def test_one_that_was_closed_does_not_answer_and_leaves_no_thread() -> None:
    echo = Echo("127.0.0.1")
    ask(echo.address, seconds=10.0)
    echo.close()
    with pytest.raises(ConnectionRefusedError):
        ask(echo.address, seconds=0.5)
    for _ in range(100):
        if not any(thread.name == "self_healing echo" for thread in threading.enumerate()):
            return
        time.sleep(0.05)
    raise AssertionError("its thread is still there")


def test_strangers_get_nothing_back(echo: Echo) -> None:
    with pytest.raises(ConnectionError):
        ask(replace(echo.address, token="0" * len(echo.address.token)), seconds=1.0)
    ask(echo.address, seconds=10.0)


def test_one_that_asks_and_says_no_more_holds_nobody_up_for_long(echo: Echo) -> None:
    with socket.create_connection((echo.address.host, echo.address.port)):
        ask(echo.address, seconds=20.0)


def test_strangers_who_say_nothing_hold_nobody_up(echo: Echo) -> None:
    place = (echo.address.host, echo.address.port)
    with contextlib.ExitStack() as strangers:
        for _ in range(20):
            strangers.enter_context(socket.create_connection(place))
        ask(echo.address, seconds=20.0)


def test_it_answers_once_more_strangers_than_it_serves_have_gone(echo: Echo) -> None:
    place = (echo.address.host, echo.address.port)
    for _ in range(300):
        with socket.create_connection(place) as stranger, contextlib.suppress(OSError):
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    for _ in range(100):
        with contextlib.suppress(OSError):
            ask(echo.address, seconds=10.0)
            return
        time.sleep(0.1)
    raise AssertionError("it does not answer any more")


def test_a_process_none_of_whose_threads_runs_has_its_port_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1], "x" * 16)
        assert is_open(address, seconds=10.0)
    assert not is_open(address, seconds=10.0)
    assert not is_open(Address("no such host.invalid", 1, "x" * 16), seconds=1.0)


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.1.1", True), ("::1", True), ("10.0.0.7", False), ("fe80::1%eth0", False)]
)
def test_an_address_that_every_machine_has_is_known_as_such(host: str, local: bool) -> None:
    assert Address(host, 1, "x" * 16).is_local is local


def test_a_process_that_accepts_and_does_not_answer_is_waited_for_no_longer_than_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            ask(Address("127.0.0.1", silent.getsockname()[1], "x" * 16), seconds=0.5)
        assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("named", [lambda name: name, lambda name: f"={name}", lambda name: f"nothing,{name[:-1]}"])
def test_the_network_that_nccl_is_told_to_use_is_used(
    named: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {"other0": "192.0.2.7", "wanted0": "198.51.100.7"}
    found = {name: [SimpleNamespace(family=socket.AF_INET, address=way)] for name, way in ways.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", named("wanted0"))
    assert own_host("127.0.0.1", 29500) == "198.51.100.7"


def test_without_one_it_is_the_way_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert own_host("127.0.0.1", 29500) == "127.0.0.1"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0")
    assert own_host("127.0.0.1", 29500) == "127.0.0.1"
