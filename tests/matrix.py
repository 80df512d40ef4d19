"""
What is healed where, as tests show it: `docs/matrix.json`, the table in the README, that of `self-healing doctor`, and
that of faults on one of several ranks.

A test that proves a cell says so, `@pytest.mark.heals("out_of_memory", "ddp", partly="...")`; what became of it in the
last run is in `docs/matrix.json`. `make matrix` runs them all and writes that file and all tables;
`python tests/matrix.py` writes the tables from what is on record.

A cell of the table of ranks is a test, `tests/ranks/test_faults_*.py::test_...[fault-strategy]`. One that cannot pass
yet is marked `xfail(strict=True, reason=...)`, and the reason stands below the table; so does that of a fault that
nobody can notice, `reason=f"{UNNOTICEABLE}..."`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parent.parent
RECORD = ROOT / "docs" / "matrix.json"
# Goes with the package, for the doctor.
SHIPPED = ROOT / "self_healing" / "tools" / "matrix.json"
RANKS_PAGE = ROOT / "docs" / "ranks.md"
BEGIN = "<!-- What follows is written by `make matrix`. -->"
END = "<!-- Up to here. -->"

FAULTS = {
    "transient": "[NaN or Inf](docs/how-it-works.md) that is gone when the step is computed again",
    "poison_rows": "[Rows](docs/how-it-works.md) that give NaN or Inf every time",
    "unexplained": "NaN or Inf that nothing explains: the step is left out",
    "corrupted_weights": "NaN or Inf in [weights or optimizer state](docs/detection.md)",
    "replicas": "A [bit that flips](docs/detection.md) in the weights of one rank, and shows in no loss",
    "gradient_spike": "[Gradient spike](docs/detection.md)",
    "divergence": "Loss that rises and stays up because [weights were hit](docs/detection.md)",
    "learning_rate": "[Learning rate](docs/detection.md#the-learning-rate) far too high",
    "red_flag": "[Red flags](docs/detection.md#metric-rules) in metrics of GRPO, DPO, SFT",
    "out_of_memory": "[Out of memory](docs/memory.md) in the model",
    "optimizer_memory": "Out of memory in `optimizer.step()`",
    "bad_sample": "[Sample](docs/data.md) that raises while it is loaded or collated",
    "service": "[Reward function, stream, vLLM server](docs/data.md) that fails for a while",
    "connection": "Lost connection anywhere else in `train()`",
    "tracker": "Tracker or Hub that fails",
    "worker": "Data loader worker that is killed",
    "disk": "[Checkpoint](docs/checkpoints.md#when-one-cannot-be-written) that cannot be written",
    "damaged_checkpoint": "Damaged [checkpoint](docs/checkpoints.md) on resume",
    "hang": "[Hang](docs/hangs.md) in Python",
    "native_hang": "Hang in native code, under a launcher",
    "killed": "[Killed process](docs/running.md), under a launcher",
    "preemption": "Preemption: SIGTERM, SIGUSR1",
    "lost_device": "Lost device (simulated), under a launcher",
    "exception": "An exception of your own code",
}
COLUMNS = {
    "callback": "callback",
    "wrapper": "wrapper",
    "gpu": "one GPU",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "deepspeed": "DeepSpeed",
}

# How the reason begins why a fault is not healed that leaves no trace by which it could be told from none.
UNNOTICEABLE = "it cannot be noticed: "

# Of faults on one of several ranks: how the model is trained there, and by the name of each fault what it is.
STRATEGIES = {
    "ddp": "DDP",
    "fsdp2_full": "FSDP2, full",
    "fsdp2_sharded": "FSDP2, sharded",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
}
# Those of a column of the README.
STRATEGIES_OF = {
    "ddp": ("ddp",),
    "fsdp2": ("fsdp2_full", "fsdp2_sharded"),
    "deepspeed": ("zero1", "zero2", "zero3"),
}
RANK_FAULTS = {
    "Healed while all ranks train on": {
        "none": "Nothing: bitwise the run of the plain trainer",
        "transient_nan": "NaN in the loss that is gone when the step is computed again",
        "poison_rows_loss": "Rows whose loss is NaN every time (dropped: not bitwise)",
        "poison_rows_gradient": "Rows whose gradient alone is NaN every time (dropped: not bitwise)",
        "nan_weights": "NaN in weights",
        "nan_policy": "NaN in weights that answers are generated with (GRPO: steps are lost, not bitwise)",
        "gradient_spike": "Gradient spike that passes",
        "scrambled_weights": "A loss that rises and stays up because weights were hit, on all ranks",
        "learning_rate": "A learning rate far too high (lowered: not bitwise)",
        "red_flag": "A red flag whose rule asks for going back (not bitwise)",
        "drifting_replica": "A layer that is multiplied by 1.01",
        "bad_sample": "Samples that raise while they are loaded (replaced: not bitwise)",
        "full_disk_rank_0": "Full disk on rank 0 while a checkpoint is written",
        "full_disk_rank_1": "Full disk on rank 1",
        "reward_retried": "A reward whose connection is lost twice",
        "evaluation_retried": "`compute_metrics` whose connection is lost twice",
        "callback_retried": "A callback of your own whose connection is lost",
        "tracker": "A tracker that cannot be reached at all",
        "torn_weights": "The newest checkpoint has torn weights (sharded: those of rank 1)",
        "torn_rank_part": "The newest checkpoint lacks the part of rank 1",
    },
    "Ends the job on all ranks; started again, it goes on": {
        "model": "Exception in the model",
        "collator": "Exception in the collator",
        "callback": "Exception in a callback",
        "callback_before_update": "Exception in a callback, between a gradient and its update",
        "evaluation": "Exception in an evaluation",
        "reward": "Exception in a reward",
        "oom_once": "Out of memory once (split from then on: not bitwise; DDP, ZeRO-1 and 2: in place)",
        "oom_above_4_rows": "Out of memory above four rows, always (split: not bitwise; DDP, ZeRO-1 and 2: in place)",
        "optimizer_memory": "Out of memory in `optimizer.step()`, after the first one",
        "worker": "A data loader worker is killed",
        "lost_device": "Lost device (simulated: from one moment on every operation raises)",
        "sigkill": "SIGKILL",
        "sigkill_while_saving": "SIGKILL while a checkpoint is written, with nothing left in memory",
        "sigkill_in_last_step": "SIGKILL after the last step, before it is evaluated and saved",
        "hang": "Hang in Python",
        "native_hang": "Hang in native code",
        "sigterm": "SIGTERM",
        "sigstop": "SIGSTOP",
    },
}

# Rows of the README that the table of ranks shows as well: by its faults, and what is done in place of healing them.
_ENDS = "ends the job; the next start goes on, from memory where it can"
SHOWN_ON_RANKS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "transient": (("transient_nan",), None),
    "poison_rows": (("poison_rows_loss", "poison_rows_gradient"), None),
    "corrupted_weights": (("nan_weights",), None),
    "gradient_spike": (("gradient_spike",), None),
    "divergence": (("scrambled_weights",), None),
    "learning_rate": (("learning_rate",), None),
    "red_flag": (("red_flag",), "reported, or stopped, or rolled back, as the rule says"),
    "optimizer_memory": (
        ("optimizer_memory",),
        "taken again in the first step (not with DeepSpeed); later it ends the job, and the next start goes on",
    ),
    "tracker": (("tracker",), None),
    "worker": (("worker",), _ENDS),
    "lost_device": (("lost_device",), None),
    "bad_sample": (("bad_sample",), None),
    "service": (("reward_retried",), None),
    "connection": (
        ("evaluation_retried", "callback_retried"),
        "in callbacks and `compute_metrics`; elsewhere it ends the job",
    ),
    "disk": (("full_disk_rank_0", "full_disk_rank_1"), None),
    "damaged_checkpoint": (("torn_weights", "torn_rank_part"), None),
    "hang": (("hang",), _ENDS),
    "native_hang": (("native_hang",), None),
    "killed": (("sigkill", "sigkill_while_saving"), None),
    "preemption": (("sigterm",), None),
    "exception": (("model", "collator", "callback", "evaluation", "reward"), _ENDS),
}


@dataclass(frozen=True, slots=True)
class Proof:
    """A test, as pytest names it without parameters, that shows that a fault is healed, or what is done instead."""

    test: str
    fault: str
    column: str
    partly: str | None


class MatrixError(ValueError):
    """A mark, or the record, that makes no sense."""


def proofs(directory: Path = ROOT / "tests") -> list[Proof]:
    """Reads all marks off the source, in a fraction of the time that collecting the tests would take."""
    found = []
    for path in sorted(directory.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "mark.heals(" in source:
            place = path.relative_to(directory.parent).as_posix()
            found += _marked(ast.parse(source).body, place)
    return found


def _marked(body: list[ast.stmt], place: str) -> Iterator[Proof]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _marked(node.body, f"{place}::{node.name}")
        elif isinstance(node, ast.FunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.heals":
                    yield _proof(mark, f"{place}::{node.name}")


def _proof(mark: ast.Call, test: str) -> Proof:
    try:
        fault, column = (ast.literal_eval(argument) for argument in mark.args)
        options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in mark.keywords}
    except ValueError:
        raise MatrixError(f"{test}: a fault and a column, written out: heals('killed', 'wrapper')") from None
    if fault not in FAULTS or column not in COLUMNS or not options.keys() <= {"partly"}:
        raise MatrixError(f"{test}: {ast.unparse(mark)} is none of {list(FAULTS)}, {list(COLUMNS)}, partly=")
    return Proof(test, fault, column, options.get("partly"))


# ---- what became of the tests ----


def read_record(path: Path = RECORD) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _cases_in(results: Path) -> Iterator[ElementTree.Element]:
    """Reads the tests in a file of results; of a run that was broken off, the last one has no name."""
    try:
        cases = list(ElementTree.parse(results).iter("testcase"))
    except ElementTree.ParseError as error:
        raise MatrixError(f"{results} is not complete ({error}); let its tests run to their end") from None
    for case in cases:
        if not {"classname", "name"} <= case.attrib.keys():
            raise MatrixError(f"{results} is not complete: its run was broken off; let its tests run to their end")
        yield case


def outcomes_in(results: Path) -> dict[str, str]:
    """Reads what pytest has written with `--junit-xml`: of a test with parameters, the worst counts."""
    worst: dict[str, str] = {}
    for case in _cases_in(results):
        # "tests.memory.test_memory.TestForward": as far as it is a file, a path.
        parts = case.attrib["classname"].split(".")
        modules = next(n for n, part in enumerate(parts, start=1) if part.startswith("test_"))
        test = "::".join(["/".join(parts[:modules]) + ".py", *parts[modules:], case.attrib["name"].partition("[")[0]])
        told = {child.tag for child in case}
        outcome = "failed" if told & {"failure", "error"} else "skipped" if "skipped" in told else "passed"
        worst[test] = min(outcome, worst.get(test, outcome), key=("failed", "skipped", "passed").index)
    return worst


def rank_cells_in(results: Path) -> dict[str, dict[str, str]]:
    """Reads what became of each fault under each strategy; of one that is known not to be healed also why."""
    found = {}
    for case in _cases_in(results):
        name = case.attrib["name"].partition("[")[2].removesuffix("]")
        if ".ranks.test_faults_" not in case.attrib["classname"] or not name:
            continue
        fault, _, strategy = name.rpartition("-")
        if strategy not in STRATEGIES or not any(fault in faults for faults in RANK_FAULTS.values()):
            raise MatrixError(f"{name}: is no <fault>-<strategy> of {RANK_FAULTS} and {list(STRATEGIES)}")
        told = {child.tag: child for child in case}
        skipped = told.get("skipped")
        if told.keys() & {"failure", "error"}:
            found[name] = {"outcome": "failed"}
        elif skipped is None:
            found[name] = {"outcome": "passed"}
        elif skipped.get("type") == "pytest.xfail":
            why = skipped.get("message", "")
            outcome = "unnoticeable" if why.startswith(UNNOTICEABLE) else "not healed"
            found[name] = {"outcome": outcome, "why": why}
    return found


def recorded(results: list[Path], device: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Adds what became of the marked tests to a record, and drops tests that are marked no more."""
    marked = {proof.test for proof in proofs()}
    told = dict(record.get(device, {}).get("outcomes", {}))
    ranks = dict(record.get(device, {}).get("ranks", {}))
    for path in results:
        told |= outcomes_in(path)
        ranks |= rank_cells_in(path)
    entry = {
        "recorded": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "trl")},
        "outcomes": {test: told[test] for test in sorted(marked & told.keys())},
        "ranks": {name: ranks[name] for name in sorted(ranks)},
    }
    return {**record, device: entry}


