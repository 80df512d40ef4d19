"""A thread that waits for other ranks is told from one that computes, by the functions it is in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from self_healing.hangs.collectives import collective_in


def called_from(*places: tuple[str, str]) -> str | None:
    """What is said of a thread that is in native code, called by these files and functions, the innermost last."""

    def look() -> str | None:
        return collective_in(sys._getframe(1))

    call: Callable[[], str | None] = look
    for file, name in reversed(places):
        namespace: dict[str, Any] = {"inner": call}
        exec(compile(f"def {name}():\n    return inner()", f"/venv/site-packages/{file}", "exec"), namespace)
        call = namespace[name]
    return call()


WAITS = ("deepspeed/runtime/zero/partition_parameters.py", "wait")
MEASURED = ("deepspeed/utils/nvtx.py", "wrapped_fn")


@pytest.mark.parametrize("places", [(WAITS,), (WAITS, MEASURED)], ids=["by itself", "measured"])
def test_a_rank_that_waits_for_weights_of_zero_3_is_in_a_collective(places: tuple[tuple[str, str], ...]) -> None:
    assert called_from(("deepspeed/runtime/engine.py", "forward"), *places) == "all_gather of weights"


def test_what_deepspeed_computes_is_no_collective() -> None:
    assert called_from(("deepspeed/runtime/engine.py", "forward"), MEASURED) is None
    assert called_from(("deepspeed/runtime/zero/partition_parameters.py", "partition"), MEASURED) is None
