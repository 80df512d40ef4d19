"""
What the demo prints in a terminal of 80 columns, as it is kept in `docs/img`.

`make demo-output` runs the demo, some two minutes, and writes the file again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from replayed_terminal import terminal_of


KEPT = Path(__file__).parent.parent / "docs" / "img" / "demo.txt"


def demo_in_terminal() -> str:
    """Runs `self-healing demo` as a user does, and returns what is on the screen in the end."""
    command = [sys.executable, "-m", "self_healing.tools.cli", "demo", "--output-dir", "outputs/demo"]
    # The size is that of the terminal; the demo keeps itself from the Hub.
    left_out = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    environment = {
        name: value for name, value in os.environ.items() if name not in left_out and not name.startswith("HF_")
    }
    with tempfile.TemporaryDirectory() as directory, terminal_of(80) as terminal:
        code = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stdout,
            stderr=sys.stderr,
            cwd=directory,
            env=environment | {"TERM": "xterm"},
        ).returncode
    shown = "\n".join(terminal.lines)
    assert code == 0, shown
    return shown.strip("\n") + "\n"


def in_every_run(text: str) -> list[str]:
    """The words that two runs have in common: without numbers, and files without their directory."""
    words = [word.rpartition("/")[2] for word in re.sub("[━─]+", "─", text).split()]
    return [re.sub(r"\d{8}-\d{6}-[0-9a-f]{6}|[+-]?\d+", "0", word) for word in words]


def main() -> None:
    # Wherever Python is installed here.
    shown = demo_in_terminal().replace(sysconfig.get_path("stdlib"), "/usr/lib/python3.11")
    KEPT.write_text(shown, encoding="utf-8")
    print(KEPT)


if __name__ == "__main__":
    main()
