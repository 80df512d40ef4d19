"""A job that is started again goes on from the snapshots that its killed process has left in shared memory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import job_log, job_result, journal, sft_trainer, start_job
from started_ranks import StartedRanks
from transformers import TrainerCallback
from trl import SFTTrainer

from self_healing import HealingConfig, SelfHealingTrainer
from self_healing.healers.restarts.start import no_progress_from_memory
from self_healing.hf.trainer_state import loads_more
from self_healing.rollback import shared_memory
from self_healing.rollback.shared_memory import directory_of
from self_healing.run.record import Attempt, RunRecord


pytestmark = pytest.mark.skipif(not shared_memory.ROOT.is_dir(), reason="the system has no shared memory as files")
CLOSE = {"snapshot_interval": 2, "snapshot_verify_steps": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output_dir = tmp_path_factory.mktemp("plain") / "job"
    assert start_job(output_dir, {}, {}) == 0
    return job_result(output_dir)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "job"
    shutil.rmtree(directory_of(tmp_path / "job"), ignore_errors=True)


def resumed_from_memory(output_dir: Path) -> list[int]:
    return [event["step"] for event in journal(output_dir, "resumed_from_memory")]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "kept"), [(7, 6), (9, 8)], ids=["in mid-epoch", "where an epoch begins"])
def test_a_killed_job_goes_on_from_memory_and_ends_bitwise_equal(
    job: Path, plain: dict[str, Any], until_it_ends: Callable[..., list[int]], step: int, kept: int
) -> None:
    options = {"in_memory": True, "config": CLOSE, "arguments": {"save_steps": 5}}
    codes = until_it_ends(job, 2, fault="sigkill", step=step, **options)
    assert codes == [-9, 0]
    assert resumed_from_memory(job) == [kept]
    assert job_result(job)["weights"] == plain["weights"]
    assert job_result(job)["losses"] == plain["losses"]
    (incident,) = job_result(job)["incidents"]
    assert incident["steps_repeated"] == step - kept
    assert not directory_of(job).exists()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["torn", "does not fit the model"])
def test_where_the_state_cannot_be_used_the_job_goes_on_from_disk(
    job: Path, plain: dict[str, Any], start: Callable[..., int], wrong: str
) -> None:
    options = {"fault": "sigkill", "step": 7, "config": CLOSE, "in_memory": True}
    if wrong != "torn":
        options["buffer_after_restart"] = True
    assert start(job, 0, **options) == -9
    if wrong == "torn":
        for file in directory_of(job).glob("*/*.state"):
            os.truncate(file, file.stat().st_size - 20)
    assert start(job, 1, **options) == 0
    assert "in shared memory cannot be gone on from" in job_log(job)
    assert "Resumed from memory" not in job_log(job)
    assert resumed_from_memory(job) == []
    assert journal(job, "run_started")[-1]["resumed_from"] == str(job / "checkpoint-4")
    (incident,) = job_result(job)["incidents"]
    assert incident["steps_repeated"] == 3
    assert job_result(job)["weights"] == plain["weights"]
    assert not directory_of(job).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{}, {"use_adaptive_entropy": True, "entropy_coef_delta": 0.2, "entropy_target": 100.0}],
    ids=["", "adaptive entropy"],
)
def test_a_generation_cycle_goes_on_in_its_middle(job: Path, start: Callable[..., int], more: dict[str, Any]) -> None:
    cycle = {
        "steps_per_generation": 8,
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
        "max_steps": 8,
        **more,
    }
    options = {"trainer": "grpo", "arguments": cycle, "config": CLOSE, "in_memory": True}
    whole = job.with_name("whole")
    assert start(whole, 0, **options) == 0
    fault = {"fault": "sigkill", "step": 7}
    assert [start(job, 0, **options, **fault), start(job, 1, **options, **fault)] == [-9, 0]
    assert resumed_from_memory(job) == [6]
    assert job_result(job)["weights"] == job_result(whole)["weights"]


class Raising(TrainerCallback):
    """Ends the run in a step, or not at all."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5 and self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("error", "restarts", "left"),
    [
        (None, "yes", False),
        pytest.param(KeyboardInterrupt(), "yes", False, marks=pytest.mark.slow),
        (ValueError("a bug"), "yes", True),
        (ValueError("a bug"), "no", False),
    ],
    ids=["finished", "interrupted", "may be started again", "nobody starts it again"],
)
def test_states_stay_only_where_another_process_goes_on(
    job: Path, tokenizer: Any, error: BaseException | None, restarts: Any, left: bool
) -> None:
    trainer = sft_trainer(job, tokenizer, max_steps=6, callbacks=[Raising(error)])
    config = HealingConfig(**CLOSE, launcher_restarts=restarts)
    with contextlib.suppress(KeyboardInterrupt, ValueError):
        SelfHealingTrainer(trainer, config).train()
    assert directory_of(job).exists() == left


