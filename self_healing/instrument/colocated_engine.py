"""A vLLM engine that generates in this process, beside the model that is trained."""

from __future__ import annotations

import inspect
import logging
from typing import Any


logger = logging.getLogger(__name__)


def is_free_of_requests(trainer: Any) -> bool:
    """
    Drops what a call that raised has left in the engine, which the next call would answer together with its own
    prompts: their completions would come first, and each row would get those of another.
    """
    engine = getattr(getattr(getattr(trainer, "vllm_generation", None), "llm", None), "llm_engine", None)
    if engine is None:
        return True
    try:
        if engine.has_unfinished_requests():
            _abort(engine, list(engine.output_processor.request_states))
        return not engine.has_unfinished_requests()
    except Exception:
        logger.warning("What a failed call has left in the vLLM engine cannot be dropped.", exc_info=True)
        return False


def _abort(engine: Any, requests: list[str]) -> None:
    # Newer versions know them by another name than the one they were given.
    internal = "internal" in inspect.signature(engine.abort_request).parameters
    engine.abort_request(requests, **({"internal": True} if internal else {}))
