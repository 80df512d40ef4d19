"""Memory that runs out on a rank of DDP is healed there under each of DDP's settings, and wherever it can be."""

from __future__ import annotations

from typing import Any

import pytest
from short_under_ddp import SETTINGS
from test_distributed import on_two_processes


pytestmark = pytest.mark.slow
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return on_two_processes(tmp_path_factory.mktemp("settings"), script="short_under_ddp.py")


def leaves_no_trace(ranks: Ranks, name: str, plain: str) -> None:
    for rank in ranks:
        assert [rank[name][part] for part in ("sum", "losses")] == [rank[plain][part] for part in ("sum", "losses")]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_rank_runs_its_rows_in_pieces_whatever_ddp_is_set_to(ranks: Ranks, setting: str) -> None:
    assert [rank[setting]["fired"] for rank in ranks] == [0, 2]
    assert ranks[1][setting]["incidents"] == [["out_of_memory", "resolved"]]
    assert ranks[0][setting]["sum"] == ranks[1][setting]["sum"]
    for rank in ranks:
        plain = rank[f"{setting}_plain"]
        # Of a gradient that is sent in half precision, or as one of low rank, rounding is part of the result.
        loose = setting in ("hook", "power_sgd")
        assert rank[setting]["sum"] == pytest.approx(plain["sum"], rel=1e-4 if loose else 1e-8)
        assert rank[setting]["losses"] == pytest.approx(plain["losses"], rel=1e-3 if loose else 1e-5)


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_fits_the_second_time_leaves_no_trace_whatever_ddp_is_set_to(ranks: Ranks, setting: str) -> None:
    assert [rank[f"{setting}_once"]["fired"] for rank in ranks] == [0, 1]
    leaves_no_trace(ranks, f"{setting}_once", f"{setting}_plain")


def test_a_model_whose_forward_is_a_meeting_of_ranks_is_computed_again_whole(ranks: Ranks) -> None:
    assert [rank["averaged"]["fired"] for rank in ranks] == [0, 1]
    leaves_no_trace(ranks, "averaged", "averaged_plain")


def test_ranks_that_learn_other_sizes_in_the_same_step_split_alike_from_then_on(ranks: Ranks) -> None:
    assert all(rank["unlike"]["fired"] >= 2 for rank in ranks)
    assert ranks[0]["unlike"]["sum"] == ranks[1]["unlike"]["sum"]
    assert ranks[0]["unlike"]["sum"] == pytest.approx(ranks[0]["default_plain"]["sum"], rel=1e-8)
    for rank in ranks:
        # Nothing larger than what fits on both from the next step on.
        assert max(rows for step, rows in rank["unlike"]["seen"] if step > 1) == 1


def test_a_loss_that_asks_all_ranks_is_given_the_answer_it_was_given_before(ranks: Ranks) -> None:
    assert [rank["own_gather"]["fired"] for rank in ranks] == [0, 1]
    assert ranks[1]["own_gather"]["incidents"] == [["out_of_memory", "resolved"]]
    leaves_no_trace(ranks, "own_gather", "own_gather_plain")


def test_an_update_that_changed_nothing_is_taken_again_on_that_rank(ranks: Ranks) -> None:
    assert [rank["update"]["fired"] for rank in ranks] == [0, 1]
    assert ranks[1]["update"]["incidents"] == [["out_of_memory", "resolved"]]
    leaves_no_trace(ranks, "update", "default_plain")
