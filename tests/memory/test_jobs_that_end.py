"""
Where memory that runs out on one rank cannot be healed in place, all ranks end within seconds, and the next start of
the job goes on with smaller pieces, or says why it cannot.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from short_jobs import STEPS


pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "short_jobs.py"
# From the last failure to the end of the last rank, in seconds; and far beyond what all jobs take.
BOUND, SECONDS = 10.0, 3000
REFERENCES = {"generation": "plain_policy", "evaluation": "plain_sharded", "both_sharded": "plain_sharded"}
Starts = list[dict[str, Any]]


def run(directory: Path, *names: str) -> dict[str, Starts]:
    subprocess.run([sys.executable, str(SCRIPT), str(directory), *names], check=True, timeout=SECONDS)
    jobs: dict[str, Starts] = json.loads((directory / "results.json").read_text())
    return jobs


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Starts]:
    return run(tmp_path_factory.mktemp("jobs"))


def ends_soon(start: dict[str, Any]) -> None:
    assert start["hung"] == [], start["log"]
    # The launcher starts it again, also where both ranks have failed.
    assert set(start["codes"]) <= {1, 75}, start["log"]
    assert 0 < start["apart"] < BOUND


def comes_to_its_end(start: dict[str, Any], steps: int = STEPS) -> list[dict[str, Any]]:
    assert start["codes"] == [0, 0], start["log"]
    ranks: list[dict[str, Any]] = start["ranks"]
    assert [rank["steps"] for rank in ranks] == [steps, steps]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    return ranks


@pytest.mark.parametrize("name", ["backward", "loss", "generation", "evaluation", "both", "both_sharded"])
def test_the_next_start_goes_on_with_smaller_pieces(jobs: dict[str, Starts], name: str) -> None:
    first, second = jobs[name]
    ends_soon(first)
    ranks = comes_to_its_end(second)
    assert any("and the next start of the job splits it" in each for each in first["advice"])
    if name == "loss":
        # It has a factor of its own, and ran out only once.
        return
    (reference,) = jobs[REFERENCES.get(name, "plain")]
    if name != "generation":
        # Generated in pieces, answers are others.
        for rank in ranks:
            assert rank["sums"] == pytest.approx(reference["ranks"][0]["sums"], rel=1e-4, abs=1e-4)


def test_an_update_that_was_left_half_way_is_in_no_weight(jobs: dict[str, Starts]) -> None:
    first, second = jobs["update"]
    ends_soon(first)
    ranks, (reference,) = comes_to_its_end(second), jobs["plain"]
    assert [rank["weights"] for rank in ranks] == [rank["weights"] for rank in reference["ranks"]]
    # No size of a call is to blame, and nothing is split for it.
    assert any("optimizer with smaller state" in each for each in first["advice"])
    assert ranks[0]["most_rows"] == reference["ranks"][0]["most_rows"]


def test_the_first_step_of_a_static_graph_is_not_computed_again_on_one_rank(jobs: dict[str, Starts]) -> None:
    first, second = jobs["static_graph"]
    ends_soon(first)
    comes_to_its_end(second)
    assert any("learns its static graph in the first step" in each for each in first["advice"])


def test_what_cannot_be_split_says_so_at_each_start(jobs: dict[str, Starts]) -> None:
    for start in jobs["averaged"]:
        ends_soon(start)
        assert "other ranks take part in a forward of the model" in start["advice"][1]
        assert "Please lower per_device_train_batch_size" in start["advice"][1]


def test_ranks_of_a_sharded_model_that_have_learned_other_sizes_split_alike(jobs: dict[str, Starts]) -> None:
    (only,) = jobs["learned"]
    ranks, (reference,) = comes_to_its_end(only), jobs["plain_sharded"]
    assert only["struck_at"] == []
    assert max(rank["most_rows"] for rank in ranks) <= 2
    assert ranks[0]["calls"] == ranks[1]["calls"]
    assert ranks[0]["sums"] == pytest.approx(reference["ranks"][0]["sums"], rel=1e-4, abs=1e-4)
