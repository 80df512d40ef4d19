"""Whom a run tells of trouble beside its log: alerts of trackio and wandb, and a webhook."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ..system.processes import log_safely


logger = logging.getLogger("self_healing")

WEBHOOK = "SELF_HEALING_WEBHOOK"
# Seconds for a message, and at the end of the process for all that are on their way.
_LIMIT = 5.0
# On their way at once: with a server that takes none, threads must not gather.
_AT_ONCE = 8
_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}


def to_trackio(title: str, text: str, severity: str, step: int) -> None:
    """Raises an alert about an optimizer step if a trackio run is active."""
    trackio: Any = sys.modules.get("trackio")
    run = None if trackio is None else trackio.context_vars.current_run.get()
    if run is not None:
        # Of the run: `trackio.alert` takes no step, and counts how often something was logged.
        run.alert(title, text, level=trackio.AlertLevel[_LEVELS[severity]], step=step)


def to_wandb(title: str, text: str, severity: str, step: int) -> None:
    """Raises an alert if a wandb run is active: mail or Slack, as its user has it there."""
    # Where wandb is not installed, a directory `wandb` of earlier runs can be imported, and has nothing in it.
    wandb: Any = sys.modules.get("wandb")
    run = getattr(wandb, "run", None)
    if run is not None:
        run.alert(title=title, text=text, level=wandb.AlertLevel[_LEVELS[severity]])


def address(warn: bool = False) -> str | None:
    """Gives the address of the webhook; `None` if there is none, and for what is none."""
    url = os.environ.get(WEBHOOK, "").strip()
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if fits and url.isascii() and url.isprintable() and " " not in url:
        return url
    if url and warn:
        text = (
            "%s (it begins with %r) is not the address of a web server, and nobody is told by it. Please give all of "
            "it, http:// or https:// with a host and a path, or unset it."
        )
        # No more than the beginning: whoever knows such an address can write to it.
        log_safely(logger, logging.WARNING, text, WEBHOOK, url[:10])
    return None


class Webhook(logging.Handler):
    """
    Posts to `SELF_HEALING_WEBHOOK`, each message in a thread of its own.

    It handles no records. It is a handler because `logging.shutdown` flushes those: at Python's own end, after an
    exception as well, and before each end of the process from the inside. So the last message gets out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._on_their_way: list[threading.Thread] = []
        self._has_failed = False

    def post(self, message: Mapping[str, Any]) -> None:
        """Posts a message as JSON; waits for nothing."""
        url = address()
        self._on_their_way = [each for each in self._on_their_way if each.is_alive()]
        if url is None or len(self._on_their_way) >= _AT_ONCE:
            return
        body = json.dumps(message).encode()
        thread = threading.Thread(target=self._send, args=(url, body), name="self_healing webhook", daemon=True)
        thread.start()
        self._on_their_way.append(thread)

    def _send(self, url: str, body: bytes) -> None:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_LIMIT):
                pass
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                text = "A message to %s (%s) did not get through: %s. The journal has what it says. This is said once."
                log_safely(logger, logging.WARNING, text, WEBHOOK, urlsplit(url).hostname, error)

    def flush(self) -> None:
        """Waits for the messages on their way, not for long."""
        ends = time.monotonic() + _LIMIT
        for thread in self._on_their_way:
            thread.join(max(ends - time.monotonic(), 0.0))
