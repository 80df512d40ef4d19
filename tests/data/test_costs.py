"""What guarding the data costs a run in which nothing is wrong with them, counted and not timed."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TEXTS, sft_trainer
from datasets import Dataset
from test_data import Rows, guarded
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from self_healing import SelfHealingCallback
from self_healing.healers.data.datasets import GuardedCollator
from self_healing.healers.data.streams import GuardedStream
from self_healing.hf.dataloader import DataPosition
from self_healing.hf.objective import GENERIC


STEPS, WARM = 8, 4


class Synchronisations(TorchDispatchMode, TrainerCallback):
    """What would wait for a GPU, by the end of each step: values that are read, shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.by_step = 0, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func._schema.name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
        return func(*args, **(kwargs or {}))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.by_step.append(self.seen)


def test_rows_of_a_packed_stream_are_told_apart_only_where_somebody_asks(tmp_path: Path, tokenizer: Any) -> None:
    counted = []
    for healed in (False, True):
        seen = Synchronisations()
        trainer = sft_trainer(
            tmp_path / str(healed),
            tokenizer,
            dataset=Dataset.from_dict({"text": TEXTS * 4}).to_iterable_dataset(),
            packing=True,
            callbacks=[SelfHealingCallback({"snapshot_interval": STEPS})] * healed + [seen],
            gradient_accumulation_steps=4,
            max_steps=STEPS,
            report_to=[],
        )
        with seen:
            trainer.train()
        counted.append(seen.by_step[-1] - seen.by_step[WARM])
    # Loss and norm of each step are read, and the step that a snapshot is taken in has more.
    assert counted[1] - counted[0] <= 3 * (STEPS - WARM)


def calls_in(part: str, function: Any) -> Counter[str]:
    """How often functions of files whose path has a part in it are entered."""
    calls = Counter[str]()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and part in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_a_batch_passes_two_functions_of_the_guard(tmp_path: Path) -> None:
    data = guarded(Dataset.from_dict({"number": list(range(32))}), tmp_path)
    loader = DataLoader(data, batch_size=8, collate_fn=GuardedCollator(list, data.guard, data))
    batches = iter(loader)
    # Where an epoch begins, the sampler asks for the length besides.
    next(batches)
    assert sum(calls_in("self_healing/healers", lambda: next(batches)).values()) == 2


@pytest.mark.parametrize("size", [1, 8])
def test_following_the_data_of_a_step_is_one_call(size: int) -> None:
    loader = DataLoader(Rows([{}] * 64), batch_size=2)
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(global_step=0),
        train_dataset=loader.dataset,
        callback_handler=SimpleNamespace(train_dataloader=loader),
    )
    position = DataPosition(trainer, GENERIC)
    position.watch()
    drawn = iter(loader.batch_sampler)

    def step() -> None:
        for _ in range(size):
            next(drawn)
        position.advance(size)

    step()
    assert sum(calls_in("self_healing/hf", step).values()) == 1
    for _ in range(size):
        next(drawn)
    assert position.sampled(size) == set(range(4 * size, 6 * size))
    # Asked twice, it says the same.
    assert position.sampled(size) == set(range(4 * size, 6 * size))
    assert torch.utils.data.BatchSampler in type(loader.batch_sampler).__mro__


def test_a_sample_of_a_stream_passes_one_function_of_the_guard(tmp_path: Path) -> None:
    guard = guarded([], tmp_path).guard
    stream = GuardedStream(Dataset.from_dict({"number": list(range(64))}).to_iterable_dataset(), guard)
    batches = iter(DataLoader(stream, batch_size=8, collate_fn=GuardedCollator(list, guard, stream)))
    next(batches)
    calls = calls_in("self_healing/healers", lambda: next(batches))
    # One for the source, which need not be a table, and one for what is read from it.
    assert sum(calls.values()) <= 2 + 2 * 8
