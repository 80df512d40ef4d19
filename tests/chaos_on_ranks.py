"""
Run by test_chaos_on_ranks.py: a job of several ranks under faults, started again and again until it ends.

    python tests/chaos_on_ranks.py DIRECTORY '{"ranks": 4, "seed": 0}'
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from conftest import VOTES, build_tokenizer, every_fault, sft_trainer
from constants import settings_among
from forked import end_after
from two_sharded_processes import sharded_on_the_cpu, whole

from self_healing import HealingConfig, SelfHealingTrainer
from self_healing.tools.chaos.callback import Chaos


store_class: Any = torch.distributed.TCPStore

CONFIG = {
    "api_retry_base_delay": 0.01,
    "api_retry_max_delay": 0.05,
    # No step of this model takes as long, however busy the machine is.
    "hang_floor_seconds": 12.0,
    "GRACE_SECONDS": 2.0,
    "REFUND_STEPS": 5,
    "snapshot_interval": 5,
}
# A deadlock is a failure after this time; more than any launch needs.
MOST_STARTS, LAUNCH_SECONDS = 16, 240.0
# After the first rank that fails the others have as long to end by themselves, or after SIGTERM, before SIGKILL.
GRACE_SECONDS = 30.0


def train(directory: Path, rank: int, options: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    arguments = options.get("arguments", {})
    trainer = sft_trainer(
        directory / "run",
        build_tokenizer(),
        max_steps=options["steps"],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        learning_rate=3e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        seed=options["seed"],
        ddp_backend="gloo",
        save_strategy="steps",
        save_steps=5,
        save_total_limit=3,
        **arguments,
    )
    if "faults" in options:
        chaos = Chaos(options["faults"], seed=options["seed"], ledger=directory / "chaos.jsonl")
        chaos.attach(trainer)
    SelfHealingTrainer(trainer, HealingConfig.aggressive(**settings_among(CONFIG))).train()
    content = hashlib.sha256()
    finite = True
    for value in trainer.model.state_dict().values():
        value = whole(value)
        finite = finite and bool(torch.isfinite(value).all())
        content.update(value.numpy().tobytes())
    return {
        "weights": content.hexdigest(),
        "finite": finite,
        "steps": trainer.state.global_step,
        "sharded": all(hasattr(each, "placements") for each in trainer.model.parameters()),
    }


def run_rank(directory: Path, rank: int, port: int, start: int, options: dict[str, Any]) -> None:
    """In a process of its own, as torchrun starts it."""
    log = os.open(directory / f"log.{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    print(f"\n===== start {start} =====", flush=True)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options["ranks"]),
        LOCAL_WORLD_SIZE=str(options["ranks"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID="job",
        TORCHELASTIC_RESTART_COUNT=str(start),
        TORCHELASTIC_MAX_RESTARTS="30",
    )

    def run() -> None:
        if options.get("strategy", "ddp") == "fsdp2":
            sharded_on_the_cpu("fsdp2")
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
        result = train(directory, rank, options)
        (directory / f"results.{rank}.json").write_text(json.dumps(result))
        VOTES.compare()
        torch.distributed.barrier()

    end_after(run)


def launch(directory: Path, start: int, options: dict[str, Any]) -> dict[str, Any]:
    """Starts all ranks, ends them as torchrun does once one has failed, and tells how they ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=run_rank, args=(directory, rank, port, start, options)) for rank in range(options["ranks"])
    ]
    for process in ranks:
        process.start()
    # Served here, as by torchrun; made once nothing has to be forked with its thread any more.
    store = store_class("127.0.0.1", port, is_master=True, wait_for_workers=False)
    began, failed = time.monotonic(), None
    while any(process.is_alive() for process in ranks):
        now = time.monotonic()
        if failed is None and any(process.exitcode not in (None, 0) for process in ranks):
            failed = now
            if options.get("sigterm", True):
                for process in ranks:
                    process.terminate()
        if now - began > LAUNCH_SECONDS or (failed is not None and now - failed > GRACE_SECONDS):
            break
        time.sleep(0.1)
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in hung:
        # Its stack, where torch and Python are still there to tell.
        ranks[rank].kill()
    for process in ranks:
        process.join()
    del store
    ended = 0.0 if failed is None else round(time.monotonic() - failed, 1)
    return {
        "codes": [process.exitcode for process in ranks],
        "hung": hung,
        "seconds": round(time.monotonic() - began, 1),
        "last_after": ended,
    }


def rehearse(directory: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Starts the job until it ends."""
    launches: list[dict[str, Any]] = []
    until = time.monotonic() + options.get("seconds", 900.0)
    while len(launches) < MOST_STARTS and time.monotonic() < until:
        launches.append(launch(directory, len(launches), options))
        print(json.dumps(launches[-1]), flush=True)
        if set(launches[-1]["codes"]) == {0}:
            break
        for rank in range(options["ranks"]):
            with contextlib.suppress(FileNotFoundError):
                (directory / f"results.{rank}.json").unlink()
    return launches


def main(arguments: Sequence[str]) -> None:
    directory = Path(arguments[0])
    directory.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    options = {"ranks": 2, "seed": 0, "steps": 30, **json.loads(arguments[1])}
    if options.get("faults") == "every":
        options["faults"] = every_fault()
    launches = rehearse(directory, options)
    (directory / "launches.json").write_text(json.dumps(launches))


if __name__ == "__main__":
    main(sys.argv[1:])
