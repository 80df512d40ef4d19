"""Progress bars of a `train()` call that an exception has ended: taken off the terminal before it is entered again."""

from __future__ import annotations

import logging
from typing import Any

from transformers import ProgressCallback


logger = logging.getLogger(__name__)


def remove_progress_bars(trainer: Any) -> None:
    """
    Takes away the bars that callbacks have left on the terminal: entered again, `train()` has them draw new ones,
    which would be drawn below those, and over what is written in between.
    """
    for callback in trainer.callback_handler.callbacks:
        try:
            if isinstance(callback, ProgressCallback):
                _remove_bars(callback)
            elif getattr(callback, "rich_group", None) is not None:
                # RichProgressCallback (TRL 1.16), which need not be installed.
                callback.rich_group.stop()
                callback.rich_group = None
        except Exception:
            logger.info("The progress bars of %s could not be removed.", type(callback).__name__, exc_info=True)


def _remove_bars(callback: ProgressCallback) -> None:
    for name in ("prediction_bar", "training_bar"):
        bar = getattr(callback, name)
        if bar is not None:
            bar.leave = False
            bar.close()
            setattr(callback, name, None)
