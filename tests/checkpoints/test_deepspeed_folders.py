"""What DeepSpeed would load from a checkpoint is vetted without DeepSpeed, and compared with the job that loads it."""

from __future__ import annotations

import math
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import TrainerState

from self_healing.checkpoints.deepspeed import ZeroJob, why_of_another_job
from self_healing.checkpoints.marker import write_marker
from self_healing.checkpoints.vetting import may_be_loaded, vet


# Three matrices of a model; over two ranks the last one does not come out even.
SHAPES = [OrderedDict(first=torch.Size([4, 4]), second=torch.Size([6])), OrderedDict(odd=torch.Size([5]))]


class DeepSpeedWriter:
    """
    Writes checkpoints in the format of DeepSpeed 0.19.8 and of the Trainer, without either.

    Args:
        output_dir (`Path`):
            Of the run.
        stage (`int`, *optional*, defaults to 2):
            Of ZeRO.
        processes (`int`, *optional*, defaults to 2):
            How many ranks there are.
        bf16 (`bool`, *optional*, defaults to `False`):
            Whether it trains in bf16.
    """

    def __init__(self, output_dir: Path, stage: int = 2, processes: int = 2, bf16: bool = False) -> None:
        self.output_dir, self.stage, self.processes, self.bf16 = output_dir, stage, processes, bf16

    def write(self, step: int = 4, counted: int | None = None) -> Path:
        """Writes a checkpoint of a step, at which DeepSpeed may have counted another number of them."""
        checkpoint = self.output_dir / f"checkpoint-{step}"
        counted = step if counted is None else counted
        folder = checkpoint / f"global_step{counted}"
        folder.mkdir(parents=True)
        with deepspeed_classes() as (loss_scaler, stage):
            for rank in range(self.processes):
                if rank == 0 or self.stage == 3:
                    save(self.model_states(counted), folder / self.model_file(rank))
                if self.stage:
                    states = self.optimizer_states(counted, loss_scaler, stage)
                    save(states, folder / self.optimizer_file(rank))
                torch.save({"cpu": torch.random.get_rng_state()}, checkpoint / f"rng_state_{rank}.pth")
        (checkpoint / "latest").write_text(folder.name)
        torch.save({"last_epoch": step}, checkpoint / "scheduler.pt")
        TrainerState(global_step=step).save_to_json(str(checkpoint / "trainer_state.json"))
        return checkpoint

    def model_file(self, rank: int) -> str:
        return f"{f'zero_pp_rank_{rank}_' * (self.stage == 3)}mp_rank_00_model_states.pt"

    def optimizer_file(self, rank: int) -> str:
        return f"{'bf16_' * self.bf16}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def model_states(self, step: int) -> dict[str, Any]:
        names = [(name, shape) for group in SHAPES for name, shape in group.items()]
        return {
            "module": OrderedDict((name, torch.ones(0 if self.stage == 3 else shape)) for name, shape in names),
            "optimizer": None if self.stage else {"state": {0: {"step": torch.tensor(float(step))}}},
            "param_shapes": SHAPES,
            "frozen_param_shapes": OrderedDict(frozen=torch.Size([3])) if self.stage == 3 else None,
            "frozen_param_fragments": OrderedDict(frozen=torch.ones(2)) if self.stage == 3 else None,
            "lr_scheduler": None,
            "global_steps": step,
            "dp_world_size": self.processes,
            "mp_world_size": 1,
            "ds_config": {"zero_optimization": {"stage": self.stage}, "never": math.inf},
        }

    def optimizer_states(self, step: int, loss_scaler: Any, stage: Any) -> dict[str, Any]:
        lengths = [sum(math.ceil(shape.numel() / self.processes) for shape in group.values()) for group in SHAPES]
        partitions = [torch.ones(length) for length in lengths]
        state = {
            index: {"step": torch.tensor(float(step)), "exp_avg": torch.ones(length)}
            for index, length in enumerate(lengths)
        }
        optimizer = {"state": state, "param_groups": [{"lr": 0.1, "growth_rate": math.inf}]}
        zero = {"loss_scaler": loss_scaler, "zero_stage": stage(self.stage), "partition_count": self.processes}
        if self.stage == 3:
            zero |= {"optimizer_state_dict": optimizer, "fp32_flat_groups": partitions}
        else:
            zero |= {"base_optimizer_state": optimizer, "single_partition_of_fp32_groups": partitions}
        return {"optimizer_state_dict": zero, "ds_version": "0.19.8"}


class deepspeed_classes:
    """Has classes of DeepSpeed's names be there while they are written, and gone when they are read."""

    def __enter__(self) -> tuple[Any, Any]:
        names = ("", ".runtime", ".runtime.fp16", ".runtime.fp16.loss_scaler", ".runtime.zero", ".runtime.zero.config")
        modules = {f"deepspeed{name}": types.ModuleType(f"deepspeed{name}") for name in names}
        scaler = type("LossScaler", (), {"__module__": "deepspeed.runtime.fp16.loss_scaler"})
        stage = type("ZeroStageEnum", (int,), {"__module__": "deepspeed.runtime.zero.config"})
        vars(modules[scaler.__module__]).update(LossScaler=scaler)
        vars(modules[stage.__module__]).update(ZeroStageEnum=stage)
        self._there = mock.patch.dict(sys.modules, modules)
        self._there.start()
        written = scaler()
        vars(written).update(cur_scale=math.inf)
        return written, stage

    def __exit__(self, *_: Any) -> None:
        self._there.stop()


def save(content: Any, file: Path) -> None:
    torch.save(content, file)


