"""
Logs the report of a run to its trackers: to TensorBoard and wandb as text, to trackio as a text and as the page.

Trackers are told by the callback that transformers has for each, without importing any of them.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from typing import Any

from .briefing import briefing_of
from .page.rendering import page_of
from .records import RunReport


TAG = "self_healing/report"
PAGE_TAG = "self_healing/page"
# What transformers' callbacks plot everything over.
_STEP = "train/global_step"


def log_to_tracker(tracker: Any, report: RunReport, step: int) -> bool:
    """
    Logs a report to one tracker.

    Args:
        tracker ([`~transformers.TrainerCallback`]):
            The callback that tells it.
        report ([`RunReport`]):
            Of the run.
        step (`int`):
            Optimizer steps finished.

    Returns:
        Whether it was logged: the tracker is open, and one of those that are known.
    """
    for each in type(tracker).__mro__:
        if each.__name__ in _TRACKERS:
            return _TRACKERS[each.__name__](tracker, report, step)
    return False


def _to_tensorboard(tracker: Any, report: RunReport, step: int) -> bool:
    writer = getattr(tracker, "tb_writer", None)
    if writer is None:
        return False
    # Shown as Markdown.
    writer.add_text(TAG, briefing_of(report), step)
    writer.flush()
    return True


def _to_wandb(tracker: Any, report: RunReport, step: int) -> bool:
    wandb = sys.modules.get("wandb")
    run = getattr(wandb, "run", None)
    if wandb is None or run is None:
        return False
    # Its media are tables, pictures and HTML: a text of several lines is shown as it is by the last.
    run.log({TAG: wandb.Html(f"<pre>{html.escape(briefing_of(report))}</pre>"), _STEP: step})
    return True


def _to_trackio(tracker: Any, report: RunReport, step: int) -> bool:
    trackio = sys.modules.get("trackio")
    run = None if trackio is None else trackio.context_vars.current_run.get()
    if trackio is None or run is None:
        return False
    told = {TAG: trackio.Markdown(briefing_of(report)), _STEP: step}
    # Since trackio 0.34.0 (gradio-app/trackio#652).
    if hasattr(trackio, "Html"):
        told[PAGE_TAG] = trackio.Html(page_of(report), inject=False)
    run.log(told)
    return True


_TRACKERS: dict[str, Callable[[Any, RunReport, int], bool]] = {
    "TensorBoardCallback": _to_tensorboard,
    "WandbCallback": _to_wandb,
    "TrackioCallback": _to_trackio,
}
