"""Chaos, for half a minute: a job that learns runs out of memory, hangs and is killed; and the ledger of it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..chaos.faults import KINDS, Ledger, Strike
from ..chaos.rehearsal import Survival, command_line, environment, survival_table, survived


JOB = Path(__file__).with_name("job.py")
LEDGER_FILE, LOG_FILE = "chaos.jsonl", "chaos.log"
_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class RehearsalResult:
    """
    Outcome of the rehearsal.

    Args:
        exit_code (`int`):
            Of the job.
        rows (`list[Survival]`):
            What became of each fault.
        held_out_loss (`float`, *optional*):
            Loss in the end on rows that it has not seen; `None` if it did not get there.
        unigram_loss (`float`, *optional*):
            What the frequencies of tokens alone would give there.
    """

    exit_code: int
    rows: list[Survival]
    held_out_loss: float | None = None
    unigram_loss: float | None = None

    @property
    def problems(self) -> list[str]:
        """What should have been seen and was not; empty if all is well."""
        problems = [] if self.exit_code == 0 else [f"the job came out with exit code {self.exit_code}"]
        problems += [f"{row.fault} was not survived: {row.outcome}" for row in self.rows if not row.survived]
        problems += [f"{row.fault} never took place" for row in self.rows if not row.effect]
        if not self.rows:
            problems.append("no fault struck")
        loss, least = self.held_out_loss, self.unigram_loss
        if loss is not None and least is not None and not loss < least:
            problems.append(f"the held-out loss, {loss:.3f}, is not below the {least:.3f} of token frequencies alone")
        return problems


def rehearsal_faults(steps: int) -> str:
    """Gives the faults of the rehearsal, a quarter of the run apart."""
    return f"oom@{steps // 4},hang@{steps // 2}:seconds=60,sigkill@{3 * steps // 4 + 2}"


def run_rehearsal(
    output_dir: str | os.PathLike[str], *, steps: int = 80, seed: int = 0, console: Console | None = None
) -> RehearsalResult:
    """
    Trains a tiny language model under torchrun while it runs out of memory, hangs and is killed, and shows it.

    Args:
        output_dir (`str` or `os.PathLike`):
            Where the job writes checkpoints and journal; ledger and log go beside it.
        steps (`int`, *optional*, defaults to 80):
            Optimizer steps.
        seed (`int`, *optional*, defaults to 0):
            Of the weights.
        console ([`~rich.console.Console`], *optional*):
            Where to print.

    Returns:
        [`RehearsalResult`]: What was survived.
    """
    console = console or Console(highlight=False)
    directory = Path(output_dir)
    directory.parent.mkdir(parents=True, exist_ok=True)
    ledger, log = Ledger(directory.parent / LEDGER_FILE), directory.parent / LOG_FILE
    console.print(
        "\n[bold]Chaos: a job that learns runs out of memory, hangs, and is killed.[/]\n"
        "It is started by torchrun, which starts it again when its process is gone."
    )
    told: dict[str, Any] = {}
    lines = _Lines(console, steps)
    code = None
    for line in _lines_of(directory, steps, seed, ledger, log):
        if isinstance(line, int):
            code = line
        elif line is not None:
            told.update(line)
            lines.take_in(line)
        lines.strikes(ledger.strikes())
        lines.outcomes(survived(ledger, ledger.run_dirs()))
    assert code is not None
    rows = survived(ledger, ledger.run_dirs())
    result = RehearsalResult(code, rows, told.get("held_out_loss"), told.get("unigram_loss"))
    console.print(survival_table(rows))
    if result.held_out_loss is not None:
        console.print(
            f"Held-out loss: [bold]{result.held_out_loss:.3f}[/]; the frequencies of tokens alone would give "
            f"{result.unigram_loss:.3f}."
        )
    for problem in result.problems:
        console.print(
            f"[bold red]Not as it should be:[/] {escape(problem)}. The job's own words: {log}", soft_wrap=True
        )
    if not result.problems:
        console.print("[bold green]Every fault was survived.[/]")
    console.print(f"Ledger: {directory.parent / LEDGER_FILE}", soft_wrap=True)
    return result


def _lines_of(
    directory: Path, steps: int, seed: int, ledger: Ledger, log: Path
) -> Iterator[dict[str, Any] | int | None]:
    """Starts the job; gives what it tells line by line, `None` while it is silent, and its exit code in the end."""
    command = command_line(JOB, [str(directory), str(steps), str(seed)], restarts=1)
    told = environment(rehearsal_faults(steps), seed, ledger.path, None) | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    with log.open("w") as errors:
        process = subprocess.Popen(command, env=told, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
            reader.start()
            while True:
                try:
                    line = lines.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    yield None
                    continue
                if line is None:
                    break
                yield _parsed(line)
            yield process.wait()
        finally:
            process.terminate()
            process.wait()


def _read(stream: Any, lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _parsed(line: str) -> dict[str, Any] | None:
    """What the job tells; nothing for what libraries print."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class _Lines:
    """What the job tells, what strikes, and what was healed, as it comes."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._step = self._processes = self._struck = 0
        self._healed: set[str] = set()

    def take_in(self, line: dict[str, Any]) -> None:
        if "pid" in line:
            self._processes += 1
            self._note("bold green" if self._processes > 1 else "dim", self._began(line["pid"]))
        if "step" in line:
            if self._processes > 1 and self._step > line["step"]:
                self._note("bold green", f"goes on from the checkpoint of step {line['step'] - 1}")
            self._step = int(line["step"])
            if self._step % max(self._steps // 8, 1) == 0:
                self._note("dim", f"loss {line['loss']:.4f}")

    def _began(self, pid: int) -> str:
        return f"process {pid} begins" if self._processes == 1 else f"torchrun has started process {pid}"

    def strikes(self, strikes: Sequence[Strike]) -> None:
        for strike in strikes[self._struck :]:
            self._step = strike.step
            self._note("bold yellow", f"{strike.kind}: {KINDS[strike.kind].what}")
        self._struck = len(strikes)

    def outcomes(self, rows: Sequence[Survival]) -> None:
        for row in rows:
            if row.incident is None or row.fault in self._healed or not row.survived or row.outcome == "open":
                continue
            self._healed.add(row.fault)
            done = ", ".join(action.replace("_", " ") for action in row.actions)
            self._note("bold green", f"healed {row.fault.partition('@')[0]}: {done}")

    def _note(self, style: str, text: str) -> None:
        # In a file, a line that is searched for is in one piece.
        piped = not self._console.is_terminal
        self._console.print(f"  {self._step:>4}/{self._steps}  [{style}]{escape(text)}[/]", soft_wrap=piped)
