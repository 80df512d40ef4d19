"""The text that demo and examples learn from: the docstrings of Python's standard library, which every machine has."""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

from .size import DemoSize


# What a decoder writes for bytes it cannot read: the commonest trace of a broken file in scraped text.
BROKEN_CHARACTER = "\ufffd"

# Folders of the standard library that hold other people's packages, or tests.
_NOT_READ = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Corpus:
    """
    Text of one demo.

    Args:
        all (`list[str]`):
            What the tokenizer learns from.
        training (`list[str]`):
            Rows of the training set, in the order they are trained on; one of them holds the broken character.
        held_out (`list[str]`):
            Rows the model is judged on.
    """

    all: list[str]
    training: list[str]
    held_out: list[str]


def stdlib_docstrings(least: int = 80, most: int | None = None) -> list[str]:
    """
    Collects the docstrings of Python's standard library, each once, in the order of files and lines.

    The files are parsed, never imported.

    Args:
        least (`int`, *optional*, defaults to 80):
            Shortest docstring that is taken, in characters.
        most (`int`, *optional*):
            How many are taken: all of them are some 4,000, and take seconds to collect.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, None] = {}
    for path in sorted(root.rglob("*.py")):
        if most is not None and len(texts) >= most:
            break
        if _NOT_READ.intersection(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            # Some files are there to be wrong: bad syntax or encodings, for the tests of lib2to3.
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text is not None and len(text) >= least and BROKEN_CHARACTER not in text:
                    texts[text] = None
    return list(texts)[:most]


def demo_corpus(size: DemoSize, seed: int, poison_row: int) -> Corpus:
    """
    Chooses the rows of a demo, in random order, and breaks one of them.

    Args:
        size ([`DemoSize`]):
            Says how many rows.
        seed (`int`):
            Of the order.
        poison_row (`int`):
            The training row that gets the broken character.

    Raises:
        RuntimeError: If the standard library has too few docstrings.
    """
    texts = stdlib_docstrings()
    needed = size.training_rows + size.held_out
    if len(texts) < needed:
        raise RuntimeError(
            f"The demo needs {needed} docstrings and found {len(texts)} in {sysconfig.get_paths()['stdlib']}. "
            "Please run it with a Python that has the source of its standard library beside it."
        )
    chosen = random.Random(seed).sample(texts, needed)
    held_out, training = chosen[: size.held_out], chosen[size.held_out :]
    training[poison_row] = f"{BROKEN_CHARACTER} {training[poison_row]}"
    return Corpus(texts, training, held_out)