# ---- the table ----


def shown(fault: str, column: str, marked: list[Proof], record: Mapping[str, Any]) -> dict[str, str]:
    """Says whether tests show that a fault is healed somewhere; of what is done in part, what that is."""
    # One GPU: the tests of one process, run there. What the callback heals, the wrapper's callback does.
    columns = {"gpu": ("callback", "wrapper"), "wrapper": ("wrapper", "callback")}.get(column, (column,))
    device = "cuda" if column == "gpu" else "cpu"
    outcomes = record.get(device, {}).get("outcomes", {})
    if column == "gpu" and not outcomes:
        return {"state": "not run"}
    cells = record.get(device, {}).get("ranks", {})
    on_ranks, done_instead = SHOWN_ON_RANKS.get(fault, ((), None))
    for each in columns:
        of_cell = [proof for proof in marked if (proof.fault, proof.column) == (fault, each)]
        names = [f"{one}-{strategy}" for one in on_ranks for strategy in STRATEGIES_OF.get(each, ())]
        if of_cell:
            # What was not run takes nothing from what another test shows.
            names = [name for name in names if name in cells]
        told = [outcomes.get(proof.test) for proof in of_cell] + [cells.get(name, {}).get("outcome") for name in names]
        if told and all(outcome == "passed" for outcome in told):
            partly = next((proof.partly for proof in of_cell if proof.partly is not None), None)
            return _as_shown(partly or (done_instead if names else None))
    return {"state": "not shown"}


