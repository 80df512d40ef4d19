"""
What healing adds to a healthy step, counted: synchronisations, kernels, Python calls. No clock and no GPU are needed,
and two runs count the same: `python benchmarks/counts.py` prints a line for each case and writes the JSON.

On a CPU a synchronisation is what would be one on a GPU: a value that Python reads from a tensor (`item`, `tolist`,
`bool`), a tensor whose shape depends on values (`nonzero`, boolean masks). A kernel is an operator of ATen that
computes or copies; views and allocations are none. Calls are all Python functions that are entered, whoever they
belong to. The plain trainer's numbers are taken off, step by step; steps with a snapshot are left out, and so is the
step log, which is written every second whatever the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from conftest import build_tokenizer, dpo_trainer, grpo_trainer, plain_trainer, sft_trainer  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from self_healing import SelfHealingCallback  # noqa: E402
from self_healing.journal import step_log  # noqa: E402


RESULTS = ROOT / "benchmarks" / "results" / "counts.json"
# The first steps build things up: baselines, the optimizer's state.
WARM, MEASURED = 40, 32
# A snapshot is taken every so many steps, which are an epoch at accumulation 1.
PERIOD = 16
# Operators are the same in each step: they are counted up to the end of an epoch.
OPERATORS = 8

READS_A_VALUE = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"}
SHAPED_BY_VALUES = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive"}
NO_KERNEL = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"),
    *("aten::detach", "aten::alias", "aten::set_", "aten::resize_", "aten::lift_fresh"),
}

TRAINERS: dict[str, Callable[..., Any]] = {
    "trainer": plain_trainer,
    "sft": sft_trainer,
    "dpo": dpo_trainer,
    "grpo": grpo_trainer,
}
PRECISIONS = ("fp32", "bf16", "lora")
ACCUMULATIONS = (1, 8)


@dataclass
class Counts:
    """Of one step."""

    synchronisations: int = 0
    kernels: int = 0
    calls: int = 0


class Counting(TorchDispatchMode):
    """Counts into the step that is going on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in READS_A_VALUE or name in SHAPED_BY_VALUES:
            self.now.synchronisations += 1
        elif not func.is_view and name not in NO_KERNEL:
            self.now.kernels += 1
        return func(*args, **(kwargs or {}))

    def seen(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is not Counting.__torch_dispatch__.__code__:
            self.now.calls += 1


class WholeReads(TorchFunctionMode):
    """`tolist` reads a tensor at once; on a CPU it asks for one value after the other."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._counting.now.synchronisations
        found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.tolist:
            self._counting.now.synchronisations = before + 1
        return found


class Steps(TrainerCallback):
    """
    Cuts what is counted into steps, from the end of one to the end of the next. Operators are counted in the steps
    after those whose calls are: dispatch is made of calls, too.
    """

    def __init__(self, warm: int, calls: int) -> None:
        self.counting, self.operators, self.calls = Counting(), list[Counts](), list[Counts]()
        self._ended, self._warm, self._measured = 0, warm, calls
        self._counted = contextlib.ExitStack()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sys.setprofile(None)
        self._ended += 1
        past = self._ended - self._warm
        if past > 0:
            (self.calls if past <= self._measured else self.operators).append(self.counting.now)
        if past == self._measured:
            self._counted.enter_context(self.counting)
            self._counted.enter_context(WholeReads(self.counting))
        self.counting.now = Counts()
        if 0 <= past < self._measured:
            sys.setprofile(self.counting.seen)

    def stop(self) -> None:
        sys.setprofile(None)
        self._counted.close()


def run(kind: str, precision: str, accumulation: int, healed: bool, **settings: float) -> Steps:
    """
    The counts of a run. A plain one needs no baselines, and its counts come again with each epoch, but where rows are
    generated: there no two steps are alike.
    """
    alike = not healed and kind != "grpo"
    epoch = PERIOD // accumulation
    warm, calls, operators = (WARM % PERIOD, epoch, min(epoch, OPERATORS)) if alike else (WARM, MEASURED, OPERATORS)
    steps, arguments = Steps(warm, calls), dict[str, Any]()
    if precision == "lora":
        adapter = {"peft_config": LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])}
        arguments["trainer_kwargs"] = adapter | ({"ref_model": None} if kind == "dpo" else {})
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
        trainer = TRAINERS[kind](
            Path(directory),
            build_tokenizer(),
            # The last callback: what ours does at the end of a step is counted to that step.
            callbacks=[*([SelfHealingCallback({"snapshot_interval": PERIOD, **settings})] if healed else []), steps],
            max_steps=warm + calls + operators,
            gradient_accumulation_steps=accumulation,
            logging_steps=1000,
            save_strategy="no",
            bf16=precision == "bf16",
            **arguments,
        )
        try:
            with mock.patch.object(step_log, "_EVERY", math.inf):
                trainer.train()
        finally:
            steps.stop()
    return steps


def added(kind: str, precision: str, accumulation: int, **settings: float) -> dict[str, float]:
    """What healing adds to a healthy step, the mean over the measured steps without a snapshot."""
    plain, healed = (run(kind, precision, accumulation, healed, **settings) for healed in (False, True))
    found: dict[str, float] = {}
    for name in ("synchronisations", "kernels", "calls"):
        part = "calls" if name == "calls" else "operators"
        ours, theirs = getattr(healed, part), getattr(plain, part)
        # A snapshot is taken as a step begins, after the end of the one before.
        numbers = [number for number in range(len(ours)) if (WARM + number) % PERIOD]
        differences = (getattr(ours[each], name) - getattr(theirs[each % len(theirs)], name) for each in numbers)
        found[name] = round(mean(differences), 2)
    return found


def cases() -> Iterator[tuple[str, str, int]]:
    for kind in TRAINERS:
        for precision in PRECISIONS:
            if (kind, precision) != ("trainer", "lora"):
                yield from ((kind, precision, accumulation) for accumulation in ACCUMULATIONS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[*TRAINERS, []], help="all by default; then the JSON is written")
    asked = parser.parse_args().kinds
    torch.set_num_threads(1)
    found = []
    for kind, precision, accumulation in cases():
        if not asked or kind in asked:
            case = {"trainer": kind, "precision": precision, "accumulation": accumulation}
            found.append(case | added(kind, precision, accumulation))
            print(json.dumps(found[-1]), flush=True)
    if not asked:
        RESULTS.write_text(json.dumps({"torch": torch.__version__, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
