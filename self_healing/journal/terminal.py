"""`Terminal`: what this library logs, written past progress bars, each message behind its name."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from ..system.processes import contained, log_safely
from .incident import Incident, headline


NAME = "[self_healing]"
# The most characters of an incident's line, with the name in front.
WIDTH = 100
HEADLINE_WIDTH = WIDTH - len(NAME) - 1
# Of one kind: the first ones, then the tenth, the hundredth, ...
_IN_FULL = 3
# As TRANSFORMERS_VERBOSITY, for programs whose code is not changed.
VERBOSITY = "SELF_HEALING_VERBOSITY"
_LEVELS: dict[str, int] = {name: getattr(logging, name.upper()) for name in ("info", "warning", "error", "critical")}
_CLEAR_LINE = "\r\x1b[K"
_GREEN, _YELLOW, _RED = "\x1b[32m", "\x1b[33m", "\x1b[31m"
_COLOURS = {"info": _GREEN, "warning": _YELLOW, "error": _RED}

_logger = logging.getLogger("self_healing")


class Terminal(logging.Handler):
    """Writes what this library logs to stderr, past the progress bars of `tqdm`."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self._rank = rank
        self._name = NAME if rank == 0 else f"{NAME[:-1]} rank {rank}]"
        self._process = os.getpid()
        self._begun = False
        self._times: collections.Counter[Any] = collections.Counter()

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Speaks for the time of a block; does nothing within one in which it speaks already."""
        if self in _logger.handlers:
            yield
            return
        with contained(_logger, "The terminal cannot be written to.", logging.WARNING):
            self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        """Speaks from here on, unless another one does already: two trainers share a terminal."""
        _logger.addHandler(self)
        if self._begun:
            return
        self._begun, asked = True, os.environ.get(VERBOSITY)
        self.setLevel(max(chosen_level(), logging.ERROR if self._rank else logging.NOTSET))
        if asked and asked.lower() not in _LEVELS:
            text = "%s=%r is not known, and is ignored. Please use %s."
            log_safely(_logger, logging.WARNING, text, VERBOSITY, asked, " or ".join(_LEVELS))

    def stop(self) -> None:
        """Speaks no longer; may be called again."""
        _logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record of `logging`. A terminal that cannot be written to is no matter of the training."""
        if _speaker() is not self:
            return
        try:
            if _is_on_the_terminal(record):
                _clear_bars()
            elif (suffix := self._repeated(record)) is not None:
                self._write(record, suffix)
        except Exception:
            # `handleError` writes to stderr, which may be what has failed.
            with contextlib.suppress(Exception):
                self.handleError(record)

    def _repeated(self, record: logging.LogRecord) -> str | None:
        """Counts a message by its kind; gives what to add to it, `None` for one that is left out."""
        if record.levelno >= logging.ERROR:
            return ""
        # The same but for its numbers: steps, seconds, sizes.
        kind = getattr(record, "kind", None) or re.sub(r"\d+", "", record.getMessage())
        self._times[kind] += 1
        times = self._times[kind]
        if times < _IN_FULL:
            return ""
        shown = str(times).rstrip("0") == "1"
        if times > _IN_FULL and not shown:
            return None
        return f" ({times} so far; next at {10 ** len(str(times))})"

    def _write(self, record: logging.LogRecord, suffix: str) -> None:
        stream = sys.stderr
        if stream is None:
            return
        name, incident = self._name, getattr(record, "incident", None)
        text = record.getMessage()
        if incident is not None:
            text = headline(Incident.from_dict(incident), WIDTH - len(name) - 1 - len(suffix))
        text += suffix
        if record.exc_info:
            text += "\n" + (self.formatter or logging.Formatter()).formatException(record.exc_info)
        severity = getattr(record, "severity", None)
        if severity is None and record.levelno >= logging.WARNING:
            severity = "error" if record.levelno >= logging.ERROR else "warning"
        colour = _COLOURS.get(str(severity))
        is_terminal = bool(getattr(stream, "isatty", lambda: False)())
        # https://no-color.org
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not is_terminal
        if colour is not None and not plain:
            name = f"{colour}{name}\x1b[0m"
        if os.getpid() == self._process:
            tqdm.write(f"{name} {text}", file=stream)
            return
        # A data loader worker knows nothing of the bars, and must not wait for their lock: who held it when the worker
        # was forked is not there to give it back. The bar's line is taken, and the bar comes again on the next one.
        stream.write(f"{_CLEAR_LINE if is_terminal else ''}{name} {text}\n")
        stream.flush()


def chosen_level() -> int:
    """The level that the environment asks for, one of `logging`; one that is not known asks for nothing."""
    return _LEVELS.get((os.environ.get(VERBOSITY) or "info").lower(), logging.NOTSET)


def speaking_of(args: Any) -> contextlib.AbstractContextManager[None]:
    """Speaks for the time of a block outside of training, unless something speaks already."""
    return contextlib.nullcontext() if _speaker() is not None else Terminal(int(args.process_index)).speaking()


def announce(text: str, level: int = logging.INFO, severity: str | None = None) -> None:
    """Says how a run begins or ends: logged, and also shown in a terminal where nobody has chosen a level."""
    extra = {"severity": severity}
    if _logger.isEnabledFor(level):
        log_safely(_logger, level, "%s", text, extra=extra)
        return
    terminal = _speaker()
    nobody_has_chosen = _logger.level == logging.NOTSET and not _logger.disabled and _logger.manager.disable < level
    if terminal is not None and level >= terminal.level and nobody_has_chosen:
        record = _logger.makeRecord(_logger.name, level, __file__, 0, "%s", (text,), None, extra=extra)
        if not _is_on_the_terminal(record):
            terminal.handle(record)


def _speaker() -> Terminal | None:
    """The one that speaks, where several runs are trained: else each line came as often as there are runs."""
    return next((handler for handler in _logger.handlers if isinstance(handler, Terminal)), None)


def _is_on_the_terminal(record: logging.LogRecord) -> bool:
    """Whether a handler of the program's own is there to write messages of this library to a terminal."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        if any(_writes_to_terminal(handler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _writes_to_terminal(handler: logging.Handler) -> bool:
    if isinstance(handler, Terminal):
        return False
    # `RichHandler`, of rich and of what builds on it.
    if hasattr(handler, "console"):
        return True
    own = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    stream = getattr(handler, "stream", None)
    return stream is not None and any(stream is each for each in own)


def _clear_bars() -> None:
    """Leaves the line of each bar to what is written next; a bar draws itself anew when it moves."""
    # Not `external_write_mode`, which draws them again at its end: before what is to be written.
    with tqdm.get_lock():
        for bar in list(getattr(tqdm, "_instances", ())):
            if not bar.disable:
                bar.clear(nolock=True)
