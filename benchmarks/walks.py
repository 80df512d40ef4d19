"""
How much of the package a reader has to follow: the functions and files that a run goes through in a healthy step, in a
step whose NaN is healed, in one that is split because it ran out of memory, and from an exception to the step after
`train()` was entered again. Counted, not timed: `python benchmarks/walks.py` prints the table. The step log is left
out, which is written every second whatever the steps.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from conftest import OutputFault, RaisingForward, build_tokenizer, lost_connection, plain_trainer  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from self_healing import HealingConfig, SelfHealingTrainer  # noqa: E402
from self_healing.journal import step_log  # noqa: E402


PACKAGE = str(ROOT / "self_healing")
WARM, STRUCK, STEPS = 4, 10, 12
Walk = Counter[tuple[str, int, str]]


class Walks(TrainerCallback):
    """Counts the calls into the package from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.walks: list[Walk] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.walks.append(Counter())
        if len(self.walks) > WARM:
            sys.setprofile(self._seen)

    def _seen(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self.walks[-1][code.co_filename, code.co_firstlineno, code.co_qualname] += 1


def walk(fault: Callable[[Any], object]) -> list[Walk]:
    """The walks of the steps of a run, once it is warm."""
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
        walks = Walks()
        trainer = plain_trainer(
            Path(directory), build_tokenizer(), max_steps=STEPS, logging_steps=100, callbacks=[walks]
        )
        fault(trainer)
        config = HealingConfig(api_retry_base_delay=0.0, snapshot_interval=4)
        try:
            with mock.patch.object(step_log, "_EVERY", math.inf):
                SelfHealingTrainer(trainer, config, sleep=lambda _: None).train()
        finally:
            sys.setprofile(None)
    return walks.walks[WARM:-1]


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


# Of two micro-batches a step.
FIRST = 2 * STRUCK
FAULTS: dict[str, Callable[[Any], object]] = {
    "healthy step": lambda trainer: None,
    "NaN healed": lambda trainer: OutputFault(trainer.model, lambda number: number == FIRST),
    "out of memory, split": lambda trainer: RaisingForward(
        # The first is tried again with freed memory.
        trainer.model,
        lambda number: number in (FIRST, FIRST + 1),
        out_of_memory,
    ),
    "exception, entered again": lambda trainer: RaisingForward(
        trainer.model, lambda number: number == FIRST, lost_connection
    ),
}


def row_of(name: str) -> dict[str, Any]:
    """What one of the walks goes through."""
    walks = walk(FAULTS[name])
    # A healthy step is one without a snapshot; a struck one goes through the most.
    chosen = min(walks, key=Counter.total) if name == "healthy step" else max(walks, key=len)
    files = {file for file, _, _ in chosen}
    return {"walk": name, "functions": len(chosen), "files": len(files), "calls": chosen.total()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in FAULTS:
        print(json.dumps(row_of(name)))
