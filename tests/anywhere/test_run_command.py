"""`self-healing run`: what it starts, what it refuses, and what it says."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from self_healing import HealingConfig
from self_healing.tools.anywhere import hook, program
from self_healing.tools.cli import app


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["run", *arguments], env={"COLUMNS": "200", **environment})


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would have taken the place of this process, which goes on with the tests."""
    seen: dict[str, Any] = {}

    def execve(file: str, command: list[str], environment: dict[str, str]) -> None:
        seen.update(file=file, command=command, environment=environment)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    return seen


# ---- what is started ----


def test_the_program_gets_its_arguments_as_they_are(started: dict[str, Any]) -> None:
    result = run("--", "ls", "--config", "a b.yaml", "--preset", "of the program", "--", "x")
    assert (result.exit_code, result.stdout) == (0, "")
    assert started["command"] == ["ls", "--config", "a b.yaml", "--preset", "of the program", "--", "x"]
    assert os.path.basename(started["file"]) == "ls"


@pytest.mark.parametrize(
    ("arguments", "environment", "expected", "told"),
    [
        ([], {}, None, ""),
        (["--preset", "aggressive"], {}, HealingConfig.aggressive(), " (given: preset aggressive)"),
        # Left to each process, which may set another one.
        ([], {"SELF_HEALING_PRESET": "conservative"}, None, ""),
    ],
)
def test_the_settings_are_handed_on(
    started: dict[str, Any],
    arguments: list[str],
    environment: dict[str, str],
    expected: HealingConfig | None,
    told: str,
) -> None:
    result = run(*arguments, "--", "ls", **environment)
    assert json.loads(started["environment"][hook.VARIABLE]) == (expected and expected.to_dict())
    assert result.stderr == (
        f"[self_healing] Every Trainer of this program is healed{told}, and says so when it begins to train.\n"
    )


def test_rules_that_a_recipe_names_are_found_from_wherever_the_script_looks(
    started: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rules.toml").touch()
    Path("recipe.toml").write_text('rules_file = "rules.toml"\n')
    assert run("--config", "recipe.toml", "--", "ls").exit_code == 0
    given = json.loads(started["environment"][hook.VARIABLE])
    assert given["rules_file"] == str(tmp_path / "rules.toml")


# ---- what is refused before anything is started ----


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (None, "The settings in recipe.toml cannot be read: No such file or directory. Please name a readable TOML"),
        ("[nonfinite]\nnan_patiance = 2\n", "Did you mean `nan_patience`"),
        ("nan_patience = \n", "is not valid TOML"),
        ('rules_file = "nowhere.toml"\n', "No such file or directory: "),
    ],
)
def test_a_recipe_that_cannot_be_used_is_an_error(
    started: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if recipe is not None:
        Path("recipe.toml").write_text(recipe)
    result = run("--config", "recipe.toml", "--", "ls")
    assert (result.exit_code, started) == (2, {})
    assert message in result.stderr


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_a_preset_there_is_not_is_an_error_that_names_those_there_are(started: dict[str, Any], how: str) -> None:
    result = run("--preset", "timid", "--", "ls") if how == "flag" else run("--", "ls", SELF_HEALING_PRESET="timid")
    assert (result.exit_code, started) == (2, {})
    assert "timid" in result.stderr
    assert "conservative" in result.stderr
    if how == "variable":
        assert result.stderr == (
            "[self_healing] SELF_HEALING_PRESET is 'timid', which is not one of: default, aggressive, conservative. "
            "Please change it, or unset it.\n"
        )


def test_a_preset_beside_a_recipe_is_an_error(started: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").touch()
    result = run("--preset", "aggressive", "--config", str(tmp_path / "recipe.toml"), "--", "ls")
    assert (result.exit_code, started) == (2, {})
    assert "`healing_preset` under [preset]" in result.stderr


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["nowhere-to-be-found"], 127, "There is no program 'nowhere-to-be-found', neither on the PATH"),
        (["trl sft --config x.yaml"], 127, "Please leave out the quotes"),
        (["train.py", "--lr", "1"], 126, "Did you mean: self-healing run -- python train.py --lr 1"),
        (["./train.sh"], 126, "chmod +x ./train.sh"),
        (["."], 126, ". is not an executable file"),
    ],
)
def test_a_program_there_is_not_ends_as_in_a_shell(
    started: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "train.sh"):
        Path(name).touch()
    result = run("--", *command)
    assert (result.exit_code, started) == (code, {})
    assert message in result.stderr


# ---- Python that would not hear of us ----


def test_a_python_that_ignores_us_is_refused(started: dict[str, Any]) -> None:
    result = run("--", sys.executable, "-uI", "train")
    assert (result.exit_code, started) == (2, {})
    assert "-I and -E have Python ignore PYTHONPATH" in result.stderr


def test_a_python_without_the_package_is_refused(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_QUESTION", "print('hooked missing')")
    result = run("--", sys.executable, "train.py")
    assert (result.exit_code, started) == (2, {})
    assert f"{sys.executable} -m pip install self-healing-trl" in result.stderr
