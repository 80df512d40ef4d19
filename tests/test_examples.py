"""The examples, run as a user runs them."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TEXTS, journal, tiny_model
from screens import NOTEBOOK, cells_of, outputs_of, run_cells


EXAMPLES = Path(__file__).parent.parent / "examples"
SFT = EXAMPLES / "sft.py"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "offline.py")
ON_ANY_MACHINE = ["--use_cpu", "--bf16", "False", "--per_device_train_batch_size", "2", "--logging_steps", "1"]


@pytest.fixture
def sft(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the example in this process, which has everything imported."""

    # As `python examples/sft.py` has it.
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def sft(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [str(SFT), *ON_ANY_MACHINE, *arguments])
        runpy.run_path(str(SFT), run_name="__main__")

    return sft


@pytest.mark.slow
def test_sft_offline(tmp_path: Path, sft: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"max_steps: 3\nnan_patience: 2\nhealing_dir: {tmp_path / 'healing'}\n", encoding="utf-8")
    sft(
        *("--offline_tiny", "--config", str(config), "--output_dir", str(tmp_path / "run")),
        *("--on_nonfinite", "skip", "--api_retry_max_delay", "10"),
    )
    assert "Nothing had to be healed." in capsys.readouterr().out
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
        *("--use_peft", "--lora_r", "4", "--no_snapshots"),
    )
    assert "Nothing had to be healed." in capsys.readouterr().out
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    assert journal(tmp_path / "run", "run_ended")


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script != "fsdp2.py"])
def test_without_a_model_it_says_what_is_missing(script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [script, "--output_dir", str(tmp_path), "--use_cpu"])
    with pytest.raises(SystemExit, match="Please name --model_name_or_path and --dataset_name"):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def test_every_example_is_run() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    run_by_name = set(re.findall(r"\"(\w+\.py)\"", tests.partition("# ---- each as a user runs it")[2]))
    assert run_by_name == set(SCRIPTS)


def test_every_example_has_its_line() -> None:
    listed = re.findall(r"^\| \[(.*?)\]\((.*?)\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    files = sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")])
    assert sorted(listed) == [(path.name, path.name) for path in files]


def test_the_notebook_runs_and_shows_what_is_kept_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    cells = cells_of(NOTEBOOK)
    shown = [outputs_of(value, str(tmp_path)) for value in run_cells(cells)]
    incidents = [event["failure"] for event in journal(tmp_path / "outputs" / "notebook", "outcome")]
    assert incidents == ["nonfinite_transient", "nonfinite_poison_rows", "network"]
    assert sum(map(bool, shown)) == 3
    assert in_every_run(shown) == in_every_run([cell.get("outputs", []) for cell in cells])


def in_every_run(outputs: list[Any]) -> str:
    """What a notebook shows, without times and measured numbers."""
    return re.sub(r"\d[\d.:-]*", "0", re.sub(r", [\d.]+ s\b", "", json.dumps(outputs)))


# ---- each as a user runs it, with the tiny model ----


def run(script: str, output_dir: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """Runs an example with `--offline-tiny` and returns what it has printed."""
    done = subprocess.run(
        [
            *(sys.executable, *launcher, str(EXAMPLES / script), *arguments),
            *("--offline-tiny", "--output_dir", str(output_dir), "--disable_tqdm", "True"),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=output_dir.parent,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


def learned(text: str) -> float:
    """How far the held-out loss is below that of token frequencies alone, in nats."""
    found = re.search(r"Held-out loss: (\d+\.\d+); the frequencies of tokens alone would give (\d+\.\d+)", text)
    assert found is not None, text
    return float(found[2]) - float(found[1])


def of_logs(name: str, text: str) -> list[float]:
    return [float(value) for value in re.findall(rf"'{name}': '([-\d.e]+)'", text)]


def torchrun(processes: int) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))


@pytest.mark.slow
def test_the_tiny_model_learns(tmp_path: Path) -> None:
    text = run("trainer.py", tmp_path / "run", "--max_steps", "60")
    assert "Nothing had to be healed." in text
    assert learned(text) > 0.3
    assert (tmp_path / "run" / "model.safetensors").is_file()


@pytest.mark.slow
def test_dpo_learns_which_answer_is_preferred(tmp_path: Path) -> None:
    text = run("dpo.py", tmp_path / "run")
    assert "Nothing had to be healed." in text
    assert of_logs("rewards/accuracies", text)[-1] > 0.8


@pytest.mark.slow
def test_grpo_learns_what_is_rewarded(tmp_path: Path) -> None:
    rewards = of_logs("reward", run("grpo.py", tmp_path / "run"))
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.3


@pytest.mark.slow
def test_a_scrambled_layer_shows_and_is_healed(tmp_path: Path) -> None:
    faults = ("-m", "self_healing.tools.cli", "chaos", "--faults", "scrambled_layer@100")
    ledger = ("--ledger", str(tmp_path / "chaos.jsonl"), "--")
    # How often a snapshot is taken is chosen by the time it takes, which is not the same on a busy machine.
    text = run("sft.py", tmp_path / "run", "--snapshot_interval", "10", launcher=(*faults, *ledger))
    assert "Every fault was survived." in text
    # The loss is back where it was, and goes on falling.
    assert learned(text) > 1.0
    assert [event["failure"] for event in journal(tmp_path / "run", "outcome")] == ["divergence"]


@pytest.mark.slow
def test_a_killed_job_is_started_again(tmp_path: Path) -> None:
    faults = ("-m", "self_healing.tools.cli", "chaos", "--faults", "sigkill@22", "--restarts", "1")
    ledger = ("--ledger", str(tmp_path / "chaos.jsonl"), "--")
    text = run("restarts.py", tmp_path / "run", "--max_steps", "24", launcher=(*faults, *ledger))
    assert "Started again: 1 of 1 restarts." in text
    assert "Every fault was survived." in text


@pytest.mark.slow
def test_fsdp2_shards_over_two_processes(tmp_path: Path) -> None:
    text = run("fsdp2.py", tmp_path / "run", "--max_steps", "40", launcher=torchrun(2))
    assert "The weights are sharded over 2 processes." in text
    assert learned(text) > 0.2
    assert (tmp_path / "run" / "model.safetensors").is_file()
