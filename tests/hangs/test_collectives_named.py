"""A thread that waits for other ranks is told from one that computes, by the functions it is in."""

from __future__ import annotations

import json
import linecache
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch._C._distributed_c10d as c10d

from self_healing.healers.hangs.threads import collective_in, unfinished_collectives


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


def test_what_deepspeed_computes_is_no_collective() -> None:
    assert called_from(ENGINE, MEASURED) is None
    assert called_from(ENGINE, (PARAMETERS, "param.data = gathered.view(shape)"), MEASURED) is None


@pytest.mark.parametrize("line", ["os.wait()", "os.waitpid(pid, 0)", "awaited = step.waits(1)"])
def test_what_waits_for_something_else_is_none_either(line: str) -> None:
    assert called_from(("launcher.py", line)) is None


def test_a_thread_that_waits_for_another_one_is_in_none() -> None:
    thread = threading.Thread(target=(event := threading.Event()).wait, daemon=True)
    thread.start()
    while (frame := sys._current_frames()[thread.ident or 0]).f_code.co_name != "wait":
        pass
    assert collective_in(frame) is None
    event.set()
    thread.join()


# ---- the flight recorder ----


def entry(number: int, **changes: Any) -> dict[str, Any]:
    """A record of torch 2.13; one that has not come to its end."""
    return {
        "profiling_name": "nccl:all_reduce",
        "collective_seq_id": number,
        "process_group": ["0", "default_pg"],
        "input_sizes": [[3, 4]],
        "state": "started",
        "retired": False,
        **changes,
    }


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the recorders of torch give some records; one that is not named is not there."""

    def record(**of_recorders: list[dict[str, Any]]) -> None:
        for name in ("nccl", "fr"):
            monkeypatch.delattr(c10d, f"_dump_{name}_trace_json", raising=False)
        for name, entries in of_recorders.items():
            content = json.dumps({"entries": entries} if entries else {})
            monkeypatch.setattr(c10d, f"_dump_{name}_trace_json", lambda *_, it=content: it, raising=False)

    return record


def test_of_recorded_collectives_the_newest_that_have_not_ended_are_told(recorded: Callable[..., None]) -> None:
    ended = [entry(1, retired=True, state="scheduled"), entry(2, state="completed")]
    recorded(nccl=[*ended, *map(entry, range(3, 12))])
    told = unfinished_collectives()
    assert [each.split()[2] for each in told] == ["7", "8", "9", "10", "11"]
    assert told[-1] == "nccl:all_reduce number 11 of default_pg, sizes [[3, 4]], started"


def test_where_nccl_has_recorded_nothing_that_waits_the_recorder_of_the_others_is_asked(
    recorded: Callable[..., None],
) -> None:
    # Its name is all that a group need have.
    gloo = entry(5, profiling_name="gloo:barrier", process_group=["7", ""], state="scheduled")
    recorded(nccl=[entry(1, retired=True)], fr=[gloo])
    assert unfinished_collectives() == ["gloo:barrier number 5 of 7, sizes [[3, 4]], scheduled"]


def test_where_nothing_is_recorded_nothing_is_told(recorded: Callable[..., None]) -> None:
    for recorders in ({}, {"fr": []}, {"nccl": [], "fr": []}):
        recorded(**recorders)
        assert unfinished_collectives() == []
