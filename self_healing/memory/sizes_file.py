"""`healing_sizes.json`: which sizes of model calls fitted, for the next process of the run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import of_rank, replace_file
from ..run.context import RunContext
from .remedies import MemoryState


logger = logging.getLogger("self_healing")

SIZES_FILE = "healing_sizes.json"
_VERSION = 1


class SizesFile:
    """
    Keeps what is known to fit in the run directory; each rank has a file of its own.

    Args:
        run ([`RunContext`]):
            The run.
        state ([`MemoryState`]):
            What is known to fit.
    """

    def __init__(self, run: RunContext, state: MemoryState) -> None:
        self._run = run
        self._state = state

    @property
    def path(self) -> Path:
        """The file of this rank."""
        return of_rank(self._run.directory / SIZES_FILE, self._run.journal.rank)

    def write(self) -> None:
        """Writes down what is known to fit this model on this device."""
        try:
            replace_file(self.path, json.dumps(self.content(), indent=1) + "\n")
        except OSError as error:
            logger.warning("%s could not be written (%s): the next start has to learn it again.", self.path, error)

    def content(self) -> dict[str, Any]:
        """Gives what is known to fit this model on this device."""
        return {
            "version": _VERSION,
            "for": self._fingerprint(),
            "checkpointing_activations": self._state.checkpointing_activations,
            "sizes": self._state.sizes.state_dict(),
        }

    def take_over(self, content: Mapping[str, Any], own: bool) -> bool:
        """
        Takes over what another process knows.

        Args:
            content (`Mapping`):
                As [`content`] gives it.
            own (`bool`):
                Whether it was this rank, in an earlier start.

        Returns:
            `bool`: `False` if it is about another model or device.
        """
        if content["version"] != _VERSION or content["for"] != self._fingerprint():
            return False
        self._state.sizes.load_state_dict(content["sizes"], own)
        return True

    def read(self) -> None:
        """Takes over what did not fit in an earlier process, on any rank, if it was the same model and device."""
        paths = sorted(self._run.directory.glob("healing_sizes*.json"))
        # Its own first: what fitted on another rank is weighed against what failed here.
        for path in sorted(paths, key=lambda path: path != self.path):
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                if not self.take_over(content, own=path == self.path):
                    continue
                self._state.checkpointing_activations |= bool(content["checkpointing_activations"])
            except Exception as error:
                logger.warning("%s cannot be read and is not used: %s", path, error)
                continue
            if self._state.sizes.limits:
                logger.info("%s: batches that did not fit in an earlier start are split from the beginning.", path)

    def _fingerprint(self) -> Any:
        return self._run.instrument.view.fingerprint()
