"""Where something fails on one of two ranks that train together, both go on, or both end: none waits for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked import Forked

from self_healing.report.reading import read_run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failing")


@pytest.fixture(scope="module")
def outcomes(directory: Path) -> dict[str, Any]:
    assert Forked("failing_ranks.py", directory).wait(3600) == 0
    outcomes: dict[str, Any] = json.loads((directory / "outcomes.json").read_text())
    return outcomes


def both(outcomes: dict[str, Any], scenario: str) -> list[dict[str, Any]]:
    """The results of both ranks, which came to the end together."""
    outcome = outcomes[scenario]
    assert not outcome["hung"]
    assert [rank.get("error") for rank in outcome["ranks"]] == [None, None]
    ranks: list[dict[str, Any]] = outcome["ranks"]
    return ranks


def trained_alike(ranks: list[dict[str, Any]]) -> bool:
    return all(rank["steps"] == 14 and rank["finite"] for rank in ranks) and ranks[0]["weights"] == ranks[1]["weights"]


def test_all_ranks_are_given_the_same_answers(outcomes: dict[str, Any]) -> None:
    for rank in both(outcomes, "votes"):
        assert rank["sum"] == [-4.0]
        assert (rank["any"], rank["all"]) == (True, False)
        assert (rank["largest"], rank["smallest"]) == ([3.0, 7.0], -7.0)
        assert rank["first"] == {"rank": 0, "text": "x" * 1000}


def test_a_vote_raises_on_all_ranks_or_on_none(outcomes: dict[str, Any]) -> None:
    for rank in both(outcomes, "votes"):
        assert (rank["raises"], rank["apart"]) == ("RankRaised", "RanksDisagree")
        assert rank["still"] == 2.0


@pytest.mark.parametrize("where", ["between_steps", "before_the_vote"])
def test_a_failure_of_our_own_in_a_healthy_step_takes_the_library_off_all_ranks(
    outcomes: dict[str, Any], where: str
) -> None:
    ranks, (plain, _) = both(outcomes, where), both(outcomes, "plain")
    assert [(rank["broken"], rank["failures"]) for rank in ranks] == [(True, [])] * 2
    assert trained_alike(ranks)
    assert (ranks[0]["weights"], ranks[0]["losses"]) == (plain["weights"], plain["losses"])


def test_elsewhere_it_ends_the_job_and_the_next_start_trains_without_healing(
    outcomes: dict[str, Any], directory: Path
) -> None:
    first, ranks, (plain, _) = outcomes["first"], both(outcomes, "second"), both(outcomes, "plain")
    assert not first["hung"]
    assert "error" in first["ranks"][0]
    assert first["ranks"][1]["error"].startswith("HealingFailed: self_healing failed on rank 1 at step")
    assert [rank["began"] for rank in ranks] == [7, 7]
    assert [rank["broken"] for rank in ranks] == [True, True]
    assert trained_alike(ranks)
    assert ranks[0]["weights"] == plain["weights"]
    said = [line for line in (directory / "second.txt").read_text().splitlines() if "[self_healing]" in line]
    assert said[0].startswith("[self_healing] Healing is off: self_healing failed on rank 1 at step")
    assert said[0].endswith(f"to heal again, please remove {directory / 'started_twice' / 'healing_off.json'}.")
    (notice,) = [each for each in read_run(directory / "started_twice").notices if each["name"] == "healing_off"]
    assert notice["text"].startswith("healing is off (self_healing failed on rank 1")


def test_snapshots_that_one_rank_has_no_memory_for_are_off_on_both(outcomes: dict[str, Any]) -> None:
    ranks = both(outcomes, "snapshot_without_memory")
    assert [rank["broken"] for rank in ranks] == [False, False]
    assert trained_alike(ranks)


def test_an_experiment_that_raises_on_one_rank_is_given_up_on_both(outcomes: dict[str, Any]) -> None:
    ranks = both(outcomes, "experiment_raises")
    assert [rank["broken"] for rank in ranks] == [False, False]
    assert {failure for rank in ranks for failure in rank["failures"]} == {"nonfinite_numerical"}
    assert trained_alike(ranks)


def test_an_experiment_that_leaves_a_rank_in_a_collective_ends_both(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["experiment_strands"]
    assert not outcome["hung"]
    waiting, raising = (rank["error"] for rank in outcome["ranks"])
    assert raising.startswith("Stranded")
    # It is told by gloo, or ended by what the other rank has told it (ranks/), whichever comes first.
    assert any(text in waiting for text in ("Connection closed by peer", "Connection reset by peer", "left no result"))


def test_a_checkpoint_that_one_rank_does_not_have_is_loaded_on_neither(outcomes: dict[str, Any]) -> None:
    for rank in both(outcomes, "checkpoint_elsewhere"):
        assert rank["loaded"] == []
        assert rank["ended"] == "UnrecoverableTrainingError"


def test_an_exception_that_says_nan_is_healed_where_all_ranks_raise_it(outcomes: dict[str, Any]) -> None:
    ranks = both(outcomes, "draws_from_nan")
    assert [rank["failures"] for rank in ranks] == [["nonfinite_transient"]] * 2
    assert trained_alike(ranks)


def test_an_exception_that_says_nan_on_one_rank_ends_both(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["draws_from_nan_alone"]
    assert not outcome["hung"]
    assert outcome["ranks"][1]["error"].startswith("RuntimeError: probability tensor contains")
    assert "error" in outcome["ranks"][0]
