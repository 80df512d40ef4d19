"""Run by test_faults_that_end_a_job.py: a job on two ranks, one of which is struck when it is started first."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from conftest import TEXTS, build_tokenizer, count_of_the, grpo_trainer, losses, sft_trainer
from constants import only_on_disk, settings_among
from datasets import Dataset
from ending_together import hold_connections, strike_rank
from forked_pairs import run_pair
from lost_device import LostDevice
from restarted_job import minutes_in_native_code
from strategies import ZERO, arguments_of, prepare, trained_as, whole_weights
from transformers import TrainerCallback, set_seed
from two_processes import digest_of

from self_healing import HealingConfig, SelfHealingTrainer
from self_healing.hf.state import unwrap_optimizer


# A checkpoint every so many steps; the fault comes when so many are finished, or while a checkpoint is evaluated or
# written.
SAVE_STEPS, STRUCK_AFTER, EVALUATED_AFTER, SAVED_AFTER = 3, 7, 8, 6
STEPS = 12
# Of a micro-batch, and what one rank has memory for.
ROWS, ROWS_THAT_FIT = 6, 4
# A hang is noticed after a few seconds; sizes that failed are tried again after a few steps.
SETTINGS = {"hang_floor_seconds": 5.0, "GRACE_SECONDS": 1.0, "LEARNING_STEPS": 1, "PROBE_STEPS": 2}
# What happens in a call of the model, where it is called something else.
AS_STRIKES = {"model": "exception", "oom_once": "oom", "sigkill": "kill", "sigstop": "stop"}
# How long one rank may outlive the other, and how long both may take.
APART, SECONDS = 20.0, 180.0


class Told(TrainerCallback):
    """Writes down the steps as they are finished, over all starts of the job."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._file.open("a") as file:
            file.write(f"{state.global_step}\n")


