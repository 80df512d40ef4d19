"""Logs what must not end a run, whatever handlers the program has."""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import suppress
from typing import Any


def log_safely(logger: logging.Logger, level: int, message: str, *args: Any, **options: Any) -> None:
    """
    Logs a message; a handler or a filter of the program's that raises is reported on stderr, and ends nothing.

    `logging` leaves it to each handler to catch what it raises, and one that sends a message to somebody's phone may
    not. The next message of this library would otherwise end `train()`.

    Args:
        logger (`logging.Logger`), level (`int`), message (`str`), *args, **options:
            As of `logging.Logger.log`.
    """
    try:
        logger.log(level, message, *args, **options)
    except Exception:
        with suppress(Exception):
            print("[self_healing] A logging handler of this program raised:", file=sys.stderr)
            traceback.print_exc()
