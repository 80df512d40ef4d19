"""Work of a thread that must not wait for it for ever: on disks and services that may hang as well."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from typing import Any


logger = logging.getLogger("self_healing")


def within(seconds: float, work: Callable[[], Any]) -> None:
    """Does something that touches disks or services, and goes on without it where they hang, or where it fails."""
    context = contextvars.copy_context()

    def do() -> None:
        try:
            context.run(work)
        except Exception:
            logger.exception("The response to a hang failed.")

    thread = threading.Thread(target=do, name="self_healing watchdog's hand", daemon=True)
    thread.start()
    thread.join(seconds)
