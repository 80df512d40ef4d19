"""What became of the runs of the demo: what was not as it should be, and the tables at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from .events import cause_of, remedy_of
from .faults import DemoFault
from .record import RunRecord, first_difference


def unmet(faults: Sequence[DemoFault], poison_row: int, healed: RunRecord, twin: RunRecord) -> list[str]:
    """
    Lists what a run that healed everything would show, and this one did not.

    Args:
        faults (`Sequence[DemoFault]`):
            What was to strike.
        poison_row (`int`):
            The row that should be blamed.
        healed ([`RunRecord`]):
            The run they struck.
        twin ([`RunRecord`]):
            The same without faults.
    """
    assert healed.ended is not None
    incidents, struck = healed.ended.incidents, healed.ended.struck
    problems = []
    if healed.stopped is not None:
        problems.append(f"the run ended with {healed.stopped.kind}")
    if healed.step != healed.steps:
        problems.append(f"{healed.step} of {healed.steps} steps were trained")
    for fault in faults:
        if fault.kind not in struck:
            problems.append(f"the {fault.name} never struck")
            continue
        found = _incidents_of(fault, incidents)
        if len(found) != 1:
            problems.append(f"the {fault.name} is the cause of {len(found)} incidents, not of one")
        problems += [
            f"the {fault.name} at step {incident['step']} was not healed without loss: {incident['outcome']}, "
            f"{incident['steps_lost']} steps lost"
            for incident in found
            if incident["outcome"] != "resolved" or incident["steps_lost"]
        ]
    known = {fault.failure.value for fault in faults}
    problems += [
        f"an incident that no fault explains, at step {incident['step']}: {incident['symptom']}, {incident['cause']}"
        for incident in incidents
        if incident["failure"] not in known
    ]
    blamed = [row["dataset_index"] for incident in incidents for row in incident["evidence"].get("rows", ())]
    if blamed != [poison_row]:
        problems.append(f"rows {blamed} were blamed, row {poison_row} is the poison sample")
    different, poisoned = first_difference(healed, twin), poison_step(faults)
    if different is not None and different <= poisoned:
        problems.append(
            f"the weights differ from the fault-free twin's from step {different} on, and should be bitwise equal "
            f"through step {poisoned}"
        )
    loss, twin_loss = healed.held_out_loss, twin.held_out_loss
    if not abs(loss - twin_loss) <= 0.02 * twin_loss:
        problems.append(f"the held-out loss, {loss:.4f}, is more than 2 % off the twin's, {twin_loss:.4f}")
    return problems


def poison_step(faults: Sequence[DemoFault]) -> int:
    """The last step before the poison row, which the twin learns from and the healed run does not."""
    return next(fault.step for fault in faults if fault.kind == "poison_samples")


def equality(faults: Sequence[DemoFault], healed: RunRecord, twin: RunRecord) -> str:
    """How far the weights of the healed run are bitwise those of the twin, as compared after every step."""
    different = first_difference(healed, twin)
    if different is None:
        return f"Bitwise equal to the fault-free twin after each of {len(twin.weights)} steps."
    if different <= poison_step(faults):
        return f"Bitwise equal to the fault-free twin up to step {different - 1} only."
    return (
        f"Bitwise equal to the fault-free twin up to the poison row: all weights, compared after each of the first "
        f"{different - 1} steps. From there on they differ: the twin, which had no fault, also learned from that row."
    )


def _incidents_of(fault: DemoFault, incidents: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [incident for incident in incidents if incident["failure"] == fault.failure.value]


def incident_table(faults: Sequence[DemoFault], healed: RunRecord) -> Table:
    """Each fault, and what the healed run made of it."""
    assert healed.ended is not None
    table = Table(header_style="bold")
    for column in ("fault", "cause found", "remedy", "steps\nlost", "seconds\nlost"):
        table.add_column(column, justify="right" if "lost" in column else "left")
    for fault in faults:
        name = f"{fault.name}\n(step {fault.step})"
        found = _incidents_of(fault, healed.ended.incidents)
        for incident in found:
            table.add_row(
                name,
                escape(cause_of(incident)),
                escape(remedy_of(incident)),
                str(incident["steps_lost"]),
                f"{incident['seconds_lost']:.2f}",
            )
        if not found:
            missing = "not found" if fault.kind in healed.ended.struck else "never struck"
            table.add_row(name, f"[bold red]{missing}[/]", "", "", "")
    return table


def contrast_table(runs: Mapping[str, RunRecord]) -> Table:
    """What became of each run: a column for each, by the name it is shown under."""
    table = Table(header_style="bold")
    table.add_column("")
    for title in runs:
        table.add_column(title)
    table.add_row("came to", *(_came_to(run) for run in runs.values()))
    table.add_row("weights", *(_weights(run) for run in runs.values()))
    table.add_row("held-out loss", *(f"{run.held_out_loss:.4f}" for run in runs.values()))
    return table


def _came_to(run: RunRecord) -> str:
    if run.stopped is None:
        return f"step {run.step} of {run.steps}"
    return f"[bold red]dead at step {run.step} of {run.steps}[/]\n{escape(run.stopped.kind)}"


def _weights(run: RunRecord) -> str:
    if run.ruined is None:
        return "all finite"
    return f"[bold red]{run.ruined.tensors}\nhold NaN since step {run.ruined.step}[/]"
