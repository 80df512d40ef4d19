"""A thread that waits for other ranks is told from one that computes, by the functions it is in."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from typing import Any

import pytest

from self_healing.healers.hangs.threads import collective_in


def called_from(*places: tuple[str, str]) -> str | None:
    """What is said of a thread that is in native code, called by these lines of these files, the innermost last."""

    def look() -> str | None:
        return collective_in(sys._getframe(1))

    call: Callable[[], str | None] = look
    for number, (file, line) in enumerate(reversed(places)):
        name = f"/venv/{number}/site-packages/{file}"
        linecache.cache[name] = (0, None, ["def function():\n", f"    {line}\n"], name)
        namespace: dict[str, Any] = {"inner": call}
        exec(compile("def function():\n    return inner()", name, "exec"), namespace)
        call = namespace["function"]
    return call()


ENGINE = ("deepspeed/runtime/engine.py", "loss = self.module(*inputs, **kwargs)")
PARAMETERS = "deepspeed/runtime/zero/partition_parameters.py"
MEASURED = ("deepspeed/utils/nvtx.py", "ret_val = func(*args, **kwargs)")


@pytest.mark.parametrize(
    "places",
    [
        [(PARAMETERS, "handle.wait()")],
        [(PARAMETERS, "instrument_w_nvtx(self.__handle.wait)()")],
        [(PARAMETERS, "instrument_w_nvtx(self.__handle.wait)()"), MEASURED],
    ],
    ids=["by itself", "that is measured", "below what is measured"],
)
def test_a_rank_that_waits_for_weights_of_zero_3_is_in_a_collective(places: list[tuple[str, str]]) -> None:
    assert called_from(ENGINE, *places) == "all_gather of weights"


def test_so_is_one_that_waits_for_what_its_own_code_has_begun() -> None:
    assert called_from(("parallel/layers.py", "work.wait()")) == "a collective begun before"


@pytest.mark.parametrize("line", ["os.wait()", "os.waitpid(pid, 0)", "awaited = step.waits(1)"])
def test_what_waits_for_something_else_is_none_either(line: str) -> None:
    assert called_from(("launcher.py", line)) is None
