"""A report with something in each of its fields, for pages and files that are made of it."""

from __future__ import annotations

import math
import random

from self_healing.report.records import (
    Budget,
    Checkpoint,
    Entry,
    Goodput,
    IncidentStory,
    NextStep,
    RunReport,
    State,
    no_series,
)


BEGAN = 1_795_400_000.0
SAMPLE_TEXT = "what the sample says"
OUTCOMES = ("resolved", "reported", "unresolved", "self_recovered", "open", "fatal")


def made_up_steps(first: int, last: int, seed: int = 0) -> Entry:
    """Steps of a run that learns, with a gradient that stands far out in the middle and a loss that is not finite."""
    chance, middle = random.Random(seed), (first + last) // 2
    columns: Entry = no_series()["kept"]
    for step in range(first, last):
        loss = None if step == first + 7 else 2 + 5 * math.exp(-step / 400) + 0.1 * chance.gauss(0, 1)
        norm = 900.0 if step == middle else abs(1 + 0.2 * chance.gauss(0, 1))
        scale = 1.0 if step < middle else 0.5
        row = {"step": step, "steps": 1, "skipped": 0, "attempt": 1, "time": BEGAN + 0.4 * step}
        row |= {"seconds": 9.0 if step % 500 == 499 else 0.4 + 0.02 * chance.random(), "busy": 0.35}
        row |= {"loss": loss, "loss_max": loss, "grad_norm": norm, "grad_norm_max": norm}
        row |= {"grad_norm_usual": 1.0, "grad_norm_bound": 4.0}
        row |= {"learning_rate": 2e-4 * scale, "learning_rate_scale": scale}
        row |= {"memory": 6.1e10 + 1e9 * chance.random(), "memory_peak": 6.3e10, "host_memory": 1.2e10}
        for name, value in row.items():
            columns[name].append(value)
    return columns


def made_up_series(kept: Entry, discarded: list[Entry] | None = None, **logged: Entry) -> Entry:
    return {**no_series(), "source": "steps", "kept": kept, "discarded": discarded or [], "logged": logged}


def _line(part: str, text: str, happened: bool = True, **details: object) -> Entry:
    return {"part": part, "text": text, "time": None, "happened": happened, "details": details}


def _row(name: str, kind: str, why: str, **known: object) -> Entry:
    keys = ("step", "epoch", "time", "incident", "dataset_index", "content_hash", "preview")
    return {"name": name, "kind": kind, "why": why, **dict.fromkeys(keys), "details": {}, **known}


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
            _line("evidence", f"The loss was NaN{mark}", value="nan", baseline=2.31, **{f"k{mark}": mark}),
            _line("experiment", f"Computed again: NaN{mark}"),
            _line("experiment", "Rows 17 and 44 are NaN by themselves", control={f"of{mark}": [mark]}),
            _line("cause", f"These rows make the loss non-finite{mark}"),
            _line("remedy", f"Two rows were left out{mark}"),
            _line("remedy", "Rolled back", happened=False, why=f"no trusted state{mark}"),
            _line(f"outcome{mark}", "The loss is back"),
        ],
        rows=[_row(f"row 17{mark}", "row", f"not finite{mark}", preview=SAMPLE_TEXT)],
        files=[{"what": f"offending batch{mark}", "path": f"incidents/{mark}.pt", "bytes": 12345}],
    )


def made_up_report(steps: int = 2000, incidents: int = 6, mark: str = "") -> RunReport:
    """Makes a report; `mark` stands in every text that a run, its data, or its machine has written."""
    back = steps // 2
    undone = made_up_steps(back, back + steps // 20 + 1, seed=1)
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
        notices=[
            {"step": 40, "name": f"loss_notice{mark}", "text": f"A high loss{mark}.", "time": None, "rank": 0},
        ],
        goodput=Goodput(1000, 900, 20, 15, 30, 35, 0.9, steps, steps + steps // 20),
        budgets=[Budget(f"recoveries{mark}", f"max_recovery_attempts{mark}", 1, 5, f"Entries without progress{mark}")],
        attempts=[
            {
                **{"number": 1, "pid": 41, "host": f"host{mark}", "began": BEGAN, "ended": BEGAN + 99},
                **{"first_step": 0, "last_step": back, "resumed_from": None, "ending": "died"},
                "why": f"signal 9{mark}",
            },
            {
                **{"number": 2, "pid": 42, "host": "host", "began": BEGAN + 120, "ended": None},
                **{"first_step": back, "last_step": steps, "resumed_from": f"checkpoint{mark}"},
                **{"ending": f"ended{mark}" if mark else "died", "why": ""},
            },
        ],
        ranks=[
            {
                **{"rank": rank, "step": steps, "seen": BEGAN, "incidents": incidents, "error": error},
                **{"journal": f"healing_events.jsonl{mark}", "postmortem": None},
            }
            for rank, error in enumerate((None, f"timeout{mark}"))
        ],
        quarantine=[
            _row(
                f"row 17 of train_dataset{mark}",
                "row",
                f"not finite by itself{mark}",
                step=120,
                incident=f"run-001{mark}",
                dataset_index=17,
                content_hash=f"{mark}c219c0a6ad1d",
                preview=SAMPLE_TEXT,
            ),
            _row("sample 5 of shard 2", "sample", "cannot be decoded", incident=f"another{mark}"),
        ],
        checkpoints=[
            Checkpoint(f"checkpoint-{steps}{mark}", steps, "unverified", True, time=BEGAN, bytes=2_400_000_000),
            Checkpoint(f"checkpoint-{back}", back, "verified", True, pinned=True),
            Checkpoint("checkpoint-9", 9, f"suspect{mark}", False, finite=False, incident=f"run-002{mark}"),
        ],
        learning_rate=f"The learning rate was reduced once{mark}.",
        next_steps=[
            NextStep(f"Start the job again{mark}.", f"It goes on{mark}.", f"torchrun train.py{mark}"),
            NextStep("Look at the incident.", incidents=[f"run-002{mark}"]),
        ],
        series={
            **made_up_series(
                made_up_steps(0, steps),
                [undone],
                eval_loss={"step": [back, steps], "value": [3.2, 2.4]},
                **{f"metric{mark}": {"step": [1], "value": [1.0]}},
            ),
            "memory_total": 8.5e10,
        },
        files=[{"what": f"journal{mark}", "path": f"healing_events.jsonl{mark}", "bytes": 9}],
        remarks=[f"One line could not be read{mark}."],
        other_runs=[{"run": f"earlier{mark}", "began": BEGAN, "step": 3, "incidents": 1, "state": f"ended{mark}"}],
    )
