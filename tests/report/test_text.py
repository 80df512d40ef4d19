"""The report as it is printed."""

from __future__ import annotations

import io

from rich.console import Console

from self_healing.report.text import _line


def test_text_of_an_exception_steers_no_terminal_and_can_be_encoded() -> None:
    with io.TextIOWrapper(io.BytesIO(), encoding="utf-8") as stream:
        _line(Console(file=stream, width=80), "  No file \x1b[31mr\udce9sum\u00e9\nPlease look.")
        stream.flush()
        stream.seek(0)
        assert stream.read() == "  No file  [31mr sum\u00e9\nPlease look.\n"
