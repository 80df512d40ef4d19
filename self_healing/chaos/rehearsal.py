"""Runs a script under faults in a process of its own, and tells what was survived."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .faults import parse_faults
from .ledger import Ledger
from .run import environment
from .survival import Survival, survived


def command_line(script: Path, arguments: Sequence[str], restarts: int, processes: int = 1) -> list[str]:
    """Plain Python, or torchrun where the script is to be started again, or in several processes."""
    launcher = [sys.executable]
    if restarts > 0 or processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        launcher += ["--max-restarts", str(restarts)]
    return [*launcher, "-m", "self_healing.chaos.run", str(script), *arguments]


def rehearse(
    script: str | os.PathLike[str],
    faults: str,
    arguments: Sequence[str] = (),
    seed: int = 0,
    restarts: int = 0,
    ledger: str | os.PathLike[str] = "chaos.jsonl",
    min_gap: int | None = None,
    processes: int = 1,
) -> tuple[int, list[Survival]]:
    """
    Runs a training script under faults.

    Args:
        script (`str` or `PathLike`):
            The script, which is not changed.
        faults (`str`):
            As [`parse_faults`] reads them.
        arguments (`Sequence[str]`):
            Of the script.
        seed (`int`, *optional*, defaults to 0), min_gap (`int`, *optional*):
            Of [`Chaos`].
        restarts (`int`, *optional*, defaults to 0):
            How often torchrun starts the script again.
        ledger (`str` or `PathLike`):
            The file that remembers what has struck.
        processes (`int`, *optional*, defaults to 1):
            How many of them train together.

    Returns:
        `tuple[int, list[Survival]]`: The exit code and what became of each fault.

    Raises:
        `FaultError`: if a fault cannot be had like this.
    """
    parse_faults(faults)
    book = Ledger(ledger)
    process = subprocess.run(
        command_line(Path(script), arguments, restarts, processes),
        env=environment(faults, seed, book.path, min_gap),
        check=False,
    )
    return process.returncode, survived(book, book.run_dirs())
