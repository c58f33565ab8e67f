"""A lock for calls of an object that may come from several threads, from within each other, or from another process."""

import os
import sys
import threading
from contextlib import AbstractContextManager
from types import FrameType

from tunesmith.base.core.errors import InputError


class Turns:
    """Lets one thread at a time call an object, `what`; others wait for their turn.

    A call from within a call, by a function that the first one calls, would wait for ever; and where an object
    `has_pipes` or sockets, a process that was forked has the same ones as its parent. Both are refused.
    """

    def __init__(self, what: str, *, has_pipes: bool = False) -> None:
        self._what = what
        self._lock = threading.RLock()
        self._last = threading.local()  # `frame`: the id and code of the function that took the last turn of a thread
        self._process = os.getpid() if has_pipes else None

    def next(self) -> AbstractContextManager[object]:
        """The block of a call, to be entered at once, by a `with` of the function that calls this.

        It is the lock itself: Python handles no signal between the block and its release, and before 3.14 none between
        taking the lock and the block. A function of ours could be left by Ctrl-C there. From 3.14 on the lock may be
        left taken so: the thread's next call, which no function within a block makes, frees it.

        Raises:
            InputError: the call comes from within another one, or from a process that was forked.
        """
        caller = sys._getframe(1)  # type: ignore[reportPrivateUsage] - the frame of the call
        if self._lock._is_owned():  # type: ignore[attr-defined]
            if self._is_within_block(caller):
                raise InputError(
                    f"the {self._what} was called from within a call of it, by a function that it calls; call it when "
                    "that call has returned, or make another one for this"
                )
            self._lock.release()
        if self._process not in (None, os.getpid()):
            raise InputError(
                f"the {self._what} was opened by process {self._process}, and this is another one, {os.getpid()}, "
                "that was forked from it; open one in each process"
            )
        self._last.frame = id(caller), caller.f_code
        return self._lock

    def _is_within_block(self, caller: FrameType) -> bool:
        """True if the function that took the last turn of this thread is still being computed, and called `caller`."""
        frame = caller.f_back
        while frame is not None and (id(frame), frame.f_code) != self._last.frame:
            frame = frame.f_back
        return frame is not None
