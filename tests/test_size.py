"""
How large the package is. Each bound is what has been reached: it is lowered with the code, and raised only in the
commit that says what a user gets for it.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from self_healing import HealingConfig


ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "self_healing"
sys.path.insert(0, str(ROOT / "benchmarks"))
walks = importlib.import_module("walks")
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

CODE_LINES = 27_670
LINES = 39_353
MODULES = 135
FUNCTIONS = 2_607
SETTINGS = 40
# Of the statements of a function, from its `def` to its end without its docstring.
NINE_OF_TEN, LONGEST = 18, 62
# Functions and files of the package that a step goes through (other threads add a few), and a healthy one's calls.
WALKS = {
    "healthy step": (84, 36),
    "NaN healed": (236, 53),
    "out of memory, split": (358, 59),
    "exception, entered again": (548, 77),
}
CALLS = 112


@cache
def sources() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(text) for path, text in sources().items()}


def lines_of(node: Any) -> range:
    return range(node.lineno, node.end_lineno + 1)


@cache
def code_lines(path: Path) -> set[int]:
    """What is not blank, and neither a comment nor a docstring; texts over several lines are code throughout."""
    lines = enumerate((line.strip() for line in sources()[path].splitlines()), 1)
    found = {number for number, line in lines if line and not line.startswith("#")}
    docstrings: list[range] = []
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            found.update(lines_of(node))
        elif isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings.append(lines_of(node.body[0]))
    return found.difference(*docstrings)


def functions() -> Iterator[int]:
    """The lines of code of each function."""
    for path, tree in trees().items():
        code = code_lines(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield len(code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))


def test_the_package_does_not_grow() -> None:
    assert sum(len(code_lines(path)) for path in sources()) <= CODE_LINES
    assert sum(len(text.splitlines()) for text in sources().values()) <= LINES


def test_modules_do_not_multiply() -> None:
    assert sum(bool(code_lines(path)) or path.name != "__init__.py" for path in sources()) <= MODULES


def test_functions_are_few_and_short() -> None:
    lengths = sorted(functions())
    assert len(lengths) <= FUNCTIONS
    assert lengths[len(lengths) * 9 // 10] <= NINE_OF_TEN
    assert lengths[-1] <= LONGEST


def test_settings_do_not_multiply() -> None:
    assert len(fields(HealingConfig)) <= SETTINGS


@pytest.mark.parametrize("name", WALKS)
def test_a_reader_follows_a_step_through_few_functions_and_files(name: str) -> None:
    walk, (functions, files) = walks.row_of(name), WALKS[name]
    assert (walk["functions"] <= functions, walk["files"] <= files) == (True, True), walk
    assert name != "healthy step" or walk["calls"] <= CALLS
