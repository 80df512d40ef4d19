"""The hook in processes of a program: it waits for `transformers.trainer`, and leaves everything else as it was."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from self_healing.tools.anywhere import hook
from self_healing.tools.anywhere.entering import environment


def python(code: str, given: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=False)


def module(directory: Path, name: str, code: str) -> str:
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.py").write_text(code, encoding="utf-8")
    return str(directory)


# ---- what a program finds otherwise than without us ----


def test_a_process_that_trains_nothing_imports_nothing_of_ours() -> None:
    show = "import sys; print([name for name in sys.modules if name.partition('.')[0] in ('self_healing', 'torch')])"
    assert python(show, environment()).stdout == "[]\n"


# ---- a `sitecustomize` there is already ----


def test_a_sitecustomize_of_the_program_runs_as_well(tmp_path: Path) -> None:
    theirs = module(tmp_path / "their site", "sitecustomize", "import sys; sys.flag = __name__")
    given = environment(None, {**os.environ, "PYTHONPATH": theirs})
    result = python("import sys, sitecustomize; print(sys.flag, sitecustomize.__file__)", given)
    assert result.stdout == f"sitecustomize {theirs}/sitecustomize.py\n"


# ---- the module that is awaited ----


def test_a_failure_of_ours_does_not_fail_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(module: ModuleType) -> None:
        raise RuntimeError("ours")

    monkeypatch.syspath_prepend(module(tmp_path / "modules", "awaited_module", "value = 1"))
    monkeypatch.setattr(sys, "meta_path", [hook.Awaiting("awaited_module", fail), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "awaited_module", raising=False)
    assert importlib.import_module("awaited_module").value == 1
    told = capsys.readouterr().err
    assert "[self_healing] Nothing is healed in this process" in told
    assert "RuntimeError: ours" in told


def trainers(code: str) -> ModuleType:
    module = ModuleType("transformers.trainer")
    exec(code, vars(module))
    return module


TRAINER = """
class Trainer:
    def train(self, resume_from_checkpoint=None):
        "Main training entry point."
        return "trained"
"""


def test_a_python_without_the_package_trains_plainly_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = trainers(TRAINER)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    hook.heal_trainers_of(found)
    assert found.Trainer().train() == "trained"
    told = capsys.readouterr().err
    assert f"{sys.executable} -m pip install self-healing-trl" in told


def test_a_package_that_cannot_be_imported_leaves_training_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = trainers(TRAINER)
    hook.heal_trainers_of(found)
    monkeypatch.setitem(sys.modules, "self_healing.tools.anywhere.entering", None)
    assert found.Trainer().train() == "trained"
    assert "This training is not healed" in capsys.readouterr().err


# ---- where nothing was healed ----


def first_process(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Python as the first process of a program: it has the number that is in the name of the file."""
    become = (
        "import os, sys; os.environ[{!r}] += f'.{{os.getpid()}}'; os.execv(sys.executable, ['python', '-c', {!r}])"
    )
    given = {**environment(), hook.UNTOUCHED: str(tmp_path / "untouched")}
    return python(become.format(hook.UNTOUCHED, code), given)


def test_a_program_that_trains_no_trainer_is_told_so_at_its_end(tmp_path: Path) -> None:
    result = first_process("print('done')", tmp_path)
    assert result.stdout == "done\n"
    assert result.stderr.startswith("[self_healing] No Trainer of this program has begun to train here")
    assert list(tmp_path.iterdir()) == []


def test_one_whose_child_trains_is_not(tmp_path: Path) -> None:
    child = f"import os; os.remove(os.environ[{hook.UNTOUCHED!r}])"
    result = first_process(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])", tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


# ---- the settings ----
