"""Constants of the library that tests make small: a fault has to be noticed soon, and be over soon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from self_healing.failures import retry
from self_healing.healers import train_begin_end
from self_healing.healers.hangs import watchdog
from self_healing.healers.numerics import learning_rate
from self_healing.healers.oom import calls
from self_healing.healers.restarts import ending
from self_healing.hf import sections
from self_healing.run import incidents, run


READ_IN: dict[str, tuple[Any, ...]] = {
    "FACTOR": (watchdog,),
    "GRACE_SECONDS": (watchdog,),
    "LEARNING_STEPS": (sections,),
    "LONGEST_CALL": (retry,),
    "OUTCOME_STEPS": (incidents,),
    "PROBE_STEPS": (calls,),
    "REFUND_STEPS": (run, learning_rate, train_begin_end),
}


def settings_among(values: Mapping[str, Any], change: Callable[[Any, str, Any], None] = setattr) -> dict[str, Any]:
    """Sets the constants among settings and constants, and gives the settings."""
    for name in READ_IN.keys() & values.keys():
        for module in READ_IN[name]:
            change(module, name, values[name])
    return {name: value for name, value in values.items() if name not in READ_IN}


def only_on_disk(change: Callable[[Any, str, Any], None] = setattr) -> None:
    """As where a machine is lost together with its memory."""
    change(ending, "ROOT", Path("/nowhere"))
