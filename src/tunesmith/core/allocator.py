"""The system's memory allocator: what a process has freed, it keeps.

glibc gives a large block back to the kernel as soon as it is freed, and every page of the next one costs a fault. A
training step frees and takes gigabytes: on two CPU cores a tenth of its time went there.
"""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let large blocks come from the heap, and the heap never shrink; True if the system's allocator is told so.

    It holds for the whole process and cannot be taken back. Only glibc knows it; elsewhere nothing happens.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return all(library.mallopt(name, value) == 1 for name, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER)))
