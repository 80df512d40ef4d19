"""Tells which collective a rank waits in: by its stack, and by the flight recorder of torch where there is one."""

from __future__ import annotations

import json
import linecache
import re
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed


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
