"""Where something fails on one of two ranks that train together, both go on, or both end: none waits for ever."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from self_healing import consensus
from self_healing.consensus import RanksDisagree, Stranded
from self_healing.instrument.failsafe import Failsafe
from self_healing.instrument.hooks import Hooks
from self_healing.instrument.replacing import Replacements


def run_script(directory: Path, part: str, seconds: float) -> dict[str, Any]:
    script = Path(__file__).parents[1] / "failing_ranks.py"
    subprocess.run([sys.executable, str(script), str(directory), part], check=True, timeout=seconds)
    outcomes: dict[str, Any] = json.loads((directory / "outcomes.json").read_text())
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_script(tmp_path_factory.mktemp("failing"), "findings", 3600)


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
        assert (rank["fails"], rank["raises"], rank["apart"]) == ("RankFailed", "RankRaised", "RanksDisagree")
        assert rank["still"] == 2.0


def test_ranks_that_do_different_things_are_no_bug_of_this_library(caplog: pytest.LogCaptureFixture) -> None:
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=5))
    failsafe = Failsafe(trainer, Hooks(), Replacements(), lambda: None)
    failsafe.switch_off(RanksDisagree("news at the end: other ranks are in another vote"))
    (record,) = caplog.records
    assert "step 5 (news at the end: other ranks are in another vote): look for code that decides" in caplog.text
    assert (record.exc_info, "report" in caplog.text) == (None, False)


def test_nor_are_those_that_do_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def apart(*_: Any) -> list[float]:
        raise RanksDisagree("what is left of the step: other ranks are in another vote")

    trainer = SimpleNamespace(state=SimpleNamespace(global_step=5), accelerator=SimpleNamespace(device=None))
    failsafe = Failsafe(trainer, Hooks(), Replacements(), lambda: None)
    monkeypatch.setattr(consensus, "sum_over_ranks", apart)
    with pytest.raises(Stranded, match=r"the ranks do different things \(the step: other ranks are in another vote\)"):
        failsafe.give_up_together(RanksDisagree("the step: other ranks are in another vote"))


@pytest.mark.parametrize(
    "where",
    [
        "between_steps",
        "before_the_vote",
        "after_the_vote",
        "at_the_end",
        "search_before_generation",
        "search_in_an_experiment",
    ],
)
def test_a_failure_of_our_own_on_one_rank_switches_healing_off_on_both(outcomes: dict[str, Any], where: str) -> None:
    ranks = both(outcomes, where)
    assert [rank["broken"] for rank in ranks] == [True, True]
    assert trained_alike(ranks)


def test_weights_of_one_rank_that_an_evaluation_could_not_generate_with_are_healed_first(
    outcomes: dict[str, Any],
) -> None:
    ranks = both(outcomes, "evaluated_policy")
    assert [rank["failures"] for rank in ranks] == [["corrupted_state"]] * 2
    assert trained_alike(ranks)


def test_snapshots_that_one_rank_has_no_memory_for_are_off_on_both(outcomes: dict[str, Any]) -> None:
    ranks = both(outcomes, "snapshot_without_memory")
    assert [rank["broken"] for rank in ranks] == [False, False]
    assert trained_alike(ranks)


def test_steps_that_one_rank_has_not_kept_are_replayed_on_neither(outcomes: dict[str, Any]) -> None:
    ranks = both(outcomes, "batches_too_large")
    assert [(rank["failures"], rank["lost"]) for rank in ranks] == [(["corrupted_state"], [5])] * 2
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


def test_an_incident_that_a_thread_opens_does_not_make_a_step_unhealthy(outcomes: dict[str, Any]) -> None:
    ranks = both(outcomes, "incident_of_a_thread")
    assert len(ranks[1]["failures"]) > len(ranks[0]["failures"])
    assert trained_alike(ranks)


def test_a_callback_that_one_rank_alone_calls_again_costs_nothing(outcomes: dict[str, Any]) -> None:
    ranks = both(outcomes, "callback_raises")
    assert [(rank["calls"], rank["failures"]) for rank in ranks] == [(1, []), (2, ["network"])]
    assert trained_alike(ranks)


def test_a_callback_that_has_met_the_other_rank_is_not_called_again_alone(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["callback_raises_past_a_collective"]
    assert not outcome["hung"]
    assert outcome["ranks"][1]["error"].startswith("ConnectionError: the storage went away")
    assert "error" in outcome["ranks"][0]


def test_an_exception_that_says_nan_is_healed_where_all_ranks_raise_it(outcomes: dict[str, Any]) -> None:
    ranks = both(outcomes, "draws_from_nan")
    assert [rank["failures"] for rank in ranks] == [["nonfinite_transient"]] * 2
    assert trained_alike(ranks)


def test_an_exception_that_says_nan_on_one_rank_ends_both(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["draws_from_nan_alone"]
    assert not outcome["hung"]
    assert outcome["ranks"][1]["error"].startswith("RuntimeError: probability tensor contains")
    assert "error" in outcome["ranks"][0]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "wrapper", "fsdp2", "told"])
def test_any_call_of_ours_that_fails_on_one_rank_leaves_none_behind(tmp_path: Path, strategy: str) -> None:
    # Each pair has a limit of its own, by what the first one has taken on this machine.
    fuzzed = run_script(tmp_path, f"{strategy}:0-20", 2 * 3600)
    recorded = fuzzed.pop("recorded")
    assert trained_alike(both({"": recorded}, "")), recorded
    assert len(fuzzed) == 20
    wrong = [why for outcome in fuzzed.values() for why in wrong_with(outcome)]
    assert not wrong, "\n".join(wrong)


def wrong_with(outcome: dict[str, Any]) -> Iterator[str]:
    """Says what must not be after one call has failed, with the seed."""
    failed, errors = outcome["failed"], [rank.get("error") for rank in outcome["ranks"]]
    if outcome["hung"]:
        yield f"{failed}: ranks {outcome['hung']} wait for ever. {' | '.join(outcome['last'])}"
    elif any(errors) and outcome["beside"]:
        yield f"{failed}: it has failed beside the training, which has ended for it: {errors}"
    elif any(errors) and not all(errors):
        yield f"{failed}: one rank has ended, and the other one has not: {errors}"
    elif not any(errors) and outcome["ranks"][0]["weights"] != outcome["ranks"][1]["weights"]:
        yield f"{failed}: weights differ"
