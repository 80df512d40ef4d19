"""Finds the lines at which threads and workers wait, and writes all stacks to a file."""

from __future__ import annotations

import faulthandler
import gc
import linecache
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import psutil


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
    package = str(Path(__file__).parents[1]) + os.sep
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