def _as_shown(partly: str | None) -> dict[str, str]:
    return {"state": "healed"} if partly is None else {"state": "in part", "what": partly}


def shipped(marked: list[Proof], record: Mapping[str, Any]) -> str:
    """Renders the same for the doctor: JSON, without links."""
    faults = {
        fault: {
            "what": re.sub(r"\[(.*?)\]\(.*?\)", r"\1", label),
            "needs_launcher": label.endswith(", under a launcher"),
            "shown": {column: shown(fault, column, marked, record) for column in COLUMNS},
        }
        for fault, label in FAULTS.items()
    }
    recorded_on = {device: record[device]["recorded"] for device in ("cpu", "cuda") if device in record}
    return json.dumps({"recorded": recorded_on, "columns": COLUMNS, "faults": faults}, indent=1) + "\n"


def table(marked: list[Proof], record: Mapping[str, Any]) -> str:
    """Renders the table and the notes below it."""
    notes: dict[str, int] = {}
    signs = {"healed": "✅", "not shown": "❌"}
    # That of one GPU once something has been recorded there.
    columns = [column for column in COLUMNS if column != "gpu" or "cuda" in record]

    def cell(fault: str, column: str) -> str:
        found = shown(fault, column, marked, record)
        if "what" in found:
            return f"◐ {notes.setdefault(found['what'], len(notes) + 1)}"
        return signs[found["state"]]

    lines = [
        "| what goes wrong | " + " | ".join(COLUMNS[column] for column in columns) + " |",
        "|---" + "|:---:" * len(columns) + "|",
    ]
    for fault, label in FAULTS.items():
        lines.append(f"| {label} | " + " | ".join(cell(fault, column) for column in columns) + " |")
    legend = "✅ healed; ◐ in part; ❌ no test shows that it is healed."
    numbered = [f"{number}: {note}." for note, number in notes.items()]
    return "\n".join([*lines, "", " ".join([legend, *numbered])])


