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


class Outcomes(dict[str, Any]):
    """What came of a scenario, which is run when it is asked for."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def __missing__(self, scenario: str) -> Any:
        assert Forked("failing_ranks.py", self._directory / scenario, scenario).wait() == 0
        self[scenario] = json.loads((self._directory / f"{scenario}.json").read_text())
        return self[scenario]


@pytest.fixture(scope="module")
def outcomes(directory: Path) -> Outcomes:
    return Outcomes(directory)


def both(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of both ranks, which came to the end together."""
    assert not outcome["hung"]
    assert [rank.get("error") for rank in outcome["ranks"]] == [None, None]
    ranks: list[dict[str, Any]] = outcome["ranks"]
    return ranks


def trained_alike(ranks: list[dict[str, Any]]) -> bool:
    return all(rank["steps"] == 10 and rank["finite"] for rank in ranks) and ranks[0]["weights"] == ranks[1]["weights"]


def test_all_ranks_are_given_the_same_answers_and_a_vote_raises_on_all_or_on_none(outcomes: Outcomes) -> None:
    for rank in both(outcomes["votes"]):
        assert rank["sum"] == [-4.0]
        assert (rank["any"], rank["all"]) == (True, False)
        assert (rank["largest"], rank["smallest"]) == ([3.0, 7.0], -7.0)
        assert rank["first"] == {"rank": 0, "text": "x" * 1000}
        assert (rank["raises"], rank["apart"]) == ("RankRaised", "RanksDisagree")
        assert rank["still"] == 2.0


@pytest.mark.parametrize("where", ["between_steps", "before_the_vote"])
def test_a_failure_of_our_own_in_a_healthy_step_takes_the_library_off_all_ranks(
    outcomes: Outcomes, where: str
) -> None:
    ranks, (plain, _) = both(outcomes[where]), both(outcomes["plain"])
    assert [(rank["broken"], rank["failures"]) for rank in ranks] == [(True, [])] * 2
    assert trained_alike(ranks)
    assert (ranks[0]["weights"], ranks[0]["losses"]) == (plain["weights"], plain["losses"])


def test_elsewhere_it_ends_the_job_and_the_next_start_trains_without_healing(
    outcomes: Outcomes, directory: Path
) -> None:
    started, (plain, _) = outcomes["started_twice"], both(outcomes["plain"])
    first, ranks = started["first"], both(started["second"])
    assert not first["hung"]
    assert "error" in first["ranks"][0]
    assert first["ranks"][1]["error"].startswith("HealingFailed: self_healing failed on rank 1 at step")
    assert [rank["began"] for rank in ranks] == [5, 5]
    assert [rank["broken"] for rank in ranks] == [True, True]
    assert trained_alike(ranks)
    assert ranks[0]["weights"] == plain["weights"]
    said = [line for line in (directory / "second.txt").read_text().splitlines() if "[self_healing]" in line]
    assert said[0].startswith("[self_healing] Healing is off: self_healing failed on rank 1 at step")
    assert said[0].endswith(f"to heal again, please remove {directory / 'started_twice' / 'healing_off.json'}.")
    (notice,) = [each for each in read_run(directory / "started_twice").notices if each["name"] == "healing_off"]
    assert notice["text"].startswith("healing is off (self_healing failed on rank 1")


@pytest.mark.slow
def test_snapshots_that_one_rank_has_no_memory_for_are_off_on_both(outcomes: Outcomes) -> None:
    ranks = both(outcomes["snapshot_without_memory"])
    assert [rank["broken"] for rank in ranks] == [False, False]
    assert trained_alike(ranks)


@pytest.mark.slow
def test_an_experiment_that_raises_on_one_rank_is_given_up_on_both(outcomes: Outcomes) -> None:
    ranks = both(outcomes["experiment_raises"])
    assert [rank["broken"] for rank in ranks] == [False, False]
    assert {failure for rank in ranks for failure in rank["failures"]} == {"nonfinite_numerical"}
    assert trained_alike(ranks)


@pytest.mark.slow
def test_a_checkpoint_that_one_rank_does_not_have_is_loaded_on_neither(outcomes: Outcomes) -> None:
    for rank in both(outcomes["checkpoint_elsewhere"]):
        assert rank["loaded"] == []
        assert rank["ended"] == "UnrecoverableTrainingError"


@pytest.mark.slow
def test_an_exception_that_says_nan_is_healed_where_all_ranks_raise_it(outcomes: Outcomes) -> None:
    ranks = both(outcomes["draws_from_nan"])
    assert [rank["failures"] for rank in ranks] == [["nonfinite_transient"]] * 2
    assert trained_alike(ranks)


@pytest.mark.slow
def test_an_exception_that_says_nan_on_one_rank_ends_both(outcomes: Outcomes) -> None:
    outcome = outcomes["draws_from_nan_alone"]
    assert not outcome["hung"]
    assert outcome["ranks"][1]["error"].startswith("RuntimeError: probability tensor contains")
    assert "error" in outcome["ranks"][0]
