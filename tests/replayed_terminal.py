"""A terminal in which tests see what a person would see: a pty of some width, and its output replayed to a screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field


_TOKEN = re.compile(r"\x1b\[(\?)?([\d;]*)([A-Za-z])|\r|\n|\x08|[^\x1b\r\n\x08]+")


def screen(output: str, columns: int) -> list[str]:
    """Lines on a terminal without end after all of some output, without colours and blanks at the end of a line."""
    lines: list[list[str]] = [[]]
    row = column = 0
    for token in _TOKEN.finditer(output):
        text, number = token[0], int(token[2]) if token[2] and token[2].isdigit() else 1
        if text == "\r":
            column = 0
        elif text == "\n":
            row += 1
        elif text == "\x08":
            column = max(column - 1, 0)
        elif token[3] == "A":
            row = max(row - number, 0)
        elif token[3] == "B":
            row += number
        elif token[3] == "K":
            del lines[row][column:]
        elif not text.startswith("\x1b"):
            for letter in text:
                if column == columns:
                    row, column = row + 1, 0
                lines += [[] for _ in range(row + 1 - len(lines))]
                lines[row] += " " * (column + 1 - len(lines[row]))
                lines[row][column] = letter
                column += 1
        lines += [[] for _ in range(row + 1 - len(lines))]
    return ["".join(line).rstrip() for line in lines]


@dataclass
class Shown:
    """What was written to a terminal."""

    columns: int
    written: bytearray = field(default_factory=bytearray)

    @property
    def raw(self) -> str:
        return self.written.decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        return screen(self.raw, self.columns)


@contextlib.contextmanager
def terminal_of(columns: int) -> Iterator[Shown]:
    """Has stdout and stderr be a terminal of some width; what was written is whole when the block has ended."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    shown = Shown(columns)

    def read() -> None:
        # Ends when the other side is closed, on Linux by an error.
        with contextlib.suppress(OSError):
            while piece := os.read(master, 65536):
                shown.written += piece

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with open(slave, "w", buffering=1, encoding="utf-8") as stream, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(stream))
        stack.enter_context(contextlib.redirect_stderr(stream))
        yield shown
        sys.stderr.flush()
    reader.join(10)
    os.close(master)
