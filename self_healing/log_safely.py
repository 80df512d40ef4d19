"""Logs what must not end a run, whatever handlers the program has."""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import suppress
from typing import Any


def log_safely(logger: logging.Logger, level: int, message: str, *args: Any, **options: Any) -> None:
    """Logs a message; a handler or a filter of the program's that raises is reported on stderr, and ends nothing."""
    try:
        logger.log(level, message, *args, **options)
    except Exception:
        with suppress(Exception):
            print("[self_healing] A logging handler of this program raised:", file=sys.stderr)
            traceback.print_exc()
