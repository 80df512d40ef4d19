"""Runs the demo: trains, shows, judges."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..config import HealingConfig
from ..own_files import EVENTS_FILE
from ..report.page.rendering import write_page
from ..report.reading import read_run
from . import faults as plan
from . import text
from .launch import Launch, in_processes
from .record import RunRecord
from .runs import HEALED, PLAIN, TWIN, Episode
from .screen import TITLES, Lines
from .size import DemoSize
from .verdict import contrast_table, equality, incident_table, unmet


PAGE_FILE = "report.html"


@dataclass(frozen=True, slots=True)
class DemoResult:
    """
    Outcome of the demo.

    Args:
        problems (`list[str]`):
            What should have been seen and was not; empty if all is well.
        incidents (`list[dict]`):
            The incidents of the healed run, as [`HealingReport`] gives them.
        held_out_loss (`float`):
            Loss of the trained model on rows it has not seen; NaN if the model is ruined.
        twin_loss (`float` or `None`):
            The same for the fault-free twin, trained by the plain trainer.
    """

    problems: list[str] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    held_out_loss: float = math.nan
    twin_loss: float | None = None


def run_demo(
    output_dir: str | os.PathLike[str],
    *,
    healing: bool = True,
    seed: int = 0,
    size: DemoSize | None = None,
    config: HealingConfig | None = None,
    console: Console | None = None,
    launch: Launch = in_processes,
) -> DemoResult:
    """
    Trains a small language model while three faults strike, with the plain trainer and healed, and shows both.

    Args:
        output_dir (`str` or `os.PathLike`):
            Where the healed run writes its journal, and the report goes. Should not hold an earlier run.
        healing (`bool`, *optional*, defaults to `True`):
            Whether there is a healed run, and a fault-free twin, beside the plain one.
        seed (`int`, *optional*, defaults to 0):
            Of weights and order.
        size ([`DemoSize`], *optional*):
            How much is trained.
        config ([`HealingConfig`], *optional*):
            Of the healing. Defaults to the default configuration with a short wait before the reconnection.
        console ([`~rich.console.Console`], *optional*):
            Where to print.
        launch (`Launch`, *optional*, defaults to [`in_processes`]):
            How the runs are started: beside each other, or one after the other with [`in_turn`].

    Returns:
        [`DemoResult`]: with the expectations that were not met, if any.

    Raises:
        RuntimeError: If there is too little text, or a run's process has died.
    """
    size, console = size or DemoSize(), console or Console(highlight=False)
    # The default first wait is up to 5 seconds: right for a server, long for an audience.
    config = config or HealingConfig(retry_initial_seconds=1.0)
    faults = plan.demo_faults(size.steps)
    names = (PLAIN, HEALED, TWIN) if healing else (PLAIN,)
    episodes = [Episode(name, size, seed, faults, config, str(output_dir)) for name in names]
    runs = {name: RunRecord(size.steps) for name in names}
    # In the second row of the first micro-batch of its step, or somewhat further on.
    poison_row = faults[1].step * size.rows * size.accumulation + size.rows // 2
    told = ", ".join(f"{fault.name} (step {fault.step})" for fault in faults)
    console.print(
        f"\n[bold]SFTTrainer teaches a small Llama {size.training_rows:,} docstrings of Python's library.[/]\n"
        f"Three faults strike: {told}.\n"
        "Loading torch and TRL, and reading the text.\n"
    )
    lines = Lines(console, runs)
    for name, event in launch(episodes, lambda: text.demo_corpus(size, seed, poison_row)):
        runs[name].take_in(event)
        lines.show(name, event)
    console.print()
    if not healing:
        _tell_of_plain(runs[PLAIN], console)
        return DemoResult(held_out_loss=runs[PLAIN].held_out_loss)

    healed, twin = runs[HEALED], runs[TWIN]
    assert healed.ended is not None
    problems = unmet(faults, poison_row, healed, twin)
    loss, twin_loss = healed.held_out_loss, twin.held_out_loss
    console.print(contrast_table({TITLES[name]: run for name, run in runs.items()}))
    console.print(incident_table(faults, healed))
    console.print(
        f"Held-out loss: [bold]{loss:.4f}[/] healed, [bold]{twin_loss:.4f}[/] fault-free twin "
        f"({100 * (loss / twin_loss - 1):+.2f} %)."
    )
    console.print(equality(faults, healed, twin))
    if not problems:
        console.print("[bold green]Every fault was found and healed, and no step was lost.[/]")
    for problem in problems:
        console.print(f"[bold red]Not as it should be:[/] {escape(problem)}.", soft_wrap=True)
    page = Path(output_dir) / PAGE_FILE
    write_page(read_run(Path(output_dir)), page)
    console.print(f"Report: {page}", soft_wrap=True)
    console.print(f"Journal: {Path(output_dir) / EVENTS_FILE}", soft_wrap=True)
    return DemoResult(problems, list(healed.ended.incidents), loss, twin_loss)


def _tell_of_plain(run: RunRecord, console: Console) -> None:
    console.print("[bold]What became of the run[/]\n")
    if run.ruined is not None:
        console.print(
            f"Weights: {run.ruined.tensors} hold NaN since step {run.ruined.step}; the steps after it were in vain."
        )
    else:
        console.print("Weights: all finite.")
    if run.stopped is not None:
        console.print(
            f"Run: killed by {run.stopped.kind} at step {run.step} of {run.steps}; no checkpoint was written."
        )
    else:
        console.print(f"Run: reached its last step, {run.step}.")
    console.print(f"Held-out loss: [bold]{run.held_out_loss:.4f}[/].")
    console.print("The same faults with healing: [bold]self-healing demo[/]")


def fresh_run_dir(parent: str | os.PathLike[str] = "outputs") -> Path:
    """A directory named by the time, so that the journals of two demos do not run into one."""
    return Path(parent) / time.strftime("demo-%Y%m%d-%H%M%S")
