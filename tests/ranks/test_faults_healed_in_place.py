"""
A fault on one of two ranks is healed while both train on, with equal weights: under DDP, under FSDP2 with full and
with sharded state dicts, and under ZeRO. Each case is a cell of docs/ranks.md.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import UNNOTICEABLE
from strategies import IN_PARTS, STRATEGIES, WITH_DEEPSPEED, ZERO
from struck_ranks import BASELINES, RUNS, SAVE_EVERY, STEPS, TAKE_LONG
from test_distributed import launch

from self_healing.checkpoints.vetting import vet


FAULTS = [name for name in RUNS if name not in BASELINES.values()]
# Far beyond what all of them need; a deadlock ends after 90 seconds by itself.
SECONDS = 900
NO_COPY = f"{UNNOTICEABLE}each rank has the only copy of its shard, and there is nothing to compare it with"
NOT_YET = {("drifting_replica", strategy): NO_COPY for strategy in STRATEGIES if strategy != "ddp"}
# What came of a fault, and of the run that it is compared with, on each rank.
Ranks = list[dict[str, Any]]
See = Callable[[str, str], tuple[Ranks, Ranks]]


# For every day, one of each kind that test_distributed.py does not have.
QUICK = {(fault, "ddp") for fault in ("none", "gradient_spike", "full_disk_rank_1", "callback_retried")}


def cells(*faults: str) -> pytest.MarkDecorator:
    """Some faults under each strategy."""
    found = []
    for fault, strategy in itertools.product(faults, STRATEGIES):
        marks = [] if (fault, strategy) in QUICK else [pytest.mark.slow]
        if strategy in ZERO:
            marks.append(WITH_DEEPSPEED)
        if (fault, strategy) in NOT_YET:
            marks.append(pytest.mark.xfail(strict=True, reason=NOT_YET[fault, strategy]))
        found.append(pytest.param(fault, strategy, id=f"{fault}-{strategy}", marks=marks))
    return pytest.mark.parametrize(("fault", "strategy"), found)


def strike(directory: Path, strategy: str, faults: list[str]) -> dict[str, Ranks]:
    """Strikes with one fault after the other in one launch; after one that ends the job, the rest in another."""
    found: dict[str, Ranks] = {}
    while left := [fault for fault in faults if fault not in found]:
        launched = directory / str(len(found))
        launched.mkdir()
        try:
            ended = f"exit code {launch(launched, strategy, *left, script='struck_ranks.py', seconds=SECONDS)}"
        except subprocess.TimeoutExpired as error:
            ended = str(error)
        paths = [launched / f"results.{rank}.json" for rank in (0, 1)]
        first, second = (json.loads(path.read_text()) if path.exists() else {} for path in paths)
        for name in first:
            if "weights" in first[name] and "weights" in second.get(name, {}):
                found[name] = [first[name], second[name]]
        broken = next((fault for fault in left if fault not in found), None)
        if broken is not None:
            found[broken] = [{"error": ended} | results.get(broken, {}) for results in (first, second)]
    return found


@pytest.fixture(scope="module")
def see(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> See:
    """Gives both ranks of a fault, after what holds for all of them was looked at, and of what it is compared with."""
    asked_for = {
        (item.callspec.params["fault"], item.callspec.params["strategy"])
        for item in request.session.items
        if item.path == request.path
    }
    struck: dict[tuple[str, bool], dict[str, Ranks]] = {}

    def see(fault: str, strategy: str) -> tuple[Ranks, Ranks]:
        launched = strategy, fault in TAKE_LONG
        if launched not in struck:
            together = [
                each for each in FAULTS if (each in TAKE_LONG) == launched[1] and (each, strategy) in asked_for
            ]
            struck[launched] = strike(tmp_path_factory.mktemp(strategy), strategy, together)
        ranks, others = struck[launched][fault], struck[launched][BASELINES.get(fault, "none")]
        assert [rank.get("error") for rank in ranks] == [None, None]
        for rank, other in zip(ranks, others, strict=True):
            assert rank["trained_as"] == strategy.partition("_")[0]
            assert rank["saved_as"] in (None, "parts" if strategy in IN_PARTS else "whole")
            assert rank["steps"] == other["steps"]
            assert rank["finite"]
        assert ranks[0]["weights"] == ranks[1]["weights"]
        return ranks, others

    return see


def leaves_no_trace(ranks: Ranks, others: Ranks) -> None:
    """To the last bit."""
    assert [rank["weights"] for rank in ranks] == [other["weights"] for other in others]
    assert [rank["losses"] for rank in ranks] == [other["losses"] for other in others]


def outcomes(rank: dict[str, Any]) -> list[list[Any]]:
    return [
        [each["failure"], each["outcome"], each["steps_lost"]] for each in rank["events"] if each["kind"] == "outcome"
    ]


def named(rank: dict[str, Any], key: str) -> list[Any]:
    """What the diagnoses of a journal say."""
    return [
        each["evidence"][key] for each in rank["events"] if each["kind"] == "diagnosed" and key in each["evidence"]
    ]


@cells("none")
def test_a_run_that_nothing_happens_to_is_the_plain_one(see: See, fault: str, strategy: str) -> None:
    ranks, plain = see(fault, strategy)
    leaves_no_trace(ranks, plain)
    assert [outcomes(rank) for rank in ranks] == [[], []]


@cells("transient_nan")
def test_a_nan_that_passes_leaves_no_trace_and_its_rank_is_named(see: See, fault: str, strategy: str) -> None:
    ranks, others = see(fault, strategy)
    leaves_no_trace(ranks, others)
    assert [rank["fired"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert outcomes(rank) == [["nonfinite_transient", "resolved", 0]]
        assert named(rank, "ranks") == [[1]]


@cells("poison_rows_loss", "poison_rows_gradient")
def test_poison_rows_are_dropped_and_their_rank_is_named(see: See, fault: str, strategy: str) -> None:
    ranks, _ = see(fault, strategy)
    assert ranks[0]["fired"] == 0
    for rank in ranks:
        assert outcomes(rank) == [["nonfinite_poison_rows", "resolved", 0]] * 3
        assert named(rank, "ranks") == [[1]] * 3


@cells("nan_weights")
def test_weights_that_turn_nan_leave_no_trace_and_their_rank_is_named(see: See, fault: str, strategy: str) -> None:
    ranks, others = see(fault, strategy)
    leaves_no_trace(ranks, others)
    assert [rank["fired"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert outcomes(rank) == [["corrupted_state", "resolved", 0]]
        assert [each["action"] for each in rank["events"] if each["kind"] == "action"] == ["roll_back", "replay_steps"]
        assert named(rank, "ranks") == [[1]]


@cells("nan_policy")
def test_a_policy_whose_weights_turn_nan_goes_back_and_the_rank_is_named(see: See, fault: str, strategy: str) -> None:
    ranks, _ = see(fault, strategy)
    assert [rank["fired"] for rank in ranks] == [0, 1]
    for rank in ranks:
        # What was generated since the snapshot is not generated again.
        assert outcomes(rank) == [["corrupted_state", "resolved", 3]]
        assert named(rank, "ranks") == [[1]]


@cells("gradient_spike")
def test_a_gradient_spike_that_passes_leaves_no_trace(see: See, fault: str, strategy: str) -> None:
    ranks, others = see(fault, strategy)
    leaves_no_trace(ranks, others)
    assert [rank["fired"] for rank in ranks] == [0, 1]
    # Whose it was is not known: gradients are summed over ranks before anybody sees them.
    assert [outcomes(rank) for rank in ranks] == [[["spike_transient", "resolved", 0]]] * 2


@cells("scrambled_weights")
def test_weights_that_spoil_the_loss_are_gone_back_from_and_leave_no_trace(
    see: See, fault: str, strategy: str
) -> None:
    ranks, others = see(fault, strategy)
    # Losses were logged before the rise was known to be one.
    assert [rank["weights"] for rank in ranks] == [other["weights"] for other in others]
    assert [rank["fired"] for rank in ranks] == [1, 1]
    for rank in ranks:
        assert outcomes(rank)[-1] == ["divergence", "resolved", 0]
        actions = [each["action"] for each in rank["events"] if each["kind"] == "action"]
        assert actions[-2:] == ["roll_back", "replay_steps"]


@cells("learning_rate")
def test_a_learning_rate_far_too_high_is_lowered_from_the_beginning(see: See, fault: str, strategy: str) -> None:
    ranks, _ = see(fault, strategy)
    for rank in ranks:
        actions = [each for each in rank["events"] if each["kind"] == "action"]
        back = next(each for each in actions if each["action"] == "roll_back")
        assert (back["state"], back["to_step"]) == ("initial", 0)
        assert next(each for each in actions if each["action"] == "reduce_learning_rate")["learning_rate"] < 0.1
        assert rank["losses"][-1] < 4.5


@cells("red_flag")
def test_a_rule_that_asks_for_going_back_has_all_ranks_go_back(see: See, fault: str, strategy: str) -> None:
    ranks, _ = see(fault, strategy)
    for rank in ranks:
        actions = [each["action"] for each in rank["events"] if each["kind"] == "action"]
        assert actions[:3] == ["roll_back", "skip_step", "reduce_learning_rate"]
        assert {failure for failure, *_ in outcomes(rank)} == {"red_flag"}


@cells("tracker")
def test_a_tracker_that_one_rank_cannot_reach_changes_nothing(see: See, fault: str, strategy: str) -> None:
    ranks, others = see(fault, strategy)
    leaves_no_trace(ranks, others)
    assert ranks[0]["fired"] > 1
    assert [outcomes(rank) for rank in ranks] == [[["reporting", "reported", 0]], []]


@cells("drifting_replica")
def test_a_layer_that_is_another_on_one_rank_leaves_no_trace_and_the_rank_is_named(
    see: See, fault: str, strategy: str
) -> None:
    ranks, others = see(fault, strategy)
    # Two steps were logged before the ranks were compared.
    assert [rank["weights"] for rank in ranks] == [other["weights"] for other in others]
    assert [rank["fired"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert outcomes(rank) == [["replicas_differ", "resolved", 0]]
        assert named(rank, "odd_ranks") == [[1]]


@cells("bad_sample")
def test_samples_that_one_rank_cannot_load_are_replaced_there(see: See, fault: str, strategy: str) -> None:
    ranks, _ = see(fault, strategy)
    assert outcomes(ranks[0]) == []
    assert outcomes(ranks[1]) == [["bad_data", "resolved", 0]] * 3
    quarantine = Path(ranks[0]["directory"], "quarantine.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["dataset_index"] for line in quarantine) == [5, 17, 30]


@cells("full_disk_rank_0", "full_disk_rank_1")
def test_a_full_disk_of_one_rank_costs_both_one_checkpoint(see: See, fault: str, strategy: str) -> None:
    ranks, others = see(fault, strategy)
    leaves_no_trace(ranks, others)
    for rank in ranks:
        assert outcomes(rank) == [["disk", "resolved", 0]]
        assert [each["missing"] for each in rank["events"] if each["kind"] == "outcome"] == [[2 * SAVE_EVERY]]
        (seen,) = (each for each in rank["events"] if each["kind"] == "detected")
        assert seen["evidence"]["message"].endswith(f"(rank {fault[-1]})")
    written = {
        path.name: vet(path).reason.partition(";")[0] for path in Path(ranks[0]["directory"]).glob("checkpoint-*")
    }
    assert written == dict.fromkeys([f"checkpoint-{SAVE_EVERY}", f"checkpoint-{STEPS}"], "complete")


@cells("reward_retried")
def test_a_reward_that_one_rank_cannot_have_for_a_while_leaves_no_trace(see: See, fault: str, strategy: str) -> None:
    ranks, others = see(fault, strategy)
    leaves_no_trace(ranks, others)
    assert [(rank["fired"], rank["waits"]) for rank in ranks] == [(0, 0), (2, 2)]
    assert [outcomes(rank) for rank in ranks] == [[], [["network", "resolved", 0]]]


@cells("evaluation_retried", "callback_retried")
def test_a_connection_that_user_code_of_one_rank_has_lost_leaves_no_trace(see: See, fault: str, strategy: str) -> None:
    ranks, others = see(fault, strategy)
    leaves_no_trace(ranks, others)
    assert ranks[0]["fired"] == 0
    assert ranks[1]["fired"] == ranks[1]["waits"] > 0
    assert [outcomes(rank) for rank in ranks] == [[], [["network", "resolved", 0]]]


@cells("torn_weights", "torn_rank_part")
def test_a_torn_part_of_a_checkpoint_is_not_resumed_from(see: See, fault: str, strategy: str) -> None:
    ranks, others = see(fault, strategy)
    leaves_no_trace(ranks, others[:1] * 2)
    (passed_over,) = (each for each in ranks[0]["events"] if each["kind"] == "checkpoint_passed_over")
    torn = {
        "torn_rank_part": "rng_state_1.pth",
        "ddp": "model.safetensors",
        "fsdp2_full": "pytorch_model_fsdp.bin",
        "fsdp2_sharded": "__1_0.distcp",
        **dict.fromkeys(ZERO, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    }
    assert torn.get(fault, torn[strategy]) in passed_over["reason"]
    started = [each["step"] for rank in ranks for each in rank["events"] if each["kind"] == "run_started"]
    assert started == [SAVE_EVERY, SAVE_EVERY]
