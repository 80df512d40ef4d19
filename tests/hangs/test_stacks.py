"""What is written down of threads and processes when training hangs."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import FrameType, SimpleNamespace

import psutil

from self_healing.hangs import stacks
from self_healing.hangs.stacks import user_line_of, worker_line_in, write_stacks


def test_the_stacks_begin_with_the_training_thread(tmp_path: Path) -> None:
    path = tmp_path / "hangs" / "stacks.txt"
    write_stacks(path, "nothing moves", training_thread=0, workers={})
    assert "the training thread" not in path.read_text()
    write_stacks(path, "nothing moves", training_thread=threading.get_ident(), workers={})
    headline, first, *_ = path.read_text().split("\n---- ")
    assert headline.endswith(f"process {os.getpid()}: nothing moves\n")
    assert first.startswith("thread MainThread (the training thread)")


def test_a_process_is_described_by_state_and_command(tmp_path: Path) -> None:
    process = SimpleNamespace(pid=os.getpid(), cmdline=lambda: ["python", "x" * 300], status=lambda: "sleeping")
    described = stacks._describe_process(process)  # type: ignore[arg-type]
    assert described.startswith(f"{os.getpid()} (sleeping, kernel: ")
    # Cut, and ended by a line break.
    assert described.endswith(") python " + "x" * 193 + "\n")


def test_a_process_that_has_ended_meanwhile_is_named_with_what_is_known() -> None:
    def gone() -> list[str]:
        raise psutil.NoSuchProcess(41)

    assert stacks._describe_process(SimpleNamespace(pid=41, cmdline=gone)) == "41: NoSuchProcess\n"  # type: ignore[arg-type]


def test_a_line_of_user_code_is_found_below_pythons_own_and_above_the_package(tmp_path: Path) -> None:
    def inside() -> str | None:
        return user_line_of(sys._getframe())

    own = inside()
    assert own is not None
    assert "in inside: return user_line_of(sys._getframe())" in own
    # Sorting calls the key: the innermost frame is Python's where the module says so.
    library: dict[str, object] = {"ask": inside}
    exec(compile("def call(): return ask()", f"{sys.base_prefix}/lib/any.py", "exec"), library)
    frames: list[FrameType] = []
    library["ask"] = lambda: frames.append(sys._getframe().f_back)  # type: ignore[arg-type]
    library["call"]()  # type: ignore[operator]
    found = user_line_of(frames[0])
    assert found is not None
    assert f"{__file__}:" in found
    assert user_line_of(None) is None


def test_a_worker_that_does_not_answer_is_taken_for_one_that_loads() -> None:
    assert worker_line_in("") == ("an unknown line (it does not answer)", True)
