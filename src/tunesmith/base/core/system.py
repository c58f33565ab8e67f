"""The user's cache folder, settings of the memory allocator and of OpenMP, and the time that syncs to disk take."""

import ctypes
import errno
import functools
import os
import platform
import sys
import time
from pathlib import Path

from tunesmith.base.core import faults
from tunesmith.base.core.log import get_logger

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_NEVER = 2**31 - 1
_MADV_PAGEOUT = 21  # linux/mman.h
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)

SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables that say how long GNU's OpenMP, which torch and our kernels share, lets a waiting thread spin."""

SPIN_COUNT = "10000"
"""Spins of a waiting thread before it sleeps: some ten microseconds. GNU's default is 300000."""


class _HeapSizes(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = (
        *((f"_{index}", ctypes.c_size_t) for index in range(8)),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    )


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


def unused_heap_gb() -> float:
    """Memory that the program has freed and its allocator keeps, in GB (1e9 bytes); 0 where it does not say (glibc
    before 2.33, and others). The heaps of other threads than the first are not counted.
    """
    if platform.libc_ver()[0] != "glibc" or not hasattr(library := ctypes.CDLL(None), "mallinfo2"):
        return 0.0
    library.mallinfo2.restype = _HeapSizes
    return float(library.mallinfo2().fordblks) / 1e9


def trim_memory() -> None:
    """Give all freed pages back to the system, where its allocator can (glibc), also those between blocks in use."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def drop_mapped_pages(address: int, num_bytes: int) -> None:
    """Give back the memory of those whole pages that hold a mapped file, on Linux; they are read again when next used.

    The pages count as memory of this process until then. Memory that belongs to no file is left alone, and so are pages
    that were written to: the system would have to keep them elsewhere.
    """
    if sys.platform != "linux":
        return
    page = os.sysconf("SC_PAGE_SIZE")
    first, end = -(-address // page) * page, (address + num_bytes) // page * page
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, _, _, _, file, *_ = line.split()
        low, high = (int(one, 16) for one in place.split("-"))
        if file != "0" and (start := max(low, first)) < (stop := min(high, end)):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_PAGEOUT)


def limit_spinning() -> None:
    """Let OpenMP's threads sleep after a few microseconds of waiting, unless a variable of the user says otherwise.

    By default they spin for milliseconds, which is time taken from the thread that they wait for if another program
    uses one of the cores. OpenMP reads its variables when it is loaded, so it is too late once torch is.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in SPIN_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def compute_alone_after_fork() -> None:
    """Let a process that was forked from this one compute in one thread, until it sets another number itself.

    The child has none of the threads of its parent, and GNU's OpenMP waits for them for ever: servers that load a model
    and then fork their workers, and multiprocessing on Linux before Python 3.14, hang at the first product.
    """
    os.register_at_fork(after_in_child=_compute_alone)


def _compute_alone() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@functools.cache
def warn_of_spinning() -> None:
    """Log, once in a process, what to set if torch was loaded before `limit_spinning` was called."""
    if not any(name in os.environ for name in SPIN_VARIABLES):
        get_logger(__name__).warning(
            "torch was loaded before tunesmith: its threads spin for milliseconds while they wait, which is slow "
            f"beside other programs. Import tunesmith first, or set GOMP_SPINCOUNT={SPIN_COUNT} before Python starts"
        )


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


def sync(path: Path) -> None:
    """Have the content of a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def name_file(aside: Path, path: Path) -> None:
    """Give the file or folder `aside` the name `path`, which must be free: another process may have taken it a moment
    ago.

    Raises:
        FileExistsError: there is a file of that name, or a folder; it stays as it is.
    """
    if aside.is_dir():
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        # Onto a file, or a folder with something in it, it fails.
        aside.rename(path)
        return
    try:
        os.link(aside, path)
        aside.unlink()
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))  # now the name is ours
        os.replace(aside, path)


def fsync_s() -> float:
    """Seconds that `fsync` has taken since the process began, in all threads."""
    return _fsync_s
