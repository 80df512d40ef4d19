"""The table of what heals where: up to date with the tests that say so, and honest about what became of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from matrix import (
    BEGIN,
    COLUMNS,
    END,
    FAULTS,
    RANK_FAULTS,
    RANKS_PAGE,
    SHIPPED,
    SHOWN_ON_RANKS,
    STRATEGIES,
    MatrixError,
    Proof,
    outcomes_in,
    proofs,
    ranks_tables,
    read_record,
    shipped,
    table,
    with_table,
)

from self_healing.tools.doctor import Setting, coverage_of


ROOT = Path(__file__).parent.parent
HEALED_IN_PLACE, _ = RANK_FAULTS.values()
SIGKILLS, _ = SHOWN_ON_RANKS["killed"]


def test_the_table_in_the_readme_is_up_to_date() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == with_table(readme, table(proofs(), read_record())), "make matrix, or python tests/matrix.py"


def test_the_table_of_the_doctor_is_up_to_date() -> None:
    assert SHIPPED.read_text(encoding="utf-8") == shipped(proofs(), read_record()), "python tests/matrix.py"


def test_the_table_of_ranks_is_up_to_date() -> None:
    page = RANKS_PAGE.read_text(encoding="utf-8")
    assert page == with_table(page, ranks_tables(read_record())), "make matrix, or python tests/matrix.py"


def test_no_fault_on_a_rank_is_without_a_cell_of_its_own() -> None:
    cells = read_record()["cpu"]["ranks"]
    assert not [name for name, found in cells.items() if found["outcome"] == "failed"]
    assert {f"{fault}-{strategy}" for fault in HEALED_IN_PLACE for strategy in STRATEGIES} <= cells.keys()


def test_every_proof_has_passed() -> None:
    outcomes = read_record()["cpu"]["outcomes"]
    assert {proof.test: outcomes.get(proof.test) for proof in proofs()} == dict.fromkeys(outcomes, "passed")


# A run that has something in each column of the README, and starts again.
STARTED = {
    "callback": {},
    "wrapper": {},
    "one GPU": {},
    "DDP": {"WORLD_SIZE": "2"},
    "FSDP2": {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"},
    "DeepSpeed": {"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"},
}


@pytest.mark.parametrize("column", STARTED)
def test_the_doctor_says_what_the_readme_says(column: str) -> None:
    written = (ROOT / "README.md").read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in written.splitlines() if line.startswith("|")
    ]
    notes = dict(re.findall(r"(\d+): (.*?)\.(?= \d|$)", written.strip().splitlines()[-1]))
    # What has not been run at all has no column.
    signs = [row[header.index(column)] if column in header else "–" for row in rows]
    readme = [(row[0], sign) for row, sign in zip(rows, signs, strict=True)]

    environment = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "3", **STARTED[column]}
    told = coverage_of(Setting.of(environment), device="cuda")
    told_as = {"healed": "✅", "not shown": "❌", "not run": "–"}
    doctor = []
    for row in told:
        shown = row["shown"][column]
        sign = told_as.get(shown["state"]) or next(
            (f"◐ {number}" for number, what in notes.items() if what == shown["what"]), "?"
        )
        doctor.append((row["what"], sign))
    assert doctor == [(re.sub(r"\[(.*?)\]\(.*?\)", r"\1", what), sign) for what, sign in readme]


def cells(marked: list[Proof], record: dict[str, Any], fault: str) -> dict[str, str]:
    names = {name: column for column, name in COLUMNS.items()}
    header, _, *rows = [
        [cell.strip() for cell in line.split("|")[2:-1]] for line in table(marked, record).splitlines()
    ]
    return dict(zip((names[name] for name in header), rows[list(FAULTS).index(fault)], strict=True))


def record(**outcomes: str) -> dict[str, Any]:
    return {"cpu": {"outcomes": outcomes}}


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_one_of_two_proofs_that_did_not_pass_is_enough_to_doubt(outcome: str) -> None:
    marked = [Proof("a", "hang", "wrapper", None), Proof("b", "hang", "wrapper", None)]
    assert cells(marked, record(a="passed", b=outcome), "hang")["wrapper"] == "❌"
    assert cells(marked, record(a="passed"), "hang")["wrapper"] == "❌"


def test_what_a_test_of_one_process_shows_holds_where_it_ran() -> None:
    marked = [Proof("a", "transient", "callback", None), Proof("a", "killed", "wrapper", None)]
    shown = cells(marked, record(a="passed"), "transient")
    assert shown == {"callback": "✅", "wrapper": "✅", "ddp": "❌", "fsdp2": "❌", "deepspeed": "❌"}
    on_both = {**record(a="passed"), "cuda": {"outcomes": {"a": "passed"}}}
    shown = cells(marked, on_both, "killed")
    assert (shown["callback"], shown["wrapper"], shown["gpu"], shown["ddp"]) == ("❌", "✅", "✅", "❌")


def test_what_is_done_in_part_is_said_below() -> None:
    marked = [Proof("a", "hang", "callback", "reported"), Proof("b", "red_flag", "callback", "reported")]
    outcomes = record(a="passed", b="passed")
    assert cells(marked, outcomes, "hang")["callback"] == "◐ 1"
    assert cells(marked, outcomes, "red_flag")["callback"] == "◐ 1"
    assert table(marked, outcomes).endswith(" 1: reported.")


def test_of_a_test_with_parameters_the_worst_outcome_counts(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.hangs.test_watchdog" name="test_x[1]"/>'
        '<testcase classname="tests.hangs.test_watchdog" name="test_x[2]"><failure/></testcase>'
        '<testcase classname="tests.memory.test_memory.TestForward" name="test_y"><skipped/></testcase>'
        '<testcase classname="tests.test_z" name="test_z"/>'
        "</testsuite></testsuites>"
    )
    assert outcomes_in(tmp_path / "results.xml") == {
        "tests/hangs/test_watchdog.py::test_x": "failed",
        "tests/memory/test_memory.py::TestForward::test_y": "skipped",
        "tests/test_z.py::test_z": "passed",
    }


def test_results_of_a_run_that_was_broken_off_are_named_and_not_used(tmp_path: Path) -> None:
    for left in ('<testsuites><testsuite><testcase time="0.1"/></testsuite></testsuites>', "<testsuites><testsuite>"):
        (tmp_path / "results.xml").write_text(left)
        with pytest.raises(MatrixError, match=r"results\.xml is not complete"):
            outcomes_in(tmp_path / "results.xml")


def test_a_fault_on_a_rank_that_has_not_passed_is_enough_to_doubt_what_a_marked_test_shows() -> None:
    marked, told = [Proof("a", "transient", "deepspeed", None)], record(a="passed")
    assert cells(marked, told, "transient")["deepspeed"] == "✅"
    told["cpu"]["ranks"] = {f"transient_nan-zero{stage}": {"outcome": "passed"} for stage in (1, 2, 3)}
    assert cells(marked, told, "transient")["deepspeed"] == "✅"
    told["cpu"]["ranks"]["transient_nan-zero3"] = {"outcome": "not healed", "why": "nobody knows"}
    assert cells(marked, told, "transient")["deepspeed"] == "❌"
    told["cpu"] |= {"outcomes": {"a": "failed"}, "ranks": {}}
    assert cells(marked, told, "transient")["deepspeed"] == "❌"
