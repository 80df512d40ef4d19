"""Memory that runs out on one of two ranks is healed there, while the other one waits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from test_distributed import on_two_processes


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_two_processes(tmp_path_factory.mktemp("short"), script="short_of_memory.py")


@pytest.mark.parametrize(
    ("name", "plain"), [("forward", "plain"), ("backward", "plain"), ("dpo", "dpo_plain"), ("grpo", "grpo_plain")]
)
def test_a_rank_runs_its_rows_in_pieces_and_the_other_one_waits(
    ranks: list[dict[str, Any]], name: str, plain: str
) -> None:
    struck = ranks[1][name]
    # Once as it was, once more with memory freed, and in pieces from there on.
    assert struck["fired"] == 2
    assert struck["incidents"] == [["out_of_memory", "resolved"]]
    assert struck["actions"] == ["free_memory", "split_batch"]
    for rank in ranks:
        assert rank[name]["sum"] == ranks[0][name]["sum"]
        assert rank[name]["sum"] == pytest.approx(rank[plain]["sum"], rel=1e-8)
        assert rank[name]["losses"] == pytest.approx(rank[plain]["losses"], rel=1e-5, abs=1e-7)


def test_ranks_begin_the_same_collectives_as_without_it_and_tell_what_did_not_fit(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["forward"]["collectives"] for rank in ranks)
    assert first == second
    more = Counter(first) - Counter(ranks[0]["untroubled"]["collectives"])
    # Once, when the step is judged: a vote, and what each rank has to tell.
    assert more == {"c10d::allreduce_": 1, "c10d::allgather_": 2}


def test_what_fits_the_second_time_leaves_no_trace(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["once"]["fired"] == 1
    assert ranks[1]["once"]["incidents"] == [["out_of_memory", "resolved"]]
    for rank in ranks:
        for part in ("sum", "losses"):
            assert rank["once"][part] == rank["plain"][part]


def test_a_buffer_that_a_forward_changes_is_put_back_first(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["counted"]["fired"] == 1
    for rank in ranks:
        for part in ("sum", "forwards"):
            assert rank["counted"][part] == rank["counted_plain"][part]


def test_random_numbers_of_code_that_prepares_batches_are_not_drawn_again(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["drawn"]["fired"] == 1
    for rank in ranks:
        for part in ("sum", "losses"):
            assert rank["drawn"][part] == rank["drawn_plain"][part]


def test_an_evaluation_that_does_not_fit_is_split_on_that_rank(ranks: list[dict[str, Any]]) -> None:
    struck = ranks[1]["evaluation"]
    assert struck["fired"] > 0
    assert {tuple(each) for each in struck["incidents"]} == {("out_of_memory", "resolved")}
    assert ranks[0]["evaluation"]["evaluated"] == struck["evaluated"]
    assert struck["sum"] == ranks[1]["plain"]["sum"]
