"""
What whole runs say of themselves in the terminal, in the report and in agent.md, as it was when it was last read
through. Times, names and measured numbers are left out. Where a text is meant to change, look at each difference and
write it down: `python tests/report/test_whole_runs.py`.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tokenizer, grpo_trainer
from rich.console import Console

from self_healing import SelfHealingTrainer
from self_healing.own_files import BRIEFING_FILE
from self_healing.report.healing_report import HealingReport
from self_healing.report.reading import read_run
from self_healing.report.text import show


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


RUNS: dict[str, Callable[[Path, Any], None]] = {"learned_nothing": learned_nothing}


def told_of(run: Callable[[Path, Any], None], directory: Path, tokenizer: Any) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        run(directory, tokenizer)
    terminal = [line for line in re.split("[\r\n]", stream.getvalue()) if line.startswith("[self_healing")]
    console = Console(file=io.StringIO(), width=100)
    show(read_run(directory), HealingReport.from_run_dir(directory), console)
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
        (r"\n ?N s\n", "\n"),
        (r" N s (\w+)\n", r" - \1\n"),
        (r" +\n", "\n"),
    ):
        text = re.sub(pattern, shown, text)
    return text


@pytest.mark.parametrize("name", RUNS)
def test_a_whole_run_is_told_as_it_was_read_through(name: str, tmp_path: Path, tokenizer: Any) -> None:
    assert told_of(RUNS[name], tmp_path / "run", tokenizer) == (EXPECTED / f"{name}.txt").read_text(encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    EXPECTED.mkdir(exist_ok=True)
    for each, training in RUNS.items():
        with tempfile.TemporaryDirectory() as place:
            text = told_of(training, Path(place) / "run", build_tokenizer())
        (EXPECTED / f"{each}.txt").write_text(text, encoding="utf-8")