class At(TrainerCallback):
    """Does something at one event of one step."""

    def __init__(self, event: str, step: int, strike: Callable[[], None]) -> None:
        def act(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                strike()

        setattr(self, event, act)


def half_of_a_part(trainer: Any, strategy: str, strike: Callable[[], None]) -> None:
    """The process dies when half of its part of a checkpoint is written."""
    original, rank = trainer._save_optimizer_and_scheduler, trainer.args.process_index

    def save(output_dir: str) -> None:
        if trainer.state.global_step == SAVED_AFTER:
            precision = "bf16_" if trainer.args.bf16 else ""
            own = {
                "ddp": "optimizer.pt" if rank == 0 else f"rng_state_{rank}.pth",
                "fsdp2_full": "optimizer.bin" if rank == 0 else f"rng_state_{rank}.pth",
                "fsdp2_sharded": f"optimizer_0/__{rank}_0.distcp",
            }.get(strategy, f"global_step{SAVED_AFTER}/{precision}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            Path(output_dir, own).parent.mkdir(exist_ok=True)
            Path(output_dir, own).write_bytes(b"half")
            strike()
        original(output_dir)

    trainer._save_optimizer_and_scheduler = save


def no_room_to_step(trainer: Any, strike: Callable[[str], None], call: int) -> None:
    """There is no memory for what a step of the optimizer makes, once; in which of its calls in that step."""

    class NoRoom(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            inner = unwrap_optimizer(kwargs["optimizer"])
            original, calls = inner.step, 0

            def step(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += state.global_step == STRUCK_AFTER
                if calls == call:
                    inner.step = original
                    strike("oom")
                return original(*args, **kwargs)

            inner.step = step

    trainer.add_callback(NoRoom())


def kill_worker(strike: Callable[[str], None]) -> None:
    """A process that loads data for this rank is gone, and torch is told."""
    strike("worker")
    worker = psutil.Process(multiprocessing.active_children()[0].pid)
    worker.kill()
    while worker.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def lose_device(strike: Callable[[str], None]) -> None:
    strike("lost device")
    LostDevice().lose()


def put_in(trainer: Any, strategy: str, fault: str | None, strike: Callable[[str], None]) -> None:
    """Has a fault come to a trainer."""

    def in_model(module: Any, args: Any, kwargs: dict[str, Any], what: Callable[[], None], training: bool) -> None:
        after = STRUCK_AFTER if training else EVALUATED_AFTER
        if module.training == training and trainer.state.global_step == after:
            what()

    def when_called(what: Callable[[], None], training: bool = True) -> None:
        trainer.model.register_forward_pre_hook(partial(in_model, what=what, training=training), with_kwargs=True)

    if fault == "callback":
        trainer.add_callback(At("on_step_end", STRUCK_AFTER, lambda: strike("exception")))
    elif fault == "callback_before_update":
        # By then the other rank has its numbers of this step, and goes on to apply it.
        trainer.add_callback(At("on_pre_optimizer_step", STRUCK_AFTER, lambda: strike("exception")))
    elif fault == "sigkill_in_last_step":
        # What is left is to be evaluated and saved by all ranks.
        trainer.add_callback(At("on_step_end", STEPS, lambda: strike("kill")))
    elif fault == "evaluation":
        when_called(lambda: strike("exception"), training=False)
    elif fault == "collator":
        collate = trainer.data_collator

        def broken(rows: Any) -> Any:
            # From here on, for every row there is: otherwise it would be the rows.
            if trainer.state.global_step >= STRUCK_AFTER:
                strike("exception")
            return collate(rows)

        trainer.data_collator = broken
    elif fault == "sigkill_while_saving":
        half_of_a_part(trainer, strategy, lambda: strike("kill"))
    elif fault == "optimizer_memory":
        # DeepSpeed calls it for each group of parameters: the first one is updated by then.
        no_room_to_step(trainer, strike, 2 if strategy in ZERO else 1)
    elif fault == "worker":
        trainer.add_callback(At("on_step_end", STRUCK_AFTER, lambda: kill_worker(strike)))
    elif fault == "lost_device":
        trainer.add_callback(At("on_substep_end", STRUCK_AFTER, lambda: lose_device(strike)))
    elif fault == "sigterm":
        trainer.add_callback(At("on_substep_end", STRUCK_AFTER, lambda: strike("sigterm")))
    else:
        when_called(lambda: strike(AS_STRIKES.get(str(fault), str(fault))))


def short_of_memory(trainer: Any, strike: Callable[[str], None]) -> None:
    """This rank has memory for so many rows of a call at a time, in each start of the job."""

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[0] > ROWS_THAT_FIT and module.training:
            strike("oom")

    trainer.model.register_forward_pre_hook(look, with_kwargs=True)


def job(directory: Path, rank: int, strategy: str, fault: str | None, on: int, start: int, **options: Any) -> Any:
    """
    Trains on one rank.

    Args:
        directory (`Path`), rank (`int`):
            The run directory's parent, and the rank.
        strategy (`str`):
            One of `STRATEGIES`.
        fault (`str`, *optional*), on (`int`):
            What strikes, and which rank.
        start (`int`):
            How often the job was started before. Only the first one is struck, but by memory that is always short.
        options:
            `dropout`, and `trainer`, which is `"sft"` or `"grpo"`.
    """
    prepare(strategy)
    output_dir = directory / "run"
    struck = False

    def strike(what: str) -> None:
        nonlocal struck
        if struck and fault == "oom_once":
            return
        # Of a fault that comes again and again the first time counts.
        note = Path(os.devnull) if struck else directory / "struck"
        if not struck and what in ("exception", "oom", "native_hang", "worker", "lost device"):
            hold_connections()
        struck = True
        strike_rank(what, note)
        if what == "native_hang":
            minutes_in_native_code()
        elif what == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)

    set_seed(1234)
    arguments: dict[str, Any] = {
        "dropout": options["dropout"],
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        **arguments_of(strategy),
        "ddp_timeout": 1800,
        "dataloader_num_workers": int(fault == "worker"),
        "callbacks": [Told(directory / f"steps.{rank}")],
    }
    struck_now = rank == on and fault is not None
    if options["trainer"] == "grpo":

        def reward(completions: list[str], **named: Any) -> list[float]:
            if struck_now and start == 0 and trainer.state.global_step == STRUCK_AFTER:
                strike("exception")
            return count_of_the(completions, **named)

        trainer = grpo_trainer(output_dir, build_tokenizer(), reward_funcs=reward, **arguments)
    else:
        trainer = sft_trainer(
            output_dir,
            build_tokenizer(),
            trainer_kwargs={"eval_dataset": Dataset.from_dict({"text": TEXTS[:8]})},
            per_device_train_batch_size=ROWS,
            per_device_eval_batch_size=4,
            eval_strategy="steps",
            eval_steps=EVALUATED_AFTER // 2,
            **arguments,
        )
    if struck_now and fault == "oom_above_4_rows":
        short_of_memory(trainer, strike)
    elif struck_now and start == 0 and fault not in (None, "reward"):
        put_in(trainer, strategy, fault, strike)
    if fault == "sigkill_while_saving":
        only_on_disk()
    SelfHealingTrainer(trainer, HealingConfig(**settings_among(SETTINGS))).train()
    weights = whole_weights(trainer)
    return {
        "trained_as": trained_as(trainer),
        "weights": digest_of(weights),
        "sums": [float(value.double().sum()) for value in weights.values()],
        "losses": losses(trainer),
        "struck": struck,
        "steps": trainer.state.global_step,
    }


def main(directory: Path, request: dict[str, Any]) -> None:
    """Runs the job once; how it ended is in `outcome.json`."""
    launcher = {
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": str(request["start"]),
        "TORCHELASTIC_MAX_RESTARTS": "3",
    }
    outcome = run_pair(directory, partial(job, **request), SECONDS, APART, launcher)
    (directory / "outcome.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
