"""The examples, run as a user runs them."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TEXTS, journal, tiny_model

from self_healing import UnrecoverableTrainingError


SFT = Path(__file__).parent.parent / "examples" / "sft.py"
ON_ANY_MACHINE = ["--use_cpu", "--bf16", "False", "--per_device_train_batch_size", "2", "--logging_steps", "1"]


@pytest.fixture
def sft(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the example in this process, which has everything imported."""

    def sft(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [str(SFT), *ON_ANY_MACHINE, *arguments])
        runpy.run_path(str(SFT), run_name="__main__")

    return sft


def test_sft_offline(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"max_steps: 3\nnan_patience: 2\nhealing_dir: {tmp_path / 'healing'}\n", encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, str(SFT), "--offline_tiny", "--config", str(config)),
            *("--output_dir", str(tmp_path / "run"), "--on_nonfinite", "skip", "--retry_max_seconds", "10"),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Nothing had to be healed." in done.stdout
    kinds = [event["kind"] for event in journal(tmp_path / "healing")]
    assert kinds == ["run_started", "checkpoints_kept", "run_ended"]
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_sft_with_model_and_dataset_by_name_and_lora(
    tmp_path: Path, tokenizer: Any, sft: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    # A folder stands in for the Hub: transformers and datasets take either.
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        lines = [json.dumps({"text": text}) for text in TEXTS[:16]]
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")

    sft(
        *("--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "data")),
        *("--output_dir", str(tmp_path / "run"), "--max_steps", "2", "--eval_strategy", "steps", "--eval_steps", "1"),
        *("--use_peft", "--lora_r", "4", "--no_drop_poison_rows"),
    )
    assert "Nothing had to be healed." in capsys.readouterr().out
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    assert journal(tmp_path / "run", "run_ended")


@pytest.mark.slow
def test_sft_ends_with_a_postmortem_where_nothing_helps(tmp_path: Path, sft: Any) -> None:
    # A learning rate no model survives: the overflow is real, and the settings from the command line end the run.
    with pytest.raises(UnrecoverableTrainingError, match=r"\(nan_patience=2\); the learning rate: it still fails"):
        sft(
            *("--offline_tiny", "--output_dir", str(tmp_path), "--max_steps", "24", "--nan_patience", "2"),
            *("--learning_rate", "1e20", "--max_grad_norm", "1e30", "--optim", "sgd"),
        )
    assert json.loads((tmp_path / "postmortem.json").read_text())["failure"] == "learning_rate"


def test_sft_without_model_says_what_is_missing(tmp_path: Path, sft: Any) -> None:
    with pytest.raises(SystemExit, match="Please name --model_name_or_path and --dataset_name"):
        sft("--output_dir", str(tmp_path))


def test_sft_refuses_a_wrong_setting(tmp_path: Path, sft: Any) -> None:
    with pytest.raises(ValueError, match="`nan_patience` is 0"):
        sft("--offline_tiny", "--output_dir", str(tmp_path), "--nan_patience", "0")
