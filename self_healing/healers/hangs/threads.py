"""Stacks of all threads, the collective one waits in, and the signal that wakes the main thread."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import linecache
import os
import re
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import psutil
import torch
import torch.distributed


# ---- stacks: finds the lines at which threads and workers wait, and writes all stacks to a file ----


_READING = threading.Lock()


def current_frames() -> dict[int, FrameType]:
    """Gives the frame of each thread."""
    with _READING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def write_stacks(path: Path, headline: str, training_thread: int, workers: Mapping[int, str]) -> None:
    """Writes the stacks of all threads to a file, and what is known of the processes started by this one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    order = sorted(frames, key=lambda ident: ident != training_thread)
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}: {headline}\n")
        for ident in order:
            training = " (the training thread)" if ident == training_thread else ""
            file.write(f"\n---- thread {names.get(ident, '?')}{training}, {ident}\n")
            file.writelines(traceback.format_stack(frames[ident]))
        file.write("\n---- the same as the interpreter sees it\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.write("\n---- processes started by this one\n")
        for child in psutil.Process().children(recursive=True):
            file.write(_describe_process(child))
        for pid, stacks in workers.items():
            file.write(f"\n---- process {pid}, a data loader worker\n{stacks or 'does not answer'}\n")


def line_of(frame: FrameType) -> str:
    """Gives file, line, function and code of a frame."""
    # Code that torch.compile has made need not have lines, whatever typeshed says.
    line: int | None = frame.f_lineno
    name, line = frame.f_code.co_filename, line or 0
    return f"{name}:{line}, in {frame.f_code.co_name}: {linecache.getline(name, line).strip()}"


def user_line_of(frame: FrameType | None) -> str | None:
    """Finds the innermost line of user code: not Python's, nor an installed package's, and called by the trainer."""
    package = str(Path(__file__).parents[2]) + os.sep
    while frame is not None and not frame.f_code.co_filename.startswith(package):
        if not _installed(frame.f_code.co_filename):
            return line_of(frame)
        frame = frame.f_back
    return None


def _installed(file: str) -> bool:
    return file.startswith((sys.base_prefix, "<frozen")) or "site-packages" in file


def worker_line_in(stacks: str) -> tuple[str, bool]:
    """Finds the line a data loader worker waits at, and tells whether it loads a batch or has nothing to do."""
    answered = re.findall(
        r'File "(.*?)", (line \d+ in .*)', stacks.partition("Current thread")[2].partition("\n\n")[0]
    )
    if not answered:
        return "an unknown line (it does not answer)", True
    loading: list[tuple[str, str]] = []
    for file, line in answered:
        if file.endswith("_utils/worker.py"):
            break
        loading.append((file, line))
    own = next(((file, line) for file, line in loading if not _installed(file)), answered[0])
    return f"{own[0]}, {own[1]}", any("/multiprocessing/" not in file for file, _ in loading[1:])


def _describe_process(process: psutil.Process) -> str:
    try:
        command = " ".join(process.cmdline())[:200]
        waits = ""
        path = Path(f"/proc/{process.pid}/wchan")
        if path.exists():
            waits = f", kernel: {path.read_text().strip() or '?'}"
        return f"{process.pid} ({process.status()}{waits}) {command}\n"
    except (psutil.Error, OSError) as error:
        return f"{process.pid}: {type(error).__name__}\n"


# ---- collectives ----


_TORCH = Path(torch.__file__).parent
# Where a call leads through to native code, whichever it is.
_LEADS_THROUGH = tuple(str(_TORCH / name) for name in ("_ops.py", "_library", "utils/_contextlib.py"))
_DISTRIBUTED = (str(_TORCH / "distributed"), str(_TORCH / "nn" / "parallel" / "distributed.py"))
# Gradients are reduced in native code, while the backward pass goes on (DDP).
_BACKWARD = (str(_TORCH / "autograd" / "graph.py"), "_engine_run_backward")
# What is begun ahead of time is waited for in native code, where Python's own locks and processes have their frames.
# What DeepSpeed measures leads through as well.
_WAITS = re.compile(r"(?<!\bos)\.wait\b")
_MEASURED = "deepspeed/utils/nvtx.py"
_GATHERED = "deepspeed/runtime/zero/partition_parameters.py"
# Of the newest collectives that have not come to their end, so many are told.
_TOLD = 5


def collective_in(frame: FrameType | None) -> str | None:
    """Names the collective that a thread is in."""
    while frame is not None and _leads_through(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    if (frame.f_code.co_filename, frame.f_code.co_name) == _BACKWARD:
        return "backward, with its reduction of gradients"
    innermost = frame.f_code.co_name
    inside: FrameType | None = frame
    while inside is not None and inside.f_code.co_filename.startswith(_DISTRIBUTED):
        # Not what it is made of: `wait`, `_all_gather_base`.
        if not inside.f_code.co_name.startswith(("_", "wait")) and hasattr(torch.distributed, inside.f_code.co_name):
            return inside.f_code.co_name
        inside = inside.f_back
    if inside is not frame:
        return innermost
    if _WAITS.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)) is None:
        return None
    return "all_gather of weights" if frame.f_code.co_filename.endswith(_GATHERED) else "a collective begun before"


def _leads_through(file: str) -> bool:
    return file.startswith(_LEADS_THROUGH) or file.endswith(_MEASURED)


def unfinished_collectives() -> list[str]:
    """Asks torch's flight recorder (`TORCH_FR_BUFFER_SIZE`) for the collectives that have not come to their end."""
    import torch._C._distributed_c10d as c10d

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump: Any = getattr(c10d, name, None)
        if dump is None:
            # Of a build without NCCL; of a torch before 2.9.
            continue
        entries = json.loads(dump(True, False)).get("entries", [])
        waiting = [each for each in entries if not each.get("retired") and each.get("state") != "completed"]
        if waiting:
            return [_described(each) for each in waiting[-_TOLD:]]
    return []


