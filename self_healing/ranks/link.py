"""`Echo`, `ask` and `is_open`: whether one process of a job gets through to another one, over the network."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass

import psutil


logger = logging.getLogger("self_healing")

# Sent there and back: more than a few packets, so that a path on which only small ones arrive (an MTU that is set
# wrong) is seen as well.
_BYTES = 1 << 16
_TOKEN_BYTES = 16
# So many questions are answered at a time, each of which may take as long as this, in seconds. Whoever comes besides
# (a port scanner) is sent away.
_AT_ONCE, _ANSWERING = 32, 2.0
# Of connections that nobody has taken yet, because no thread of the process runs: a queue that is full looks like a
# machine that is gone.
_WAITING = 1024
# By what NCCL and gloo are told which network to use; names, or what names begin with.
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True)
class Address:
    """
    Where a process answers.

    Args:
        host (`str`), port (`int`):
            Of its socket.
        token (`str`):
            What a question begins with; of others nothing is sent back.
    """

    host: str
    port: int
    token: str

    @property
    def is_local(self) -> bool:
        """Whether it leads to whatever is on the machine that asks; an `/etc/hosts` may name it so on its own one."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False


class Echo:
    """
    Sends back what another process of the job sends, in threads that nothing waits for, until it is closed.

    Args:
        host (`str`):
            An address of this machine.

    Raises:
        OSError: If there can be no socket.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=_WAITING)
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        self.address = Address(host, int(self._socket.getsockname()[1]), secrets.token_hex(_TOKEN_BYTES // 2))
        threading.Thread(target=self._answer_all, name="self_healing echo", daemon=True).start()

    def close(self) -> None:
        """Answers no more."""
        # Wakes the thread, which a close alone does not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _answer_all(self) -> None:
        while self._socket.fileno() >= 0:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # Closed; or too many files are open for the moment.
                time.sleep(0.1)
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            try:
                # One after the other, a stranger who says nothing would hold up those who ask.
                answer = threading.Thread(target=self._answer, args=(connection,), name="self_healing echo")
                answer.daemon = True
                answer.start()
            except RuntimeError:
                # There can be no more threads.
                self._free.release()
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        until = time.monotonic() + _ANSWERING
        try:
            # Whoever has gone, or is not one of the job, is left alone.
            with contextlib.suppress(OSError), connection:
                if secrets.compare_digest(_received(connection, _TOKEN_BYTES, until), self.address.token.encode()):
                    content = _received(connection, _BYTES, until)
                    connection.settimeout(_ANSWERING)
                    connection.sendall(content)
        finally:
            self._free.release()


def ask(address: Address, seconds: float) -> None:
    """
    Sends a process something, and waits until it is back.

    Args:
        address ([`Address`]):
            Where it answers.
        seconds (`float`):
            How long that may take.

    Raises:
        OSError: If it does not come back.
    """
    until = time.monotonic() + seconds
    with socket.create_connection((address.host, address.port), timeout=seconds) as connection:
        connection.sendall(address.token.encode() + bytes(_BYTES))
        _received(connection, _BYTES, until)


def is_open(address: Address, seconds: float) -> bool:
    """
    Whether the process that answers at an address is there. The system of its machine takes a connection for it, also
    while no thread of the process runs: native code holds the GIL, or it is stopped.

    Args:
        address ([`Address`]):
            Of the process.
        seconds (`float`):
            How long that may take.
    """
    with contextlib.suppress(OSError):
        socket.create_connection((address.host, address.port), timeout=seconds).close()
        return True
    return False


def _received(connection: socket.socket, count: int, until: float) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionError("the other side has ended the connection")
        parts += part
    return bytes(parts)


def own_host(host: str, port: int) -> str:
    """
    Gives the address by which other machines of the job reach this one: that of the network which NCCL and gloo are
    told to use, or of the one on which the store of the job is.

    Args:
        host (`str`), port (`int`):
            Of the store.
    """
    for name in _INTERFACES:
        for wanted in os.environ.get(name, "").lstrip("=").split(","):
            for interface, addresses in psutil.net_if_addrs().items() if wanted and wanted[0] != "^" else ():
                found = [each.address for each in addresses if each.family is socket.AF_INET]
                if interface.startswith(wanted) and found:
                    return str(found[0])
    family, kind, protocol, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Sends nothing: only looks up the way.
        probe.connect(there)
        return str(probe.getsockname()[0])