def test_a_trainer_that_reads_more_of_a_checkpoint_goes_on_from_disk(job: Path, tokenizer: Any) -> None:
    class AveragingTrainer(SFTTrainer):
        """Keeps averaged weights in its checkpoints, which no state in memory has."""

        def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            super()._load_from_checkpoint(*args, **kwargs)

    plain = sft_trainer(job, tokenizer, max_steps=6)
    assert loads_more(plain) is None
    trainer = sft_trainer(job, tokenizer, max_steps=6, callbacks=[Raising(ValueError("a bug"))])
    trainer.__class__ = AveragingTrainer
    assert loads_more(trainer) == "AveragingTrainer._load_from_checkpoint"
    with pytest.raises(ValueError, match="a bug"):
        SelfHealingTrainer(trainer, HealingConfig(**CLOSE, launcher_restarts="yes")).train()
    assert not directory_of(job).exists()


@pytest.mark.slow
def test_of_what_a_process_has_left_only_what_is_gone_on_from_stays_until_there_is_a_newer_one(
    job: Path, start: Callable[..., int]
) -> None:
    options = {"fault": "sigkill", "step": 7, "config": CLOSE, "in_memory": True}
    # Killed again, before it has a state of its own.
    again = {**options, "step": 6, "struck": "again"}
    assert start(job, 0, **options) == -9
    left = {path.name for path in directory_of(job).glob("*/*.state")}
    assert start(job, 1, **again) == -9
    (kept,) = directory_of(job).glob("*/*.state")
    assert kept.name in left
    assert start(job, 2, **options) == 0
    assert resumed_from_memory(job) == [6]


def test_a_state_from_which_the_process_before_came_no_step_further_is_passed_over(tmp_path: Path) -> None:
    def record(first: int, last: int, resumed_from: Path) -> RunRecord:
        attempt = Attempt(2, 0, "", 0.0, resumed_from=str(resumed_from), first_step=first, last_step=last)
        return RunRecord(tmp_path, "run", [attempt])

    in_memory = directory_of(tmp_path) / "run-rank0-of-1" / "checkpoint-6"
    assert no_progress_from_memory(record(6, 6, in_memory))
    assert not no_progress_from_memory(record(6, 7, in_memory))
    assert not no_progress_from_memory(record(6, 6, tmp_path / "checkpoint-6"))


class Ranks:
    """Ranks that are started again and again, each time with another store."""

    def __init__(self, directory: Path, script: str = "restarted_ranks.py", count: int = 2, **options: Any) -> None:
        self.directory = directory
        self._options = {"save_steps": 20, "evaluates": False, "frozen": "", "states": "SHARDED_STATE_DICT"} | options
        self._script, self._count, self.seconds = script, count, 180

    def start(self, restarts: int, *counts: int) -> list[int]:
        """Waits for the end of all; `counts` is how often each rank is told that it was started before."""
        ranks = StartedRanks(
            self.directory / f"logs.{restarts}",
            self._count,
            self._script,
            self.directory,
            json.dumps(self._options),
            TORCHELASTIC_RUN_ID="job",
            TORCHELASTIC_RESTART_COUNT=counts or restarts,
            TORCHELASTIC_MAX_RESTARTS=3,
        )
        try:
            return ranks.join(self.seconds * self._count)
        finally:
            ranks.end()

    def log(self) -> str:
        logs = sorted(self.directory.glob("logs.*/*"))
        return "\n".join(f"==== {log.relative_to(self.directory)}\n{log.read_text()[-6000:]}" for log in logs)

    def results(self) -> list[dict[str, Any]]:
        files = [self.directory / f"results.{rank}.json" for rank in range(self._count)]
        return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "fault", "at", "goes_on_at"),
    [
        ("ddp", "exception", 5, 5),
        ("ddp", "sigkill", 5, 3),
        ("ddp", "callback", 7, 7),
        # The other rank has applied the step.
        ("ddp", "before_update", 8, 6),
        # Nobody has applied it.
        ("ddp", "before_no_update", 7, 7),
        ("fsdp2", "before_update", 8, 6),
        ("fsdp2", "exception", 5, 5),
        ("fsdp2", "sigkill", 8, 6),
        ("fsdp2 full", "exception", 5, 5),
        # An evaluation has left the weights of norm and head gathered, when the state is taken.
        ("fsdp2 evaluated", "sigkill", 6, 6),
    ],
    ids=lambda value: str(value),
)
def test_ranks_go_on_from_the_step_that_all_of_them_have(
    tmp_path: Path, strategy: str, fault: str, at: int, goes_on_at: int
) -> None:
    states = "FULL_STATE_DICT" if strategy.endswith("full") else "SHARDED_STATE_DICT"
    evaluates = strategy.endswith("evaluated")
    ranks = Ranks(tmp_path, strategy=strategy.split()[0], fault=fault, at=at, states=states, evaluates=evaluates)
    try:
        codes = ranks.start(0)
        assert 0 not in codes, ranks.log()
        assert ranks.start(1) == [0, 0], ranks.log()
        assert resumed_from_memory(tmp_path / "run") == [goes_on_at], ranks.log()
        assert not directory_of(tmp_path / "run").exists()
    finally:
        shutil.rmtree(directory_of(tmp_path / "run"), ignore_errors=True)
    for result in ranks.results():
        assert result["steps"] == 10
        assert result["sharded"] == (strategy != "ddp")
        assert result["weights"] == result["plain_weights"]
        assert result["losses"] == result["plain_losses"]
    record = json.loads((tmp_path / "run" / "healing_run.json").read_text())
    assert record["attempts"][0]["last_step"] - record["attempts"][1]["first_step"] == at - goes_on_at


