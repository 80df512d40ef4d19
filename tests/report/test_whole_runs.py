"""
What whole runs say of themselves in the terminal, in the report and in agent.md, as it was when it was last read
through. Times, names and measured numbers are left out. Where a text is meant to change, look at each difference and
write it down: `python tests/report/test_whole_runs.py`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    Adversarial,
    OutputFault,
    RaisingForward,
    build_tokenizer,
    encoded_rows,
    grpo_trainer,
    lost_connection,
    plain_trainer,
    sft_trainer,
    slowly,
    tiny_model,
)
from rich.console import Console
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from self_healing import HealingConfig, SelfHealingTrainer
from self_healing.report.healing_report import HealingReport
from self_healing.report.output import show
from self_healing.report.reading import read_run
from self_healing.system.files import BRIEFING_FILE


EXPECTED = Path(__file__).parent.parent / "data" / "whole_runs"


def learned_nothing(directory: Path, tokenizer: Any) -> None:
    trainer = grpo_trainer(
        directory,
        tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        max_steps=25,
        gradient_accumulation_steps=1,
    )
    SelfHealingTrainer(trainer).train()


class Filler(TrainerCallback):
    """Takes the room of the disk that the second checkpoint would need, from then on."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        disk = Path(args.output_dir).parent
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 200 * 2**10))


