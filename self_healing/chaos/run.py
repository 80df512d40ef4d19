"""
Runs a script under the faults that `SELF_HEALING_CHAOS` names: `python -m self_healing.chaos.run train.py --lr 1e-4`.

What `self-healing chaos` starts, and what torchrun starts again.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


VARIABLE = "SELF_HEALING_CHAOS"


def environment(faults: str, seed: int, ledger: Path, min_gap: int | None) -> dict[str, str]:
    """Gives the environment that tells processes and their children of a rehearsal."""
    told = {"faults": faults, "seed": seed, "ledger": str(ledger), "min_gap": min_gap}
    return os.environ | {VARIABLE: json.dumps(told)}


def attach_to_every_trainer(settings: dict[str, Any]) -> None:
    """
    Makes every `Trainer` of this process begin with a [`Chaos`] callback.

    The one place where a class of others is changed: the script is the user's and is run as it is, so there is no
    instance to be had before it makes one. The process does nothing else and ends with the rehearsal.
    """
    from transformers import Trainer

    from .callback import Chaos

    cls: Any = Trainer
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not any(isinstance(callback, Chaos) for callback in self.callback_handler.callbacks):
            Chaos(**settings).attach(self)

    cls.__init__ = __init__


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        raise SystemExit("usage: python -m self_healing.chaos.run SCRIPT [ARGUMENTS...]")
    settings = os.environ.get(VARIABLE)
    if settings:
        attach_to_every_trainer(json.loads(settings))
    script = str(arguments[0])
    sys.argv = [script, *arguments[1:]]
    # As `python script` has it.
    sys.path[0] = str(Path(script).absolute().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
