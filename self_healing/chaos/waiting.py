"""Waits that hang: one that a signal handler can interrupt, and one that it cannot."""

from __future__ import annotations

import ctypes
import threading
import time


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait_in_python(seconds: float) -> None:
    """Waits for a lock: nothing but an exception out of a signal handler ends it earlier."""
    threading.Event().wait(seconds)


def wait_in_c(seconds: float) -> None:
    """
    Waits inside of one C call: signals are delivered, their Python handlers do not run before it returns.

    Not a sleep, which a signal ends; a mutex that the thread holds already is waited for to the end.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "pthread_mutex_timedlock"):
        ctypes.PyDLL(None).sleep(ctypes.c_uint(max(round(seconds), 1)))
        return
    # Zeros are PTHREAD_MUTEX_INITIALIZER; larger than the type is anywhere.
    mutex = ctypes.create_string_buffer(128)
    until = time.time() + seconds
    deadline = _TimeSpec(int(until), int(until % 1 * 1e9))
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, ctypes.byref(deadline))