def disk_full_to_the_end(directory: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(
        directory, tokenizer, max_steps=8, save_strategy="steps", save_steps=2, callbacks=[Filler()]
    )
    SelfHealingTrainer(trainer).train()


class Average(TrainerCallback):
    """An average of the weights, which a user takes home."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, weight in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow.get(name, weight.detach()) + 0.1 * weight.detach()


class HitsWeights(TrainerCallback):
    """Writes NaN into one layer at the end of one step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 12:
            with torch.no_grad():
                model.model.layers[0].mlp.down_proj.weight.view(-1)[:3] = torch.nan


def average_with_nan(directory: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(directory, tokenizer, max_steps=20, callbacks=[HitsWeights(), Average()])
    SelfHealingTrainer(trainer, HealingConfig(snapshot_interval=5)).train()


def layerwise_with_nan(directory: Path, tokenizer: Any) -> None:
    """As transformers does with GaLore: each weight is updated, and its gradient dropped, in the backward pass."""
    model = tiny_model(tokenizer)
    optimizers = {weight: torch.optim.AdamW([weight], lr=1e-3) for weight in model.parameters()}

    def update(weight: torch.Tensor) -> None:
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(update)
    dummy = LayerWiseDummyOptimizer(optimizer_dict=optimizers, lr=1e-3)
    trainer = plain_trainer(
        directory,
        tokenizer,
        model=model,
        gradient_accumulation_steps=1,
        max_steps=12,
        trainer_kwargs={"optimizers": (dummy, torch.optim.lr_scheduler.LambdaLR(dummy, lambda step: 1.0))},
    )
    OutputFault(model, lambda forward: forward == 8)
    SelfHealingTrainer(trainer).train()


def adversarial_with_lost_connection(directory: Path, tokenizer: Any) -> None:
    trainer = plain_trainer(
        directory, tokenizer, trainer_class=Adversarial, gradient_accumulation_steps=1, max_steps=20
    )
    RaisingForward(trainer.model, lambda forward: forward == 26, lost_connection)
    SelfHealingTrainer(trainer, HealingConfig(snapshot_interval=5), sleep=lambda seconds: None).train()


def evaluation_too_big(directory: Path, tokenizer: Any) -> None:
    """Predictions fit into the host's memory, and what is computed from them does not."""

    def compute_metrics(_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

    trainer = plain_trainer(
        directory,
        tokenizer,
        max_steps=8,
        eval_strategy="steps",
        eval_steps=4,
        trainer_kwargs={"eval_dataset": encoded_rows(tokenizer), "compute_metrics": compute_metrics},
    )
    with contextlib.suppress(torch.OutOfMemoryError):
        SelfHealingTrainer(trainer).train()


def reward_that_raises(directory: Path, tokenizer: Any) -> None:
    """A judge that cannot read one completion, and later does not answer once."""
    asked, unreadable = list[int](), list[str]()

    def judge(completions: list[str], **_: Any) -> list[float]:
        asked.append(len(completions))
        if len(asked) == 3:
            unreadable.append(completions[5])
        if len(asked) == 20:
            raise KeyError("score")
        return [float(len(set(each))) if each not in unreadable else json.loads(each)["score"] for each in completions]

    SelfHealingTrainer(grpo_trainer(directory, tokenizer, reward_funcs=judge, max_steps=12)).train()


RUNS: dict[str, Callable[[Path, Any], None]] = {
    "learned_nothing": learned_nothing,
    "disk_full_to_the_end": disk_full_to_the_end,
    "average_with_nan": average_with_nan,
    "layerwise_with_nan": layerwise_with_nan,
    "adversarial_with_lost_connection": adversarial_with_lost_connection,
    "evaluation_too_big": evaluation_too_big,
    "reward_that_raises": reward_that_raises,
}


def told_of(run: Callable[[Path, Any], None], directory: Path, tokenizer: Any) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as stream, pytest.MonkeyPatch.context() as patch:
        # Where a line is cut depends on how long the seconds in it are.
        patch.setattr("self_healing.journal.terminal.WIDTH", 400)
        run(directory, tokenizer)
    terminal = [line for line in re.split("[\r\n]", stream.getvalue()) if line.startswith("[self_healing")]
    console = Console(file=io.StringIO(), width=100)
    report = HealingReport.from_run_dir(directory)
    for incident in report.incidents:
        # Where a cell is cut depends on whether it took long enough to be told of.
        incident["seconds_lost"] = 0.0
    show(read_run(directory), report, console)
    assert isinstance(console.file, io.StringIO)
    briefing = (directory / BRIEFING_FILE).read_text(encoding="utf-8")
    parts = {"terminal": "\n".join(terminal), "report": console.file.getvalue(), "agent.md": briefing}
    return "\n".join(f"==== {name}\n{without_times(text, directory)}" for name, text in parts.items())


def without_times(text: str, directory: Path) -> str:
    for pattern, shown in (
        (re.escape(str(directory)), "RUN"),
        (r"\d{8}-\d{6}-[0-9a-f]+", "NAME"),
        (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME"),
        (r"\d+(\.\d+)?e[-+]\d+|\d+\.\d+", "N"),
        (r"\b\d+( min)? s\b", "N s"),
        (r"[─ ]{2,}", " "),
        # Shown from a twentieth of a second on.
        (r"( are in the weights|are in the weights)? \((start-up|healing|lost steps)[^)]*\)", r"\1"),
        (r"( lost)(, \d+ repeated)?, N s", r"\1\2"),
        (r"(,| and) N s lost", " lost"),
        (r"\n ?N s\n", "\n"),
        (r" N s (\w+)\n", r" - \1\n"),
        (r" +\n", "\n"),
    ):
        text = re.sub(pattern, shown, text)
    return text


def told_on_a_disk_of_its_own(name: str, place: Path) -> str:
    """The same on a file system of 4 MiB, which can be mounted in a namespace of its own."""
    enter = ("unshare", "--user", "--map-root-user", "--mount")
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], capture_output=True).returncode != 0:
        pytest.skip("mounting needs user namespaces")
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [*enter, sys.executable, __file__, name, str(place)],
        env={**os.environ, "PYTHONPATH": paths},
        text=True,
        capture_output=True,
        check=True,
    )
    return done.stdout.partition("====")[1] + done.stdout.partition("====")[2]


def told(name: str, place: Path) -> str:
    if name.startswith("disk_full"):
        return told_on_a_disk_of_its_own(name, place)
    return told_of(RUNS[name], place / "run", build_tokenizer())


@pytest.mark.parametrize("name", [*sorted(RUNS.keys() - {"disk_full_to_the_end"}), *slowly("disk_full_to_the_end")])
def test_a_whole_run_is_told_as_it_was_read_through(name: str, tmp_path: Path) -> None:
    assert told(name, tmp_path) == (EXPECTED / f"{name}.txt").read_text(encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:
        disk = Path(sys.argv[2])
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
        print(told_of(RUNS[sys.argv[1]], disk / "run", build_tokenizer()), end="")
    else:
        EXPECTED.mkdir(exist_ok=True)
        for each in RUNS:
            with tempfile.TemporaryDirectory() as folder:
                (EXPECTED / f"{each}.txt").write_text(told(each, Path(folder)), encoding="utf-8")
