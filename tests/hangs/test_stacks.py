"""What is written down of threads and processes when training hangs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace

import psutil
import pytest

from self_healing.healers.hangs import threads
from self_healing.healers.hangs.threads import line_of, user_line_of, worker_line_in, write_stacks


@pytest.fixture
def other_thread() -> Iterator[threading.Thread]:
    """A thread that waits."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="the other one")
    thread.start()
    yield thread
    over.set()
    thread.join()


def test_the_stacks_begin_with_the_training_thread(tmp_path: Path, other_thread: threading.Thread) -> None:
    path = tmp_path / "hangs" / "threads.txt"
    for first, second in [(threading.main_thread(), other_thread), (other_thread, threading.main_thread())]:
        assert first.ident is not None
        write_stacks(path, "nothing moves", training_thread=first.ident, workers={})
        headline, *parts = path.read_text().split("\n---- ")
        assert headline.endswith(f"process {os.getpid()}: nothing moves\n")
        assert parts[0].startswith(f"thread {first.name} (the training thread), {first.ident}\n  File ")
        assert any(part.startswith(f"thread {second.name}, {second.ident}\n  File ") for part in parts)


def test_the_interpreter_s_own_view_and_the_processes_come_after(
    tmp_path: Path, other_thread: threading.Thread
) -> None:
    path = tmp_path / "threads.txt"
    write_stacks(path, "nothing moves", threading.get_ident(), workers={41: "File there", 42: ""})
    *_, interpreters, processes, answered, silent = path.read_text().split("\n---- ")
    assert interpreters.startswith("the same as the interpreter sees it\n")
    assert interpreters.count("(most recent call first)") > 1
    assert processes.startswith("processes started by this one\n")
    assert answered == "process 41, a data loader worker\nFile there\n"
    assert silent == "process 42, a data loader worker\ndoes not answer\n"


def test_processes_that_a_process_of_ours_has_started_are_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    itself = psutil.Process()
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [itself] if recursive else [])
    write_stacks(tmp_path / "threads.txt", "nothing moves", threading.get_ident(), workers={})
    assert f"---- processes started by this one\n{os.getpid()} (" in (tmp_path / "threads.txt").read_text()


def test_a_process_is_described_by_state_and_command(tmp_path: Path) -> None:
    process = SimpleNamespace(pid=os.getpid(), cmdline=lambda: ["python", "x" * 300], status=lambda: "sleeping")
    described = threads._describe_process(process)  # type: ignore[arg-type]
    assert described.startswith(f"{os.getpid()} (sleeping, kernel: ")
    # Cut, and ended by a line break.
    assert described.endswith(") python " + "x" * 193 + "\n")


def test_a_process_that_has_ended_meanwhile_is_named_with_what_is_known() -> None:
    def gone() -> list[str]:
        raise psutil.NoSuchProcess(41)

    assert threads._describe_process(SimpleNamespace(pid=41, cmdline=gone)) == "41: NoSuchProcess\n"  # type: ignore[arg-type]


def test_a_frame_without_a_line_is_named_as_well() -> None:
    """torch.compile makes such code."""

    def made() -> FrameType:
        return sys._getframe()

    made.__code__ = made.__code__.replace(co_linetable=b"")
    assert line_of(made()).endswith("test_stacks.py:0, in made: ")


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


def test_what_the_package_waits_in_itself_is_no_line_of_user_code() -> None:
    package = str(Path(threads.__file__).parents[1] / "instrument" / "any.py")
    ours: dict[str, object] = {"ask": lambda: user_line_of(sys._getframe().f_back)}
    exec(compile("def call(): return ask()", package, "exec"), ours)
    assert ours["call"]() is None  # type: ignore[operator]


def test_a_worker_that_does_not_answer_is_taken_for_one_that_loads() -> None:
    assert worker_line_in("") == ("an unknown line (it does not answer)", True)
