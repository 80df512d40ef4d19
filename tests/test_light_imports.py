"""What only reads files imports neither torch nor transformers; the public names are there all the same."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import self_healing


# Each takes seconds to import.
HEAVY = ("torch", "transformers", "accelerate", "trl", "numpy")

RUNS_COMMANDS = """
import json, sys
from typer.testing import CliRunner
from self_healing.tools.cli import app
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    loaded = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
    print(json.dumps([result.exit_code, loaded]))
"""


def loaded_by(*commands: list[str]) -> list[tuple[int, list[str]]]:
    """Runs commands in a process of their own, and gives the exit code of each, and what was imported by then."""
    done = subprocess.run(
        [sys.executable, "-c", RUNS_COMMANDS, json.dumps(commands), json.dumps(HEAVY)],
        capture_output=True,
        text=True,
        check=True,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_commands_that_only_read_wait_for_no_torch(tmp_path: Path) -> None:
    (tmp_path / "healing_events.jsonl").write_text('{"run": "a", "step": 0, "time": 1.0, "kind": "run_started"}\n')
    found = loaded_by(["--help"], ["report", "--help"], ["report", str(tmp_path)], ["config"], ["rules"])
    assert found == [(0, []), (0, []), (4, []), (0, []), (0, [])]


def imported_for_types() -> dict[str, str]:
    """The public names that type checkers see, each with the module it is imported from."""
    tree = ast.parse(Path(self_healing.__file__).read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            # `name as name` is what makes it public.
            found.update((alias.asname or "", node.module or "") for alias in node.names)
    return found


def test_type_checkers_see_the_names_there_are() -> None:
    assert sorted(imported_for_types()) == self_healing.__all__


def test_a_public_name_is_what_its_module_has() -> None:
    for name, module in imported_for_types().items():
        assert getattr(self_healing, name) is getattr(importlib.import_module(f"self_healing.{module}"), name)
    assert self_healing.tools.__name__ == "self_healing.tools"
    assert {"HealingConfig", "__version__"} <= set(dir(self_healing))


def test_a_name_there_is_not_is_told() -> None:
    with pytest.raises(AttributeError, match="module 'self_healing' has no attribute 'Healer'"):
        self_healing.Healer  # noqa: B018
