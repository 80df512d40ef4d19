"""
Whole programs under `self-healing run`, and without it: TRL's command line, scripts, launchers. Their trainers are hit
by what belongs to the user: the model's own code, a reward function.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import POISON_WORD, TEXTS, journal, quarantined, tiny_model
from safetensors.torch import load_file


pytestmark = pytest.mark.slow

SCRIPTS = Path(sys.executable).parent
HEALED = [sys.executable, "-m", "self_healing.tools.cli", "run"]

# The model's own code, as a repository on the Hub brings it along (`trust_remote_code`).
MODEL = """
import os, torch
from transformers import LlamaForCausalLM

class Faulty(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        # Not in `forward`, in whose place TRL puts one of its own.
        self.model.embed_tokens.register_forward_pre_hook(self.see)
        self.model.norm.register_forward_hook(self.spoil)

    def see(self, module, inputs):
        self.bad = (inputs[0] == {poison}).any(dim=1)[:, None, None]

    def spoil(self, module, inputs, output):
        if not (self.training and torch.is_grad_enabled()):
            return output
        return output.masked_fill(self.bad, float("nan")) if os.environ.get("FAULT") == "poison" else output
"""
REWARDS = """
calls = 0

def length(completions, **kwargs):
    global calls
    calls += 1
    if calls == 3:
        raise ConnectionError("the judge does not answer")
    return [float(len(str(each))) for each in completions]
"""
SCRIPT = """
import sys
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer, TrlParser

parser = TrlParser(SFTConfig)
(args,) = parser.parse_args_and_config()
data = load_dataset("./sft data", split="train")
trainer = SFTTrainer("./the model", args=args, train_dataset=data)
output = trainer.train()
trainer.save_model()
print("trained", output.global_step, type(trainer).__name__)
sys.exit(3)
"""


@pytest.fixture
def project(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a user's: model, data, reward, script; with spaces where there may be some."""
    directory = tmp_path / "my project"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(directory)]))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = tiny_model(tokenizer)
    model.save_pretrained("the model")
    config = Path("the model", "config.json")
    own = {"architectures": ["Faulty"], "auto_map": {"AutoModelForCausalLM": "faulty.Faulty"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | own))
    tokenizer.save_pretrained("the model")
    code = MODEL.replace("{poison}", str(tokenizer.convert_tokens_to_ids(POISON_WORD)))
    Path("the model", "faulty.py").write_text(code)
    texts = [f"{text} {POISON_WORD}" if index == 5 else text for index, text in enumerate(TEXTS[:32])]
    rows = {
        "sft": [{"text": text} for text in texts],
        "grpo": [{"prompt": text[:20]} for text in TEXTS],
    }
    for name, each in rows.items():
        Path(f"{name} data").mkdir()
        Path(f"{name} data", "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    Path("my_rewards.py").write_text(REWARDS)
    Path("train it.py").write_text(SCRIPT)
    return directory


ARGUMENTS = [
    *("--max_steps", "4", "--per_device_train_batch_size", "4", "--learning_rate", "1e-3", "--logging_steps", "1"),
    *("--save_strategy", "no", "--report_to", "none", "--use_cpu", "true", "--output_dir", "out"),
]
COMMON = [*ARGUMENTS, "--model_name_or_path", "the model", "--trust_remote_code", "true", "--bf16", "false"]


def trl(command: str, *more: str) -> list[str]:
    return [str(SCRIPTS / "trl"), command, "--dataset_name", f"{command} data", *COMMON, *more]


def call(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=900
    )


def losses(result: subprocess.CompletedProcess[str]) -> list[float]:
    return [float(value) for value in re.findall(r"'loss': '?([-\w.]+)", result.stdout)]


def failures() -> list[tuple[str, str]]:
    return [(event["failure"], event["outcome"]) for event in journal(Path("out"), "outcome")]


def trained_model_is_finite() -> bool:
    return all(bool(value.isfinite().all()) for value in load_file("out/model.safetensors").values())


# ---- TRL's command line ----


def test_trl_sft_with_a_poison_row(project: Path) -> None:
    command = trl("sft", "--max_steps", "8")
    plain = call(command, FAULT="poison")
    assert plain.returncode == 0, plain.stderr
    assert not trained_model_is_finite()

    healed = call([*HEALED, "--", *command], FAULT="poison")
    assert healed.returncode == 0, healed.stderr
    assert "Every Trainer of this program is healed, and says so" in healed.stderr
    assert trained_model_is_finite()
    assert len(quarantined(Path("out"))) == 1
    assert failures() == [("nonfinite_poison_rows", "resolved")]


def test_trl_grpo_whose_judge_does_not_answer(project: Path) -> None:
    command = trl(
        *("grpo", "--reward_funcs", "my_rewards.length", "--num_generations", "4", "--max_completion_length", "8"),
        *("--gradient_accumulation_steps", "1"),
    )
    plain = call(command)
    assert plain.returncode == 1
    assert "the judge does not answer" in plain.stderr

    Path("quick.toml").write_text("api_retry_base_delay = 0\n")
    healed = call([*HEALED, "--config", "quick.toml", "--", *command])
    assert healed.returncode == 0, healed.stderr
    assert len(losses(healed)) == 4
    assert [outcome for _, outcome in failures()] == ["resolved"]


def test_a_preset_in_the_yaml_of_trl_is_the_one_in_force(project: Path) -> None:
    Path("sft.yaml").write_text("env:\n  SELF_HEALING_PRESET: conservative\nmax_steps: 8\n")
    arguments = trl("sft", "--config", "sft.yaml")
    del arguments[arguments.index("--max_steps") : arguments.index("--max_steps") + 2]
    result = call([*HEALED, "--", *arguments], FAULT="poison")
    assert result.returncode == 0, result.stderr
    assert "Every Trainer of this program is healed, and says so" in result.stderr
    assert "on (preset conservative): heals" in result.stderr


# ---- scripts, modules, launchers ----


PROGRAMS = {
    "python": [sys.executable, "train it.py"],
    "accelerate launch": [str(SCRIPTS / "accelerate"), "launch", "--cpu", "--num_processes", "1", "train it.py"],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_trains_healed_and_ends_as_it_would(project: Path, program: str) -> None:
    result = call([*HEALED, "--", *PROGRAMS[program], *ARGUMENTS])
    assert "trained 4 SFTTrainer" in result.stdout, result.stderr
    # Launchers end with 1 whatever their script ends with.
    assert result.returncode == (1 if program == "accelerate launch" else 3)
    assert "No Trainer of this program" not in result.stderr
    assert len({event["run"] for event in journal(Path("out"), "run_started")}) == 1


def test_two_ranks_are_both_healed(project: Path) -> None:
    torchrun = [str(SCRIPTS / "torchrun"), "--standalone", "--nproc-per-node", "2", "train it.py"]
    result = call([*HEALED, "--", *torchrun, *ARGUMENTS])
    assert result.stdout.count("trained 4 SFTTrainer") == 2, result.stderr
    assert len({event["run"] for event in journal(Path("out"), "run_started")}) == 1


# ---- signals ----


def test_a_signal_reaches_the_program_itself(project: Path) -> None:
    Path("wait.py").write_text(
        "import os, signal\n"
        "def bye(*_):\n    print('told', flush=True); os._exit(9)\n"
        "signal.signal(signal.SIGUSR1, bye)\nprint(os.getpid(), flush=True)\nsignal.pause()\n"
    )
    process = subprocess.Popen([*HEALED, "--", sys.executable, "wait.py"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    # The program has the number of the command: who stops that, stops this.
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.read() == "told\n"
    assert process.wait(timeout=60) == 9


def test_what_is_ignored_is_as_a_shell_would_have_it(project: Path) -> None:
    """Python ignores SIGPIPE, and what is ignored stays so in the program that follows."""
    command = ["grep", "SigIgn", "/proc/self/status"]
    assert call([*HEALED, "--", *command]).stdout == call(command).stdout
