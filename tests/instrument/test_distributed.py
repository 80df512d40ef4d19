"""Two processes that train together judge and heal together."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from started_ranks import StartedRanks

from self_healing.checkpoints.vetting import vet


def launch(
    directory: Path, *arguments: str, script: str = "two_processes.py", processes: int = 2, seconds: float = 300
) -> int:
    """Runs a script on each rank, as torchrun does without restarts; gives the first code that is not 0."""
    told = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    ranks = StartedRanks(
        directory.with_name(f"{directory.name}.logs"), processes, script, directory, *arguments, **told
    )
    try:
        return ranks.run(seconds)
    finally:
        ranks.end()
        for rank in range(processes):
            print(ranks.log(rank))


def on_two_processes(directory: Path, *arguments: str, processes: int = 2, **options: str) -> list[dict[str, Any]]:
    assert launch(directory, *arguments, processes=processes, **options) == 0
    return [json.loads((directory / f"results.{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def results(directory: Path) -> list[dict[str, Any]]:
    return on_two_processes(directory)


def test_a_healthy_run_is_the_plain_one(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["healthy"]["weights"] == rank["plain"]["weights"]
        assert rank["healthy"]["losses"] == rank["plain"]["losses"]
    assert not results[0]["healthy"]["outcomes"]


def test_what_no_loss_of_one_rank_shows_is_healed_on_both_before_it_is_saved(
    results: list[dict[str, Any]], directory: Path
) -> None:
    assert all(rank["unseen"]["finite"] for rank in results)
    assert results[0]["unseen"]["actions"] == ["roll_back", "replay_steps"]
    assert vet(directory / "unseen" / "checkpoint-6").usable
    assert {rank["unseen"]["best"] for rank in results} == {None}
    assert results[0]["unseen"]["weights"] == results[1]["unseen"]["weights"]


@pytest.mark.heals("transient", "ddp")
@pytest.mark.parametrize("struck", [0, 1])
def test_a_nan_on_one_rank_is_undone_on_both(results: list[dict[str, Any]], struck: int) -> None:
    assert [rank[f"struck_on_{struck}"]["fired"] for rank in results] == [1 - struck, struck]
    for rank in results:
        assert rank[f"struck_on_{struck}"]["weights"] == rank["plain"]["weights"]
        assert rank[f"struck_on_{struck}"]["losses"] == rank["plain"]["losses"]
    (outcome,) = results[0][f"struck_on_{struck}"]["outcomes"]
    assert outcome["failure"] == "nonfinite_transient"


@pytest.mark.heals("poison_rows", "ddp")
def test_poison_rows_of_one_rank_are_dropped_and_both_stay_together(results: list[dict[str, Any]]) -> None:
    assert sum(rank["poison"]["fired"] for rank in results)
    assert results[0]["poison"]["weights"] == results[1]["poison"]["weights"]
    assert results[0]["poison"]["steps"] == 4
    assert all(math.isfinite(loss) for loss in results[0]["poison"]["losses"])
    assert {outcome["failure"] for outcome in results[0]["poison"]["outcomes"]} == {"nonfinite_poison_rows"}
    assert all(outcome["steps_lost"] == 0 for outcome in results[0]["poison"]["outcomes"])


@pytest.mark.heals("red_flag", "ddp", partly="reported, or stopped, or rolled back, as the rule says")
def test_a_red_flag_that_only_one_rank_sees_ends_the_run_on_both(results: list[dict[str, Any]]) -> None:
    assert [rank["flagged_on_1"]["steps"] for rank in results] == [2, 2]
    for rank in results:
        # With rule and remedy.
        assert "It is mine. (rule mine)" in rank["flagged_on_1"]["stopped"]
        assert "What to do: Ask the test." in rank["flagged_on_1"]["stopped"]
    assert "(seen by rank 1)" in results[0]["flagged_on_1"]["stopped"]
    assert "seen by" not in results[1]["flagged_on_1"]["stopped"]


@pytest.mark.heals("corrupted_weights", "ddp")
def test_weights_that_turn_nan_on_one_rank_are_rolled_back_on_both(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["corrupted_on_1"]["weights"] == rank["corrupted_plain"]["weights"]
        assert rank["corrupted_on_1"]["losses"] == rank["corrupted_plain"]["losses"]
    assert results[0]["corrupted_on_1"]["actions"] == ["roll_back", "replay_steps"]
    (outcome,) = results[0]["corrupted_on_1"]["outcomes"]
    assert (outcome["failure"], outcome["steps_lost"]) == ("corrupted_state", 0)


@pytest.mark.heals("replicas", "ddp")
@pytest.mark.parametrize(
    "name",
    ["flipped_on_1", "flipped_moment_on_1", "flipped_before_snapshots_on_1"],
    ids=["weight", "moment", "before snapshots"],
)
def test_a_bit_that_flips_on_one_rank_is_found_undone_on_both_and_the_rank_is_named(
    results: list[dict[str, Any]], name: str
) -> None:
    assert [rank[name]["flipped"] for rank in results] == [0, 1]
    for rank in results:
        # The same run, but for the fault.
        assert rank[name]["weights"] == rank["corrupted_plain"]["weights"]
        assert rank[name]["named"] == [[1]]
        assert rank[name]["outcomes"] == [["replicas_differ", 0]]


def test_a_rank_whose_weights_are_changed_again_and_again_ends_the_run_and_is_named(
    results: list[dict[str, Any]],
) -> None:
    for rank in results:
        assert "the weights of the ranks are not the same any more" in rank["drifting_on_1"]["ended"]
        assert "hit so far: rank 1 (2 times)" in rank["drifting_on_1"]["ended"]


@pytest.mark.heals("preemption", "ddp")
def test_one_that_is_asked_to_leave_leaves_together_with_the_other(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["preempted_1"] == {"steps": 3, "code": 143, "checkpoints": ["checkpoint-3"]}


@pytest.mark.parametrize("scenario", ["healthy", "slow_to_save_1"], ids=["callback", "wrapper"])
def test_all_processes_of_a_run_know_it_by_one_name(results: list[dict[str, Any]], scenario: str) -> None:
    (name,) = results[0][scenario]["runs"]
    assert results[1][scenario]["runs"] == [name]


def test_a_checkpoint_is_complete_when_the_slowest_has_written_its_part(
    results: list[dict[str, Any]], directory: Path, tmp_path: Path
) -> None:
    checkpoint = directory / "slow_to_save_1" / "checkpoint-1"
    files = json.loads((checkpoint / "healing.json").read_text())["files"]
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= files.keys()
    torn = shutil.copytree(checkpoint, tmp_path / "checkpoint-1")
    assert vet(torn).usable
    (torn / "rng_state_1.pth").unlink()
    verdict = vet(torn)
    assert not verdict.usable
    assert "rng_state_1.pth" in verdict.reason


@pytest.mark.heals("damaged_checkpoint", "ddp")
def test_the_first_process_decides_which_checkpoint_all_resume_from(
    results: list[dict[str, Any]], directory: Path
) -> None:
    first, second = (rank["damaged_0"] for rank in results)
    assert (first["resumed_at"], second["resumed_at"]) == (2, 2)
    assert first["weights"] == second["weights"]
    assert (first["looked"], second["looked"]) == (True, False)
    for rank in (first, second):
        assert f"There is no checkpoint in {directory / 'damaged_0.nothing_of_rank_0'}" in rank["refused"]


def test_an_error_that_says_that_another_process_is_gone_is_no_bug(results: list[dict[str, Any]]) -> None:
    # The last three speak of something else.
    gone, other = ["process_died"] * 5, ["user_code", "user_code", "network"]
    assert results[0]["of_a_gone_peer"] == gone + other


def test_the_one_that_is_left_says_that_another_is_gone(results: list[dict[str, Any]]) -> None:
    left, faulty = results[0]["faulty_1"]["first"]
    assert (left["failure"], faulty["failure"]) == ("process_died", "user_code")
    assert faulty["error"]["message"] == "only here"
    assert left["run"] == faulty["run"]


def test_the_one_that_is_left_says_what_the_other_has_raised(results: list[dict[str, Any]]) -> None:
    left, _ = results[0]["faulty_1"]["first"]
    incident = left["chain"][-1]
    assert (incident["cause"], incident["outcome"]) == ("rank 1: user_code", "fatal")
    assert "rank 1 failed first; it failed after step 3: ValueError: only here" in incident["evidence"]["diagnosis"]
    assert left["what_to_do"].startswith("See the postmortem or the output of rank 1. Fix the cause named in the")


def test_an_emergency_checkpoint_that_was_not_written_is_not_told_of(results: list[dict[str, Any]]) -> None:
    for postmortem in results[0]["faulty_1"]["first"]:
        assert postmortem["emergency_checkpoint"] is None
        assert "checkpoint-2" in postmortem["resume_with"]
        assert "emergency checkpoint" not in postmortem["what_to_do"]
        assert "checkpoint-2." in postmortem["what_to_do"]
        assert postmortem["chain"][-1]["actions"] == ["stop"]
    assert results[0]["faulty_1"]["report"][-1]["actions"] == ["stop"]
    tried, stop = results[0]["faulty_1"]["actions"]
    assert (tried["action"], tried["happened"]) == ("emergency_checkpoint", False)
    assert "several processes" in tried["why"]
    assert (stop["action"], stop["happened"]) == ("stop", True)


def test_a_refusal_names_what_each_of_the_processes_ended_with(results: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        assert "Training is not started again" in results[rank]["faulty_1"]["ends"][2]
        assert "rank 1 at step 3: builtins.ValueError: only here" in results[rank]["faulty_1"]["ends"][2]
    refusal, faulty = results[0]["faulty_1"]["refused"]
    assert "rank 1 at step 3: builtins.ValueError: only here" in refusal["verdict"]
    assert [(other["rank"], other["error"]["message"]) for other in refusal["other_ranks"]] == [(1, "only here")]
    assert faulty["error"]["message"] == "only here"


@pytest.mark.heals("exception", "ddp", partly="ends the job; the next start goes on, from memory where it can")
def test_a_run_that_finishes_after_all_leaves_no_postmortem(results: list[dict[str, Any]], directory: Path) -> None:
    assert [rank["faulty_1"]["ends"][3] for rank in results] == ["finished", "finished"]
    assert results[0]["faulty_1"]["left"] == [None, None]
    assert len(list((directory / "faulty_1").glob("postmortem*.before-*.json"))) == 2


def test_the_steps_that_were_done_again_are_counted_on_every_rank(results: list[dict[str, Any]]) -> None:
    # Twice in vain from step 2 to step 3.
    assert [rank["faulty_1"]["repeated"] for rank in results] == [[1, 1], [1, 1]]
    assert [rank["faulty_1"]["lost"] for rank in results] == [[0, 0], [0, 0]]
    assert [rank["faulty_1"]["outcomes"] for rank in results] == [["unresolved", "resolved"]] * 2


@pytest.mark.heals(
    "out_of_memory",
    "ddp",
    partly="in place until a gradient has been added; after that it ends the job, and the next start runs fewer rows "
    "at a time",
)
@pytest.mark.slow
def test_one_that_runs_out_of_memory_makes_the_next_start_split(tmp_path: Path) -> None:
    for name in ("plain", "healed"):
        (tmp_path / name).mkdir()
    plain = on_two_processes(tmp_path / "plain", "memory")
    # Not by --max-restarts: gloo now and then looks for the addresses of the first attempt in the second.
    assert launch(tmp_path / "healed", "memory") != 0
    healed = on_two_processes(tmp_path / "healed", "memory")
    # Not once in the second start: what did not fit in the first was known.
    assert [rank["fired"] for rank in healed] == [0, 0]
    assert healed[0]["weights"] == healed[1]["weights"]
    assert healed[0]["sum"] == pytest.approx(plain[0]["sum"], rel=1e-6)
    assert healed[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-5)


# ---- FSDP2 ----


def under(strategy: str, directory: Path, *parts: str, processes: int = 2) -> list[dict[str, Any]]:
    return on_two_processes(directory, strategy, *parts, script="two_sharded_processes.py", processes=processes)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return under("fsdp2", tmp_path_factory.mktemp("sharded"), "step")


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return under("fsdp2", tmp_path_factory.mktemp("in_parts"), "only_rows", "pieces")


def test_fsdp2_shards_every_parameter_of_every_run(sharded: list[dict[str, Any]]) -> None:
    assert all(run["sharded"] for rank in sharded for run in rank.values())


def test_a_step_thrown_away_under_fsdp2_leaves_no_gradient(sharded: list[dict[str, Any]]) -> None:
    assert {run["left_over"] for rank in sharded for run in rank.values()} == {0}


@pytest.mark.heals("transient", "fsdp2")
def test_a_nan_under_fsdp2_is_undone_bitwise(sharded: list[dict[str, Any]]) -> None:
    for rank in sharded:
        assert rank["transient"]["losses"] == rank["plain"]["losses"]
        assert rank["transient"]["sum"] == rank["plain"]["sum"]
    assert sharded[0]["transient"]["outcomes"] == [["nonfinite_transient", 0]]


@pytest.mark.heals("unexplained", "fsdp2")
def test_a_skipped_step_under_fsdp2_spoils_no_later_one(sharded: list[dict[str, Any]]) -> None:
    assert sharded[0]["skipped"]["outcomes"] == [["nonfinite_numerical", 1]] * 2


@pytest.mark.heals("poison_rows", "fsdp2")
@pytest.mark.parametrize("poison", ["poison", "gradient"])
def test_poison_rows_are_found_under_fsdp2(sharded: list[dict[str, Any]], poison: str) -> None:
    outcomes = sharded[0][poison]["outcomes"]
    assert outcomes
    assert all(outcome == ["nonfinite_poison_rows", 0] for outcome in outcomes)


@pytest.mark.heals("poison_rows", "fsdp2")
@pytest.mark.slow
def test_a_rank_is_left_without_a_row_as_if_that_had_never_counted(in_parts: list[dict[str, Any]]) -> None:
    for rank in in_parts:
        assert rank["only_row"]["losses"] == rank["masked"]["losses"]
        assert rank["only_row"]["sum"] == rank["masked"]["sum"]
    assert in_parts[0]["only_row"]["outcomes"] == [["nonfinite_poison_rows", 0]]


@pytest.mark.slow
def test_a_mean_over_micro_batches_leaves_out_those_without_a_row(in_parts: list[dict[str, Any]]) -> None:
    assert in_parts[0]["only_pair"]["losses"] == pytest.approx([math.log(2)] * 8, rel=1e-6)
    assert in_parts[0]["only_pair"]["outcomes"] == [["nonfinite_poison_rows", 0]] * 2


@pytest.mark.heals("out_of_memory", "fsdp2", partly="ends the job; the next start runs fewer rows at a time")
@pytest.mark.parametrize(("name", "whole"), [("pieces", "whole"), ("pieces_of_pairs", "whole_pairs")])
@pytest.mark.slow
def test_what_did_not_fit_on_one_rank_is_split_alike_on_all(
    in_parts: list[dict[str, Any]], name: str, whole: str
) -> None:
    for rank in in_parts:
        assert rank[name]["fired"] == 0
        assert rank[name]["losses"] == pytest.approx(rank[whole]["losses"], rel=1e-6)
        assert rank[name]["sum"] == pytest.approx(rank[whole]["sum"], rel=1e-6)
    # Of the reference model, too, which has both rows of each pair in one call.
    assert in_parts[0][name]["metrics"]["healing/split_into"] >= 4


@pytest.mark.heals("unexplained", "ddp")
@pytest.mark.slow
def test_fsdp2_heals_as_ddp_does(
    sharded: list[dict[str, Any]], in_parts: list[dict[str, Any]], tmp_path: Path
) -> None:
    replicated = under("ddp", tmp_path, "step", "only_rows", "pieces")
    for *parts, twin in zip(sharded, in_parts, replicated, strict=True):
        for name, run in (parts[0] | parts[1]).items():
            assert run["outcomes"] == twin[name]["outcomes"]
            assert run["losses"] == pytest.approx(twin[name]["losses"], rel=1e-6)
            assert run["sum"] == pytest.approx(twin[name]["sum"], rel=1e-6)


VARIANTS = [
    # Processes, how the model gets sharded, and the variants that are trained one after the other.
    pytest.param(2, "fsdp2", ("kept", "offloaded", "checkpointing", "bf16", "lora"), id="by accelerate"),
    pytest.param(2, "loaded", ("loaded", "loaded_tensor_parallel"), id="while loaded"),
    pytest.param(4, "fsdp2", ("hsdp",), id="in replicas"),
    pytest.param(4, "loaded", ("loaded_hsdp",), id="in replicas, while loaded"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "strategy", "variants"), VARIANTS)
def test_each_way_to_shard_is_healed(processes: int, strategy: str, variants: tuple[str, ...], tmp_path: Path) -> None:
    ranks = under(strategy, tmp_path, *variants, processes=processes)
    for rank in ranks:
        for name in variants:
            plain, transient, poison = (rank[f"{name}_{run}"] for run in ("plain", "transient", "poison"))
            pieces = rank.get(f"{name}_pieces")
            assert "Shard" in plain["placements"]
            assert ("Replicate" in plain["placements"]) == ("hsdp" in name)
            assert (transient["losses"], transient["sum"]) == (plain["losses"], plain["sum"])
            assert poison["losses"] != plain["losses"]
            assert all(math.isfinite(loss) for loss in poison["losses"])
            # Of an adapter and in half precision, pieces round, or draw, in another way.
            exactness = 1e-3 if name in ("bf16", "lora") else 1e-6
            assert {run["left_over"] for run in (transient, poison)} == {0}
            if pieces is None:
                assert name == "loaded_tensor_parallel"
                continue
            assert pieces["losses"] == pytest.approx(plain["losses"], rel=exactness)
            assert pieces["left_over"] == 0
            assert pieces["metrics"]["healing/split_into"] == 4
    for name in variants:
        for run in ("plain", "transient", "poison"):
            assert len({rank[f"{name}_{run}"]["sum"] for rank in ranks}) == 1
        assert ranks[0][f"{name}_transient"]["outcomes"] == [["nonfinite_transient", 0]]
        outcomes = ranks[0][f"{name}_poison"]["outcomes"]
        assert outcomes
        assert all(outcome == ["nonfinite_poison_rows", 0] for outcome in outcomes)


@pytest.mark.heals("replicas", "fsdp2", partly="where shards are replicated (HSDP)")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "strategy", "variant", "flips"),
    [(4, "fsdp2", "hsdp", {"weight": 1, "moment": 2}), (2, "loaded", "loaded_tensor_parallel", {"weight": 1})],
    ids=["in replicas of shards", "beside split weights"],
)
def test_a_bit_that_flips_in_what_several_ranks_keep_is_undone_and_the_rank_named(
    processes: int, strategy: str, variant: str, flips: dict[str, int], tmp_path: Path
) -> None:
    part = "hsdp_replicas" if variant == "hsdp" else "tensor_parallel_replicas"
    ranks = under(strategy, tmp_path, part, processes=processes)
    for rank in ranks:
        plain = rank[f"{variant}_plain"]
        assert "Shard" in plain["placements"]
        for name in ("healthy", *flips):
            run = rank[f"{variant}_{name}"]
            # What was logged meanwhile is what came out with the weights as they were.
            assert (run["losses"][-1], run["sum"]) == (plain["losses"][-1], plain["sum"])
    assert ranks[0][f"{variant}_healthy"]["outcomes"] == []
    for name, struck in flips.items():
        assert [rank[f"{variant}_{name}"]["fired"] for rank in ranks] == [int(at == struck) for at in range(processes)]
        assert ranks[0][f"{variant}_{name}"]["outcomes"] == [["replicas_differ", 0]]
        assert ranks[0][f"{variant}_{name}"]["named"] == [[struck]]
