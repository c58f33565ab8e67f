"""The native sampler from Python: start, stop, the stage that it attributes its samples to, and the figures so far."""

import atexit
import ctypes
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.errors import NativeUnavailableError
from tunesmith.kernels.native import load

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


class _Shared(ctypes.Structure):
    """The beginning of `Sampler` in cpu.cpp."""

    _fields_: Sequence[Any] = (
        ("stage", ctypes.c_int32),
        ("is_stopped", ctypes.c_int32),
        ("figures", ctypes.c_int64 * _FIELDS * _STAGES),
    )


class Sampler:
    """A running sampler. Stop it; at the end of the interpreter it stops by itself.

    Raises:
        NativeUnavailableError: there is no compiler, or no thread could be started.
    """

    def __init__(self) -> None:
        self._library = _library()
        self._shared: Any = self._library.sampler_start()
        if not self._shared:
            raise NativeUnavailableError("no thread could be started for the sampler")
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


def has_lock() -> bool:
    """False in an interpreter without a global lock (free-threaded Python), where waits for it mean nothing."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


@functools.cache
def _library() -> ctypes.CDLL:
    library = load("sampler", sources=Path(__file__).parent.parent)
    library.sampler_start.restype = ctypes.POINTER(_Shared)
    library.sampler_stop.argtypes = [ctypes.POINTER(_Shared)]
    library.sampler_stop.restype = None
    return library
