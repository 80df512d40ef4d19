"""Leaves the files of self_healing out of what the Trainer uploads to the Hub."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from transformers import trainer as trainer_module


def leave_out_of_uploads(folder: str, patterns: Sequence[str]) -> None:
    """Leaves some files out of what the Trainer uploads from a folder, or from one inside of it, from here on."""
    # transformers 5.4 calls the function, later versions the client that they share.
    module: Any = trainer_module
    holder = module if hasattr(module, "upload_folder") else module.hf_api()
    if not isinstance(holder.upload_folder, _Upload):
        holder.upload_folder = _Upload(holder, holder.upload_folder)
    holder.upload_folder.leave_out(Path(folder).resolve(), patterns)


class _Upload:
    """Calls `upload_folder` with more patterns to ignore."""

    def __init__(self, holder: Any, original: Callable[..., Any]) -> None:
        # A method is looked up at each call: its class may be changed by others, too.
        self._class: Any = type(holder) if getattr(original, "__self__", None) is holder else None
        self._holder, self._original = holder, original
        # By the folder they are relative to.
        self._left_out: dict[Path, Sequence[str]] = {}
        functools.update_wrapper(self, original)

    def leave_out(self, folder: Path, patterns: Sequence[str]) -> None:
        """Has uploads of a folder, or of one inside of it, leave out what these patterns match."""
        self._left_out[folder] = tuple(patterns)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        left_out = self._patterns_for(Path(kwargs["folder_path"]).resolve()) if "folder_path" in kwargs else []
        if left_out:
            ignored = kwargs.get("ignore_patterns") or []
            kwargs["ignore_patterns"] = [*([ignored] if isinstance(ignored, str) else ignored), *left_out]
        if self._class is None:
            return self._original(*args, **kwargs)
        return self._class.upload_folder(self._holder, *args, **kwargs)

    def _patterns_for(self, folder: Path) -> list[str]:
        """The patterns that apply to a folder, relative to it."""
        found: list[str] = []
        for outer, patterns in self._left_out.items():
            if folder == outer:
                found.extend(patterns)
            elif folder.is_relative_to(outer):
                inside = folder.relative_to(outer).as_posix()
                parts = (pattern.rpartition("/") for pattern in patterns)
                found.extend(name for directory, slash, name in parts if slash and fnmatchcase(inside, directory))
        return found
