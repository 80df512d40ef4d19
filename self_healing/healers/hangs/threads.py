"""Stacks of all threads, and the collective that one waits in."""

from __future__ import annotations

import gc
import linecache
import logging
import os
import re
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

import psutil
import torch
import torch.distributed

from ...failures.recipes import Action
from ...journal.incident import Incident
from ...journal.journal import Journal


logger = logging.getLogger("self_healing")


# ---- stacks: finds the lines at which threads and workers wait, and writes all stacks to a file ----


_READING = threading.Lock()


_COMPILER = os.path.join("torch", "_dynamo", "convert_frame.py")


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


def compiles() -> bool:
    """Whether a thread of this process compiles a model (`torch.compile`), as it does for each new shape."""
    for frame in current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            # What runs a model that is compiled comes by other files.
            if at.f_code.co_filename.endswith(_COMPILER):
                return True
            at = at.f_back
    return False


def stacks_of(journal: Journal, incident: Incident) -> Path:
    return journal.directory / "hangs" / f"{incident.id}-stacks.txt"


def keep_stacks(journal: Journal, incident: Incident, headline: str, training_thread: int) -> None:
    """Keeps the stacks of all threads for an incident, and says so in the journal."""
    path, kept = stacks_of(journal, incident), True
    try:
        write_stacks(path, headline, training_thread)
    except OSError as error:
        kept = False
        logger.warning("The stacks could not be written to %s: %s.", path, error)
    journal.acted(incident, Action.WRITE_STACKS.value, happened=kept, path=str(path))


def write_stacks(path: Path, headline: str, training_thread: int) -> None:
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
        file.write("\n---- processes started by this one\n")
        for child in psutil.Process().children(recursive=True):
            file.write(_describe_process(child))


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
        file = frame.f_code.co_filename
        if not file.startswith((sys.base_prefix, "<frozen")) and "site-packages" not in file:
            return line_of(frame)
        frame = frame.f_back
    return None


def _describe_process(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.status()}) {' '.join(process.cmdline())[:200]}\n"
    except psutil.Error as error:
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


def collective_in(frame: FrameType | None) -> str | None:
    """Names the collective that a thread is in."""
    while frame is not None and (
        frame.f_code.co_filename.startswith(_LEADS_THROUGH) or frame.f_code.co_filename.endswith(_MEASURED)
    ):
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