@pytest.mark.slow
def test_ranks_of_a_node_that_is_not_told_of_the_restart_go_on_as_the_others(tmp_path: Path) -> None:
    """Each node has an agent of torchrun, which counts the restarts that its own processes have caused."""
    ranks = Ranks(tmp_path, strategy="ddp", fault="sigkill", at=5)
    try:
        assert 0 not in ranks.start(0), ranks.log()
        assert ranks.start(1, 0, 1) == [0, 0], ranks.log()
    finally:
        shutil.rmtree(directory_of(tmp_path / "run"), ignore_errors=True)
    assert resumed_from_memory(tmp_path / "run") == [3]
    assert len(json.loads((tmp_path / "run" / "healing_run.json").read_text())["attempts"]) == 2
    assert [result["weights"] == result["plain_weights"] for result in ranks.results()] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_whose_state_does_not_fit_go_on_from_disk(tmp_path: Path, strategy: str) -> None:
    """The script has drawn its frozen weights anew: `train()` is left on all ranks, and entered again."""
    ranks = Ranks(tmp_path, strategy=strategy, fault="sigkill", at=6, save_steps=4, frozen="drawn anew")
    try:
        assert 0 not in ranks.start(0), ranks.log()
        assert ranks.start(1) == [0, 0], ranks.log()
        assert not directory_of(tmp_path / "run").exists()
    finally:
        shutil.rmtree(directory_of(tmp_path / "run"), ignore_errors=True)
    assert "weights that are not trained" in ranks.log()
    assert [event["step"] for event in journal(tmp_path / "run", "run_started")] == [0, 4]
    for result in ranks.results():
        assert result["sharded"] == (strategy != "ddp")
        assert result["weights"] == result["plain_weights"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "strategy", "variants"),
    [
        (2, "fsdp2", ("changed", "kept", "offloaded", "checkpointing", "bf16", "lora")),
        (4, "fsdp2", ("hsdp",)),
    ],
    ids=["by accelerate", "in replicas"],
)
def test_each_way_to_shard_goes_on_from_memory(
    tmp_path: Path, count: int, strategy: str, variants: tuple[str, ...]
) -> None:
    ranks = Ranks(tmp_path, "restarted_variants.py", count, strategy=strategy, variants=variants)
    # Each of them is trained twice.
    ranks.seconds = 180 * len(variants)
    try:
        assert ranks.start(0) == [0] * count, ranks.log()
        assert ranks.start(1) == [0] * count, ranks.log()
        assert not any(directory_of(tmp_path / name).exists() for name in variants)
    finally:
        for name in variants:
            shutil.rmtree(directory_of(tmp_path / name), ignore_errors=True)
    for rank, results in enumerate(ranks.results()):
        for name, result in results.items():
            assert result["steps"] == 7
            assert result["sharded"]
            assert ("Replicate" in result["placements"]) == (name == "hsdp")
            assert (result["weights"], result["losses"]) == (result["plain_weights"], result["plain_losses"])
            assert rank > 0 or resumed_from_memory(tmp_path / name) == ([] if name == "changed" else [5])
    if "changed" in variants:
        resumed_from = journal(tmp_path / "changed", "run_started")[-1]["resumed_from"]
        assert resumed_from == str(tmp_path / "changed" / "checkpoint-3")
        log = (tmp_path / "logs.1" / "err.0").read_text()
        assert log.count("in shared memory cannot be gone on from: buffer 'added' was not there") == 1
