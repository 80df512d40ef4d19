"""Tells a thread that works for long from one that hangs: it compiles, or it computes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from .stacks import current_frames


_TORCH = Path(torch.__file__).parent
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
