"""
What a snapshot costs, against a checkpoint: taking and putting back the AdamW state of a 100M-parameter model.

    python benchmarks/snapshots.py

Real trainer, real steps; the operations are interleaved, round by round, in one process: a snapshot in memory of the
process, one in shared memory with all that another process needs to go on from it, and so on. Bytes, seconds, and the
share of a training step. On a GPU the copy runs beside the next step, so its time is an upper bound of what it costs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from self_healing import HealingConfig, SelfHealingCallback
from self_healing.hf.state import reload_checkpoint
from self_healing.hf.trainer_state import ResumeRecord
from self_healing.rollback.ring import SnapshotRing
from self_healing.rollback.shared_memory import SharedStates, remove_states
from self_healing.rollback.snapshots import OVERHEAD_BUDGET, size_of
from self_healing.system.random_state import RandomState


RESULTS = Path(__file__).parent / "results"


def model(size: str) -> LlamaForCausalLM:
    hidden, layers = {"100M": (768, 8), "tiny": (64, 2)}[size]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32_000,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            tie_word_embeddings=True,
        )
    )


class Rounds(TrainerCallback):
    """Times the operations between two steps of a running trainer."""

    def __init__(self, healing: SelfHealingCallback, rounds: int) -> None:
        self.healing, self.rounds = healing, rounds
        self.seconds: dict[str, list[float]] = {}
        self.step_seconds: list[float] = []
        self._step_began = 0.0
        self.nbytes = 0
        self._shared: SharedStates | None = None
        self._shared_ring = SnapshotRing()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The first step allocates the moments, the first round the buffers: neither is counted.
        if state.global_step >= 1:
            self._round(counted=state.global_step >= 2)
        self._step_began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._synchronise()
        if state.global_step > 1:
            self.step_seconds.append(time.perf_counter() - self._step_began)

    def _round(self, counted: bool) -> None:
        run = self.healing.run
        assert run is not None
        assert run.instrument is not None
        trainer, ring = run.instrument.trainer, run.rollback.ring
        live = run.instrument.view.live_state()
        step, output_dir = int(trainer.state.global_step), str(trainer.args.output_dir)
        if self._shared is None:
            self._shared = SharedStates(output_dir, "benchmark", 0, 1)
            self._shared_ring = SnapshotRing(shared=self._shared)
        shared, shared_ring = self._shared, self._shared_ring
        shared.open(lambda: size_of(live))
        checkpoint = f"{trainer.args.output_dir}/checkpoint-{trainer.state.global_step}"

        def take() -> None:
            self.nbytes = ring.take(live, int(trainer.state.global_step), {}).nbytes

        def take_shared() -> None:
            record = partial(ResumeRecord.of, trainer, run.instrument.ledger, RandomState.capture(trainer.args.device))
            snapshot = shared_ring.take(live, step, {})
            shared.prepare(snapshot, live, record)
            snapshot.wait()
            shared.store()
            assert snapshot.stored is not None

        def restore() -> None:
            assert ring.candidate is not None
            ring.restore(ring.candidate, live)

        for name, operation in (
            ("snapshot", take),
            ("shared_snapshot", take_shared),
            ("restore", restore),
            ("save_checkpoint", lambda: trainer._save_checkpoint(trainer.model, trial=None)),
            ("load_checkpoint", lambda: reload_checkpoint(run.instrument.trainer, checkpoint)),
        ):
            self._time(name, operation, counted)

    def _time(self, name: str, operation: Callable[[], Any], counted: bool) -> None:
        self._synchronise()
        began = time.perf_counter()
        operation()
        self._synchronise()
        if counted:
            self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    @staticmethod
    def _synchronise() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def measure(size: str, rounds: int, sequence: int, directory: str) -> dict[str, Any]:
    set_seed(0)
    healing = SelfHealingCallback(HealingConfig(snapshot_interval=10**6))
    clock = Rounds(healing, rounds)
    ids = torch.randint(0, 32_000, (rounds + 2, sequence))
    trainer = Trainer(
        model=model(size),
        args=TrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=1,
            max_steps=rounds + 2,
            save_strategy="no",
            save_total_limit=1,
            report_to=[],
            logging_steps=1000,
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[healing, clock],
    )
    try:
        trainer.train()
    finally:
        remove_states(directory)
    step = statistics.median(clock.step_seconds)
    seconds = {name: statistics.median(values) for name, values in clock.seconds.items()}
    budget = OVERHEAD_BUDGET
    return {
        "model": size,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "bytes": clock.nbytes,
        "tokens_per_step": sequence,
        "step_seconds": step,
        "seconds": seconds,
        "spread": {name: [min(values), max(values)] for name, values in clock.seconds.items()},
        "snapshot_share_of_step": seconds["snapshot"] / step,
        "interval_at_the_default_budget": max(round(seconds["snapshot"] / step / budget), 1),
        "shared_over_snapshot": seconds["shared_snapshot"] / seconds["snapshot"],
        "snapshot_over_save": seconds["snapshot"] / seconds["save_checkpoint"],
        "restore_over_load": seconds["restore"] / seconds["load_checkpoint"],
        "rounds": rounds,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=["100M", "tiny"], default="100M")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--output", type=Path, default=RESULTS / "snapshots_cpu.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = measure(options.size, options.rounds, options.sequence, directory)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
