"""Under ZeRO steps are judged before DeepSpeed takes them: computed again, thinned out, left out, gone back from."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import slowly
from test_distributed import launch, on_two_processes


pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed (`make test-deepspeed`)"
)

STAGES = [f"{stage}-{precision}" for precision in ("fp32", "bf16") for stage in (1, 2, 3)]
# Optimizer state in host memory, and the weights of ZeRO-3.
OFFLOADED = [f"{each}-offloaded" for each in ("1-bf16", "2-fp32", "3-fp32", "3-bf16")]
# Part of `make test`.
QUICK = {"2-fp32", "3-bf16"}
CASES = [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow, id=each) for each in STAGES + OFFLOADED]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run_parts(directory: Path, case: str, *parts: str) -> list[dict[str, Any]]:
    return on_two_processes(directory, *case.split("-"), *parts, script="two_zero_processes.py")


@pytest.fixture(scope="module")
def results(
    case: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    adapter = ["adapter"] if any("LoRA" in item.name for item in request.session.items) else []
    return run_parts(tmp_path_factory.mktemp("zero"), case, "stage", *adapter, "rows", "weights", "rate")


def test_it_is_zero_that_trains(results: list[dict[str, Any]], case: str) -> None:
    stage = int(case[0])
    for rank in results:
        assert rank["plain"]["stage"] == stage
        zero = "DeepSpeedZeroOptimizer_Stage3" if stage == 3 else "DeepSpeedZeroOptimizer"
        assert rank["plain"]["optimizer"] == [zero, "AdamW"]
        assert rank["plain"]["offloaded"] == ("offloaded" in case)
    # Each rank has its own partition.
    assert results[0]["plain"]["state"] != results[1]["plain"]["state"]


@pytest.mark.parametrize("kind", ["", "_once", *slowly("_lora")], ids=["accumulated", "at once", "LoRA"])
def test_a_healthy_run_is_the_plain_one(results: list[dict[str, Any]], kind: str) -> None:
    for rank in results:
        plain, healthy = rank[f"plain{kind}"], rank[f"healthy{kind}"]
        for what in ("state", "losses", "norms", "rates", "steps"):
            assert healthy[what] == plain[what]
        assert not healthy["incidents"]


@pytest.mark.heals("transient", "deepspeed")
@pytest.mark.parametrize("kind", ["", "_once", *slowly("_lora")], ids=["accumulated", "at once", "LoRA"])
def test_a_nan_on_one_rank_is_undone_bit_for_bit(results: list[dict[str, Any]], kind: str) -> None:
    assert [rank[f"transient{kind}"]["fired"] for rank in results] == [0, 1]
    for rank in results:
        plain, healed = rank[f"plain{kind}"], rank[f"transient{kind}"]
        for what in ("state", "losses", "norms", "rates", "steps"):
            assert healed[what] == plain[what]
    assert results[0][f"transient{kind}"]["incidents"] == [["nonfinite_transient", 0]]


@pytest.mark.heals("poison_rows", "deepspeed")
@pytest.mark.parametrize("where", ["poison", "gradient"], ids=["loss", "gradient"])
def test_poison_rows_are_dropped(results: list[dict[str, Any]], where: str) -> None:
    assert sum(rank[where]["fired"] for rank in results)
    for rank in results:
        assert rank[where]["finite"]
        # No step was left out by DeepSpeed.
        assert rank[where]["steps"][:3] == [4, 4, 0]
    assert {failure for failure, _ in results[0][where]["incidents"]} == {"nonfinite_poison_rows"}
    assert all(lost == 0 for _, lost in results[0][where]["incidents"])


def test_what_is_left_is_what_ddp_leaves(results: list[dict[str, Any]]) -> None:
    for rank in results:
        # Looked for in the loss, and in the gradient alone.
        assert rank["gradient"]["state"] == rank["poison"]["state"]
        if "poison_ddp" in rank:
            assert rank["poison"]["losses"] == pytest.approx(rank["poison_ddp"]["losses"], rel=1e-4)


@pytest.mark.heals("unexplained", "deepspeed")
def test_a_step_that_nothing_explains_is_left_out_and_counted(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["skipped"]["finite"]
        assert rank["skipped"]["steps"][:3] == [4, 4, 2]
        # The schedule goes on, as under any other engine.
        assert rank["skipped"]["rates"] == rank["plain"]["rates"]


@pytest.mark.heals("corrupted_weights", "deepspeed")
def test_nan_in_the_master_weights_of_one_rank_is_gone_back_from(results: list[dict[str, Any]]) -> None:
    assert [rank["weights"]["fired"] for rank in results] == [0, 1]
    for rank in results:
        for what in ("state", "losses", "rates", "steps"):
            assert rank["weights"][what] == rank["weights_plain"][what]
    assert results[0]["weights"]["actions"] == ["roll_back", "replay_steps"]


def test_a_rate_that_is_lowered_is_that_of_each_group_of_parameters(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert "reduce_learning_rate" in rank["lowered"]["actions"]
        assert (rank["lowered"]["stopped"], rank["lowered"]["steps"][0]) == ("", 10)
        assert all(rate < 1e-3 for rates in rank["lowered"]["fired"][-4:] for rate in rates)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["2-fp32", "3-bf16"])
def test_on_one_process_an_exception_is_gone_on_from_in_it(case: str, tmp_path: Path) -> None:
    (run,) = on_two_processes(tmp_path, *case.split("-"), "entered_again", processes=1, script="two_zero_processes.py")
    plain, healed = run["entered_once"], run["entered_again"]
    assert healed["fired"] == 1
    for what in ("state", "losses", "norms", "rates"):
        assert healed[what] == plain[what]
    assert healed["incidents"] == [["network", 0]]


CPU_ADAM = Path(os.environ.get("TORCH_EXTENSIONS_DIR", "none"), "cpu_adam", "cpu_adam.so")


@pytest.mark.slow
@pytest.mark.skipif(not CPU_ADAM.is_file(), reason="DeepSpeed's Adam for the CPU is not built (`make deepspeed-adam`)")
@pytest.mark.parametrize("case", ["2-fp32-cpu_adam", "3-bf16-cpu_adam"])
def test_with_offload_to_deepspeeds_own_adam_all_is_bit_for_bit(case: str, tmp_path: Path) -> None:
    for rank in run_parts(tmp_path, case, "stage"):
        assert rank["plain"]["optimizer"][1] == "DeepSpeedCPUAdam"
        for plain, healed in (
            ("plain", "healthy"),
            ("plain", "transient"),
            ("plain_once", "transient_once"),
        ):
            for what in ("state", "losses", "norms", "rates", "steps"):
                assert rank[healed][what] == rank[plain][what]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_parts(tmp_path_factory.mktemp("watched"), "2-fp32", "watched")


@pytest.mark.slow
def test_with_offload_to_nvme_a_healthy_run_is_the_plain_one(watched: list[dict[str, Any]]) -> None:
    for rank in watched:
        assert rank["watched"]["state"] == rank["watched_plain"]["state"]
        assert rank["watched"]["norms"] == rank["watched_plain"]["norms"]


@pytest.mark.slow
def test_with_offload_to_nvme_a_step_that_deepspeed_skips_is_reported_and_counted(
    watched: list[dict[str, Any]],
) -> None:
    for rank in watched:
        assert rank["watched_struck"]["steps"][:3] == [4, 4, 1]
        # Not that of the step before.
        assert [math.isinf(norm) for norm in rank["watched_struck"]["norms"]] == [False, True, False, False]
    assert watched[0]["watched_struck"]["incidents"] == [["nonfinite_undiagnosed", 0]]
    told = "\n".join(watched[0]["watched_struck"]["told"])
    assert "it offloads to NVMe; steps are watched, but not healed" in told
    assert "1 of 4 steps is not in the weights" in told


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=pytest.mark.slow, id=each)
        for each in ("2-fp32", "3-bf16", "2-fp32-offloaded", "3-bf16-offloaded")
    ],
)
def further(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    parts = ("checkpoints", "preempted", "spike", "pairs", "policy", "half", "own_schedule")
    return run_parts(tmp_path_factory.mktemp("further"), request.param, *parts)


def test_a_checkpoint_is_gone_on_from_bit_for_bit(further: list[dict[str, Any]]) -> None:
    for rank in further:
        assert rank["first_part"]["steps"][0] == 4
        for what in ("state", "losses", "norms"):
            assert rank["resumed"][what] == rank["uninterrupted"][what]


def test_without_states_in_memory_a_checkpoint_is_gone_back_to(further: list[dict[str, Any]]) -> None:
    for rank in further:
        assert rank["from_disk"]["finite"]
        # The engine has counted no step that the Trainer has not.
        assert rank["from_disk"]["steps"][:3] == [8, 8, 0]
    assert further[0]["from_disk"]["actions"][0] == "roll_back"
    assert further[0]["from_disk"]["incidents"] == [["corrupted_state", 2]]


@pytest.mark.heals("preemption", "deepspeed")
def test_a_preempted_job_goes_on_bit_for_bit(further: list[dict[str, Any]]) -> None:
    assert [rank["asked_to_leave"]["stopped"] for rank in further] == ["143", "143"]
    for rank in further:
        assert rank["asked_to_leave"]["steps"][0] == 3
        for what in ("state", "losses", "norms", "rates"):
            assert rank["preempted"][what] == rank["never_preempted"][what]


@pytest.mark.heals("gradient_spike", "deepspeed")
def test_a_gradient_spike_that_passes_is_undone_bit_for_bit(further: list[dict[str, Any]]) -> None:
    assert [rank["spike"]["fired"] for rank in further] == [0, 1]
    for rank in further:
        for what in ("state", "losses", "norms", "rates"):
            assert rank["spike"][what] == rank["spike_plain"][what]


@pytest.mark.heals("gradient_spike", "deepspeed")
def test_a_gradient_spike_of_the_batch_is_clipped_to_what_is_usual(further: list[dict[str, Any]]) -> None:
    (wanted,) = further[0]["clipped"]["wanted"]
    assert further[0]["clipped"]["applied"] == pytest.approx([wanted, wanted], rel=2e-2)
    assert further[0]["spike_in_the_batch"]["actions"] == ["clip_gradient"]


@pytest.mark.parametrize("kind", ["pairs", "policy"], ids=["DPO", "GRPO"])
def test_so_it_is_in_preference_and_policy_training(further: list[dict[str, Any]], kind: str) -> None:
    for rank in further:
        for what in ("state", "losses", "norms", "rates", "steps"):
            assert rank[f"{kind}_healthy"][what] == rank[f"{kind}_plain"][what]
            assert rank[f"{kind}_transient"][what] == rank[f"{kind}_plain"][what]
    assert further[0][f"{kind}_transient"]["incidents"] == [["nonfinite_transient", 0]]


def test_overflows_are_left_to_the_loss_scaler(further: list[dict[str, Any]]) -> None:
    for rank in further:
        # While it looks for its scale.
        assert [math.isinf(norm) for norm in rank["half_plain"]["norms"]] == [True] * 3 + [False] * 13
        for what in ("state", "losses", "norms", "rates", "steps"):
            assert rank["half_healthy"][what] == rank["half_plain"][what]
            assert rank["half_transient"][what] == rank["half_plain"][what]
    assert not further[0]["half_healthy"]["incidents"]
    assert further[0]["half_transient"]["incidents"] == [["nonfinite_transient", 0]]


def test_the_rate_is_lowered_where_deepspeed_has_made_the_schedule(further: list[dict[str, Any]]) -> None:
    assert "reduce_learning_rate" in further[0]["too_high"]["actions"]
    for rank in further:
        for what in ("state", "losses", "rates", "steps"):
            assert rank["own_healthy"][what] == rank["own_plain"][what]
        assert rank["too_high"]["stopped"] == ""
        assert rank["too_high"]["losses"][-1] < 4.5


def test_the_third_overflow_in_a_row_is_not(further: list[dict[str, Any]]) -> None:
    assert further[0]["half_overflows"]["incidents"] == [["nonfinite_numerical", 1]]
    assert further[0]["half_overflows"]["actions"] == ["skip_step"]
    # Three while it looks for its scale, and these.
    assert further[0]["half_overflows"]["steps"][:3] == [16, 16, 6]


@pytest.mark.slow
@pytest.mark.heals("out_of_memory", "deepspeed")
@pytest.mark.parametrize(("stage", "precision"), [("1", "fp32"), ("2", "fp32"), ("2", "bf16")])
def test_memory_that_runs_out_on_one_rank_is_healed_there(stage: str, precision: str, tmp_path: Path) -> None:
    ranks = on_two_processes(tmp_path, stage, precision, "memory", script="two_zero_processes.py")
    for rank in ranks:
        # Before there is a gradient the rank is computed again alone, bitwise, also where DeepSpeed measures parts.
        for kind in ("once", "early", "measured"):
            is_the_run(rank[kind], rank["fits"])
        for kind in ("above", "early_above"):
            is_close_to(rank[kind], rank["fits_whole"], precision)
    for kind in ("once", "early", "above", "early_above"):
        assert ranks[0][kind]["sums"] == ranks[1][kind]["sums"]
        # What never fits fails twice, and is split from then on.
        assert [rank[kind]["fired"] for rank in ranks] == [0, 1 if kind in ("once", "early") else 2]


@pytest.mark.slow
@pytest.mark.heals("out_of_memory", "deepspeed")
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_memory_that_runs_out_is_healed_in_one_process(stage: str, tmp_path: Path) -> None:
    (alone,) = on_two_processes(tmp_path, stage, "fp32", "memory", script="two_zero_processes.py", processes=1)
    for kind in ("once", "early", "late"):
        assert alone[kind]["fired"] == 1
        is_the_run(alone[kind], alone["fits"])
    for kind in ("above", "early_above", "late_above"):
        is_close_to(alone[kind], alone["fits_whole"], "fp32")


@pytest.mark.slow
@pytest.mark.heals(
    "out_of_memory",
    "deepspeed",
    partly="in place until a gradient has been added (ZeRO-1, 2); otherwise it ends the job, and the next start runs "
    "fewer rows at a time",
)
@pytest.mark.parametrize(("stage", "kind"), [("2", "late"), ("3", "once"), ("3", "above")])
def test_where_ranks_have_met_the_next_start_splits_what_did_not_fit(stage: str, kind: str, tmp_path: Path) -> None:
    assert launch(tmp_path, stage, "fp32", kind, script="two_zero_processes.py") != 0
    # Started once more it comes to its end, and runs out of memory nowhere.
    ranks = on_two_processes(tmp_path, stage, "fp32", kind, script="two_zero_processes.py")
    assert [rank[kind]["fired"] for rank in ranks] == [0, 0]
    assert ranks[0][kind]["sums"] == ranks[1][kind]["sums"]
    for rank in ranks:
        is_close_to(rank[kind], rank["fits_whole"], "fp32")


def is_the_run(healed: dict[str, Any], plain: dict[str, Any]) -> None:
    for what in ("state", "losses", "norms", "rates", "steps"):
        assert healed[what] == plain[what]


def is_close_to(split: dict[str, Any], whole: dict[str, Any], precision: str) -> None:
    rounding = 1e-2 if precision == "bf16" else 1e-5
    assert split["losses"][-1] == pytest.approx(whole["losses"][-1], rel=rounding)
    assert split["norms"][-1] == pytest.approx(whole["norms"][-1], rel=10 * rounding)
    assert split["sums"] == pytest.approx(whole["sums"], rel=rounding, abs=rounding)
    # Those of DeepSpeed's own micro-batches are not in a checkpoint.
    assert split["steps"][:3] == whole["steps"][:3]
