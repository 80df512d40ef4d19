"""
Waits, in a process of the user's, for `transformers.trainer`, and has `train()` of its `Trainer` entered through us.

Loaded by its path from `site/sitecustomize.py` in every Python process of the program: it imports the standard library
alone, and the rest of the package when something is trained. A launcher or a data loader worker never does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


# The settings, as JSON; its being there is what switches the hook on.
VARIABLE = "SELF_HEALING_RUN"
# A file that the process of this number makes, and that whoever trains removes: `path.number`.
UNTOUCHED = "SELF_HEALING_RUN_UNTOUCHED"
AWAITED = "transformers.trainer"


class Awaiting(MetaPathFinder):
    """Finds one module as the others would, and has something done with it once it has been executed."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Gives the spec of the module that is awaited, and `None` for all others."""
        if fullname != self._name:
            return None
        others = (each for each in sys.meta_path if each is not self and hasattr(each, "find_spec"))
        spec = next(filter(None, (each.find_spec(fullname, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                self._then(module)
            except Exception:
                _say("Nothing is healed in this process:\n" + traceback.format_exc())

        loader.exec_module = exec_module  # type: ignore[method-assign]


def install() -> None:
    """Begins to wait, and to look whether anything was healed in the end."""
    sys.meta_path.insert(0, Awaiting(AWAITED, heal_trainers_of))
    _tell_if_nothing_was_healed()


def heal_trainers_of(module: ModuleType) -> None:
    """Has `train()` of every trainer of this process entered through [`SelfHealingTrainer`]."""
    if importlib.util.find_spec("self_healing") is None:
        _say(
            f"Nothing is healed in this process: its Python, {sys.executable}, has no self-healing-trl. Please "
            f"install it there: {sys.executable} -m pip install self-healing-trl"
        )
        return
    module.Trainer.train = healed(module.Trainer.train)


def healed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a `train()` that trains healed, and plainly where that cannot be had."""

    @functools.wraps(plain)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(OSError):
            os.remove(os.environ.get(UNTOUCHED, ""))
        try:
            # By its name: this module is loaded without the package, which builds on it.
            entering = importlib.import_module("self_healing.tools.anywhere.entering")
        except Exception:
            _say("This training is not healed, because self_healing cannot be imported:\n" + traceback.format_exc())
            return plain(self, *args, **kwargs)
        return entering.way_in(self, plain, args, kwargs)()

    return train


# ---- nothing was healed ----


def _tell_if_nothing_was_healed() -> None:
    """
    Has the first process of the program say so when it ends, if that is a Python: a loop of its own that trains, or a
    launcher whose processes are on other machines, would otherwise go unnoticed.
    """
    path = os.environ.get(UNTOUCHED, "")
    number = os.getpid()
    if path.rpartition(".")[2] != str(number):
        return
    try:
        # Not through a link: the directory may be everybody's.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        # Made by this process, before another program took its place.
        pass
    except OSError:
        return
    atexit.register(_look, path, number)


def _look(path: str, number: int) -> None:
    # Not in a process that was forked, and not below the traceback of what ended the program.
    if os.getpid() != number:
        return
    try:
        os.remove(path)
    except OSError:
        return
    if not hasattr(sys, "last_value"):
        _say(
            "No Trainer of this program has begun to train here, so nothing was healed. What is healed is train() of "
            "the Trainer of transformers, and of those made from it, as TRL's are."
        )


def _say(text: str) -> None:
    # As `journal/terminal.py` reads it, which may not be there to be imported.
    if os.environ.get("SELF_HEALING_VERBOSITY", "").lower() == "critical":
        return
    print(f"[self_healing] {text}", file=sys.stderr, flush=True)
