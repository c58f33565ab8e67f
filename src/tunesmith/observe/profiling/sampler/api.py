"""The native sampler from Python: start, stop, the stage that it attributes its samples to, and the figures so far."""

import atexit
import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.base.core.errors import NativeUnavailableError
from tunesmith.engine.kernels.native import load

_STAGES = 64  # as in cpu.cpp
_FIELDS = 6


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples taken in one stage: asks for the interpreter's lock, those that found it taken, those of them in which
    the thread that made the sampler slept, the sum of the waits, the sum of how late the thread woke, and the largest
    resident memory that it saw (0 if none).
    """

    num_asks: int
    num_blocked: int
    num_training_waits: int
    waited_ns: int
    late_ns: int
    peak_bytes: int


Look = Callable[[int, int, int], None]
"""Called with the interpreter's lock: what the training thread does, as in cpu.cpp, the file descriptor of that or -1,
and the nanoseconds that the look stands for. It must not raise."""

_LOOK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_long, ctypes.c_int64)


class _Shared(ctypes.Structure):
    """The beginning of `Sampler` in cpu.cpp."""

    _fields_: Sequence[Any] = (
        ("stage", ctypes.c_int32),
        ("is_stopped", ctypes.c_int32),
        ("figures", ctypes.c_int64 * _FIELDS * _STAGES),
    )


class Sampler:
    """A running sampler of the thread that makes it. Stop it; at the end of the interpreter it stops by itself. `look`
    is called about 50 times a second while that thread waits, and 10 times a second while it runs.

    Raises:
        NativeUnavailableError: there is no compiler, or no thread could be started.
    """

    def __init__(self, look: Look | None = None) -> None:
        self._library = _library()
        self._shared: Any = self._library.sampler_start()
        if not self._shared:
            raise NativeUnavailableError("no thread could be started for the sampler")
        self._look = None if look is None else _LOOK(look)  # kept, because the library has no reference to it
        if self._look is not None:
            self._library.sampler_look(self._shared, self._look)
        self._stages: dict[str, int] = {"": 0}
        atexit.register(self.stop)

    def enter(self, stage: str) -> None:
        """Attribute samples to `stage` from now on; the empty name is the time outside of all stages."""
        if self._shared:
            index = self._stages.setdefault(stage, len(self._stages))
            self._shared.contents.stage = index if index < _STAGES else 0

    def take(self) -> dict[str, Samples]:
        """The samples of each stage since the last call; stages without any are left out."""
        taken: dict[str, Samples] = {}
        for stage, index in self._stages.items():
            if not self._shared or index >= _STAGES:
                break
            figures = self._shared.contents.figures[index]
            if figures[0]:
                taken[stage] = Samples(*figures)
                # A sample that the thread adds at this very moment may be lost, which is harmless.
                ctypes.memset(figures, 0, ctypes.sizeof(figures))
        return taken

    def stop(self) -> None:
        """End the thread, which takes up to a period; a second call does nothing."""
        shared, self._shared = self._shared, None
        if shared:
            atexit.unregister(self.stop)
            self._library.sampler_stop(shared)


def does(thread_id: int) -> tuple[int, int]:
    """The activity of the thread with this id of the kernel, as in cpu.cpp, and its file descriptor or -1. Keeps the
    interpreter's lock.
    """
    argument = ctypes.c_long(-1)
    return _does()(thread_id, argument), argument.value


@functools.cache
def _does() -> Any:
    """The function of the library, as one during which no other thread runs Python."""
    signature = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_long))
    return signature(("sampler_does", _library()))


def has_lock() -> bool:
    """False in an interpreter without a global lock (free-threaded Python), where waits for it mean nothing."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


@functools.cache
def _library() -> ctypes.CDLL:
    library = load("sampler", sources=Path(__file__).parent.parent)
    library.sampler_start.restype = ctypes.POINTER(_Shared)
    library.sampler_look.argtypes = [ctypes.POINTER(_Shared), _LOOK]
    library.sampler_look.restype = None
    library.sampler_stop.argtypes = [ctypes.POINTER(_Shared)]
    library.sampler_stop.restype = None
    return library
