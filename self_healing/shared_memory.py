"""The files in shared memory in which states of a run outlive its processes: where they lie, and whose they are."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import stat
from functools import lru_cache
from pathlib import Path


with contextlib.suppress(ImportError):
    # On Windows there is neither this nor /dev/shm.
    import fcntl


# In memory, until the machine is started again or they are removed.
ROOT = Path("/dev/shm")
_LOCK = "in-use"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def directory_of(output_dir: str | os.PathLike[str]) -> Path:
    """Names the directory in shared memory of the runs that train into an `output_dir`."""
    key = hashlib.sha256(os.path.realpath(output_dir).encode()).hexdigest()[:16]
    return ROOT / f"self-healing-{_user()}-{key}"


def make_directory(path: Path) -> None:
    """Makes a directory in shared memory that only this user can look into."""
    for each in (path.parent, path):
        if each != ROOT:
            each.mkdir(mode=0o700, exist_ok=True)
            if not is_own(each):
                raise PermissionError(f"{each} is not a directory of this user's alone")


def is_own(path: Path) -> bool:
    """Whether a directory is there, and only this user can read what is in it, and write to it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == _user() and not found.st_mode & 0o077


def free_shared_memory() -> int:
    """Reads how many bytes may still be put there, by all processes of the machine or container."""
    try:
        found = os.statvfs(ROOT)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def hold(directory: Path) -> int:
    """
    Marks a directory as in use until this process ends, by a lock: ids of processes are given out again, and those of
    a container that shares this memory say nothing here.
    """
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # Of this process alone, and not of those that it forks, which may outlive it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def holder_of(directory: Path) -> int | None:
    """Gives the id of the other process that uses a directory, as that one counts (0 if not known), if any does."""
    try:
        descriptor = os.open(directory / _LOCK, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return int(os.pread(descriptor, 20, 0) or 0)
    else:
        return None
    finally:
        os.close(descriptor)


def processes_using(output_dir: str | os.PathLike[str]) -> list[int]:
    """Lists other processes that keep states of runs of an `output_dir` there: their ids, in order."""
    holders = (holder_of(each) for each in directory_of(output_dir).glob("*"))
    return sorted({each for each in holders if each is not None})


def bytes_in(path: Path) -> int:
    """Adds up what the files below a directory take."""
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def remove_states(output_dir: str | os.PathLike[str]) -> int:
    """Removes all that the runs of an `output_dir` have left in shared memory."""
    directory = directory_of(output_dir)
    if not is_own(directory):
        return 0
    freed = bytes_in(directory)
    shutil.rmtree(directory, ignore_errors=True)
    return freed


@lru_cache(maxsize=1)
def this_boot() -> str:
    """Names this machine, as it was started the last time."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0