def change(file: Path, name: str, at: int, value: float = math.nan) -> None:
    """Changes one number in a file with weights."""
    content = torch.load(file, weights_only=True)
    found = content
    for key in name.split("."):
        found = found[int(key) if key.isdigit() else key]
    found[at] = value
    save(content, file)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


@pytest.fixture(params=[(2, True), (3, False)], ids=["2-bf16", "3"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> DeepSpeedWriter:
    stage, bf16 = request.param
    return DeepSpeedWriter(tmp_path, stage, bf16=bf16)


def reason(checkpoint: Path) -> str:
    verdict = vet(checkpoint)
    assert not verdict.usable
    return verdict.reason


# ---- whole ----


def told(how: str) -> str:
    return f"complete; written by 2 processes under {how}; its optimizer state was not searched for NaN"


def test_a_whole_one_is_searched_and_says_who_wrote_it(writer: DeepSpeedWriter) -> None:
    verdict = vet(writer.write())
    assert (verdict.usable, verdict.reason) == (True, told(f"ZeRO-{writer.stage}"))


# ---- the parts of the ranks ----


def test_the_optimizer_state_of_a_rank_is_missing(writer: DeepSpeedWriter) -> None:
    checkpoint = writer.write()
    name = writer.optimizer_file(1)
    (checkpoint / "global_step4" / name).unlink()
    assert reason(checkpoint) == f"global_step4/{name} is missing: the part of rank 1 of 2"


@pytest.mark.parametrize("which", ["model", "optimizer"])
def test_a_torn_file_of_a_rank(writer: DeepSpeedWriter, which: str) -> None:
    checkpoint = writer.write()
    file = writer.model_file(0) if which == "model" else writer.optimizer_file(1)
    truncate(checkpoint / "global_step4" / file)
    assert reason(checkpoint).startswith(f"{file} cannot be read (RuntimeError: PytorchStreamReader")


def test_one_that_was_cut_short_while_it_was_written(writer: DeepSpeedWriter) -> None:
    checkpoint = writer.write()
    (checkpoint / "latest").unlink()
    assert reason(checkpoint).startswith("latest is missing: DeepSpeed writes it when all is written")
    (checkpoint / "trainer_state.json").unlink()
    assert reason(checkpoint).startswith("trainer_state.json is missing")


# ---- the folder that is loaded ----


def test_latest_names_the_folder_of_another_step(tmp_path: Path) -> None:
    writer = DeepSpeedWriter(tmp_path)
    checkpoint = writer.write(4)
    (writer.write(2) / "global_step2").rename(checkpoint / "global_step2")
    (checkpoint / "latest").write_text("global_step2")
    assert reason(checkpoint) == "latest names global_step2, the state of step 2; the Trainer's is of step 4"


# ---- finite ----


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    writer = DeepSpeedWriter(tmp_path)
    checkpoint = writer.write()
    write_marker(checkpoint, "run", 4, {}, False)
    assert may_be_loaded(checkpoint)
    (checkpoint / "healing.json").unlink()
    change(checkpoint / "global_step4" / writer.model_file(0), "module.odd", 2)
    write_marker(checkpoint, "run", 4, {}, False)
    assert reason(checkpoint) == "module.odd in global_step4/mp_rank_00_model_states.pt holds NaN or Inf"
    # Nor as the best model.
    assert not may_be_loaded(checkpoint)


# ---- nothing is run ----


class Harmful:
    """Writes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.mark, "run"))


def test_no_code_of_a_file_is_run(tmp_path: Path) -> None:
    writer, mark = DeepSpeedWriter(tmp_path / "run"), tmp_path / "mark"
    checkpoint = writer.write()
    file = checkpoint / "global_step4" / writer.model_file(0)
    save(writer.model_states(4) | {"client": Harmful(mark), "other": {"list": [1, Harmful(mark)]}}, file)
    assert vet(checkpoint).usable
    assert not mark.exists()


# ---- another job ----


SAME = ZeroJob(processes=2, stage=2, bf16=False, universal=False)


def refused(checkpoint: Path, **other: Any) -> str:
    job = ZeroJob(**{name: other.get(name, getattr(SAME, name)) for name in ZeroJob.__slots__})
    why = why_of_another_job(checkpoint, job)
    assert why is not None
    return why


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return DeepSpeedWriter(tmp_path).write()


def test_the_same_job_goes_on(checkpoint: Path) -> None:
    assert why_of_another_job(checkpoint, SAME) is None


def test_a_job_of_other_size_is_told_what_to_do(checkpoint: Path) -> None:
    why = refused(checkpoint, processes=4)
    assert why.startswith("it was written by 2 processes, and this job has 4")
    assert "start 2 processes, or convert it (python -m deepspeed.checkpoint.ds_to_universal" in why
    assert f"--input_folder {checkpoint}/global_step4 --output_folder {checkpoint}/global_step4_universal" in why


def test_a_job_of_another_stage_is_told_what_to_do(checkpoint: Path) -> None:
    assert refused(checkpoint, stage=3).startswith("it was written under ZeRO-2, and this job runs ZeRO-3")


def test_a_job_of_other_precision_is_told_what_to_do(checkpoint: Path) -> None:
    assert refused(checkpoint, bf16=True).endswith("What to do: set bf16=False")


def test_a_job_without_deepspeed_does_not_start_with_fresh_moments(checkpoint: Path) -> None:
    why = why_of_another_job(checkpoint, None)
    assert why is not None
    assert why.startswith("its optimizer state is DeepSpeed's, and this job runs without DeepSpeed")