def ranks_tables(record: Mapping[str, Any]) -> str:
    """Renders the tables of faults on one of several ranks, and the notes below them."""
    cells, notes = record.get("cpu", {}).get("ranks", {}), dict[str, int]()
    signs = {"passed": "✅", "failed": "❌", "not healed": "❌", "unnoticeable": "○", "not run": "–"}

    def cell(name: str) -> str:
        found = cells.get(name, {"outcome": "not run"})
        sign = signs[found["outcome"]]
        return f"{sign} {notes.setdefault(found['why'], len(notes) + 1)}" if "why" in found else sign

    lines = []
    for heading, faults in RANK_FAULTS.items():
        lines += [f"| {heading} | {' | '.join(STRATEGIES.values())} |", "|---" + "|:---:" * len(STRATEGIES) + "|"]
        for fault, what in faults.items():
            lines.append(f"| {what} | " + " | ".join(cell(f"{fault}-{strategy}") for strategy in STRATEGIES) + " |")
        lines.append("")
    numbered = [f"{number}: {note}." for note, number in notes.items()]
    legend = "✅ shown; ❌ not healed; ○ leaves nothing to be noticed by; – not run yet."
    return "\n".join([*lines, " ".join([legend, *numbered])])


def with_table(page: str, rendered: str, begin: str = BEGIN) -> str:
    """Puts a table between the two comments of a page."""
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(END)
    if not found:
        raise MatrixError(f"a page has lost the lines {begin} and {END}")
    return f"{before}{begin}\n\n{rendered}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, help="what pytest has written with --junit-xml")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where they ran")
    arguments = parser.parse_args()
    record = read_record()
    if arguments.results:
        record = recorded(arguments.results, arguments.device, record)
        RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    marked = proofs()
    for page, rendered in ((ROOT / "README.md", table(marked, record)), (RANKS_PAGE, ranks_tables(record))):
        page.write_text(with_table(page.read_text(encoding="utf-8"), rendered), encoding="utf-8")
    SHIPPED.write_text(shipped(marked, record), encoding="utf-8")
    outcomes = record.get("cpu", {}).get("outcomes", {})
    missing = sorted({proof.test for proof in marked if outcomes.get(proof.test) != "passed"})
    missing += sorted(
        f"{name}, on one of several ranks"
        for name, found in record.get("cpu", {}).get("ranks", {}).items()
        if found["outcome"] == "failed"
    )
    if missing:
        sys.exit("These did not pass, or did not run, and prove nothing:\n" + "\n".join(missing))


if __name__ == "__main__":
    main()
