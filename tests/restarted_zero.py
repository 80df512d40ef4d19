"""Run by test_memory_start_zero.py: a job on two ranks under ZeRO, one of which is struck when it is first started."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from conftest import adapter_trainer, build_tokenizer, losses, sft_trainer
from constants import settings_among
from forked_pairs import run_pair
from transformers import set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from two_zero_processes import config_of, digest_of, state_of, zero_on_the_cpu

from self_healing import HealingConfig, SelfHealingTrainer


# Steps finished when the second rank is struck.
AT = 5


def make(directory: Path, stage: int, precision: str, lora: bool, offloads: bool, save_steps: int) -> Any:
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    unset_hf_deepspeed_config()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    set_seed(1234)
    build: Callable[..., Any] = adapter_trainer if lora else sft_trainer
    # Dropout is on, and each rank draws its own.
    return build(
        directory,
        build_tokenizer(),
        use_cpu=False,
        ddp_backend="gloo",
        deepspeed=config_of(stage, **{"offload_optimizer": {"device": "cpu"}} if offloads else {}),
        max_steps=8,
        save_strategy="steps",
        save_steps=save_steps,
        logging_steps=3,
        **{} if precision == "fp32" else {precision: True},
    )


def draw_anew(model: Any) -> None:
    """A weight that is not trained is another one than in the process before."""
    frozen = next(parameter for parameter in model.parameters() if not parameter.requires_grad)
    frozen.data.view(-1)[0] += 1e-2


def result_of(trainer: Any) -> dict[str, Any]:
    engine = trainer.accelerator.deepspeed_engine_wrapped.engine
    return {
        "stage": engine.zero_optimization_stage(),
        "state": digest_of(state_of(trainer)),
        "losses": losses(trainer),
        "rates": [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log],
        "steps": [trainer.state.global_step, engine.global_steps, engine.skipped_steps, engine.micro_steps],
        "scale": engine.optimizer.loss_scale,
    }


def job(
    directory: Path,
    rank: int,
    *,
    start: int,
    stages: list[int],
    precision: str,
    fault: str,
    lora: bool = False,
    offloads: bool = False,
    drawn_anew: bool = False,
    save_steps: int = 20,
) -> dict[str, Any]:
    trained = partial(
        make, stage=stages[start], precision=precision, lora=lora, offloads=offloads, save_steps=save_steps
    )
    trainer = trained(directory / "run")

    def strike(module: Any, args: Any, kwargs: Any) -> None:
        if start > 0 or rank == 0 or trainer.state.global_step != AT or not module.training:
            return
        if fault == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "hang":
            time.sleep(600)
        raise ValueError("in the model")

    trainer.model.register_forward_pre_hook(strike, with_kwargs=True)
    if drawn_anew and start > 0:
        draw_anew(trainer.model)
    config = HealingConfig(
        snapshot_interval=3,
        snapshot_verify_steps=1,
        launcher_restarts="yes",
        hang_floor_seconds=5.0,
        **settings_among({"GRACE_SECONDS": 1.0, "LEARNING_STEPS": 1}),
    )
    SelfHealingTrainer(trainer, config).train()
    plain = trained(directory / "plain")
    plain.train()
    return {"healed": result_of(trainer), "plain": result_of(plain)}


def serve() -> None:
    """Starts the job as each line of the input has it, and answers with how it ended: imports take place only once."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    zero_on_the_cpu()
    for line in sys.stdin:
        request = json.loads(line)
        directory = Path(request.pop("directory"))
        launcher = {
            "TORCHELASTIC_RUN_ID": "job",
            "TORCHELASTIC_RESTART_COUNT": str(request["start"]),
            "TORCHELASTIC_MAX_RESTARTS": "3",
            "LOCAL_WORLD_SIZE": "2",
        }
        outcome = run_pair(directory, partial(job, **request), launcher=launcher)
        answers.write(json.dumps(outcome) + "\n")
        answers.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve()
