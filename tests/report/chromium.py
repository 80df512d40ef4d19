"""Chromium without a window, driven over a pipe: what a page logs, asks for, and looks like."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """One tab. What the page logs and asks the network for is kept from the first moment on."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._read, self._number = commands, answers, b"", 0
        self._session: str | None = None
        self._loaded = False
        self.logged: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Sends a command of the DevTools protocol, and waits for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer}"
                return answer["result"]

    def _next(self, seconds: float = 40) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], max(until - time.monotonic(), 0))
            assert ready, f"Chromium has said nothing for {seconds} seconds"
            part = os.read(self._answers, 1 << 20)
            assert part, "Chromium has ended"
            self._read += part
        line, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        about = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.consoleAPICalled":
                self.logged.append(f"{about['type']}: {about['args']}")
            case "Runtime.exceptionThrown":
                self.logged.append(f"exception: {about['exceptionDetails']}")
            case "Log.entryAdded":
                self.logged.append(f"{about['entry']['level']}: {about['entry']['text']}")
            case "Network.requestWillBeSent":
                self.requested.append(about["request"]["url"])
        return message

    def show(self, page: Path, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Loads a page, in a window of this size and a colour scheme."""
        self.logged.clear()
        self.requested.clear()
        self.scheme(dark)
        self.resize(width, height)
        self._loaded = False
        self.call("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._next()
        self.frames()

    def scheme(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def frames(self) -> None:
        """Waits until what was changed has been drawn."""
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for. Also where the page itself may run none."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Presses the mouse on an element, where one would see it."""
        place = self.ask(
            f"(() => {{ const element = document.querySelector({json.dumps(selector)}); "
            "element.scrollIntoView({block: 'center'}); const box = element.getBoundingClientRect(); "
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1, buttons=1
            )
        self.frames()

    def press(self, key: str, code: int, text: str = "") -> None:
        """Presses a key."""
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **typed)
        self.frames()


@contextmanager
def chromium(profile: Path) -> Iterator[Tab]:
    """
    Starts Chromium, and ends it.

    Args:
        profile (`Path`):
            An empty directory for what it writes.
    """
    assert CHROMIUM is not None
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()

    def pipes() -> None:
        # By the protocol it reads from 3 and writes to 4. The ends may be these numbers already, so not in place.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 100) for end in (commands_out, answers_in)]
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    process = subprocess.Popen(
        [
            CHROMIUM,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"),
            *("--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={profile}"),
        ],
        preexec_fn=pipes,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands_out)
    os.close(answers_in)
    try:
        yield Tab(commands_in, answers_out)
    finally:
        # Ends it and its children, which a signal to the first would leave.
        os.close(commands_in)
        os.close(answers_out)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
