"""The user's cache folder, a setting of the system's memory allocator, and the time that syncs to disk take."""

import ctypes
import os
import platform
import time
from pathlib import Path

from tunesmith.core import faults

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_NEVER = 2**31 - 1


def cache_folder() -> Path:
    """The folder of files that can be made again, such as converted models and compiled kernels.

    `TUNESMITH_CACHE`, else `tunesmith` under `XDG_CACHE_HOME`, else `~/.cache/tunesmith`.
    """
    if named := os.environ.get("TUNESMITH_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tunesmith"


def keep_freed_memory() -> bool:
    """Allocate large blocks from the heap and never shrink it; True if the system's allocator supports this (glibc).

    By default glibc unmaps a large block as soon as it is freed, and every page of the next one costs a page fault: a
    training step frees and allocates gigabytes. The setting holds for the whole process and cannot be taken back.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return all(library.mallopt(name, value) == 1 for name, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER)))


_fsync_s = 0.0


def fsync(descriptor: int) -> None:
    """`os.fsync`, a fault point too; its seconds are counted."""
    global _fsync_s
    start_s = time.perf_counter()
    try:
        faults.reach("fsync")
        os.fsync(descriptor)
    finally:
        _fsync_s += time.perf_counter() - start_s


def fsync_s() -> float:
    """Seconds that `fsync` has taken since the process began, in all threads."""
    return _fsync_s
