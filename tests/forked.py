"""
Scripts in processes of their own, forked from one that has imported everything: the ten seconds that imports take are
spent once. Each dies like any process, and has the environment of the tests as they are when it is started.

That process is itself forked from the one that runs the tests, before it has run any: from one that has trained, with
its threads, nothing could be forked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any


HERE = Path(__file__).parent
# What the scripts import, beside what tests do.
IMPORTED = ("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.profiler", "strategies")
_GLANCE = 0.02


class Forked:
    """A script of this directory that runs, as `subprocess.Popen` has it; it prints behind what is there."""

    def __init__(
        self,
        script: str,
        *arguments: str | Path,
        environment: dict[str, Any] | None = None,
        out: Path | None = None,
        err: Path | None = None,
    ) -> None:
        variables = {**os.environ, **{name: str(value) for name, value in (environment or {}).items()}}
        # What both processes have imported is from one place.
        request = {"arguments": [str(HERE / script), *map(str, arguments)], "environment": variables}
        self.pid: int = _ask({**request, "out": str(out or ""), "err": str(err or "")})
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float = 300.0) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_GLANCE)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


_channel: IO[str] | None = None


def fork_server() -> None:
    """It ends by itself, with the process that has started it."""
    global _channel
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        forget_pytest()
        end_after(lambda: serve(theirs.makefile("rw")))
    theirs.close()
    _channel = ours.makefile("rw")


def forget_pytest() -> None:
    """Whatever it shows, catches and hands on of what is printed, logged or raised."""
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    faulthandler.disable()


def _ask(request: dict[str, Any]) -> Any:
    assert _channel is not None
    _channel.write(json.dumps(request) + "\n")
    _channel.flush()
    return json.loads(_channel.readline())


def serve(channel: IO[str]) -> None:
    """Answers each line: with the id of a process it has started, or with how one has ended."""
    for line in channel:
        request = json.loads(line)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            import_the_rest()
            answer = os.fork()
            if answer == 0:
                _become(**request)
        channel.write(f"{json.dumps(answer)}\n")
        channel.flush()


@functools.cache
def import_the_rest() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    if find_spec("deepspeed") is not None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        importlib.import_module("deepspeed")
    # Nothing of what was imported is gone through, or copied, when a child collects its garbage.
    gc.collect()
    gc.freeze()


def _become(arguments: list[str], environment: dict[str, str], out: str, err: str) -> None:
    """The script, in a process that has nothing else to do."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in ((1, out), (2, err)):
        if path:
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    end_after(lambda: runpy.run_path(arguments[0], run_name="__main__"))


def end_after(run: Callable[[], Any]) -> None:
    """Ends this process as Python does when it has run something, but for what other threads may do meanwhile."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
