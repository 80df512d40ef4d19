"""The exit of a process that a lost device could abort, or keep from ending."""

from __future__ import annotations

import atexit
import os
import threading
import time

from ..system.processes import end_at_once


# Time the interpreter may take to end with a lost device, in seconds.
_LAST_WORDS = 60.0
# Exit code of the process, and the exception it keeps until then. At module level, because `_end` has to be
# registered with `atexit` when this is imported.
_last: list[tuple[int, BaseException]] = []


def end_process_with(code: int, error: BaseException, within: float = _LAST_WORDS) -> None:
    """
    Makes the process end with a code even if the interpreter cannot end next to a lost device: freeing memory of the
    device may abort the process, and its driver may keep it from ending.
    """

    def end() -> None:
        time.sleep(within)
        os._exit(code)

    _last.append((code, error))
    threading.Thread(target=end, name="self_healing end", daemon=True).start()


@atexit.register
def _end() -> None:
    """Ends the process before the interpreter frees anything, and after functions registered later than this one."""
    if _last:
        end_at_once(_last[0][0])
