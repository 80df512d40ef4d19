"""A checkup as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .coverage import recorded
from .doctor import Checkup, size_in_words
from .job import Job


_STYLES = {"healed": "green", "in part": "yellow", "not shown": "red", "not run": "dim", "no launcher": "red"}
_UNKNOWN = "not known"


def print_checkup(checkup: Checkup, console: Console) -> None:
    """
    Prints what there is, what is healed here, and what will not work.

    Args:
        checkup ([`Checkup`]), console (`Console`):
            What was found, and where to.
    """
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for name, value in _facts(checkup):
        facts.add_row(name, Text(value))
    ranks = [] if checkup.job is None else [Text(), *_ranks(checkup.job)]
    console.print(Group(facts, *ranks, Text(), *_healed(checkup)))
    for problem in checkup.problems:
        style = "bold red" if problem.severity == "problem" else "yellow"
        console.print(Text.assemble((f"{problem.severity}: ", style), f"{problem.what} ", (problem.to_do, "italic")))
    if checkup.works:
        console.print("Nothing was found that will not work." if checkup.problems else "All is well.")


def _ranks(job: Job) -> Iterator[RenderableType]:
    """A row for each rank of the job."""
    table = Table(title="Ranks", title_justify="left", header_style="bold")
    table.add_column("rank", justify="right")
    for name in ("host", "device"):
        table.add_column(name, overflow="fold")
    for name in ("TFLOP/s", "memory GB/s", "host GB/s", "links GB/s"):
        table.add_column(name, justify="right")
    table.add_column("results")
    for row in job.rows:
        measured = (row.teraflops, row.memory, row.from_host, row.neighbours)
        wrong = job.wrong.get(row.rank)
        results = Text("wrong", "bold red") if wrong else Text("none" if row.error else "right")
        cells = ("-" if each is None else f"{each:.3g}" for each in measured)
        table.add_row(str(row.rank), row.host, row.device, *cells, results)
    yield table
    if job.all_reduce is not None:
        yield Text(f"A large all-reduce moves {job.all_reduce:.3g} GB/s to and from each rank.", "dim")


def _healed(checkup: Checkup) -> Iterator[RenderableType]:
    """What is healed here, and the notes below it."""
    table = Table(title="What is healed here", title_justify="left", header_style="bold")
    table.add_column("what goes wrong")
    for column in checkup.coverage[0].shown if checkup.coverage else ():
        table.add_column(column, no_wrap=True)
    notes: dict[str, int] = {}
    for row in checkup.coverage:
        cells = []
        for shown in row.shown.values():
            number = f" ({notes.setdefault(shown.what, len(notes) + 1)})" if shown.what else ""
            cells.append(Text(shown.state + number, _STYLES.get(shown.state, "")))
        table.add_row(row.what, *cells)
    yield table
    yield from (Text(f"({number}) {what}", "dim") for what, number in notes.items())
    words = "healed: tests inject it into real runs, and passed; not shown: no test does"
    yield Text(f"{words} (last run: {recorded()}).", "dim")


def _facts(checkup: Checkup) -> Iterator[tuple[str, str]]:
    machine, place, setting = checkup.machine, checkup.place, checkup.setting
    device, launch = machine.device, setting.launch
    yield "python", f"{machine.python} on {machine.system}"
    yield "libraries", ", ".join(f"{name} {version}" for name, version in machine.libraries.items() if version)
    missing = [name for name, version in machine.libraries.items() if version is None]
    if missing:
        yield "not installed", ", ".join(missing)
    yield "device", ", ".join(device.names) if device.names else f"{device.kind}, {machine.cores or '?'} cores"
    yield "precision", ", ".join(["fp32", *(["bf16"] if device.bf16 else []), *(["fp16"] if device.names else [])])
    if device.cuda or device.driver:
        yield "CUDA", f"{device.cuda or 'none'} in torch, driver {device.driver or _UNKNOWN}"
    if device.total is not None:
        yield "device memory", f"{size_in_words(device.free)} free of {size_in_words(device.total)}"
    yield "host memory", f"{size_in_words(machine.memory_free)} free of {size_in_words(machine.memory_total)}"
    there = "" if place.exists else " (not made yet)"
    writable = "" if place.why_not_writable is None else ", cannot be written"
    yield "directory", f"{place.path}{there}: {size_in_words(place.free)} free{writable}"
    again = {None: "restarts not known", 0: "no restarts left"}.get(launch.restarts_left)
    again = again or f"{launch.restarts_left} restarts left"
    none = ("accelerate, with a plain python" if setting.by_accelerate else "none (plain python)") + (
        " in a pod" if launch.in_a_pod else ""
    )
    yield "launcher", none if launch.launcher == "none" else f"{launch.launcher}, {again}"
    engine = setting.engine or ("FSDP" if setting.sharded else "DDP" if setting.ranks > 1 else "")
    yield "processes", f"{setting.ranks}{f', {engine}' if engine else ''}"
    ignored = machine.ignored_signals
    yield "signals", f"{', '.join(ignored)} ignored" if ignored else "SIGTERM and SIGUSR1 arrive"
