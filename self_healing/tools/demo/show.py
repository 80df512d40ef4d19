"""
The demo: a small language model learns real text, three faults strike, and the terminal shows what becomes of them.

The plain trainer meets the faults, then a healed one does. Nothing in it is acted: the models train, the faults are
injected where real ones arise, and what is told at the end is read from the runs; what they did not show is a failure
of the demo. Torch and TRL are imported once the first lines are shown.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from ...config.healing_config import HealingConfig
from ...report.healing_report import HealingReport
from ...report.page.rendering import write_page
from ...report.reading import read_run
from ...system.files import EVENTS_FILE
from ..chaos.faults import Ledger
from ..chaos.rehearsal import Survival, command_line, environment, survival_table, survived


if TYPE_CHECKING:
    from .episode import Task
    from .model import DemoSize


# A quarter of the 80 steps apart; the last one after a checkpoint.
_REHEARSED = "oom@20,hang@40:seconds=60,sigkill@62"


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Outcome of the demo; `problems` are what should have been seen and was not."""

    problems: list[str] = field(default_factory=list)


def run_demo(
    output_dir: str | os.PathLike[str],
    *,
    healing: bool = True,
    seed: int = 0,
    size: DemoSize | None = None,
    config: HealingConfig | None = None,
    console: Console | None = None,
) -> DemoResult:
    """Trains while three faults strike, with the plain trainer and healed, and shows both."""
    console = console or Console(highlight=False)
    console.print("\n[bold]SFTTrainer teaches a small Llama the docstrings of Python's library.[/]")
    console.print("Loading torch and TRL, and reading the text.")
    # Nothing is asked of the Hub, whose client reads this when it is imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from .episode import FAULTS, Episode, make_task
    from .model import DemoSize

    task = make_task(size or DemoSize(), seed)
    console.print(f"Three faults strike in {task.size.steps} steps:")
    for fault in task.faults:
        console.print(f"  after step {fault.at}: {FAULTS[fault.kind]}")
    # The default first wait is up to 5 seconds: right for a server, long for an audience.
    config = config or HealingConfig(api_retry_base_delay=1.0)
    console.print("\n[bold]Plain trainer[/]")
    Episode(task, console).run(str(output_dir))
    if not healing:
        console.print("\nThe same faults with healing: [bold]self-healing demo[/]")
        return DemoResult()
    console.print("\nWith self_healing", style="bold")
    report = Episode(task, console).run(str(output_dir), config)
    console.print(str(report), markup=False)
    problems = unmet(task, report)
    if not problems:
        console.print("[bold green]Every fault was found and healed, and no step was lost.[/]")
    _print_problems(problems, console)
    directory = Path(output_dir)
    write_page(read_run(directory), directory / "report.html")
    console.print(f"Report: {directory / 'report.html'}", soft_wrap=True)
    console.print(f"Journal: {directory / EVENTS_FILE}", soft_wrap=True)
    return DemoResult(problems)


def _print_problems(problems: Sequence[str], console: Console) -> None:
    for problem in problems:
        console.print(f"[bold red]Not as it should be:[/] {escape(problem)}.", soft_wrap=True)


def unmet(task: Task, report: HealingReport) -> list[str]:
    """What a run that healed everything would show, and this one did not."""
    problems = []
    outcomes = [incident["outcome"] for incident in report.incidents]
    if outcomes != ["resolved"] * len(task.faults) or report.steps_lost:
        problems.append(f"{len(task.faults)} faults led to {len(outcomes)} incidents ({outcomes}); {report.lost}")
    blamed = [row["dataset_index"] for incident in report.incidents for row in incident["evidence"].get("rows", ())]
    if blamed != [task.poison_row]:
        problems.append(f"rows {blamed} were blamed, row {task.poison_row} is the poison sample")
    return problems


# ---- chaos ----


@dataclass(frozen=True, slots=True)
class RehearsalResult:
    """Outcome of the rehearsal: exit code of the job, and what became of each fault."""

    exit_code: int
    rows: list[Survival]

    @property
    def problems(self) -> list[str]:
        """What should have been seen and was not; empty if all is well."""
        problems = [] if self.exit_code == 0 else [f"the job came out with exit code {self.exit_code}"]
        problems += [f"{row.fault} was not survived: {row.outcome}" for row in self.rows if not row.survived]
        problems += [f"{row.fault} never struck" for row in self.rows if not row.effect]
        return problems if self.rows else [*problems, "no fault struck"]


def run_rehearsal(
    output_dir: str | os.PathLike[str], *, seed: int = 0, console: Console | None = None
) -> RehearsalResult:
    """Trains a tiny model under torchrun while it runs out of memory, hangs and is killed, and shows it."""
    console = console or Console(highlight=False)
    directory = Path(output_dir)
    directory.parent.mkdir(parents=True, exist_ok=True)
    ledger, log = Ledger(directory.parent / "chaos.jsonl"), directory.parent / "chaos.log"
    console.print(
        "\n[bold]Chaos: a job that learns runs out of memory, hangs, and is killed.[/]\n"
        "It is started by torchrun, which starts it again when its process is gone."
    )
    command = command_line(Path(__file__).with_name("episode.py"), [str(directory), str(seed)], restarts=1)
    told = environment(_REHEARSED, seed, ledger.path) | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=told, stdout=subprocess.PIPE, stderr=errors, text=True) as job,
    ):
        assert job.stdout is not None
        for line in job.stdout:
            console.print(escape(line.rstrip()), soft_wrap=not console.is_terminal)
    result = RehearsalResult(job.wait(), survived(ledger, *ledger.run_dirs()))
    console.print(survival_table(result.rows))
    if not result.problems:
        console.print("[bold green]Every fault was survived.[/]")
    _print_problems(result.problems, console)
    console.print(f"Ledger: {directory.parent / ledger.path.name}\nLog: {log}", soft_wrap=True)
    return result
