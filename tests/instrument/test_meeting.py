"""Ranks of which one alone heals, or by other settings, are told so instead of waiting for each other for ever."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed
from forked import Forked


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("meeting")
    assert Forked("meeting_ranks.py", directory).wait(900) == 0
    found: dict[str, Any] = {"directory": directory, **json.loads((directory / "outcomes.json").read_text())}
    return found


def both(outcomes: dict[str, Any], scenario: str) -> list[dict[str, Any]]:
    outcome = outcomes[scenario]
    assert not outcome["hung"]
    assert [rank.get("error") for rank in outcome["ranks"]] == [None, None]
    ranks: list[dict[str, Any]] = outcome["ranks"]
    return ranks


def test_processes_that_train_by_themselves_do_not_vote_together(outcomes: dict[str, Any]) -> None:
    ranks = both(outcomes, "each_by_itself")
    assert [(rank["ranks"], rank["steps"], rank["fired"]) for rank in ranks] == [(1, 3, 0), (1, 4, 1)]
    assert [rank["failures"] for rank in ranks] == [[], ["nonfinite_transient"]]


@pytest.mark.parametrize("scenario", ["callback_on_one", "wrapper_on_one"])
def test_a_rank_that_heals_alone_names_the_others_and_ends(outcomes: dict[str, Any], scenario: str) -> None:
    assert not outcomes[scenario]["hung"]
    first, second = (rank["error"] for rank in outcomes[scenario]["ranks"])
    assert first.startswith("ConfigurationError: Rank 1 has not begun a healed run, and rank 0 has.")
    assert "ConfigurationError" not in second
    log = (outcomes["directory"] / scenario / "log.0.txt").read_text()
    assert "If it only takes longer than the others, nothing is wrong." in log, "long before it gives up"


def test_settings_that_differ_are_named_on_all_ranks(outcomes: dict[str, Any]) -> None:
    first, second = (rank["refused"] for rank in both(outcomes, "other_settings"))
    assert first == second
    assert "nan_patience is 3 on rank 0, and another value on rank 1; snapshots is True on rank 0" in first
    assert "healing_dir" not in first
