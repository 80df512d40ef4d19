"""Counts the calls of this package in a run, and has one of them fail."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Self

import self_healing


BESIDE = "beside:"
_PACKAGE = str(Path(self_healing.__file__).parent)


class Injected(RuntimeError):
    """A failure of this package, as any line of it may raise one."""


class FailingCall:
    """
    Counts the calls of functions of this package, by module and name, within a `with` block; those in threads that it
    starts beside the main one by themselves.

    Args:
        function (`str`, *optional*):
            The function that fails: `"module:name:line"`, as it is counted, after `"beside:"` if in another thread.
        call (`int`, *optional*, defaults to 0):
            Which of its calls fails, from 1 on.
    """

    def __init__(self, function: str | None = None, call: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self.fired = self._over = False
        self._function, self._call = function, call
        self._names: dict[CodeType, str | None] = {}

    def __enter__(self) -> Self:
        threading.settrace(self._called)
        sys.settrace(self._called)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        self._over = True

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        if self._over:
            sys.settrace(None)
            return
        code = frame.f_code
        if code not in self._names:
            ours = code.co_filename.startswith(_PACKAGE)
            module = code.co_filename.removeprefix(_PACKAGE).strip("/")
            self._names[code] = f"{module}:{code.co_qualname}:{code.co_firstlineno}" if ours else None
        name = self._names[code]
        if name is None:
            return
        if threading.current_thread() is not threading.main_thread():
            name = f"{BESIDE}{name}"
        self.counts[name] += 1
        if name == self._function and self.counts[name] == self._call:
            self.fired = self._over = True
            sys.settrace(None)
            raise Injected(f"{name}, call {self._call}")