def _described(entry: dict[str, Any]) -> str:
    group = entry.get("process_group") or ["?"]
    return (
        f"{entry.get('profiling_name', '?')} number {entry.get('collective_seq_id', '?')} of {group[-1] or group[0]}, "
        f"sizes {entry.get('input_sizes', [])}, {entry.get('state', '?')}"
    )


# ---- working: tells a thread that works for long from one that hangs: it compiles, or it computes ----


# What is on the stack only while something is compiled, or tried for its speed, as a new shape comes up in the middle
# of a run. torch 2.13, Triton 3: the rest of these files is there while the result runs as well.
_FILES = (str(_TORCH / "_dynamo/convert_frame.py"), str(_TORCH / "utils/cpp_extension.py"))
_CALLS = frozenset(
    {
        (str(_TORCH / "_inductor/compile_fx.py"), "compile_fx_inner"),
        (str(_TORCH / "_inductor/compile_fx.py"), "_compile_fx_inner"),
        (str(_TORCH / "_inductor/runtime/triton_heuristics.py"), "benchmark_all_configs"),
        (str(_TORCH / "_inductor/runtime/triton_heuristics.py"), "coordinate_descent_tuning"),
    }
)
_TRITON = (str(Path("triton/compiler/compiler.py")), "compile")
_AUTOTUNER = (str(Path("triton/runtime/autotuner.py")), "_bench")


def compiles() -> bool:
    """Whether a thread of this process compiles: that of training, or one of autograd on behalf of it."""
    for frame in list(current_frames().values()):
        at = frame
        while at is not None:
            file, name = at.f_code.co_filename, at.f_code.co_name
            if file.startswith(_FILES) or (file, name) in _CALLS:
                return True
            if any(file.endswith(end) and name == call for end, call in (_TRITON, _AUTOTUNER)):
                return True
            at = at.f_back  # type: ignore[assignment]
    return False


def processor_seconds(thread: int) -> float | None:
    """Gives what a thread of this process has spent on a processor so far."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/self/task/{thread}/stat").read_bytes()
        # proc(5): after the name in brackets, which may hold any characters.
        spent = stat.rpartition(b")")[2].split()
        return (int(spent[11]) + int(spent[12])) / os.sysconf("SC_CLK_TCK")
    return None


# ---- wake signal ----


class Interruptible(Protocol):
    """Is interrupted by a signal."""

    @property
    def needed(self) -> bool:
        """Whether the run that is watched still goes on."""

    def interrupt(self, frame: FrameType | None) -> None:
        """Called in the training thread; may raise."""


class WakeSignal:
    """Handles the signal that interrupts the training thread, and the one that data loader workers answer to."""

    def __init__(self, watchdog: Interruptible, free: list[int]) -> None:
        self._watchdog = weakref.ref(watchdog)
        self.signal = free[0]
        self.worker_signal: int | None = None
        self.worker_stacks: Any | None = None
        self._earlier = signal.signal(self.signal, self)
        if len(free) > 1 and hasattr(os, "memfd_create"):
            # Inherited by data loader workers that are forked: they write down where they are when they are asked.
            self.worker_stacks = os.fdopen(os.memfd_create("self_healing_stacks"), "w+b", buffering=0)
            self.worker_signal = free[1]
            faulthandler.register(self.worker_signal, file=self.worker_stacks, all_threads=True)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        watchdog = self._watchdog()
        if watchdog is None:
            self.give_back()
        else:
            watchdog.interrupt(frame)

    @property
    def needed(self) -> bool:
        """Whether the run it was installed for still goes on."""
        watchdog = self._watchdog()
        return watchdog is not None and watchdog.needed

    def give_back(self) -> None:
        """Called in the main thread."""
        installed: Any = signal.getsignal(self.signal)
        if installed is self:
            signal.signal(self.signal, self._earlier)
        if self.worker_signal is not None and self.worker_stacks is not None:
            faulthandler.unregister(self.worker_signal)
            self.worker_stacks.close()
            self.worker_signal = self.worker_stacks = None

    def stacks_of_workers(self) -> dict[int, str]:
        """Asks the processes forked from this one where they are; empty for those that do not answer."""
        number, file = self.worker_signal, self.worker_stacks
        found: dict[int, str] = {}
        if number is None or file is None:
            return found
        for child in psutil.Process().children(recursive=True):
            if not (_shares(child.pid, file.fileno()) and _catches(child.pid, number)):
                continue
            begin = os.fstat(file.fileno()).st_size
            try:
                os.kill(child.pid, number)
            except ProcessLookupError:
                # It has ended since it was listed.
                continue
            for _ in range(20):
                time.sleep(0.05)
                if os.fstat(file.fileno()).st_size > begin:
                    break
            time.sleep(0.05)
            found[child.pid] = os.pread(file.fileno(), 1 << 20, begin).decode("utf-8", "replace")
        return found


def own_signals() -> list[int]:
    """Gives the signals that a watchdog may take, in the order in which they are tried."""
    if hasattr(signal, "SIGRTMIN"):
        # The first ones are taken by debuggers and profilers now and then.
        return list(range(signal.SIGRTMIN + 5, signal.SIGRTMAX))
    return [signal.SIGUSR2]


def _shares(pid: int, number: int) -> bool:
    """Whether a process was forked from this one with a file open; other programs may have other uses for a signal."""
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), os.fstat(number))
    except OSError:
        return False


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError):
        pass
    return False
