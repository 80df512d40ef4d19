"""What guarding the data costs a run in which nothing is wrong with them, counted and not timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import TEXTS, sft_trainer
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from self_healing import SelfHealingCallback


STEPS, WARM = 4, 2


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
