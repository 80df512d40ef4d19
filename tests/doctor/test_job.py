"""`self-healing doctor` as one of several ranks: what each computes is told once, and an exit code on all of them."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from started_ranks import StartedRanks
from wrong_product import WrongProduct

from self_healing.tools.doctor_machine import check_device


CPU = torch.device("cpu")


def doctor(directory: Path, fault: str, *options: str) -> list[tuple[int, str, str]]:
    """Exit code, what was printed, and the whole log of each of two ranks."""
    ranks = StartedRanks(directory / "logs", 2, "looked_at_job.py", fault, "doctor", directory, *options, COLUMNS=120)
    try:
        codes = ranks.join(180)
    finally:
        ranks.end()
    return [(code, ranks.printed(rank), ranks.log(rank)) for rank, code in enumerate(codes)]


def test_a_rank_that_computes_wrong_is_named_in_one_table_and_all_exit_with_1(tmp_path: Path) -> None:
    first, second = doctor(tmp_path, "wrong")
    assert (first[0], second[0]) == (1, 1), first[2] + second[2]
    assert second[1] == ""
    assert "problem: Rank 1 on " in first[1]
    assert "its device computes wrong results" in first[1]
    rows = [line.split()[1 :: len(line.split()) - 2] for line in first[1].splitlines() if line.startswith("rank ")]
    assert [(row[0], line_ends) for row, line_ends in zip(rows, ("right", "WRONG"), strict=True)] == [
        ("0", "right"),
        ("1", "WRONG"),
    ]


@pytest.mark.slow
def test_ranks_that_are_well_are_written_as_json(tmp_path: Path) -> None:
    first, second = doctor(tmp_path, "none", "--json")
    assert (first[0], second[0], second[1]) == (0, 0, ""), first[2] + second[2]
    job = json.loads(first[1])["job"]
    assert [row["rank"] for row in job["rows"]] == [0, 1]
    assert (job["wrong"], job["missing"], job["error"]) == ({}, [], None)


# ---- a device ----


def test_one_element_that_is_wrong_now_and_then_is_found_and_nothing_is_drawn() -> None:
    before = torch.random.get_rng_state()
    assert check_device(CPU) == (False, None)
    with WrongProduct(2):
        assert check_device(CPU) == (True, None)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_device_that_raises_is_not_called_wrong() -> None:
    with mock.patch.object(torch.Tensor, "to", side_effect=RuntimeError("CUDA out of memory\nand more")):
        assert check_device(CPU) == (False, "RuntimeError: CUDA out of memory")
