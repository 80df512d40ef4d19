"""Says what to do next about a run, most pressing first."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..failures.recipes import ASKS_FOR_A_NEW_RUN, FAILURE_RECIPES, FailureType
from ..journal.incident import counted
from .records import Budget, Checkpoint, Entry, IncidentStory, NextStep, RunReport, State, sentence
from .verdict import needs_a_look


def next_steps(report: RunReport, rate: float | None, postmortem: Mapping[str, Any] | None) -> list[NextStep]:
    """
    Says what to do next about a run of which all else is known; `rate` is the learning rate that worked, if it was
    reduced, and `postmortem` what ended it.
    """
    verdict, directory = report.verdict, Path(report.directory)
    anew = postmortem is not None and postmortem.get("failure") in ASKS_FOR_A_NEW_RUN
    over = report.state.name in ("running", "ended")
    found = [
        *([] if over else _about_the_state(report, postmortem, anew)),
        *(_about_budgets(report.budgets) if report.state.name == "running" else ()),
        *_about_incidents(directory, report.incidents),
        *([NextStep("Do not use the weights.", verdict.reasons)] if verdict and verdict.name == "do not use" else []),
        *_about_rows(directory, report.quarantine),
    ]
    # What goes on from a checkpoint goes on at its rate.
    if over and rate is not None and all(each.failure != FailureType.LEARNING_RATE for each in report.incidents):
        found.append(
            NextStep(f"Start the next run with learning_rate={rate:.3g}.", "The rate of this one had to be reduced.")
        )
    if found:
        return _once(found)
    if verdict is None:
        return [NextStep("Let it run.", "No incident is open, and no budget is nearly used up.")]
    return [NextStep(verdict.learned, verdict.reasons)]


def _about_the_state(report: RunReport, postmortem: Mapping[str, Any] | None, anew: bool) -> Iterable[NextStep]:
    state = report.state
    if state.name == "unknown" and state.pid is not None:
        yield NextStep(
            f"Check whether process {state.pid} on {state.host} is still running.",
            "Only that machine can tell whether the run is still going.",
            f"ps -p {state.pid}",
        )
    interrupted = postmortem is not None and postmortem.get("failure") == FailureType.INTERRUPTED
    if postmortem is not None and not interrupted:
        yield NextStep(
            postmortem.get("what_to_do") or "Read the postmortem.", sentence(postmortem.get("verdict") or state.why)
        )
    elif state.name == "died":
        recipe = FAILURE_RECIPES[FailureType.PROCESS_DIED]
        yield NextStep(recipe.advice, recipe.diagnosis)
    elif state.name == "stopped" and not interrupted:
        yield NextStep("Fix the error in its last output.", sentence(state.why or "train() was left before its end"))
    if not anew:
        told = None if postmortem is None else postmortem.get("resume_with")
        yield _resume(report, told)


def _resume(report: RunReport, told: str | None) -> NextStep:
    """How to go on: as the postmortem has `told`, else from the newest checkpoint that is usable."""
    state, usable = report.state, [each for each in report.checkpoints if each.usable]
    if told:
        # By its end, as the run directory may have been moved; not checkpoint-40 for last-known-good/checkpoint-40.
        of_it = [each for each in usable if told.endswith(f"/{each.path}')")]
        known = max(of_it, key=lambda each: len(each.path), default=None)
        if known is None:
            return NextStep("Resume from where the postmortem says.", "It names the checkpoint.", told)
        text = f"Resume: {known.path} (step {known.step}, {known.standing}) is what the postmortem names."
        return NextStep(text, _done_again(state, known), told)
    if not usable:
        return NextStep(
            "Start the run again.",
            "No marker of this run names a complete checkpoint; `self-healing check` reads the files themselves.",
            f"self-healing check {shlex.quote(report.output_dir)}",
        )
    newest = usable[0]
    return NextStep(
        f"Resume: {newest.path} (step {newest.step}, {newest.standing}) is the newest usable checkpoint.",
        _done_again(state, newest),
        f"trainer.train(resume_from_checkpoint={os.path.join(report.output_dir, newest.path)!r})",
    )


def _done_again(state: State, checkpoint: Checkpoint) -> str:
    lost = max(state.step - checkpoint.step, 0)
    return "No step is lost." if lost == 0 else f"{counted(lost, 'step')} {'is' if lost == 1 else 'are'} done again."


def _about_budgets(budgets: Sequence[Budget]) -> Iterable[NextStep]:
    for budget in budgets:
        if budget.used > 0 and budget.left <= 0.25 * budget.limit:
            yield NextStep(
                f"Watch the budget, {budget.name}: {budget.left:g} of {budget.limit:g} left.",
                f"{budget.told} Setting: {budget.setting}.",
            )


def _about_incidents(directory: Path, incidents: Sequence[IncidentStory]) -> Iterable[NextStep]:
    by_advice: dict[str, list[IncidentStory]] = {}
    for incident in filter(needs_a_look, incidents):
        if incident.advice or _batch_of(incident):
            by_advice.setdefault(incident.advice, []).append(incident)
    for advice, about in by_advice.items():
        kept = [each for each in about if _batch_of(each)]
        yield NextStep(
            advice or "Compute its batch again, to see where the first non-finite value appears.",
            _concerned(about),
            f"self-healing replay {shlex.quote(str(directory))} {shlex.quote(kept[-1].id)}" if kept else None,
            [each.id for each in about],
        )


def _batch_of(incident: IncidentStory) -> bool:
    return any(each["what"] == "offending batch" for each in incident.files)


def _concerned(incidents: Sequence[IncidentStory]) -> str:
    """Names the incidents that the same advice is about, and says what it is that was only reported."""
    newest = incidents[-1]
    told = f" {sentence(newest.diagnosis)}" if newest.outcome == "reported" and newest.diagnosis else ""
    several = f"{len(incidents)} incidents, the newest: step" if len(incidents) > 1 else "Step"
    return f"{several} {newest.step}, {newest.title}: {newest.outcome}.{told}"


def _once(steps: Sequence[NextStep]) -> list[NextStep]:
    """Gives each advice once: a postmortem tells that of the incident that ended the run, and goes on from there."""
    kept: list[NextStep] = []
    for given in steps:
        # Advice that enumerates, in a list that is numbered.
        step = replace(given, text=re.sub(r"(?<!\w)\(\d\) ", "", given.text))
        same = next((at for at, each in enumerate(kept) if each.text.startswith(step.text)), None)
        if same is None:
            kept.append(step)
            continue
        first = kept[same]
        why = first.why if step.why in first.why else f"{first.why} {step.why}".strip()
        incidents = list(dict.fromkeys([*first.incidents, *step.incidents]))
        kept[same] = NextStep(first.text, why, first.command or step.command, incidents)
    return kept


def _about_rows(directory: Path, quarantine: Sequence[Entry]) -> Iterable[NextStep]:
    # What was generated is not there to be repaired.
    quarantine = [row for row in quarantine if row["kind"] != "completion"]
    if quarantine:
        named = ", ".join(row["name"] for row in quarantine[:3]) + (", ..." if len(quarantine) > 3 else "")
        yield NextStep(
            f"Repair or remove {counted(len(quarantine), 'row')} of the data: {named}.",
            f"What is left out of training is listed in {directory / 'quarantine.jsonl'}.",
        )
