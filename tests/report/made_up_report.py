"""A report with something in each of its fields, for pages and files that are made of it."""

from __future__ import annotations

import math
import random

from self_healing.report.records import (
    AttemptRow,
    Budget,
    CheckpointRow,
    FileNamed,
    Goodput,
    IncidentStory,
    LoggedMetric,
    NextStep,
    Notice,
    RankRow,
    RowNamed,
    RunBrief,
    RunReport,
    Series,
    State,
    StepColumns,
    StoryLine,
)


BEGAN = 1_795_400_000.0
SAMPLE_TEXT = "what the sample says"
OUTCOMES = ("resolved", "reported", "unresolved", "self_recovered", "open", "fatal")


def made_up_steps(first: int, last: int, seed: int = 0) -> StepColumns:
    """Steps of a run that learns, with a gradient that stands far out in the middle and a loss that is not finite."""
    chance, columns = random.Random(seed), StepColumns()
    for step in range(first, last):
        loss = 2 + 5 * math.exp(-step / 400) + 0.1 * chance.gauss(0, 1)
        norm = 900.0 if step == (first + last) // 2 else abs(1 + 0.2 * chance.gauss(0, 1))
        columns.step.append(step)
        columns.steps.append(1)
        columns.skipped.append(0)
        columns.time.append(BEGAN + 0.4 * step)
        columns.seconds.append(9.0 if step % 500 == 499 else 0.4 + 0.02 * chance.random())
        columns.busy.append(0.35)
        columns.loss.append(None if step == first + 7 else loss)
        columns.loss_max.append(None if step == first + 7 else loss)
        columns.grad_norm.append(norm)
        columns.grad_norm_max.append(norm)
        columns.grad_norm_usual.append(1.0)
        columns.grad_norm_bound.append(4.0)
        columns.learning_rate.append(2e-4 * (1.0 if step < (first + last) // 2 else 0.5))
        columns.learning_rate_scale.append(1.0 if step < (first + last) // 2 else 0.5)
        columns.memory.append(6.1e10 + 1e9 * chance.random())
        columns.memory_peak.append(6.3e10)
        columns.host_memory.append(1.2e10)
        columns.attempt.append(1)
    return columns


def made_up_incident(number: int, step: int, outcome: str = "resolved", mark: str = "") -> IncidentStory:
    return IncidentStory(
        id=f"run-{number:03d}{mark}",
        step=step,
        symptom=f"nonfinite_loss{mark}",
        failure="nonfinite_poison_rows",
        cause=f"poison rows{mark}",
        severity="warning",
        outcome=outcome,
        actions=["quarantine_rows", f"drop_rows{mark}"],
        steps_lost=number % 2,
        seconds_lost=0.4 * number,
        title=f"loss not finite: poison rows{mark}",
        text=f"A paragraph{mark}",
        advice=f"Look at the rows{mark}",
        time=BEGAN + step,
        closed=BEGAN + step + 9,
        rank=number % 2,
        attempt=1,
        evidence={f"rows{mark}": [17, 44], "text": mark},
        story=[
            StoryLine(
                "evidence", f"The loss was NaN{mark}", details={"value": "nan", "baseline": 2.31, f"k{mark}": mark}
            ),
            StoryLine("experiment", f"Computed again: NaN{mark}"),
            StoryLine(
                "experiment", "Rows 17 and 44 are NaN by themselves", details={"control": {f"of{mark}": [mark]}}
            ),
            StoryLine("cause", f"These rows make the loss non-finite{mark}"),
            StoryLine("remedy", f"Two rows were left out{mark}"),
            StoryLine("remedy", "Went back", happened=False, details={"why": f"no trusted state{mark}"}),
            StoryLine(f"outcome{mark}" if mark else "outcome", "The loss is back"),
        ],
        rows=[
            RowNamed(
                f"row 17{mark}", "row", f"not finite{mark}", preview=SAMPLE_TEXT, details={"preview": SAMPLE_TEXT}
            )
        ],
        files=[FileNamed(f"offending batch{mark}", f"incidents/{mark}.pt", 12345)],
    )


def made_up_report(steps: int = 2000, incidents: int = 6, mark: str = "") -> RunReport:
    """
    Makes a report.

    Args:
        steps (`int`, *optional*, defaults to 2000):
            Steps that were done.
        incidents (`int`, *optional*, defaults to 6):
            Spread over them.
        mark (`str`, *optional*, defaults to `""`):
            Stands in every text that a run, its data, or its machine has written.
    """
    back = steps // 2
    undone = made_up_steps(back, back + steps // 20, seed=1)
    return RunReport(
        run=f"20261123-033416-9936b2{mark}",
        directory=f"/data/runs/llama-sft{mark}",
        output_dir=f"/data/runs/llama-sft{mark}",
        made=BEGAN + steps,
        state=State(
            f"died{mark}" if mark else "died",
            steps,
            2 * steps,
            BEGAN + steps,
            42,
            f"host{mark}",
            f"why{mark}",
            f"Died{mark}.",
        ),
        objective=f"sft{mark}",
        detectors=[f"nonfinite{mark}"],
        rules=[f"overfitting{mark}"],
        began=BEGAN,
        incidents=[
            made_up_incident(number, (2 * number - 1) * steps // (2 * incidents), OUTCOMES[number % 6], mark)
            for number in range(1, incidents + 1)
        ],
        notices=[Notice(40, f"loss_notice{mark}", f"A high loss{mark}.")],
        goodput=Goodput(1000, 900, 20, 15, 30, 35, 0.9, steps, steps + steps // 20),
        budgets=[Budget(f"recoveries{mark}", f"max_recovery_attempts{mark}", 1, 5, f"Entries without progress{mark}")],
        attempts=[
            AttemptRow(1, 41, f"host{mark}", BEGAN, BEGAN + 99, 0, back, None, "died", f"signal 9{mark}"),
            AttemptRow(
                2, 42, "host", BEGAN + 120, None, back, steps, f"checkpoint{mark}", f"ended{mark}" if mark else "died"
            ),
        ],
        ranks=[
            RankRow(0, steps, BEGAN, incidents, None, f"healing_events.jsonl{mark}"),
            RankRow(1, steps, BEGAN, 0, f"timeout{mark}", "healing_events.rank1.jsonl"),
        ],
        quarantine=[
            RowNamed(
                f"row 17 of train_dataset{mark}",
                "row",
                f"not finite by itself{mark}",
                120,
                incident=f"run-001{mark}",
                dataset_index=17,
                content_hash=f"{mark}c219c0a6ad1d",
                preview=SAMPLE_TEXT,
                details={"preview": SAMPLE_TEXT},
            ),
            RowNamed("sample 5 of shard 2", "sample", "cannot be decoded", incident=f"another{mark}"),
        ],
        checkpoints=[
            CheckpointRow(f"checkpoint-{steps}{mark}", steps, "unverified", True, time=BEGAN, bytes=2_400_000_000),
            CheckpointRow(f"checkpoint-{back}", back, "verified", True, pinned=True),
            CheckpointRow("checkpoint-9", 9, f"suspect{mark}", False, finite=False, incident=f"run-002{mark}"),
        ],
        learning_rate=f"The learning rate was reduced once{mark}.",
        next_steps=[
            NextStep(f"Start the job again{mark}.", f"It goes on{mark}.", f"torchrun train.py{mark}"),
            NextStep("Look at the incident.", incidents=[f"run-002{mark}"]),
        ],
        series=Series(
            "steps",
            made_up_steps(0, steps),
            [undone],
            {"eval_loss": LoggedMetric([back, steps], [3.2, 2.4]), f"metric{mark}": LoggedMetric([1], [1.0])},
            8.5e10,
        ),
        files=[FileNamed(f"journal{mark}", f"healing_events.jsonl{mark}")],
        remarks=[f"One line could not be read{mark}."],
        other_runs=[RunBrief(f"earlier{mark}", BEGAN, 3, 1, f"ended{mark}")],
    )
