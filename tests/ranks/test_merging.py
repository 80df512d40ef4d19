"""What one of two ranks learns by itself, the other one knows before the next step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_distributed import on_two_processes


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    on_two_processes(directory, request.param, script="merging_ranks.py")
    return directory


@pytest.fixture
def ranks(directory: Path) -> list[dict[str, Any]]:
    return [json.loads((directory / f"results.{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", ["rows", "samples"])
def test_what_one_rank_has_left_out_no_rank_uses_in_a_later_epoch(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        before, *epochs = rank[name]["at_beginnings"]
        assert before == 0
        # Each rank has found some in the first epoch; one that is told of nothing finds more in the second.
        assert epochs[0] > 0
        assert epochs == [epochs[0]] * 3


def test_an_event_that_all_ranks_see_is_told_once_on_each(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["rows"]["told"] for rank in ranks)
    assert [[f"{name}.rank1", *event] for name, *event in first] == second
    assert ranks[0]["rows"]["reported"] == first
    assert ranks[0]["rows"]["metrics"]["healing/quarantined_rows"] == 4


def test_the_first_rank_tells_what_only_another_one_has_seen(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["samples"]["told"] for rank in ranks)
    assert [each for each in first if ".rank1" in each[0]] == second
    assert sorted(ranks[0]["samples"]["reported"]) == sorted(first)
    assert ranks[0]["samples"]["metrics"]["healing/incidents"] == len(first)
