"""What goes to the Hub: the model and what the Trainer keeps, and nothing that self_healing has written."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import POISON_WORD, TEXTS, PoisonToken, RaisingAt, is_own, sft_trainer
from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoUrl
from transformers.utils.hub import hf_api

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.healers.data.quarantine import QUARANTINE_FILE
from self_healing.run.record import PROGRESS_FILE, RECORD_FILE
from self_healing.system.files import (
    EVENTS_FILE,
    GENERATED_FILE,
    GITIGNORE,
    MARKER_FILE,
    PINNED_DIR,
    hide_from_uploads,
    own_patterns,
)


class Hub:
    """Takes the place of the Hub behind `create_commit`: notes what arrives."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def create_commit(self, *_: Any, operations: Any, **__: Any) -> None:
        self.files |= {operation.path_in_repo for operation in operations}

    @property
    def of_ours(self) -> set[str]:
        return {path for path in self.files if is_own(path) or Path(path).name in (MARKER_FILE, GENERATED_FILE)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.hf_api.is_xet_available", lambda: False)
    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: RepoUrl("https://huggingface.co/me/model"))
    monkeypatch.setattr(HfApi, "create_commit", hub.create_commit)
    monkeypatch.setattr(HfApi, "_validate_yaml", lambda *_, **__: None)
    return hub


def struck_trainer(output_dir: Path, tokenizer: Any, config: HealingConfig | None = None, **arguments: Any) -> Any:
    """A trainer with a poison row that meets an exception, too: it has something of everything to write."""
    trainer = sft_trainer(
        output_dir,
        tokenizer,
        texts=[f"{text} {POISON_WORD}" if index == 5 else text for index, text in enumerate(TEXTS)],
        callbacks=[SelfHealingCallback(config), RaisingAt("on_step_begin", 5)],
        **{"num_train_epochs": 1, "max_steps": -1, "save_strategy": "steps", "save_steps": 2, **arguments},
    )
    PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    return trainer


def train(trainer: Any, config: HealingConfig | None = None) -> None:
    SelfHealingTrainer(trainer, config, sleep=lambda seconds: None).train()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Any:
    """A run that was healed, and its trainer."""
    trainer = struck_trainer(tmp_path_factory.mktemp("uploads") / "run", tokenizer)
    train(trainer)
    found = {path.relative_to(trainer.args.output_dir).parts[0] for path in Path(trainer.args.output_dir).rglob("*")}
    assert found >= {EVENTS_FILE, QUARANTINE_FILE, RECORD_FILE, PROGRESS_FILE, PINNED_DIR, "incidents", GITIGNORE}
    return trainer


def test_a_push_after_training_holds_the_model_and_nothing_of_ours(run: Any, hub: Hub) -> None:
    run.push_to_hub()
    assert hub.files >= {"model.safetensors", "README.md", "training_args.bin"}
    assert not hub.of_ours


def test_a_push_by_a_process_that_did_not_train_holds_nothing_of_ours(run: Any, hub: Hub, tokenizer: Any) -> None:
    other = sft_trainer(Path(run.args.output_dir), tokenizer, callbacks=[SelfHealingCallback()])
    other.push_to_hub()
    assert "model.safetensors" in hub.files
    assert not hub.of_ours


def test_git_and_the_hub_are_told_to_ignore_what_is_ours(run: Any) -> None:
    # The Hub goes by the same rules, whoever uploads the folder: a script, the `hf` command.
    folder = Path(run.args.output_dir)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    listed = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard"], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    every = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert sorted(listed) == sorted(path for path in every if not is_own(path) and not path.startswith(".git/"))


def test_everything_is_pushed_if_asked_for(run: Any, hub: Hub, tokenizer: Any) -> None:
    asked = SelfHealingCallback(HealingConfig(upload_healing_files=True))
    sft_trainer(Path(run.args.output_dir), tokenizer, callbacks=[asked]).push_to_hub()
    assert hub.of_ours >= {EVENTS_FILE, QUARANTINE_FILE}
    assert any(path.startswith(PINNED_DIR) for path in hub.files)
    assert GITIGNORE not in hub.files


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["every_save", "checkpoint"])
def test_a_push_during_training_holds_nothing_of_ours(strategy: str, tmp_path: Path, tokenizer: Any, hub: Hub) -> None:
    trainer = struck_trainer(
        tmp_path / "run",
        tokenizer,
        push_to_hub=True,
        hub_model_id="me/model",
        hub_strategy=strategy,
        hub_always_push=True,
    )
    train(trainer)
    trainer._finish_current_push()
    folder = {"every_save": "", "checkpoint": "last-checkpoint/"}[strategy]
    assert f"{folder}model.safetensors" in hub.files
    assert (tmp_path / "run" / "checkpoint-2" / MARKER_FILE).exists()
    assert not hub.of_ours


def test_a_gitignore_that_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / GITIGNORE).write_text("mine\n")
    hide_from_uploads(tmp_path)
    assert (tmp_path / GITIGNORE).read_text() == "mine\n"
    assert GITIGNORE not in own_patterns(tmp_path)


def test_uploads_of_other_folders_are_as_before(run: Any, hub: Hub, tmp_path: Path) -> None:
    run.push_to_hub()
    hub.files.clear()
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents" / "notes.txt").write_text("theirs")
    hf_api().upload_folder(repo_id="me/other", folder_path=tmp_path)
    assert hub.files == {"incidents/notes.txt"}
