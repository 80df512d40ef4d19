"""What DeepSpeed would load from a checkpoint is vetted without DeepSpeed, and compared with the job that loads it."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import TrainerState

from self_healing.checkpoints.deepspeed import ZeroJob, why_of_another_job
from self_healing.checkpoints.marker import write_marker
from self_healing.checkpoints.vetting import vet


# Three matrices of a model; over two ranks the last one does not come out even.
SHAPES = [OrderedDict(first=torch.Size([4, 4]), second=torch.Size([6])), OrderedDict(odd=torch.Size([5]))]
MODEL = "mp_rank_00_model_states.pt"
OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def write(run: Path, step: int = 4) -> Path:
    """A checkpoint of two ranks under ZeRO-2, as DeepSpeed 0.19.8 and the Trainer write it, without either."""
    checkpoint = run / f"checkpoint-{step}"
    folder = checkpoint / f"global_step{step}"
    folder.mkdir(parents=True)
    torch.save(model_states(step), folder / MODEL)
    with deepspeed_classes() as (loss_scaler, stage):
        for rank in (0, 1):
            torch.save(
                optimizer_states(step, loss_scaler, stage), folder / OPTIMIZER.replace("rank_1", f"rank_{rank}")
            )
            torch.save({"cpu": torch.random.get_rng_state()}, checkpoint / f"rng_state_{rank}.pth")
    (checkpoint / "latest").write_text(folder.name)
    torch.save({"last_epoch": step}, checkpoint / "scheduler.pt")
    TrainerState(global_step=step).save_to_json(str(checkpoint / "trainer_state.json"))
    return checkpoint


def model_states(step: int) -> dict[str, Any]:
    return {
        "module": OrderedDict((name, torch.ones(shape)) for group in SHAPES for name, shape in group.items()),
        "optimizer": None,
        "param_shapes": SHAPES,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "global_steps": step,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 2}, "never": math.inf},
    }


def optimizer_states(step: int, loss_scaler: Any, stage: Any) -> dict[str, Any]:
    lengths = [sum(math.ceil(shape.numel() / 2) for shape in group.values()) for group in SHAPES]
    state = {
        index: {"step": torch.tensor(float(step)), "exp_avg": torch.ones(length)}
        for index, length in enumerate(lengths)
    }
    zero = {
        "loss_scaler": loss_scaler,
        "zero_stage": stage(2),
        "partition_count": 2,
        "base_optimizer_state": {"state": state, "param_groups": [{"lr": 0.1, "growth_rate": math.inf}]},
        "single_partition_of_fp32_groups": [torch.ones(length) for length in lengths],
    }
    return {"optimizer_state_dict": zero, "ds_version": "0.19.8"}


@contextmanager
def deepspeed_classes() -> Iterator[tuple[Any, Any]]:
    """Has classes of DeepSpeed's names be there while they are written, and gone when they are read."""
    names = ("", ".runtime", ".runtime.fp16", ".runtime.fp16.loss_scaler", ".runtime.zero", ".runtime.zero.config")
    modules = {f"deepspeed{name}": types.ModuleType(f"deepspeed{name}") for name in names}
    scaler = type("LossScaler", (), {"__module__": "deepspeed.runtime.fp16.loss_scaler"})
    stage = type("ZeroStageEnum", (int,), {"__module__": "deepspeed.runtime.zero.config"})
    vars(modules[scaler.__module__]).update(LossScaler=scaler)
    vars(modules[stage.__module__]).update(ZeroStageEnum=stage)
    with mock.patch.dict(sys.modules, modules):
        written = scaler()
        vars(written).update(cur_scale=math.inf)
        yield written, stage


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path)


def reason(checkpoint: Path) -> str:
    verdict = vet(checkpoint)
    assert not verdict.usable
    return verdict.reason


def test_a_whole_one_is_searched_and_says_who_wrote_it(checkpoint: Path) -> None:
    told = "complete; written by 2 processes under ZeRO-2; its optimizer state was not searched for NaN"
    assert (vet(checkpoint).usable, vet(checkpoint).reason) == (True, told)


def gone(checkpoint: Path) -> None:
    (checkpoint / "global_step4" / OPTIMIZER).unlink()


def torn(checkpoint: Path) -> None:
    file = checkpoint / "global_step4" / OPTIMIZER
    file.write_bytes(file.read_bytes()[:-200])


def cut_short(checkpoint: Path) -> None:
    (checkpoint / "latest").unlink()


def of_another_step(checkpoint: Path) -> None:
    (write(checkpoint.parent, 2) / "global_step2").rename(checkpoint / "global_step2")
    (checkpoint / "latest").write_text("global_step2")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (gone, f"global_step4/{OPTIMIZER} is missing: the part of rank 1 of 2"),
        (torn, f"{OPTIMIZER} cannot be read (RuntimeError: PytorchStreamReader"),
        (cut_short, "latest is missing: DeepSpeed writes it when all is written"),
        (of_another_step, "latest names global_step2, the state of step 2; the Trainer's is of step 4"),
    ],
)
def test_a_damaged_one_is_refused_with_its_reason(checkpoint: Path, damage: Callable[[Path], None], told: str) -> None:
    damage(checkpoint)
    assert reason(checkpoint).startswith(told)


def test_weights_that_are_not_finite(checkpoint: Path) -> None:
    states = model_states(4)
    states["module"]["odd"][2] = math.nan
    torch.save(states, checkpoint / "global_step4" / MODEL)
    write_marker(checkpoint, "run", 4, {}, False)
    assert reason(checkpoint) == f"module.odd in global_step4/{MODEL} holds NaN or Inf"


class Harmful:
    """Writes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.mark, "run"))


def test_no_code_of_a_file_is_run(checkpoint: Path, tmp_path: Path) -> None:
    torch.save(model_states(4) | {"client": Harmful(tmp_path / "mark")}, checkpoint / "global_step4" / MODEL)
    assert vet(checkpoint).usable
    assert not (tmp_path / "mark").exists()


# ---- another job ----

SAME = ZeroJob(processes=2, stage=2, bf16=False)


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (dataclasses.replace(SAME, processes=4), "it was written by 2 processes under ZeRO-2, and this job has 4"),
        (dataclasses.replace(SAME, stage=3), "start it as before, or convert it (python -m deepspeed.checkpoint."),
        (dataclasses.replace(SAME, bf16=True), "and this job has 2 processes under ZeRO-2 in bf16"),
        (None, "it was written by DeepSpeed, and this job runs without"),
    ],
)
def test_another_job_is_told_what_to_do_and_the_same_one_goes_on(
    checkpoint: Path, job: ZeroJob | None, told: str
) -> None:
    assert why_of_another_job(checkpoint, SAME) is None
    assert told in str(why_of_another_job(checkpoint, job))


def test_a_job_without_deepspeed_is_told_how_the_parts_become_weights_where_the_script_lies(checkpoint: Path) -> None:
    assert "or load its weights as the model of a new run" in str(why_of_another_job(checkpoint, None))
    script = checkpoint / "zero_to_fp32.py"
    script.touch()
    told = f"or put its weights together (python {script} {checkpoint} NEW_DIRECTORY) and load them as the model of"
    assert told in str(why_of_another_job(checkpoint, None))
