"""
What the demo prints, as it is kept in `docs/img`: in a terminal of 80 and of 120 columns, and piped.

`make demo-output` runs the demo three times, some six minutes, and writes the files again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from replayed_terminal import terminal_of
from rich.cells import cell_len


KEPT = Path(__file__).parent.parent / "docs" / "img"
# Columns of the terminal; none, where the output is piped.
FILES = {80: KEPT / "demo-80.txt", 120: KEPT / "demo-120.txt", None: KEPT / "demo-piped.txt"}
OUTPUT_DIR = "outputs/demo"
# Lines for whoever searches or copies them: never broken, however long.
_IN_ONE_PIECE = re.compile(r"(Report|Journal|Ledger|Again): |  (plain|healed|twin) +\d+/| +\d+/\d+  ")
_LEFT, _RIGHT = tuple("┏┃┡│└"), tuple("┓┃┩│┘")


def demo_in_terminal(columns: int | None, directory: Path) -> str:
    """Runs `self-healing demo` as a user does, and returns what is on the screen in the end."""
    command = [sys.executable, "-m", "self_healing.cli", "demo", "--output-dir", OUTPUT_DIR]
    # The size is that of the terminal; the demo keeps itself from the Hub.
    left_out = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {name: value for name, value in environment.items() if name not in left_out} | {"TERM": "xterm"}
    if columns is None:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=directory, env=environment
        )
        shown, code = done.stdout, done.returncode
    else:
        with terminal_of(columns) as terminal:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=sys.stdout, stderr=sys.stderr, cwd=directory, env=environment
            ).returncode
        shown = "\n".join(terminal.lines)
    assert code == 0, shown
    return "\n".join(line.rstrip() for line in shown.strip("\n").splitlines()) + "\n"


def in_every_run(text: str) -> list[str]:
    """
    Gives the lines that two runs have in common, each once: without digits and times of arrival.

    Several runs tell what they do at the same time, and the numbers are those of a machine.
    """
    lines = []
    for line in text.splitlines():
        line = re.sub(r"process \d+", "process 0", line)
        line = re.sub(r"\d{8}-\d{6}-[0-9a-f]{6}", "00000000-000000-000000", line)
        line = re.sub(r"[+-](?=\d)", "", line)
        lines.append(re.sub(r"\s+", " ", re.sub(r"\d+", "0", re.sub(r"([━─])\1+", r"\1", line))).strip())
    return sorted(set(lines))


def torn_lines(text: str, columns: int) -> list[str]:
    """Gives the lines that are wider than the terminal, and those of a table that lack an end."""
    found, width = [], 0
    for line in text.splitlines():
        if line.startswith("┏"):
            width = cell_len(line)
        framed = line.startswith(_LEFT) or line.endswith(_RIGHT)
        whole = line.startswith(_LEFT) and line.endswith(_RIGHT) and cell_len(line) == width
        if (framed and not whole) or (cell_len(line) > columns and not _IN_ONE_PIECE.match(line)):
            found.append(line)
    return found


def main() -> None:
    for columns, path in FILES.items():
        with tempfile.TemporaryDirectory() as directory:
            path.write_text(demo_in_terminal(columns, Path(directory)), encoding="utf-8")
        print(path, flush=True)


if __name__ == "__main__":
    main()
